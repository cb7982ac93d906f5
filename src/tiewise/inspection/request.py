"""What an inspection is asked for, and how much work it may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiewise.core.errors import DataError

Progress = Callable[[str, int, int], None]  # (what is done, parts done, parts in all)
# that can be asked for, told by their files' names alone: to import some of them needs torch
SECTIONS = tuple(sorted(path.stem for path in (Path(__file__).parent / "sections").glob("[a-z]*.py")))


@dataclass(frozen=True)
class Effort:
    """How much is read and run; more of each makes intervals shorter."""

    windows: int = 64  # pieces of text that models are run on; a quarter as many more are held out for the lenses
    length: int = 128  # tokens of each, or as many as the model has positions
    tokens: int = 2_000_000  # most tokens of the text that are read for bigrams and frequencies
    samples: int = 4000  # rows of a table that are compared pair by pair
    lens_steps: int = 250  # steps that every tuned lens is trained for
    # share of the rows that maps between two tables are not fitted on; 0 fits on all and scores all
    held_out: float = 0.2

    def checked(self) -> Effort:
        """Return it."""
        least = {"windows": 8, "length": 2, "tokens": 2, "samples": 2, "lens_steps": 20}
        for name, low in least.items():
            if getattr(self, name) < low:
                option = name.replace("_", "-")
                raise DataError(f"--{option} {getattr(self, name)}", f"use {low} or more")
        if not 0 <= self.held_out <= 0.5:
            raise DataError(f"--held-out {self.held_out}", "use a share from 0 (fit and score all rows) to 0.5")
        return self


@dataclass(frozen=True)
class Request:
    """What to inspect a model for."""

    texts: tuple[str, ...] = ()  # sources of text, as `--text` takes them; none leaves out what needs a text
    pairs: tuple[tuple[str, str], ...] = ()  # token texts (before, after) whose transitions are asked for
    only: tuple[str, ...] = ()  # names of sections; none for all that the models and the text allow
    seed: int = 0  # of every draw
    effort: Effort = Effort()  # how much work

    def checked(self) -> Request:
        """Return it."""
        unknown = next((name for name in self.only if name not in SECTIONS), None)
        if unknown is not None:
            fix = f"sections are {', '.join(SECTIONS)}; the evidence is drawn from those that are chosen"
            raise DataError(f"there is no section {unknown!r}", fix)
        return self


def pairs_of(tokens: str) -> tuple[tuple[str, str], ...]:
    """Read "New, York" or "New, York; San, Francisco": the pairs that are asked for."""
    found = []
    for pair in tokens.split(";"):
        words = [word.strip() for word in pair.split(",")]
        if len(words) != 2 or not all(words):
            raise DataError(f"--tokens {tokens!r}: {pair.strip()!r} is no pair", 'write two tokens: "New, York"')
        found.append((words[0], words[1]))
    return tuple(found)
