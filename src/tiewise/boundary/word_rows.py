"""Rows of a table that a file of word vectors fills word by word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WIDEST = 1 << 14  # columns; published vectors have at most a few thousand, and a wrong header may name any number
DOWNLOAD_AGAIN = "take the file from its source again"


class WordRows:
    """Rows [V, E] of a table, which a reader fills word by word.

    `tokens` has the token of each row, or None. A row is nan until it is filled. If a file repeats a word, its first
    vector counts.
    """

    def __init__(self, tokens: Sequence[str | None], width: int) -> None:
        self.index: dict[bytes, int] = {}  # word of the table -> row
        for row, token in enumerate(tokens):
            if token is not None:
                self.index[token.encode("utf-8", "surrogatepass")] = row
        self.values = np.full((len(tokens), width), np.nan, np.float32)
        self.filled: set[int] = set()  # rows that have a vector
        self.repeats = 0  # number of vectors of words that already had one
        self.broken: list[int] = []  # numbers, from 1, of lines or entries without a valid vector
        self.suspicion = ""  # reason to suspect that the file is cut short

    def put(self, word: bytes, vector: np.ndarray, number: int) -> None:
        """Store the `vector` [E] of a word of the table.

        `number` is that of its line or entry, which counts as broken if a value is not finite in float32.
        """
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
