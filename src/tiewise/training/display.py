"""How progress reaches a person: lines on stderr, and bars where someone is looking.

text: builtin, tokenizer bpe:4096            a line for every stage and every finished run, also into a file
tokens   63%|██████▎   |                     on a terminal: text being prepared,
2/9 untied seed 1:  17%|█▋  | 900/5400 …     then one bar over the steps of all runs, with the time that they still take
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from tiewise.core.long_work import heard
from tiewise.training import ranks


class RunsBar:
    """One bar over all runs of a command; what an earlier process did is shown, and not taken for this one's speed."""

    def __init__(self, steps: int = 0, *, shown: bool = False) -> None:
        self.bar = tqdm(total=steps, disable=not shown, leave=False, miniters=1, smoothing=0, unit=" steps")
        self._before = 0  # steps of the runs that have ended

    def begun(self, title: str, step: int) -> None:
        """A run begins, `step` steps of which are done."""
        self.bar.set_description_str(title, refresh=False)
        self._reach(self._before + step, here=False)
        self.bar.refresh()

    def stepped(self, step: int) -> None:
        """It has taken so many."""
        self._reach(self._before + step, here=True)

    def learnt(self, nll: float) -> None:
        """Show its training loss."""
        self.bar.set_postfix(nll=f"{nll:.3f}")

    def ended(self, steps: int) -> None:
        """A run of so many steps has ended, perhaps long ago."""
        self._before += steps
        self._reach(self._before, here=False)

    def _reach(self, step: int, *, here: bool) -> None:
        if not self.bar.disable:
            more = step - self.bar.n
            self.bar.initial += 0 if here else more
            self.bar.update(more)


@dataclass(frozen=True)
class Display:
    """Where lines go, and whether bars are drawn."""

    say: Callable[[str], None]
    bars: bool = False

    @classmethod
    def on_stderr(cls, *, quiet: bool = False) -> Display:
        """Lines on stderr, bars too where someone is looking; nothing when quiet, or from any process but the first."""
        if quiet or not ranks.first():
            return cls(lambda line: None)
        # above a bar that is there
        return cls(lambda line: tqdm.write(line, file=sys.stderr), bars=sys.stderr.isatty())

    @contextmanager
    def stages(self) -> Iterator[None]:
        """Show the progress of each stage inside: reading, tokenizer, tokens, speed."""
        bar = tqdm(total=100, leave=False, disable=not self.bars, bar_format="{desc:<10}{percentage:3.0f}%|{bar}|")

        def show(stage: str, done: float, total: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.n = round(100 * min(1, done / total)) if total else 0  # the size of a stream is unknown
            bar.refresh()

        with bar, heard(show):
            yield

    @contextmanager
    def runs(self, steps: int) -> Iterator[RunsBar]:
        """Yield the bar over all runs, of so many steps together."""
        made = RunsBar(steps, shown=self.bars)
        with made.bar:
            yield made
