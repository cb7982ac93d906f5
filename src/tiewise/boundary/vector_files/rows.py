"""What a file of vectors gives a vocabulary: rows by word, and how much of the file could not be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

WIDEST = 1 << 14  # columns; published vectors have at most a few thousand, and a wrong header can say anything
_NAMED = 5  # places of broken entries that are kept


@dataclass
class Broken:
    """Lines or entries that hold no vector: how many, and the numbers of the first, from 1."""

    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, place: int) -> None:
        """Count one more."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(place)


class Rows:
    """Rows [V, E] for the words of a vocabulary, nan where the file has none; a word's first vector counts.

    Args:
        tokens: the word of each row, None where a row has none.
        width: E.
    """

    def __init__(self, tokens: Sequence[str | None], width: int) -> None:
        named = ((token, row) for row, token in enumerate(tokens) if token is not None)
        self.index = {token.encode("utf-8", "surrogatepass"): row for token, row in named}
        self.values = np.full((len(tokens), width), np.nan, np.float32)
        self.found: set[int] = set()
        self.twice = 0
        self.broken = Broken()

    def wants(self, word: bytes) -> bool:
        """Whether the vocabulary has this word."""
        return word in self.index

    def put(self, word: bytes, vector: np.ndarray, place: int) -> None:
        """Keep the `vector` [E] of a wanted word; one with a value that is no finite float32 is broken."""
        row = self.index[word]
        with np.errstate(over="ignore", invalid="ignore"):
            vector = vector.astype(np.float32)
        if not np.isfinite(vector).all():
            self.broken.add(place)
        elif row in self.found:
            self.twice += 1
        else:
            self.values[row] = vector
            self.found.add(row)
