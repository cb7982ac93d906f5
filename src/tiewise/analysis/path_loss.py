"""Where a model's own direct path stands on a corpus chain: its nll beside entropy and irreversibility."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tiewise.analysis.bigrams import Chain
from tiewise.analysis.direct_path import DirectPath, Tick, no_numbers, silent
from tiewise.analysis.path_tokens import CONFIDENCE_95, transitions
from tiewise.core.errors import DataError


@dataclass(frozen=True)
class PathLoss:
    """Mean of −log p(after | before) over a chain's pairs, in nats per token.

    Args:
        nll: over all pairs, or over those drawn.
        low: lower end of its 95 % interval; `nll` itself where all pairs were taken.
        high: upper end.
        sampled: pairs whose probability was computed.
        exact: whether these were all pairs of the chain.
    """

    nll: float
    low: float
    high: float
    sampled: int
    exact: bool

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def path_loss(path: DirectPath, chain: Chain, sample: int = 4096, seed: int = 0, tick: Tick = silent) -> PathLoss:
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
    losses = -np.array([found.log_probability for found in transitions(path, pairs, tick)])
    if not np.isfinite(losses).all():
        raise no_numbers()
    if exact:
        nll = float((losses * chain.counts).sum() / chain.pairs)
        return PathLoss(nll, nll, nll, len(chosen), True)
    nll, half = float(losses.mean()), CONFIDENCE_95 * float(losses.std(ddof=1)) / math.sqrt(sample)
    return PathLoss(nll, nll - half, nll + half, sample, False)
