"""Lookup path (A) and head path (B) of a checkpoint's table on a text: size, direction, share; in Adam's step.

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

import numpy as np
import torch
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate, mean_interval, ratio
from tiewise.analysis.token_texts import read_as
from tiewise.core.errors import DataError
from tiewise.core.frequency import bin_of, frequency_bins, token_counts
from tiewise.core.progress import progress
from tiewise.data.tokenizer import Ids
from tiewise.internals.loaded import Opened
from tiewise.internals.text_loss import TextLoss
from tiewise.internals.two_paths import Adam, AdamPaths, PathSplit, RowSums, cosine_null, parted, row_sums

PERMUTATIONS = 19
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HISTOGRAM = 20  # bins of a row's share
TOP = 20  # rows that are listed
ACTIVATION_CONVENTION = "activation-norm convention (not commensurable)"
BatchNorms = tuple[PathSplit, float, float]  # both paths, and the L2 and L1 norm at the lookups' outputs


@dataclass(frozen=True)
class PerBatch:
    """Norms of single batches' gradients: means over `batches` batches of `windows` windows, with 95 % intervals."""

    windows: int  # of a batch
    batches: int  # whole batches; a smaller last one is not among them
    a: Estimate  # ‖A‖
    b: Estimate
    share_b: Estimate  # ‖B‖ / (‖A‖ + ‖B‖), the mean of the batches' shares
    cosine: Estimate  # between A and B; nan for two tables


@dataclass(frozen=True)
class AtBatch:
    """Root mean square norms that batches of so many windows would have; `windows` None is the limit."""

    windows: int | None
    a: float
    b: float
    share_b: float


@dataclass(frozen=True)
class Activation:
    """The older convention of arXiv:2603.26663: two norms that are not of one thing, means over batches."""

    a: Estimate  # norm of the gradient at the lookups' outputs [b, T, D], where each position is a row of its own
    b: Estimate  # ‖B‖ [V, E] of the same batch
    share_b: Estimate  # b / (a + b)
    share_b_l1: Estimate  # the same with L1 norms
    convention: str = ACTIVATION_CONVENTION


@dataclass(frozen=True)
class Bin:
    """Tokens of one frequency."""

    label: str  # counts in the text, as `tiewise.core.frequency.frequency_bins` has them
    tokens: int  # rows of the table
    occurrences: int  # how often they occur together
    gradient: PathSplit  # of the text's mean loss, on these rows
    update: PathSplit  # Adam's step on these rows
    of_a: float  # these rows' part of ‖A‖²
    of_b: float


@dataclass(frozen=True)
class TokenRow:
    """One token's row of the table."""

    token: int
    text: str  # what it reads as
    count: int  # in the windows
    a: float  # ‖A_r‖
    b: float
    share_b: float
    of_all: float  # its part of ‖A‖² + ‖B‖²
    update_share_b: float


@dataclass(frozen=True)
class RowShares:
    """B's share in single rows, of tokens that occur in the windows; and what the others get."""

    tokens: int  # how many occur
    quantiles: tuple[float, ...]  # of the rows' shares in the gradient, at `QUANTILES`
    update_quantiles: tuple[float, ...]  # the same in Adam's step
    histogram: tuple[float, ...]  # part of these rows by share, `HISTOGRAM` equal bins of [0, 1]
    update_histogram: tuple[float, ...]
    absent: int  # tokens that occur in no window: they get the head path alone
    absent_of_b: float  # absent tokens' part of ‖B‖²
    absent_of_update: float  # absent tokens' part of ‖u‖², the step with both paths
    top: tuple[TokenRow, ...]  # the rows with most of ‖A‖² + ‖B‖²


@dataclass(frozen=True)
class PathGradients:
    """What `path_gradients` found."""

    tied: bool  # one table; else A is the input table's gradient, B the output table's, and they have no cosine
    vocab: int  # rows of the table
    width: int
    objective: str  # what is predicted: `next token`, `hidden` or `second half` (see `text_loss`)
    windows: int
    length: int
    predicted: int  # tokens, in all
    nll: float  # mean loss, nats per predicted token
    whole: PathSplit  # gradient of the mean loss over all windows
    cosine_null: tuple[float, float]  # lowest and highest cosine where A's rows are given to other tokens of the text
    per_batch: PerBatch
    by_batch: tuple[AtBatch, ...]  # norms and share by batch size, from the batches' scatter
    update: (
        PathSplit  # Adam's step from the batches in order, weights held still; `a` and `b` are parts whose sum it is
    )
    adam: Adam
    activation: Activation  # the older convention, for comparison with published figures
    bins: tuple[Bin, ...]  # by frequency
    rows: RowShares


def path_gradients(
    opened: Opened,
    windows: Ids,
    batch: int = 8,
    seed: int = 0,
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
    singles: list[BatchNorms] = []
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
                scatter = by_batch([s for s, _, _ in singles], (mean.a * scale, mean.b * scale), batch)
            del found
            progress("gradients", min(done * batch, len(windows)), len(windows))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise DataError(
                f"{opened.folder.path}: gradients that are no numbers", "`tiewise check --deep` names rows of such"
            )
        update = row_sums(*moments.step(), one)
    seen = token_counts(windows.reshape(-1), max(len(a), len(b)))
    gradient = row_sums(a, b, one)
    reached = torch.nonzero(torch.linalg.vector_norm(a, dim=1)).reshape(-1)  # the text's tokens, a mask or first one
    means = (mean_interval([getattr(s, name) for s, _, _ in singles]) for name in ("a", "b", "share_b", "cosine"))
    return PathGradients(
        tied=one,
        vocab=len(seen),
        width=int(a.shape[1]),
        objective=loss.kind,
        windows=len(windows),
        length=int(windows.shape[1]),
        predicted=loss.per_window * len(windows),
        nll=nll,
        whole=gradient.split(),
        cosine_null=cosine_null(a, b, reached, seed, PERMUTATIONS) if one else (math.nan, math.nan),
        per_batch=PerBatch(batch, len(singles), *means),
        by_batch=scatter,
        update=update.split(),
        adam=adam,
        activation=Activation(
            mean_interval([l2 for _, l2, _ in singles]),
            mean_interval([s.b for s, _, _ in singles]),
            mean_interval([ratio(s.b, l2 + s.b) for s, l2, _ in singles]),
            mean_interval([ratio(s.b_l1, l1 + s.b_l1) for s, _, l1 in singles]),
        ),
        bins=_by_frequency(gradient, update, seen if counts is None else counts),
        rows=_by_row(opened, gradient, update, seen),
    )


def by_batch(singles: Sequence[PathSplit], mean: tuple[float, float], batch: int) -> tuple[AtBatch, ...]:
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
    found = []
    for windows in [*sizes, None]:
        at = [signal + (0.0 if windows is None else noise / windows) for signal, noise in parts]
        a, b = (math.sqrt(x) if x > 0 else math.nan for x in at)
        found.append(AtBatch(windows, a, b, ratio(b, a + b)))
    return tuple(found)


def _by_frequency(gradient: RowSums, update: RowSums, counts: NDArray) -> tuple[Bin, ...]:
    """Gradient and step of tokens of like frequency, which `counts` [V] says."""
    rows = len(gradient.a2)
    counts = np.pad(np.asarray(counts), (0, max(0, rows - len(counts))))[:rows]
    where, all_a, all_b = bin_of(counts), gradient.a2.sum(), gradient.b2.sum()
    found = []
    for index, kind in enumerate(frequency_bins(counts)):
        its = where == index
        parts = ratio(float(gradient.a2[its].sum()), all_a), ratio(float(gradient.b2[its].sum()), all_b)
        found.append(Bin(kind.label, kind.tokens, kind.occurrences, gradient.split(its), update.split(its), *parts))
    return tuple(found)


def _by_row(opened: Opened, gradient: RowSums, update: RowSums, seen: NDArray) -> RowShares:
    """Single rows, of tokens that occur in the windows (`seen` [V]) and of those that do not."""
    present = seen > 0
    shares, steps = gradient.share_b, update.share_b
    energy = gradient.a2 + gradient.b2
    best = [int(r) for r in np.argsort(-energy, kind="stable")[:TOP]]
    top = tuple(
        TokenRow(
            token=r,
            text=text,
            count=int(seen[r]),
            a=math.sqrt(gradient.a2[r]),
            b=math.sqrt(gradient.b2[r]),
            share_b=float(shares[r]),
            of_all=ratio(float(energy[r]), float(energy.sum())),
            update_share_b=float(steps[r]),
        )
        for r, text in zip(best, read_as(opened.folder, best), strict=True)
    )
    return RowShares(
        tokens=int(present.sum()),
        quantiles=_quantiles(shares[present]),
        update_quantiles=_quantiles(steps[present]),
        histogram=_histogram(shares[present]),
        update_histogram=_histogram(steps[present]),
        absent=int((~present).sum()),
        absent_of_b=ratio(float(gradient.b2[~present].sum()), float(gradient.b2.sum())),
        absent_of_update=ratio(update.split(~present).total ** 2, update.split().total ** 2),
        top=top,
    )


def _quantiles(shares: NDArray) -> tuple[float, ...]:
    kept = shares[np.isfinite(shares)]
    return tuple(float(x) for x in np.quantile(kept, QUANTILES)) if len(kept) else (math.nan,) * len(QUANTILES)


def _histogram(shares: NDArray) -> tuple[float, ...]:
    kept = shares[np.isfinite(shares)]
    counts = np.histogram(kept, HISTOGRAM, (0.0, 1.0))[0]
    return tuple(float(x) / max(len(kept), 1) for x in counts)
