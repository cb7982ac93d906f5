"""Norms of both paths' gradients batch by batch: what training sees, and what batches of other sizes would have.

Also the older convention, whose two norms are not of one thing, beside which published figures can be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tiewise.analysis.estimates import Estimate, mean_interval, ratio
from tiewise.internals.path_rows import Split

ACTIVATION_CONVENTION = "activation-norm convention (not commensurable)"
Single = tuple[Split, float, float]  # of one batch: both paths, and the L2 and L1 norm at the lookups' outputs


@dataclass(frozen=True)
class PerBatch:
    """Norms of single batches' gradients: means over `batches` batches of `windows` windows, with 95 % intervals.

    Args:
        windows: windows of a batch.
        batches: whole batches; a smaller last one is not among them.
        a: ‖A‖.
        b: ‖B‖.
        share_b: ‖B‖ / (‖A‖ + ‖B‖), the mean of the batches' shares.
        cosine: between A and B; nan for two tables.
    """

    windows: int
    batches: int
    a: Estimate
    b: Estimate
    share_b: Estimate
    cosine: Estimate


@dataclass(frozen=True)
class AtBatch:
    """Root mean square norms that batches of so many windows would have; `windows` None is the limit."""

    windows: int | None
    a: float
    b: float
    share_b: float


@dataclass(frozen=True)
class Activation:
    """The older convention of arXiv:2603.26663: two norms that are not of one thing.

    Args:
        a: norm of the gradient at the lookups' outputs [b, T, D] of a batch, where each position is a row of its own.
        b: ‖B‖ [V, E] of the same batch.
        share_b: b / (a + b), mean over batches.
        share_b_l1: the same with L1 norms.
    """

    a: Estimate
    b: Estimate
    share_b: Estimate
    share_b_l1: Estimate
    convention: str = ACTIVATION_CONVENTION


def per_batch(singles: Sequence[Split], batch: int) -> PerBatch:
    """Means over whole batches of `batch` windows."""
    means = (mean_interval([getattr(s, name) for s in singles]) for name in ("a", "b", "share_b", "cosine"))
    return PerBatch(batch, len(singles), *means)


def activation(singles: Sequence[Single]) -> Activation:
    """Norms in the older convention, means over batches."""
    return Activation(
        mean_interval([l2 for _, l2, _ in singles]),
        mean_interval([s.b for s, _, _ in singles]),
        mean_interval([ratio(s.b, l2 + s.b) for s, l2, _ in singles]),
        mean_interval([ratio(s.b_l1, l1 + s.b_l1) for s, _, l1 in singles]),
    )


def by_batch(singles: Sequence[Split], mean: tuple[float, float], batch: int) -> tuple[AtBatch, ...]:
    """Norms by windows of a batch.

    E‖g‖² at k windows = |G|² + tr Σ / k, both estimated without bias (McCandlish et al., arXiv:1812.06162, App. A).
    `mean` are the norms of the mean gradient of the same batches. An estimate of |G|² below zero is no result: nan.
    """
    n = len(singles)
    if n < 2:
        return ()
    parts = []
    for norm, squares in zip(mean, ([s.a**2 for s in singles], [s.b**2 for s in singles]), strict=True):
        spread = (sum(squares) / n - norm**2) * n / (n - 1)  # trace of the covariance of one batch's gradient
        parts.append((norm**2 - spread / n, spread * batch))
    sizes: list[int | None] = [2**k for k in range(13)]
    return tuple(_at(windows, parts) for windows in [*sizes, None])


def _at(windows: int | None, parts: Sequence[tuple[float, float]]) -> AtBatch:
    squares = [signal + (0.0 if windows is None else spread / windows) for signal, spread in parts]
    a, b = (math.sqrt(x) if x > 0 else math.nan for x in squares)
    return AtBatch(windows, a, b, ratio(b, a + b))
