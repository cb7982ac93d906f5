"""Which row of one table belongs to which row of another: by the token's text, never by its place.

Two tokenizers give one text two ids, and one id two texts. Rows are paired by index only where both tables belong to
one vocabulary: the two ends of one model, or two vocabularies that are the same text for text.

Two tables and the pairs of their rows, read in pieces that products run on at full speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.token_table import TokenTable
from tiewise.checkpoint.hf_folder import Folder, open_folder, read_tokenizer
from tiewise.core.errors import CheckpointError


@dataclass(frozen=True)
class Pairs:
    """Rows that belong together: row a[i] of one table and row b[i] of the other, sorted by a."""

    a: NDArray[np.int64]  # rows of the first table, int64 [n]
    b: NDArray[np.int64]  # rows of the second, int64 [n]
    how: str  # `one vocabulary` or `by token text`

    def __len__(self) -> int:
        return len(self.a)

    def without(self, mask_a: NDArray[np.bool_] | None = None, mask_b: NDArray[np.bool_] | None = None) -> Pairs:
        """Leave out pairs whose row is marked: rows that are zero, repeated or never used.

        Args:
            mask_a: bool [V], true for a row of the first table to leave out.
            mask_b: bool [V'], the same for the second.
        """
        keep = np.ones(len(self), bool)
        for mask, rows in ((mask_a, self.a), (mask_b, self.b)):
            if mask is not None:
                keep &= ~mask[rows]
        return Pairs(self.a[keep], self.b[keep], self.how)


def one_vocabulary(rows_a: int, rows_b: int) -> Pairs:
    """Pair rows by index: two tables of one model. A longer table's further rows (padding) are left out."""
    rows = np.arange(min(rows_a, rows_b), dtype=np.int64)
    return Pairs(rows, rows, "one vocabulary")


def by_text(texts_a: Sequence[str | None], texts_b: Sequence[str | None]) -> Pairs:
    """Pair rows whose tokens have the same text; where a text stands twice in a vocabulary, its first row counts.

    Args:
        texts_a: text of each row of the first table; None for a row without a token.
        texts_b: the same for the second.

    Raises:
        CheckpointError: the two have no token in common.
    """
    of_b: dict[str, int] = {}
    for row, text in enumerate(texts_b):
        if text is not None:
            of_b.setdefault(text, row)
    seen: set[str] = set()
    rows_a, rows_b = [], []
    for row, text in enumerate(texts_a):
        if text is not None and text in of_b and text not in seen:
            seen.add(text)
            rows_a.append(row)
            rows_b.append(of_b[text])
    if not rows_a:
        raise CheckpointError(
            f"the two vocabularies ({len(texts_a):,} and {len(texts_b):,} rows) have no token in common",
            "give the tokenizer of each table; byte-level and SentencePiece vocabularies spell tokens differently",
        )
    return Pairs(np.array(rows_a, np.int64), np.array(rows_b, np.int64), "by token text")


def texts_of(folder: str | Path | Folder, rows: int) -> list[str | None]:
    """Return the text of each of `rows` rows as a checkpoint's tokenizer files give it; None where none has the id.

    Raises:
        CheckpointError: no folder, no tokenizer file in it that holds texts, or one that cannot be read.
    """
    opened = folder if isinstance(folder, Folder) else open_folder(folder)
    where, found = opened.path, None if opened.single else read_tokenizer(opened)
    if found is None:
        raise CheckpointError(f"{where}: no tokenizer.json, vocab.json or vocab.txt", "copy it from its source")
    if found.faults:
        raise CheckpointError(f"{where}: {found.faults[0].what}", found.faults[0].fix)
    if any(name.endswith((".model", ".spm")) for name in found.files):
        raise CheckpointError(f"{where}: a SentencePiece model, whose texts are not read", "add its tokenizer.json")
    texts: list[Any] = [None] * rows
    for text, number in [*found.base.items(), *((text, number) for number, text in found.added.items())]:
        if number < rows:
            texts[number] = text
    return texts


CHUNK_BYTES = 40 * 2**20  # of rows held in fp32
FEWEST = 16  # paired rows below which nothing is said
Order = NDArray[np.int64]


@dataclass(frozen=True)
class Paired:
    """Two tables, the pairs of their rows, and the type in which rows are multiplied."""

    a: TokenTable  # table A
    b: TokenTable  # table B
    pairs: Pairs  # rows that belong together
    dtype: type[np.floating]  # type of the products
    # directions over the pairs, [pairs, k], whose products with both tables are summed too
    beside: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        for table, wanted in ((self.a, self.pairs.a), (self.b, self.pairs.b)):
            if len(wanted) and int(wanted.max()) >= table.rows:
                raise CheckpointError(
                    f"{table.name} has {table.rows:,} rows and its vocabulary names row {int(wanted.max()):,}",
                    "give the tokenizer that belongs to the table",
                )
        if len(self.pairs) < FEWEST:
            raise CheckpointError(
                f"{len(self.pairs)} paired rows are too few to align", f"at least {FEWEST} tokens must be in both"
            )

    @property
    def widths(self) -> tuple[int, int]:
        """(d1, d2)."""
        return self.a.width, self.b.width

    def take(self, first: Order, second: Order) -> tuple[NDArray, NDArray]:
        """Rows of A at pairs `first` and of B at pairs `second`, [n, d1] and [n, d2]."""
        return self.a.take(self.pairs.a[first], self.dtype), self.b.take(self.pairs.b[second], self.dtype)

    def slices(self, count: int) -> list[slice]:
        """Pieces of `count` pairs, about CHUNK_BYTES of fp32 in each table."""
        step = max(64, CHUNK_BYTES // (4 * max(1, *self.widths)))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]
