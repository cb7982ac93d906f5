"""The best direct path of a given width on a small chain, tied and untied, and what its loss is made of.

    tied   p(j|i) ∝ exp(W_i·W_j + b_j)     nll = H + irreversibility + definiteness + rank
    untied p(j|i) ∝ exp(E_i·U_j + b_j)     nll = H + rank

H and irreversibility are exact (`bigrams`). Definiteness is what W Wᵀ of full width still pays beyond symmetry, because
its logits have no negative eigenvalue. Narrow paths are not convex: the best of several starts is taken, an upper bound
of the optimum, and the starts' spread says how far they disagree.

A text's chain reduced to its most frequent tokens, and a model's direct path on it.

All other tokens become one state, so the text stays a ring and every formula of `bigrams` holds on it. What is merged
can no longer be told apart: H and I of the reduced chain are those of that coarser text.

Where a model's own direct path stands on a corpus chain: its nll beside entropy and irreversibility.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.bigram_counts import Chain, Ids
from tiewise.analysis.estimates import Z
from tiewise.analysis.lbfgs import minimise
from tiewise.analysis.path_matrix import DirectPath, no_numbers
from tiewise.analysis.path_tokens import logits, transitions
from tiewise.analysis.token_table import Array
from tiewise.core.errors import DataError
from tiewise.core.progress import advance

MOST_TOKENS = 2048  # a dense fit takes V² memory, and time by V²·d for each step


@dataclass(frozen=True)
class PathFit:
    """The best path found."""

    width: int  # d
    tied: bool  # whether both ends are one table
    nll: float  # nats per token, on the chain that it was fitted to
    gradient: float  # largest element of the gradient there
    starts: int  # starts tried; 0 where none was needed
    spread: float  # worst less best of their losses


@dataclass(frozen=True)
class Split:
    """What direct paths of one width pay on a chain, in nats per token."""

    entropy: float  # H
    irreversibility: float  # what symmetry costs at any width
    definiteness: float  # what W Wᵀ costs beyond, at full width
    tied_rank: float  # what width d costs a tied path beyond
    untied_rank: float  # what width d costs an untied path; the only part that it pays above H
    full: PathFit  # the tied fit of full width
    tied: PathFit  # the tied fit of width d
    untied: PathFit  # the untied fit of width d


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
    """Fit tables and bias by L-BFGS from `starts` random starts."""
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


OTHERS = 512  # tokens that stand for all others


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
    drawn, weights = _others(chain, kept, seed)
    logs = _log_states(path, np.concatenate([kept.ids, drawn]), kept)
    count = len(kept.ids)
    if len(drawn):
        pooled = np.log(np.clip(weights @ np.exp(logs[count:]), np.finfo(float).tiny, None))
        logs = np.concatenate([logs[:count], pooled[None]])
    return float(-(reduced.counts * logs[reduced.before, reduced.after]).sum() / reduced.pairs), len(drawn)


def _others(chain: Chain, kept: Frequent, seed: int) -> tuple[Ids, Array]:
    """Tokens that stand for those not kept, and their shares."""
    tokens = chain.tokens
    others = np.flatnonzero((tokens > 0) & (kept.state == len(kept.ids)))
    shares = tokens[others] / max(1, tokens[others].sum())
    if len(others) <= OTHERS:
        return others.astype(np.int64), shares
    drawn = np.random.default_rng(seed).choice(others, OTHERS, p=shares)
    return drawn.astype(np.int64), np.full(OTHERS, 1 / OTHERS)


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


@dataclass(frozen=True)
class PathLoss:
    """Mean of −log p(after | before) over a chain's pairs, in nats per token."""

    nll: float  # over all pairs, or over those drawn
    low: float  # lower end of its 95 % interval; `nll` itself where all pairs were taken
    high: float  # upper end
    sampled: int  # pairs whose probability was computed
    exact: bool  # whether these were all pairs of the chain


def path_loss(path: DirectPath, chain: Chain, sample: int = 4096, seed: int = 0) -> PathLoss:
    """Measure the loss; exactly where the chain has at most `sample` different pairs, else on that many drawn ones.

    Pairs are drawn as often as they occur. Every softmax runs over the whole output table: n pairs cost n·V·E.

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
        nll = float((losses * chain.counts).sum() / chain.pairs)
        return PathLoss(nll, nll, nll, len(chosen), True)
    nll, half = float(losses.mean()), Z * float(losses.std(ddof=1)) / math.sqrt(sample)
    return PathLoss(nll, nll - half, nll + half, sample, False)
