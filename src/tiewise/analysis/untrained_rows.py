"""Rows that were never trained, or look so: zero, repeated, without a token, never in a text, near unused ones.

The indicator is that of Land & Bartolo 2024 (arXiv:2405.05417, "Indicators for detecting under-trained tokens"): rows
whose token no text can produce are moved by training in one common way, and a row that is as close to their mean as
they are themselves was probably not trained either. It names candidates, not culprits: their paper goes on to prompt
the model with each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.tables import Array, Table
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import scan_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.progress import progress

FEWEST = 5  # unused rows whose own spread can be told
SHOWN = 20


@dataclass(frozen=True)
class Suspect:
    """A row that is near the unused ones: its distance to their mean, and its cosine with it, rows less the table's."""

    row: int
    distance: float
    cosine: float


@dataclass(frozen=True)
class NearUnused:
    """Rows of tokens in use that are as near the mean unused row as unused rows are.

    Args:
        reference: rows of no token, or of tokens named reserved, unused or padding.
        reach: 95 % of these lie within this Euclidean distance of the mean of the other ones.
        count: rows in use within it.
        share: of all rows in use.
        nearest: the first of them, nearest first.
    """

    reference: int
    reach: float
    count: int
    share: float
    nearest: tuple[Suspect, ...]


@dataclass(frozen=True)
class RowState:
    """Rows of one stored table that say little.

    Args:
        zero: rows of zeros.
        repeated: groups of rows that are equal bit for bit, largest first, at most 20 groups of at most 20 rows.
        groups: number of such groups.
        in_groups: rows in them.
        unseen: rows whose token the text does not have; None without a text.
        near_unused: None where fewer than five unused rows are known.
    """

    zero: tuple[int, ...]
    repeated: tuple[tuple[int, ...], ...]
    groups: int
    in_groups: int
    unseen: int | None
    near_unused: NearUnused | None

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def row_state(
    stored: Stored,
    table: Table,
    unused: NDArray[np.int64],
    counts: NDArray[np.int64] | None = None,
) -> RowState:
    """Look at every row of a stored table, opened also as `table`.

    Args:
        stored: the tensor.
        table: the same.
        unused: rows that no text can produce, ascending.
        counts: of a text, [V].
    """
    what = f"rows of {short(stored.name)}"
    scan = scan_rows(stored, lambda done: progress(what, done, stored.nbytes))
    repeated = sorted(scan.repeated, key=len, reverse=True)
    return RowState(
        zero=scan.zero,
        repeated=tuple(group[:SHOWN] for group in repeated[:SHOWN]),
        groups=len(repeated),
        in_groups=sum(map(len, repeated)),
        unseen=None if counts is None else int((counts == 0).sum()),
        near_unused=near_unused(table, unused) if len(unused) >= FEWEST else None,
    )


def near_unused(table: Table, unused: NDArray[np.int64]) -> NearUnused:
    """Compare every row with the mean of the unused ones; two passes."""
    marked = np.zeros(table.rows, bool)
    marked[unused] = True
    total, centre = np.zeros(table.width), np.zeros(table.width)
    for start, stop in table.spans():
        rows = table.read(start, stop)
        total += rows.sum(0)
        centre += rows[marked[start:stop]].sum(0)
    centre, mean = centre / len(unused), total / table.rows
    distance, cosine = np.empty(table.rows), np.empty(table.rows)
    for start, stop in table.spans():
        rows = table.read(start, stop)
        distance[start:stop] = np.linalg.norm(rows - centre, axis=1)
        cosine[start:stop] = _cosines(rows - mean, centre - mean)
    own = distance[marked] * len(unused) / (len(unused) - 1)  # to the mean of the others
    reach = float(np.quantile(own, 0.95))
    candidates = np.nonzero(~marked & (distance <= reach))[0]
    order = candidates[np.argsort(distance[candidates], kind="stable")]
    nearest = tuple(Suspect(int(row), float(distance[row]), float(cosine[row])) for row in order[:SHOWN])
    in_use = table.rows - len(unused)
    return NearUnused(len(unused), reach, len(order), len(order) / in_use if in_use else 0.0, nearest)


def _cosines(rows: Array, direction: Array) -> Array:
    scale = np.linalg.norm(rows, axis=1) * np.linalg.norm(direction)
    cosines: Array = rows @ direction / np.where(scale > 0, scale, 1.0)
    return cosines
