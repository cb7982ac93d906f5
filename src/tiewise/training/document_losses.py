"""Losses of a run by held-out document, the second sample of a comparison.

    held-out tokens [N] → unit of each token → Σ nats and number of predicted tokens of each unit
    both arms of every seed → differences [S, J] → `core.crossed_effects`

A unit is a document, which `<eos>` ends in the prepared text. More than `MOST` documents form that many groups of
neighbours. A text of fewer than `FEWEST` documents, such as a book, is cut into `BLOCKS` blocks of equal length; blocks
of one document resemble each other, so an interval over blocks is the less cautious one. A corpus of words, where
`<eos>` ends a line, is cut into blocks as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DOCUMENTS, GROUPS, BLOCKS_OF_TEXT = "documents", "groups of documents", "blocks"
MOST = 200  # units of a run's result
FEWEST = 5  # documents; a text with fewer is cut into blocks
BLOCKS = 20
DIGITS = 4  # of a sum of nats after the point


@dataclass(frozen=True)
class DocumentLosses:
    """Held-out loss of each document of a run's text, in the order of the text."""

    unit: str  # "documents", "groups of documents", or "blocks"
    tokens: list[int]  # predicted tokens of each unit
    nats: list[float]  # their losses, summed

    def paired_with(self, other: DocumentLosses | None) -> bool:
        """Return whether another run was measured on the same tokens of the same units."""
        return other is not None and (self.unit, self.tokens) == (other.unit, other.tokens)


@dataclass(frozen=True)
class DocumentDifferences:
    """Differences of two arms by seed and document."""

    unit: str  # as `DocumentLosses.unit`
    nats: NDArray[np.float64]  # [S, J], arm − reference
    tokens: NDArray[np.float64]  # [J]


def document_differences(
    pairs: Sequence[tuple[DocumentLosses | None, DocumentLosses | None]],
) -> DocumentDifferences | None:
    """Return the differences of (reference, arm) pairs, a pair for each seed.

    None: a run lacks losses by document, has diverged, or was measured on other tokens; or there is only one unit.
    """
    first = pairs[0][0]
    if first is None or len(first.tokens) < 2:
        return None
    rows = []
    for reference, other in pairs:
        if reference is None or other is None:
            return None
        if not (first.paired_with(reference) and first.paired_with(other)):
            return None
        rows.append(np.subtract(other.nats, reference.nats))
    nats = np.array(rows, np.float64)
    if not np.isfinite(nats).all():
        return None
    return DocumentDifferences(first.unit, nats, np.array(first.tokens, np.float64))


@dataclass(frozen=True)
class TextUnits:
    """The unit of every token of a split."""

    name: str  # as `DocumentLosses.unit`
    of_token: NDArray[np.int64]  # [N], from 0


def text_units(tokens: NDArray[np.integer], end: int | None) -> TextUnits:
    """Return the units of a split [N], where the token `end` ends a document.

    None: the text marks no documents.

    >>> text_units(np.array([5, 6, 0, 7, 0, 8, 0, 9, 0, 4, 0]), 0).of_token.tolist()
    [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    """
    size = len(tokens)
    if end is not None:
        is_end = np.asarray(tokens) == end
        document = np.cumsum(is_end) - is_end
        count = int(document[-1]) + 1
        if count > MOST:
            return TextUnits(GROUPS, document * MOST // count)
        if count >= FEWEST:
            return TextUnits(DOCUMENTS, document)
    return TextUnits(BLOCKS_OF_TEXT, np.arange(size) * BLOCKS // size)


def sum_by_unit(losses: NDArray[np.float64], unit_of: NDArray[np.int64], name: str) -> DocumentLosses:
    """Return losses [n] of predicted tokens, summed by their unit [n].

    Units without a predicted token are left out.
    """
    tokens, nats = np.bincount(unit_of), np.bincount(unit_of, losses)
    used = tokens > 0
    return DocumentLosses(name, tokens[used].tolist(), nats[used].round(DIGITS).tolist())
