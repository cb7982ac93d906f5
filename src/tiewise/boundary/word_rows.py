"""Rows of a table that a file of word vectors fills word by word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WIDEST = 1 << 14  # columns; published vectors have at most a few thousand, and a wrong header can say anything
DOWNLOAD_AGAIN = "take the file from its source again"


class WordRows:
    """Rows [V, E] for `tokens` (None where a row has none), nan until filled. A word's first vector counts."""

    def __init__(self, tokens: Sequence[str | None], width: int) -> None:
        self.index: dict[bytes, int] = {}  # row of each word that the table has
        for row, token in enumerate(tokens):
            if token is not None:
                self.index[token.encode("utf-8", "surrogatepass")] = row
        self.values = np.full((len(tokens), width), np.nan, np.float32)
        self.filled: set[int] = set()
        self.repeats = 0  # further vectors of words that have one
        self.broken: list[int] = []  # numbers, from 1, of the lines or entries that hold no vector
        self.suspicion = ""  # a reason to doubt that the file is whole

    def put(self, word: bytes, vector: np.ndarray, number: int) -> None:
        """Keep the `vector` [E] of a word of the table. One with a value that is no finite float32 is broken."""
        row = self.index[word]
        with np.errstate(over="ignore", invalid="ignore"):
            vector = vector.astype(np.float32)
        if not np.isfinite(vector).all():
            self.broken.append(number)
        elif row in self.filled:
            self.repeats += 1
        else:
            self.values[row] = vector
            self.filled.add(row)
