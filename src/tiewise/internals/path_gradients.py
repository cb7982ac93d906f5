"""Path A and Path B of a checkpoint's table on a text: their size, direction and share, by token, and in Adam's step.

    windows ─ shuffled into batches → TwoLeaves → a, b [V, E] of each batch ┬ sums: the gradient of the text's mean loss
                                                                          ├ norms of each: what training sees
                                                                          └ AdamPaths: the optimizer's step by path

The norm of a mean gradient falls as the batch grows, and by different factors for the two paths, so a share belongs to
a batch size. Both are given: one batch (mean and interval over batches) and the whole text, and `by_batch` between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiewise.analysis.estimates import Estimate, mean_interval, ratio
from tiewise.analysis.token_texts import read_as
from tiewise.checkpoint.facts import Progress, silent
from tiewise.data.blocks import token_counts
from tiewise.data.frequency import bin_of, frequency_bins
from tiewise.data.windows import Ids
from tiewise.errors import DataError
from tiewise.internals.adam_paths import Adam, AdamPaths
from tiewise.internals.loaded import Opened
from tiewise.internals.path_rows import RowSums, Split, cosine_null, row_sums
from tiewise.internals.text_loss import TextLoss
from tiewise.internals.two_leaves import parted
from tiewise.training.results import to_record

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HISTOGRAM = 20  # bins of a row's share
PERMUTATIONS = 19
_TOP = 20
ACTIVATION_CONVENTION = "activation-norm convention (not commensurable)"


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


@dataclass(frozen=True)
class PathGradients:
    """What `path_gradients` found.

    Args:
        tied: one table. Else A is the input table's gradient, B the output table's, and they have no cosine.
        vocab: rows of the table.
        width: E.
        objective: what is predicted: `next token`, `hidden` or `second half` (see `text_loss`).
        windows: of the text.
        length: T.
        predicted: tokens predicted in all.
        nll: mean loss, nats per predicted token.
        whole: gradient of the mean loss over all windows.
        cosine_null: lowest and highest cosine where Path A's rows are given to other tokens of the text.
        per_batch: gradients of single batches.
        by_batch: norms and share by batch size, from the batches' scatter.
        update: Adam's step from the batches in order (weights held still; no clipping, no decay), per unit of
            learning rate; `update.a` + `update.b` are norms of parts whose sum is the step.
        adam: its constants.
        activation: the older convention, for comparison with published figures.
        bins: by frequency.
        rows: by row.
    """

    tied: bool
    vocab: int
    width: int
    objective: str
    windows: int
    length: int
    predicted: int
    nll: float
    whole: Split
    cosine_null: tuple[float, float]
    per_batch: PerBatch
    by_batch: tuple[AtBatch, ...]
    update: Split
    adam: Adam
    activation: Activation
    bins: tuple[Bin, ...]
    rows: Rows

    def record(self) -> dict[str, Any]:
        """Return everything as strict JSON takes it; what is not a number is None."""
        return to_record(self)


def path_gradients(
    opened: Opened,
    windows: Ids,
    batch: int = 8,
    seed: int = 0,
    progress: Progress = silent,
    counts: NDArray | None = None,
    adam: Adam | None = None,
) -> PathGradients:
    """Measure both paths' gradients on a text; the model is left as it was.

    Memory: ten tables of the model's own size (gradients, their sums and moments) and logits of a few windows.

    Args:
        opened: the checkpoint, in the precision in which gradients are wanted.
        windows: token ids [n, T].
        batch: windows of a batch.
        seed: of the order of windows, and of hidden tokens where the model predicts those.
        progress: told the windows done.
        counts: how often each token occurs in a longer text [V], for the bins; None counts the windows.
        adam: constants of the optimizer whose step is divided; None is torch's own.

    Raises:
        DataError: windows that this model cannot be run on, fewer than a batch, or gradients that are no numbers.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """
    loss = TextLoss(opened, windows, seed)
    if not 1 <= batch <= len(windows):
        raise DataError(f"batches of {batch} from {len(windows)} windows", "give a longer text or smaller batches")
    one, adam = opened.ends.tied, adam or Adam()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(windows)))
    pieces = order.split(batch)
    full = len(windows) // batch
    singles: list[tuple[Split, float, float]] = []
    nll = 0.0
    with parted(opened.ends) as leaves:
        a, b = torch.zeros_like(leaves.a), torch.zeros_like(leaves.b)
        moments = AdamPaths(a, b, one, adam)
        scatter: tuple[AtBatch, ...] = ()
        for done, which in enumerate(pieces, 1):
            found = leaves.gradient(loss, which)
            weight = len(which) / len(windows)
            nll += weight * found.nll
            a.add_(found.a, alpha=weight)
            b.add_(found.b, alpha=weight)
            if done <= full:
                singles.append((row_sums(found.a, found.b, one).split(), found.rows_l2, found.rows_l1))
                moments.add(found.a, found.b)
            if done == full:
                mean = row_sums(a, b, one).split()
                scale = len(windows) / (full * batch)
                scatter = _by_batch([s for s, _, _ in singles], (mean.a * scale, mean.b * scale), batch)
            del found
            progress("gradients", min(done * batch, len(windows)), len(windows))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise DataError(
                f"{opened.folder.path}: gradients that are no numbers", "`tiewise check --deep` names rows of such"
            )
        update = row_sums(*moments.step(), one)
    seen = token_counts(windows.reshape(-1), max(len(a), len(b)))
    gradient = row_sums(a, b, one)
    null = _null(a, b, seed) if one else (math.nan, math.nan)
    return PathGradients(
        one,
        len(seen),
        int(a.shape[1]),
        loss.kind,
        len(windows),
        int(windows.shape[1]),
        loss.per_window * len(windows),
        nll,
        gradient.split(),
        null,
        _per_batch([s for s, _, _ in singles], batch),
        scatter,
        update.split(),
        adam,
        _activation(singles),
        _bins(gradient, update, seen if counts is None else _lengthened(counts, len(seen))),
        _rows(opened, gradient, update, seen),
    )


def _per_batch(singles: Sequence[Split], batch: int) -> PerBatch:
    means = (mean_interval([getattr(s, name) for s in singles]) for name in ("a", "b", "share_b", "cosine"))
    return PerBatch(batch, len(singles), *means)


def _activation(singles: Sequence[tuple[Split, float, float]]) -> Activation:
    return Activation(
        mean_interval([l2 for _, l2, _ in singles]),
        mean_interval([s.b for s, _, _ in singles]),
        mean_interval([ratio(s.b, l2 + s.b) for s, l2, _ in singles]),
        mean_interval([ratio(s.b_l1, l1 + s.b_l1) for s, _, l1 in singles]),
    )


def _by_batch(singles: Sequence[Split], mean: tuple[float, float], batch: int) -> tuple[AtBatch, ...]:
    """E‖g‖² at k windows = |G|² + tr Σ / k, both estimated without bias (McCandlish et al., arXiv:1812.06162, App. A).

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


def _null(a: Tensor, b: Tensor, seed: int) -> tuple[float, float]:
    """Over the rows that Path A reaches: beside the text's tokens, a mask token or a decoder's first."""
    rows = torch.nonzero(torch.linalg.vector_norm(a, dim=1)).reshape(-1)
    return cosine_null(a, b, rows, seed, PERMUTATIONS)


def _lengthened(counts: NDArray, rows: int) -> NDArray:
    return np.pad(np.asarray(counts), (0, max(0, rows - len(counts))))[:rows]


def _bins(gradient: RowSums, update: RowSums, counts: NDArray) -> tuple[Bin, ...]:
    where, all_a, all_b = bin_of(counts), gradient.a2.sum(), gradient.b2.sum()
    found = []
    for index, kind in enumerate(frequency_bins(counts)):
        rows = where == index
        parts = ratio(float(gradient.a2[rows].sum()), all_a), ratio(float(gradient.b2[rows].sum()), all_b)
        found.append(Bin(kind.label, kind.tokens, kind.occurrences, gradient.split(rows), update.split(rows), *parts))
    return tuple(found)


def _rows(opened: Opened, gradient: RowSums, update: RowSums, seen: NDArray) -> Rows:
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
