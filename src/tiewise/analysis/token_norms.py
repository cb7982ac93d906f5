"""Lengths of a table's rows against how often a text has their tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate, mean_interval
from tiewise.analysis.similarity import NormCorrelation, norm_correlation
from tiewise.analysis.tables import Array
from tiewise.analysis.token_groups import Groups

FEWEST = 4  # rows of which Fisher's interval can be taken


@dataclass(frozen=True)
class NormGroup:
    """Row norms of one group of tokens.

    Args:
        label: of the group.
        mean: with its 95 % interval over tokens; None where the group has fewer than two.
        median: half of the tokens have shorter rows.
        quartiles: a quarter have shorter ones than the first; a quarter have longer ones than the second.
        tokens: rows in the group.
    """

    label: str
    mean: Estimate | None
    median: float
    quartiles: tuple[float, float]
    tokens: int


@dataclass(frozen=True)
class Norms:
    """Euclidean norms of a table's rows.

    Args:
        mean: over all rows.
        deviation: their standard deviation.
        frequency: correlation with the logarithm of the count, over tokens that the text has; None without a text, or
            where it has fewer than four of them or all equally often. `chance` is the exact standard deviation of
            either correlation over all permutations of the norms, 1/√(n−1), around 0.
        bins: by frequency; empty without a text. Groups without tokens are left out.
        scripts: by script; empty where the tokens' texts are not known.
    """

    mean: float
    deviation: float
    frequency: NormCorrelation | None = None
    bins: tuple[NormGroup, ...] = ()
    scripts: tuple[NormGroup, ...] = ()

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


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
