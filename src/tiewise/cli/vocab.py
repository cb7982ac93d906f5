"""`tiewise vocab hot`: the part of a vocabulary that a text uses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tiewise.cli import options as o

if TYPE_CHECKING:
    from tiewise.training.data.hot_tokens import HotTokens


def hot(
    text: list[str] = o.TEXT,
    tokenizer: str = typer.Option(..., metavar="MODEL", help="Folder of the target model, tokenizer.json, or Hub id."),
    size: int = typer.Option(32768, help="Tokens of the draft's vocabulary."),
    rows: int = typer.Option(None, "--vocab", metavar="V", help="Rows of the target, if its config is missing."),
    to: Path = typer.Option(None, metavar="FILE", help="File to write: .safetensors (EAGLE-3), .pt (FR-Spec), .json."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Choose a draft model's tokens, and measure how much of held-out text they cover.

    Give text such as the target writes. Special tokens are always among the chosen.
    """
    o.need("torch", "transformers", "datasets")
    o.hush_libraries()
    from tiewise.lab.vocabulary import hot_vocabulary
    from tiewise.training.data.hot_tokens import LAYOUTS

    texts = text or ["builtin"]
    with o.interruptible("; nothing was written"), o.progress_bar(quiet, reads=False):
        chosen = hot_vocabulary(texts, tokenizer=tokenizer, size=size, vocab=rows, to=to)
    if json_:
        return o.print_json(chosen.record())
    _print_coverage(chosen, size, texts)
    if to is not None:
        print(f"{to}: {LAYOUTS[to.suffix]}")


def _print_coverage(hot: HotTokens, size: int, texts: list[str]) -> None:
    """Print the share of held-out text that the chosen tokens cover, and its sample."""
    from tiewise.core.estimates import FEWEST_UNITS

    share = hot.coverage
    what = f"{size:,} of {hot.vocabulary:,} tokens cover {share.value:.2%} of the held-out text"
    documents = f"{share.rows:,} held-out document{'s' * (share.rows != 1)}"
    if math.isnan(share.low):
        print(f"{what}.")
        equal = f"{documents} count{'s' * (share.rows == 1)} as {hot.equal_documents:.1f} of equal length"
        print(f"No interval: {equal}, and {FEWEST_UNITS} are needed. Give more documents.")
    else:
        print(f"{what} (95 % interval over documents {share.low:.2%} – {share.high:.2%}).")
    measured = f"{hot.held_out:,} tokens of {documents}"
    print(f"Counted on {hot.counted:,} tokens of {', '.join(texts)}, measured on {measured}.")
    if hot.unseen:
        print(f"{hot.unseen:,} of the {size:,} do not occur in it: a longer text would choose them better.")
