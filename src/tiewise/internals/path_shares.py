"""How the rows of a table divide between Path A and Path B: by how often a token occurs, and row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import ratio
from tiewise.analysis.token_texts import read_as
from tiewise.data.frequency import bin_of, frequency_bins
from tiewise.internals.loaded import Opened
from tiewise.internals.path_rows import RowSums, Split

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HISTOGRAM = 20  # bins of a row's share
_TOP = 20


@dataclass(frozen=True)
class Bin:
    """Tokens of one frequency.

    Args:
        label: counts in the text, as `tiewise.data.frequency.frequency_bins` has them.
        tokens: rows of the table.
        occurrences: how often they occur together.
        gradient: of the text's mean loss, on these rows.
        update: Adam's step on these rows.
        of_a: these rows' part of ‖A‖².
        of_b: their part of ‖B‖².
    """

    label: str
    tokens: int
    occurrences: int
    gradient: Split
    update: Split
    of_a: float
    of_b: float


@dataclass(frozen=True)
class Row:
    """One token's row: what it reads as, its count in the windows, ‖A_r‖, ‖B_r‖, B's share, its part of ‖A‖² + ‖B‖²."""

    token: int
    text: str
    count: int
    a: float
    b: float
    share_b: float
    of_all: float
    update_share_b: float


@dataclass(frozen=True)
class Rows:
    """How rows of tokens that occur in the windows divide: B's share in each row.

    Args:
        tokens: how many occur.
        quantiles: of the rows' shares in the gradient, at `QUANTILES`.
        update_quantiles: the same in Adam's step.
        histogram: part of these rows by share, `HISTOGRAM` equal bins of [0, 1].
        update_histogram: the same in Adam's step.
        absent: tokens that occur in no window: they get Path B alone.
        absent_of_b: absent tokens' part of ‖B‖².
        absent_of_update: absent tokens' part of ‖u‖², the step with both paths.
        top: the rows with most of ‖A‖² + ‖B‖².
    """

    tokens: int
    quantiles: tuple[float, ...]
    update_quantiles: tuple[float, ...]
    histogram: tuple[float, ...]
    update_histogram: tuple[float, ...]
    absent: int
    absent_of_b: float
    absent_of_update: float
    top: tuple[Row, ...]


def by_frequency(gradient: RowSums, update: RowSums, counts: NDArray) -> tuple[Bin, ...]:
    """Gradient and step of tokens of like frequency, which `counts` [V] says."""
    where, all_a, all_b = bin_of(counts), gradient.a2.sum(), gradient.b2.sum()
    found = []
    for index, kind in enumerate(frequency_bins(counts)):
        rows = where == index
        parts = ratio(float(gradient.a2[rows].sum()), all_a), ratio(float(gradient.b2[rows].sum()), all_b)
        found.append(Bin(kind.label, kind.tokens, kind.occurrences, gradient.split(rows), update.split(rows), *parts))
    return tuple(found)


def by_row(opened: Opened, gradient: RowSums, update: RowSums, seen: NDArray) -> Rows:
    """Single rows, of tokens that occur in the windows (`seen` [V]) and of those that do not."""
    present = seen > 0
    shares, steps = gradient.share_b, update.share_b
    energy = gradient.a2 + gradient.b2
    best = [int(r) for r in np.argsort(-energy, kind="stable")[:_TOP]]
    top = tuple(
        Row(
            r,
            text,
            int(seen[r]),
            math.sqrt(gradient.a2[r]),
            math.sqrt(gradient.b2[r]),
            float(shares[r]),
            ratio(float(energy[r]), float(energy.sum())),
            float(steps[r]),
        )
        for r, text in zip(best, read_as(opened.folder, best), strict=True)
    )
    whole = update.split().total
    return Rows(
        int(present.sum()),
        _quantiles(shares[present]),
        _quantiles(steps[present]),
        _histogram(shares[present]),
        _histogram(steps[present]),
        int((~present).sum()),
        ratio(float(gradient.b2[~present].sum()), float(gradient.b2.sum())),
        ratio(update.split(~present).total ** 2, whole**2),
        top,
    )


def _quantiles(shares: NDArray) -> tuple[float, ...]:
    kept = shares[np.isfinite(shares)]
    return tuple(float(x) for x in np.quantile(kept, QUANTILES)) if len(kept) else (math.nan,) * len(QUANTILES)


def _histogram(shares: NDArray) -> tuple[float, ...]:
    kept = shares[np.isfinite(shares)]
    counts = np.histogram(kept, HISTOGRAM, (0.0, 1.0))[0]
    return tuple(float(x) / max(len(kept), 1) for x in counts)
