"""What direct paths pay on a text's pairs: the best of a given width, tied and untied, and a model's own.

    tied   p(j|i) ∝ exp(W_i·W_j + b_j)     nll = H + irreversibility + definiteness + rank
    untied p(j|i) ∝ exp(E_i·U_j + b_j)     nll = H + rank

H and irreversibility are exact (`bigram_counts`). Definiteness is what W Wᵀ of full width still pays beyond symmetry,
because its logits have no negative eigenvalue. Narrow paths are not convex: the best of several starts is taken, an
upper bound of the optimum, and the starts' spread says how far they disagree.

Fits are made on a text's most frequent tokens. All others become one state, so the text stays a ring and every formula
holds; what is merged can no longer be told apart, and H and I are those of that coarser text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.model_tables import Array, Ids
from tiewise.analysis.path_matrix import DirectPath, no_numbers
from tiewise.analysis.path_tokens import logits, transitions
from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, Z
from tiewise.core.long_work import advance

MOST_TOKENS = 2048  # a dense fit takes V² memory, and time by V²·d for each step
OTHERS = 512  # tokens that stand for all others
MEMORY = 30  # steps whose curvature L-BFGS remembers
ARMIJO, CURVATURE = 1e-4, 0.9
MOST_HALVINGS = 60


@dataclass(frozen=True)
class PathFit:
    """The best path found."""

    nll: float  # nats per token, on the chain that it was fitted to
    gradient: float  # largest element of the gradient there
    spread: float  # worst less best loss of all starts


@dataclass(frozen=True)
class Split:
    """What direct paths of one width pay on a chain, in nats per token; parts of fits are upper bounds."""

    entropy: float  # H
    irreversibility: float  # what symmetry costs at any width
    full: PathFit  # the tied fit of full width
    tied: PathFit  # the tied fit of the given width; of V or more it is the full one
    untied: PathFit  # the untied fit of that width; of V or more it reaches H without a fit

    @property
    def definiteness(self) -> float:
        """What W Wᵀ costs beyond, at full width."""
        return self.full.nll - self.entropy - self.irreversibility

    @property
    def tied_rank(self) -> float:
        """What the width costs a tied path beyond."""
        return self.tied.nll - self.full.nll

    @property
    def untied_rank(self) -> float:
        """What the width costs an untied path; the only part that it pays above H."""
        return self.untied.nll - self.entropy


def split(chain: Chain, width: int, starts: int = 3, steps: int = 5000, seed: int = 0) -> Split:
    """Fit and divide; DataError for more than 2,048 tokens, or a width below 1."""
    h = chain.entropy
    tied = full = fit_path(chain, chain.vocabulary, True, 1, steps, seed)
    untied = PathFit(h, 0.0, 0.0)
    if width < chain.vocabulary:
        tied = fit_path(chain, width, True, starts, steps, seed)
        untied = fit_path(chain, width, False, starts, steps, seed)
    return Split(h, chain.irreversibility, full, tied, untied)


def fit_path(chain: Chain, width: int, tied: bool, starts: int = 3, steps: int = 5000, seed: int = 0) -> PathFit:
    """Fit tables and bias by L-BFGS from `starts` random starts; the bias begins at the tokens' own frequencies."""
    if chain.vocabulary > MOST_TOKENS:
        what = f"{chain.vocabulary:,} tokens are too many for a fit"
        raise DataError(what, f"keep the {MOST_TOKENS:,} most frequent ones or fewer")
    if width < 1 or starts < 1:
        raise DataError(f"width {width}, {starts} starts", "both must be 1 or more")
    q, generator, found = chain.dense(), np.random.default_rng(seed), []
    for _ in range(starts):
        tables = generator.normal(0, 0.3 / np.sqrt(width), (1 if tied else 2) * len(q) * width)
        start = np.concatenate([tables, np.log(q.sum(0) + 1e-6)])
        found.append(minimise(lambda x: path_nll(x, q, width), start, steps, 1e-10))
    best = min(found, key=lambda end: end.value)
    return PathFit(best.value, best.gradient, max(end.value for end in found) - best.value)


def path_nll(x: Array, q: Array, width: int) -> tuple[float, Array]:
    """(nll of a path on Q [V, V], its gradient); `x` is one table or two of that width, and the bias, end to end."""
    v = len(q)
    tables = x[:-v].reshape(-1, v, width)
    left, right = tables[0], tables[-1]
    logits = left @ right.T + x[-v:]
    logits -= logits.max(1, keepdims=True)
    mass = np.exp(logits)
    total = mass.sum(1, keepdims=True)
    nll = float((q * (np.log(total) - logits)).sum())
    error = mass * (q.sum(1, keepdims=True) / total) - q
    to_left, to_right = error @ right, error.T @ left
    slopes = (to_left + to_right,) if len(tables) == 1 else (to_left, to_right)
    return nll, np.concatenate([*(slope.ravel() for slope in slopes), error.sum(0)])


@dataclass(frozen=True)
class Minimum:
    """Where the search ended."""

    x: Array  # the point
    value: float  # of the function there
    gradient: float  # its largest element there in size; the distance from an optimum, as far as a slope can tell
    steps: int  # taken


def minimise(loss: Callable[[Array], tuple[float, Array]], x: Array, steps: int, tolerance: float) -> Minimum:
    """Walk from `x` until no element of the gradient exceeds `tolerance`, or a step no longer lowers the value.

    L-BFGS (Liu & Nocedal 1989) with a weak Wolfe line search by bisection; `loss` returns value and gradient.
    """
    memory: deque[tuple[Array, Array, float]] = deque(maxlen=MEMORY)
    value, slope = loss(x)
    for step in range(steps):
        if np.abs(slope).max() <= tolerance:
            return Minimum(x, value, float(np.abs(slope).max()), step)
        direction = _direction(slope, memory)
        if direction @ slope >= 0:
            memory.clear()
            direction = -slope
        found = _line(loss, x, value, slope, direction)
        if found is None and not memory:
            return Minimum(x, value, float(np.abs(slope).max()), step)
        if found is None:
            memory.clear()
            continue
        moved, value, turned = found
        s, y = moved - x, turned - slope
        curvature = float(s @ y)
        if curvature > 0:
            memory.append((s, y, curvature))
        x, slope = moved, turned
    return Minimum(x, value, float(np.abs(slope).max()), steps)


def _direction(slope: Array, memory: deque[tuple[Array, Array, float]]) -> Array:
    """Minus the slope times the inverse curvature that the last steps show."""
    found, shares = slope.copy(), []
    for s, y, curvature in reversed(memory):
        share = s @ found / curvature
        found -= share * y
        shares.append(share)
    if memory:
        _, y, curvature = memory[-1]
        found *= curvature / (y @ y)
    for (s, y, curvature), share in zip(memory, reversed(shares), strict=True):
        found += (share - y @ found / curvature) * s
    return -found


def _line(
    loss: Callable[[Array], tuple[float, Array]], x: Array, value: float, slope: Array, direction: Array
) -> tuple[Array, float, Array] | None:
    """The point that a step along `direction` leads to; None where no step lowers the value."""
    descent = float(slope @ direction)
    low, high, size = 0.0, math.inf, min(1.0, 1.0 / float(np.abs(direction).max()))
    for _ in range(MOST_HALVINGS):
        moved = x + size * direction
        there, turned = loss(moved)
        if not there <= value + ARMIJO * size * descent:
            high = size
        elif turned @ direction < CURVATURE * descent:
            low = size
        else:
            return moved, there, turned
        size = (low + high) / 2 if math.isfinite(high) else 2 * size
    return None


@dataclass(frozen=True)
class Frequent:
    """Which tokens are kept."""

    ids: Ids  # the kept tokens, most frequent first [K]
    state: Ids  # of every token [V]: its place in `ids`, or K
    share: float  # of the text's tokens that are kept

    @property
    def states(self) -> int:
        """K, and one more where other tokens occur."""
        return len(self.ids) + (self.share < 1)

    def of(self, text: NDArray) -> Chain:
        """Return the chain of a text [N] in states."""
        return Chain.of([self.state[text]], self.states)


def keep_frequent(chain: Chain, most: int) -> Frequent:
    """Choose at most `most` tokens that occur."""
    if most < 2:
        raise DataError(f"{most} tokens kept", "keep 2 or more")
    tokens = chain.tokens
    ranked = np.argsort(-tokens, kind="stable")[:most]
    ids = ranked[tokens[ranked] > 0].astype(np.int64)
    state = np.full(chain.vocabulary, len(ids), np.int64)
    state[ids] = np.arange(len(ids))
    return Frequent(ids, state, float(tokens[ids].sum() / chain.pairs))


def frequent_loss(path: DirectPath, chain: Chain, kept: Frequent, reduced: Chain, seed: int = 0) -> tuple[float, int]:
    """Measure a path's nll on the reduced chain, never below its entropy.

    p(other | i) is the path's mass on all tokens that are not kept; p(j | other) is the mean of p(j | i) over the other
    tokens i by their frequency: over all of them, or over 512 drawn ones.

    Args:
        path: the model's.
        chain: of the whole text.
        kept: its frequent tokens.
        reduced: the chain of their states.
        seed: of the draws.

    Returns:
        nll in nats per token; other tokens that stand for all others.
    """
    tokens = chain.tokens
    others = np.flatnonzero((tokens > 0) & (kept.state == len(kept.ids)))
    weights = tokens[others] / max(1, tokens[others].sum())
    drawn = others.astype(np.int64)
    if len(others) > OTHERS:
        drawn = np.random.default_rng(seed).choice(others, OTHERS, p=weights).astype(np.int64)
        weights = np.full(OTHERS, 1 / OTHERS)
    logs = _log_states(path, np.concatenate([kept.ids, drawn]), kept)
    count = len(kept.ids)
    if len(drawn):
        pooled = np.log(np.clip(weights @ np.exp(logs[count:]), np.finfo(float).tiny, None))
        logs = np.concatenate([logs[:count], pooled[None]])
    return float(-(reduced.counts * logs[reduced.before, reduced.after]).sum() / reduced.pairs), len(drawn)


def _log_states(path: DirectPath, before: Ids, kept: Frequent) -> Array:
    """log p(state | token) [n, K + 1] of some tokens, over the whole output table."""
    left = path.left(path.input.take(before))
    count = len(kept.ids)
    if count and int(kept.ids.max()) >= path.output.rows:
        what = f"token {int(kept.ids.max())} is outside the output table's {path.output.rows:,} rows"
        raise DataError(what, "use the tokenizer that belongs to the model")
    found = np.full((len(before), count + 1), -np.inf)
    for start, stop in path.output.spans(beside=len(before)):
        block = logits(path, left, start, stop)
        inside = np.flatnonzero((kept.ids >= start) & (kept.ids < stop))
        found[:, inside] = block[:, kept.ids[inside] - start]
        block[:, kept.ids[inside] - start] = -np.inf
        found[:, count] = np.logaddexp(found[:, count], _log_sum(block))
        advance(stop)
    return found - _log_sum(found)[:, None]


def _log_sum(values: Array) -> Array:
    """log Σ exp of each row."""
    highest = values.max(1)
    safe = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        found: Array = safe + np.log(np.exp(values - safe[:, None]).sum(1))
    return found


def path_loss(path: DirectPath, chain: Chain, sample: int = 4096, seed: int = 0) -> Estimate:
    """Mean of −log p(after | before) of a path over a chain's pairs, in nats per token.

    Exact, without an interval, where the chain has at most `sample` different pairs, else of that many drawn ones, each
    as often as it occurs. Every softmax runs over the whole output table: n pairs cost n·V·E.

    Raises:
        DataError: a sample below 2, a token of the chain that a table does not have, or values that are no numbers.
    """
    if sample < 2:
        raise DataError(f"a sample of {sample}", "give 2 or more")
    exact = len(chain.keys) <= sample
    chosen = np.arange(len(chain.keys))
    if not exact:
        chosen = np.random.default_rng(seed).choice(len(chain.keys), sample, p=chain.counts / chain.pairs)
    pairs = zip(chain.before[chosen].tolist(), chain.after[chosen].tolist(), strict=True)
    losses = -np.array([found.log_probability for found in transitions(path, pairs)])
    if not np.isfinite(losses).all():
        raise no_numbers()
    if exact:
        return Estimate(float((losses * chain.counts).sum() / chain.pairs), math.nan, math.nan, len(chosen))
    nll, half = float(losses.mean()), Z * float(losses.std(ddof=1)) / math.sqrt(sample)
    return Estimate(nll, nll - half, nll + half, sample)
