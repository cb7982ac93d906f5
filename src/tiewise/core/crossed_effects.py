"""Interval of a paired difference over two crossed samples: seeds and held-out documents.

    nats of arm − reference, by seed and document [S, J], tokens [J]  →  estimate ± half-width

Every seed of both arms is measured on every document, so a document is as much a draw as a seed: another held-out text
of the same kind moves the difference too. The estimate is the mean difference per token, D = Σ nats / (S · Σ tokens).
Its variance is that of two-way clustering (Cameron, Gelbach & Miller, Journal of Business & Economic Statistics 2011):

    V = V_seeds + V_documents − V_interaction,   but at least V_seeds and at least V_documents

    V_seeds         variance of the seeds' D_s, divided by S
    V_documents     delete-one jackknife over documents of the mean over seeds, as documents have unequal lengths
    V_interaction   the same jackknife of each seed's deviation from that mean: both parts above contain it

The degrees of freedom are those of Satterthwaite (Biometrics Bulletin 1946),
V² / (V_seeds² / (S − 1) + V_documents² / (J* − 1)), but at least those of the smaller sample. J* = (Σ w)² / Σ w² is the
equivalent number of documents of equal length (Kish 1965).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.estimates import critical_t, equal_units, two_sided_p


@dataclass(frozen=True)
class DifferenceInterval:
    """A mean difference with its 95 % interval, estimate ± half_width.

    >>> interval = seed_interval([0.5, 1.0, 1.5])
    >>> interval.estimate, round(interval.standard_error, 3), interval.degrees_of_freedom, round(interval.half_width, 2)
    (1.0, 0.289, 2, 1.24)
    """

    estimate: float
    half_width: float
    standard_error: float
    degrees_of_freedom: float

    @classmethod
    def of(cls, estimate: float, standard_error: float, degrees_of_freedom: float) -> DifferenceInterval:
        """Return the interval of an estimate by Student's t."""
        return cls(estimate, critical_t(degrees_of_freedom) * standard_error, standard_error, degrees_of_freedom)

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.estimate - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.estimate + self.half_width

    @property
    def p(self) -> float:
        """Two-sided p of a difference of zero. Without a standard error it is 0 or 1."""
        if self.standard_error == 0:
            return float(self.estimate == 0)
        return two_sided_p(self.estimate / self.standard_error, self.degrees_of_freedom)


class Parts(NamedTuple):
    """Parts of the variance of a mean difference."""

    seeds: float
    documents: float
    interaction: float

    @property
    def total(self) -> float:
        """Variance of two-way clustering, at least that of each sample alone."""
        return max(self.seeds + self.documents - self.interaction, self.seeds, self.documents)


def seed_interval(differences: ArrayLike) -> DifferenceInterval:
    """Return the mean of the differences [S] of S ≥ 2 seeds with its interval.

    It is that of Student (Biometrika 1908), mean ± t·s/√S.
    """
    values = np.asarray(differences, np.float64)
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return DifferenceInterval.of(float(values.mean()), error, len(values) - 1)


def crossed_interval(nats: ArrayLike, tokens: ArrayLike) -> DifferenceInterval:
    """Return the mean difference per token with its interval over seeds and documents.

    Args:
        nats: difference of two arms, summed over the tokens of each document [S, J], for S ≥ 2 seeds, J ≥ 2 documents.
        tokens: predicted tokens of each document [J], all above 0.

    >>> interval = crossed_interval([[8.0, 12.0], [9.0, 11.0], [7.0, 13.0]], [100, 100])
    >>> round(interval.estimate, 3), round(interval.standard_error, 3), round(interval.degrees_of_freedom, 2)
    (0.1, 0.02, 1.0)
    """
    values, weights = np.asarray(nats, np.float64), np.asarray(tokens, np.float64)
    parts = variance_parts(values, weights)
    estimate = float(values.sum() / weights.sum() / len(values))
    return DifferenceInterval.of(estimate, math.sqrt(parts.total), _freedom(parts, len(values), equal_units(weights)))


def variance_parts(nats: NDArray[np.float64], tokens: NDArray[np.float64]) -> Parts:
    """Return the parts of the variance of a mean difference.

    `nats` [S, J] and `tokens` [J] are those of `crossed_interval`.
    """
    seeds = len(nats)
    by_seed = nats.sum(axis=1) / tokens.sum()
    without = (nats.sum(axis=1, keepdims=True) - nats) / (tokens.sum() - tokens)  # each seed's D without a document
    mean = without.mean(axis=0)
    interaction = _jackknife_variance(without - mean).sum() / (seeds * (seeds - 1))
    return Parts(float(by_seed.var(ddof=1)) / seeds, float(_jackknife_variance(mean)), float(interaction))


def _jackknife_variance(without: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a statistic's variance from its values without each document [..., J]."""
    variance: NDArray[np.float64] = (without.shape[-1] - 1) * without.var(axis=-1)
    return variance


def _freedom(parts: Parts, seeds: int, documents: float) -> float:
    """Return the degrees of freedom; `documents` is their number, of equal length."""
    seed_freedom, document_freedom = seeds - 1, max(documents - 1, 1.0)
    least = min(seed_freedom, document_freedom)
    spread = parts.seeds**2 / seed_freedom + parts.documents**2 / document_freedom
    if spread == 0:
        return least
    return max(parts.total**2 / spread, least)
