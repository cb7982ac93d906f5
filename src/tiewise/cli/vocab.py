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
    vocabulary: int = typer.Option(
        None, "--vocab", metavar="V", help="Rows of the target, where its config is not there."
    ),
    to: Path = typer.Option(
        None, metavar="FILE", help="x.safetensors (EAGLE-3), x.pt (FR-Spec) or x.json; none: say only."
    ),
    seed: int = typer.Option(0, min=0, help="Of what is held out."),
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

    from tiewise.data.hot_tokens import LAYOUTS, hot_tokens

    if to is not None and to.suffix not in LAYOUTS:  # said before gigabytes are read
        raise RunError(f"{to}: no layout has this ending", f"choose one of {', '.join(LAYOUTS)}")
    with TemporaryDirectory() as folder, o.interruptible("; nothing was written"), o.progress_bar(quiet, reads=False):
        found = hot_tokens(
            tuple(text or ("builtin",)), tokenizer, size, Path(folder) / "data", vocab=vocabulary, seed=seed
        )
        if to is not None:
            found.write(to)
    if json_:
        o.print_json(found.record())
        return
    from rich.console import Console

    from tiewise.report.faces import rich_table

    console = Console()
    console.print(f"{found.answer}.", style="bold", highlight=False)
    rows = [(f"{n:,}", f"{e.value:.2%}", f"{e.low:.2%} – {e.high:.2%}") for n, e in found.coverage.items()]
    console.print(rich_table([("tokens", "cover", "95 % interval"), *rows], justified=True))
    of = f"{found.counted:,} tokens of {', '.join(text or ['builtin'])}"
    console.print(f"Counted on {of}, measured on {found.held_out:,} others.", markup=False, highlight=False)
    if found.unseen:
        unseen = f"{found.unseen:,} of the {size:,} do not occur in it: a longer text would choose them better."
        console.print(unseen, highlight=False)
    if to is not None:
        console.print(f"{to}: {LAYOUTS[to.suffix]}", markup=False, highlight=False)
