"""The best direct path of a given width on a small chain, tied and untied, and what its loss is made of.

    tied   p(j|i) ∝ exp(W_i·W_j + b_j)     nll = H + irreversibility + definiteness + rank
    untied p(j|i) ∝ exp(E_i·U_j + b_j)     nll = H + rank

H and irreversibility are exact (`bigrams`). Definiteness is what W Wᵀ of full width still pays beyond symmetry, because
its logits have no negative eigenvalue. Narrow paths are not convex: the best of several starts is taken, an upper bound
of the optimum, and the starts' spread says how far they disagree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tiewise.analysis.bigrams import Chain
from tiewise.analysis.lbfgs import minimise
from tiewise.analysis.tables import Array
from tiewise.core.errors import DataError

MOST_TOKENS = 2048  # a dense fit takes V² memory, and time by V²·d for each step


@dataclass(frozen=True)
class PathFit:
    """The best path found.

    Args:
        width: d.
        tied: whether both ends are one table.
        nll: nats per token, on the chain that it was fitted to.
        gradient: largest element of the gradient there.
        starts: starts tried; 0 where none was needed.
        spread: worst less best of their losses.
    """

    width: int
    tied: bool
    nll: float
    gradient: float
    starts: int
    spread: float

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Split:
    """What direct paths of one width pay on a chain, in nats per token.

    Args:
        entropy: H.
        irreversibility: what symmetry costs at any width.
        definiteness: what W Wᵀ costs beyond, at full width.
        tied_rank: what width d costs a tied path beyond.
        untied_rank: what width d costs an untied path; the only part that it pays above H.
        full: the tied fit of full width.
        tied: the tied fit of width d.
        untied: the untied fit of width d.
    """

    entropy: float
    irreversibility: float
    definiteness: float
    tied_rank: float
    untied_rank: float
    full: PathFit
    tied: PathFit
    untied: PathFit

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def split(chain: Chain, width: int, starts: int = 3, steps: int = 5000, seed: int = 0) -> Split:
    """Fit and divide. Parts that need a fit are upper bounds as far as `gradient` and `spread` say.

    A width of V or more is full: the tied fit is the full one, and an untied path reaches H without a fit.

    Raises:
        DataError: more than 2,048 tokens, or a width below 1.
    """
    h, i = chain.entropy, chain.irreversibility
    tied = full = fit_path(chain, chain.vocabulary, True, 1, steps, seed)
    untied = PathFit(width, False, h, 0.0, 0, 0.0)
    if width < chain.vocabulary:
        tied = fit_path(chain, width, True, starts, steps, seed)
        untied = fit_path(chain, width, False, starts, steps, seed)
    return Split(h, i, full.nll - h - i, tied.nll - full.nll, untied.nll - h, full, tied, untied)


def fit_path(chain: Chain, width: int, tied: bool, starts: int = 3, steps: int = 5000, seed: int = 0) -> PathFit:
    """Fit tables and bias by L-BFGS from `starts` random starts.

    Raises:
        DataError: more than 2,048 tokens, a width below 1, or no start.
    """
    if chain.vocabulary > MOST_TOKENS:
        what = f"{chain.vocabulary:,} tokens are too many for a fit"
        raise DataError(what, f"keep the {MOST_TOKENS:,} most frequent ones or fewer")
    if width < 1 or starts < 1:
        raise DataError(f"width {width}, {starts} starts", "both must be 1 or more")
    problem = _Problem(chain.dense(), width, tied)
    generator = np.random.default_rng(seed)
    found = [minimise(problem.loss, problem.start(generator), steps, 1e-10) for _ in range(starts)]
    best = min(found, key=lambda end: end.value)
    worst = max(end.value for end in found)
    return PathFit(width, tied, best.value, best.gradient, starts, worst - best.value)


@dataclass(frozen=True)
class _Problem:
    """The nll of a path as a function of its tables and bias, laid end to end."""

    q: Array
    width: int
    tied: bool

    def start(self, generator: np.random.Generator) -> Array:
        """Draw tables; the bias begins at the tokens' own frequencies."""
        tables = generator.normal(0, 0.3 / np.sqrt(self.width), (1 if self.tied else 2) * len(self.q) * self.width)
        return np.concatenate([tables, np.log(self.q.sum(0) + 1e-6)])

    def loss(self, x: Array) -> tuple[float, Array]:
        """Return nll and gradient."""
        v = len(self.q)
        tables = x[:-v].reshape(-1, v, self.width)
        left, right = tables[0], tables[-1]
        logits = left @ right.T + x[-v:]
        logits -= logits.max(1, keepdims=True)
        mass = np.exp(logits)
        total = mass.sum(1, keepdims=True)
        nll = float((self.q * (np.log(total) - logits)).sum())
        error = mass * (self.q.sum(1, keepdims=True) / total) - self.q
        to_left, to_right = error @ right, error.T @ left
        slopes = (to_left + to_right,) if self.tied else (to_left, to_right)
        return nll, np.concatenate([*(slope.ravel() for slope in slopes), error.sum(0)])
