"""A text's chain reduced to its most frequent tokens, and a model's direct path on it.

All other tokens become one state, so the text stays a ring and every formula of `bigrams` holds on it. What is merged
can no longer be told apart: H and I of the reduced chain are those of that coarser text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.bigrams import Chain, Ids
from tiewise.analysis.direct_path import DirectPath, Tick, silent
from tiewise.analysis.path_tokens import logits
from tiewise.analysis.tables import Array
from tiewise.core.errors import DataError

OTHERS = 512  # tokens that stand for all others


@dataclass(frozen=True)
class Frequent:
    """Which tokens are kept.

    Args:
        ids: the kept tokens, most frequent first [K].
        state: of every token [V]: its place in `ids`, or K.
        share: of the text's tokens that are kept.
    """

    ids: Ids
    state: Ids
    share: float

    @property
    def states(self) -> int:
        """K, and one more where other tokens occur."""
        return len(self.ids) + (self.share < 1)

    def of(self, text: NDArray) -> Chain:
        """Return the chain of a text [N] in states."""
        return Chain.of([self.state[text]], self.states)


def keep_frequent(chain: Chain, most: int) -> Frequent:
    """Choose at most `most` tokens that occur.

    Raises:
        DataError: fewer than 2 asked for.
    """
    if most < 2:
        raise DataError(f"{most} tokens kept", "keep 2 or more")
    tokens = chain.tokens
    ranked = np.argsort(-tokens, kind="stable")[:most]
    ids = ranked[tokens[ranked] > 0].astype(np.int64)
    state = np.full(chain.vocabulary, len(ids), np.int64)
    state[ids] = np.arange(len(ids))
    return Frequent(ids, state, float(tokens[ids].sum() / chain.pairs))


def frequent_loss(
    path: DirectPath, chain: Chain, kept: Frequent, reduced: Chain, seed: int = 0, tick: Tick = silent
) -> tuple[float, int]:
    """Measure a path's nll on the reduced chain, never below its entropy.

    p(other | i) is the path's mass on all tokens that are not kept; p(j | other) is the mean of p(j | i) over the other
    tokens i by their frequency: over all of them, or over 512 drawn ones.

    Args:
        path: the model's.
        chain: of the whole text.
        kept: its frequent tokens.
        reduced: the chain of their states.
        seed: of the draws.
        tick: hears of the output rows done.

    Returns:
        nll in nats per token; other tokens that stand for all others.

    Raises:
        DataError: a token of the text that a table does not have.
    """
    drawn, weights = _others(chain, kept, seed)
    logs = _log_states(path, np.concatenate([kept.ids, drawn]), kept, tick)
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


def _log_states(path: DirectPath, before: Ids, kept: Frequent, tick: Tick) -> Array:
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
        tick(stop)
    return found - _log_sum(found)[:, None]


def _log_sum(values: Array) -> Array:
    """log Σ exp of each row."""
    highest = values.max(1)
    safe = np.where(np.isfinite(highest), highest, 0.0)
    with np.errstate(divide="ignore"):
        found: Array = safe + np.log(np.exp(values - safe[:, None]).sum(1))
    return found
