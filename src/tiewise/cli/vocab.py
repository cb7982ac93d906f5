"""`tiewise vocab`: the part of a vocabulary that a text uses."""

from __future__ import annotations

from pathlib import Path

import typer

from tiewise.cli import options as o
from tiewise.core.errors import RunError


def vocab(
    what: str = typer.Argument(..., metavar="hot", help="hot: the most frequent tokens, as a draft's vocabulary."),
    text: list[str] = o.TEXT,
    tokenizer: str = typer.Option(..., metavar="MODEL", help="Folder of the target model, tokenizer.json, or Hub id."),
    size: int = typer.Option(32768, help="Tokens of the draft's vocabulary."),
    rows: int = typer.Option(None, "--vocab", metavar="V", help="Rows of the target, where its config is not there."),
    to: Path = typer.Option(None, metavar="FILE", help="x.safetensors (EAGLE-3), x.pt (FR-Spec) or x.json."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Choose the tokens that a draft model speaks, and say how much of held-out text they cover.

    Give text such as the target writes. Special tokens are always among the chosen.
    """
    if what != "hot":
        raise RunError(f"tiewise vocab {what[:40]}", "write tiewise vocab hot")
    o.need("torch", "transformers", "datasets")
    o.hush_libraries()
    from tempfile import TemporaryDirectory

    from tiewise.data.hot_tokens import BLOCK, LAYOUTS, hot_tokens

    texts = text or ["builtin"]
    if to is not None and to.suffix not in LAYOUTS:  # said before gigabytes are read
        raise RunError(f"{to}: no layout has this ending", f"choose one of {', '.join(LAYOUTS)}")
    with TemporaryDirectory() as folder, o.interruptible("; nothing was written"), o.progress_bar(quiet, reads=False):
        found = hot_tokens(texts, tokenizer, size, Path(folder) / "data", vocab=rows)
        if to is not None:
            found.write(to)
    if json_:
        return o.print_json(found.record())
    share = found.coverage
    what = f"{size:,} of {found.vocabulary:,} tokens cover {share.value:.2%} of the held-out text"
    print(f"{what} (95 % interval {share.low:.2%} – {share.high:.2%}).")
    blocks = f"{share.rows:,} blocks of {BLOCK} others"
    print(f"Counted on {found.counted:,} tokens of {', '.join(texts)}, measured on {blocks}.")
    if found.unseen:
        print(f"{found.unseen:,} of the {size:,} do not occur in it: a longer text would choose them better.")
    if to is not None:
        print(f"{to}: {LAYOUTS[to.suffix]}")
