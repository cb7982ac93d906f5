"""Lengths of a table's rows against how often a text has their tokens.

Rows that were never trained, or look so: zero, repeated, without a token, never in a text, near unused ones.

The indicator is that of Land & Bartolo 2024 (arXiv:2405.05417, "Indicators for detecting under-trained tokens"): rows
whose token no text can produce are moved by training in one common way, and a row that is as close to their mean as
they are themselves was probably not trained either. It names candidates, not culprits: their paper goes on to prompt
the model with each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate, mean_interval
from tiewise.analysis.similarity import NormCorrelation, norm_correlation
from tiewise.analysis.token_table import Array, TokenTable
from tiewise.analysis.token_texts import Groups
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import scan_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.progress import doing

FEWEST = 4  # rows of which Fisher's interval can be taken


@dataclass(frozen=True)
class NormGroup:
    """Row norms of one group of tokens."""

    label: str  # of the group
    mean: Estimate | None  # with its 95 % interval over tokens; None where the group has fewer than two
    median: float  # half of the tokens have shorter rows
    # a quarter have shorter ones than the first; a quarter have longer ones than the second
    quartiles: tuple[float, float]
    tokens: int  # rows in the group


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of a table's rows."""

    mean: float  # over all rows
    deviation: float  # their standard deviation
    # correlation with the logarithm of the count, over tokens that the text has; None without a text, or where it has
    # fewer than four of them or all equally often. `chance` is the exact standard deviation of either correlation over
    # all permutations of the norms, 1/√(n−1), around 0
    frequency: NormCorrelation | None = None
    bins: tuple[NormGroup, ...] = ()  # by frequency; empty without a text. Groups without tokens are left out
    scripts: tuple[NormGroup, ...] = ()  # by script; empty where the tokens' texts are not known


def norms_of(
    norms: Array, counts: NDArray[np.int64] | None = None, bins: Groups | None = None, scripts: Groups | None = None
) -> Norms:
    """Describe the norms [V] of a table's rows, with counts [V] of a text and groups of tokens where there are any."""
    return Norms(
        float(norms.mean()),
        float(norms.std()),
        None if counts is None else _frequency(norms, counts),
        () if bins is None else _groups(norms, bins),
        () if scripts is None else _groups(norms, scripts),
    )


def _frequency(norms: Array, counts: NDArray[np.int64]) -> NormCorrelation | None:
    seen = counts > 0
    if seen.sum() < FEWEST or len(np.unique(counts[seen])) < 2:
        return None
    return norm_correlation(norms[seen], np.log(counts[seen]))


def _groups(norms: Array, groups: Groups) -> tuple[NormGroup, ...]:
    found = []
    for place, label in enumerate(groups.labels):
        values = norms[groups.of == place]
        if len(values):
            low, median, high = (float(q) for q in np.quantile(values, [0.25, 0.5, 0.75]))
            mean = mean_interval(values) if len(values) > 1 else None
            found.append(NormGroup(label, mean, median, (low, high), len(values)))
    return tuple(found)


FEWEST_UNUSED = 5  # unused rows whose own spread can be told
SHOWN = 20


@dataclass(frozen=True)
class Suspect:
    """A row that is near the unused ones: its distance to their mean, and its cosine with it, rows less the table's."""

    row: int
    distance: float
    cosine: float


@dataclass(frozen=True)
class NearUnused:
    """Rows of tokens in use that are as near the mean unused row as unused rows are."""

    reference: int  # rows of no token, or of tokens named reserved, unused or padding
    reach: float  # 95 % of these lie within this Euclidean distance of the mean of the other ones
    count: int  # rows in use within it
    share: float  # of all rows in use
    nearest: tuple[Suspect, ...]  # the first of them, nearest first


@dataclass(frozen=True)
class RowState:
    """Rows of one stored table that say little."""

    zero: tuple[int, ...]  # rows of zeros
    # groups of rows that are equal bit for bit, largest first, at most 20 groups of at most 20 rows
    repeated: tuple[tuple[int, ...], ...]
    groups: int  # number of such groups
    in_groups: int  # rows in them
    unseen: int | None  # rows whose token the text does not have; None without a text
    near_unused: NearUnused | None  # None where fewer than five unused rows are known


def row_state(
    stored: Stored,
    table: TokenTable,
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
    with doing(f"rows of {short(stored.name)}", stored.nbytes):
        scan = scan_rows(stored)
    repeated = sorted(scan.repeated, key=len, reverse=True)
    return RowState(
        zero=scan.zero,
        repeated=tuple(group[:SHOWN] for group in repeated[:SHOWN]),
        groups=len(repeated),
        in_groups=sum(map(len, repeated)),
        unseen=None if counts is None else int((counts == 0).sum()),
        near_unused=near_unused(table, unused) if len(unused) >= FEWEST_UNUSED else None,
    )


def near_unused(table: TokenTable, unused: NDArray[np.int64]) -> NearUnused:
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
