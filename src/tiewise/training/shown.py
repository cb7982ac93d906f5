"""How progress reaches a person: lines on stderr, and bars where someone is looking.

text: builtin, tokenizer bpe:4096            a line for every stage and every finished run, also into a file
tokens   63%|██████▎   |                     on a terminal: text being prepared, runs being trained
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from tiewise.data.build import Progress

Say = Callable[[str], None]


@dataclass(frozen=True)
class Shown:
    """Where lines go, and whether bars are drawn."""

    say: Say
    bars: bool = False

    @contextmanager
    def stages(self) -> Iterator[Progress]:
        """Yield what `tiewise.data.corpus.prepare` calls with a stage and the part of it that is done."""
        bar = tqdm(total=100, leave=False, disable=not self.bars, bar_format="{desc:<10}{percentage:3.0f}%|{bar}|")

        def show(stage: str, part: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.n = round(100 * part)
            bar.refresh()

        with bar:
            yield show
