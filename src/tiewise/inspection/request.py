"""What an inspection is asked for, and how much work it may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiewise.core.errors import DataError

Progress = Callable[[str, int, int], None]  # (what is done, parts done, parts in all)
# sections of one file each, told by their names alone: to import them needs torch
FILES = tuple(sorted(path.stem for path in (Path(__file__).parent / "sections").glob("[a-z]*.py")))
# that can be asked for; the evidence is drawn from them
SECTIONS = ("direct_path", "alignment", "closer", "run_alignment", "tokens", *FILES)


@dataclass(frozen=True)
class Effort:
    """How much is read and run; more of each makes intervals shorter.

    Args:
        windows: pieces of text that models are run on; a quarter as many more are held out for the lenses.
        length: tokens of each, or as many as the model has positions.
        tokens: most tokens of the text that are read for bigrams and frequencies.
        samples: rows of a table that are compared pair by pair.
        lens_steps: steps that every tuned lens is trained for.
        held_out: share of the rows that maps between two tables are not fitted on; 0 fits on all and scores all.
    """

    windows: int = 64
    length: int = 128
    tokens: int = 2_000_000
    samples: int = 4000
    lens_steps: int = 250
    held_out: float = 0.2

    def checked(self) -> Effort:
        """Return it.

        Raises:
            DataError: a number that leaves nothing to do.
        """
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
    """What to inspect a model for.

    Args:
        texts: sources of text, as `--text` takes them; none leaves out what needs a text.
        pairs: token texts (before, after) whose transitions are asked for.
        only: names of sections; none for all that the models and the text allow.
        seed: of every draw.
        effort: how much work.
    """

    texts: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    only: tuple[str, ...] = ()
    seed: int = 0
    effort: Effort = Effort()

    def checked(self) -> Request:
        """Return it.

        Raises:
            DataError: there is no section of a name.
        """
        unknown = next((name for name in self.only if name not in SECTIONS), None)
        if unknown is not None:
            fix = f"sections are {', '.join(SECTIONS)}; the evidence is drawn from those that are chosen"
            raise DataError(f"there is no section {unknown!r}", fix)
        return self

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def pairs_of(tokens: str) -> tuple[tuple[str, str], ...]:
    """Read "New, York" or "New, York; San, Francisco": the pairs that are asked for.

    Raises:
        DataError: not two tokens to a pair.
    """
    found = []
    for pair in tokens.split(";"):
        words = [word.strip() for word in pair.split(",")]
        if len(words) != 2 or not all(words):
            raise DataError(f"--tokens {tokens!r}: {pair.strip()!r} is no pair", 'write two tokens: "New, York"')
        found.append((words[0], words[1]))
    return tuple(found)
