"""Gradients of a text's loss, divided between lookup path (A) and head path (B).

    windows ─ shuffled into batches → TwoLeaves → a, b [V, E] of each batch ┬ sums: the gradient of the text's mean loss
                                                                          ├ norms of each: the gradients of training
                                                                          └ AdamPaths: the optimizer's step by path

The norm of a mean gradient falls as the batch grows, and by different factors for the two paths, so a share belongs to
a batch size. Both are reported: one batch (mean and interval over batches) and the full text, and `by_batch` between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tiewise.core.errors import DataError, non_finite_error
from tiewise.core.estimates import ratio
from tiewise.core.measurement import NATS, ONE, Curve, Listing, Measurement, Quantity, count, plain, visible
from tiewise.core.progress import report_progress
from tiewise.core.text import BINS, frequency_bins, token_counts
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.two_paths import (
    NEXT,
    AdamPaths,
    BatchGradient,
    PathSplit,
    RowSums,
    TextLoss,
    TwoLeaves,
    cosine_null,
    row_sums,
    separate_leaves,
)
from tiewise.inspection.tables.token_texts import read_as
from tiewise.inspection.workspace import InspectedModel, Workspace, longer_path, mean_of, section
from tiewise.training.data.tokenizer import Ids

PERMUTATIONS = 19
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HISTOGRAM = 20  # bins of the histogram of shares
NEARLY_PERPENDICULAR = 0.05  # absolute cosine below which gradients are called so: within 3 degrees of a right angle
TOP = 20  # most rows that are listed
SIZES = tuple(2**k for k in range(13))  # windows per batch
SHARE = "head path's share"
FULL_TEXT, ADAM, STEP = "whole text", "Adam's step", "in Adam's step"
OLDER = "activation-norm convention (not commensurable)"
BY_COUNT = "Head path's share by how often a token occurs"
MOVED = "Which tokens each path moves"


@section(question="Which use of the table has the larger gradient, and do both gradients agree?", order=70, text=True)
def gradients(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Divide the gradient of a text's loss, and Adam's step, between lookup and head path."""
    opened = workspace.opened(model)
    counts = workspace.counts(model, opened.vocab)
    measured_on, _ = workspace.windows(model)
    return gradients_of(opened, measured_on, seed=workspace.request.seed, counts=counts)


@dataclass(frozen=True)
class PathGradients:
    """Measured gradients of both paths, from which the report is made."""

    objective: str  # the prediction that is trained, as named in `two_paths`
    length: int  # tokens per window
    predicted: int  # number of all predicted tokens
    nll: float  # mean loss, nats per predicted token
    batch: int  # windows per batch
    batches: tuple[PathSplit, ...]  # full batches, without a smaller last one
    looked_up: tuple[tuple[float, float], ...]  # L2 and L1 norms of each batch at the lookups' outputs, by position
    mean: tuple[float, float]  # ‖A‖, ‖B‖ of the mean gradient of these batches
    gradient: RowSums  # of the mean loss over all windows
    update: RowSums  # Adam's step from the batches in order, with constant weights
    null: tuple[float, float]  # lowest and highest cosine with A's rows permuted among the text's tokens
    seen: NDArray[np.int64]  # occurrences of each token in the windows [V]
    counts: NDArray[np.int64]  # occurrences of each token in a longer text [V], for the bins
    longest: tuple[tuple[int, str], ...]  # (row, text of its token) with the largest ‖A‖² + ‖B‖²


@leaves_model
def gradients_of(
    opened: Opened,
    windows: Ids,
    batch: int = 8,
    seed: int = 0,
    counts: NDArray[np.int64] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Measurement:
    """Measure both paths' gradients on windows of token ids [n, T].

    The model is not changed. Memory: ten tables of the model's size (gradients, their sums and moments) and logits of a
    few windows.

    Args:
        opened: the checkpoint, in the precision of the gradients.
        windows: token ids, `batch` windows at a time.
        seed: of the order of windows, and of hidden tokens if the model predicts those.
        counts: occurrences of each token in a longer text [V], for the bins; None counts the windows.
        betas, eps: of the Adam whose step is divided.

    Raises:
        DataError: windows that this model cannot run on, fewer than a batch, or gradients that are no numbers.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """
    loss = TextLoss(opened, windows, seed)
    if not 1 <= batch <= len(windows):
        raise DataError(f"batches of {batch} from {len(windows)} windows", "give a longer text or smaller batches")
    full = len(windows) // batch  # full batches; a smaller last one counts in the text's gradient only
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(windows)))
    mean = math.nan, math.nan
    one_table = opened.ends.tied  # read here: within the context, both ends are separate parameters
    with separate_leaves(opened.ends) as leaves:
        sums = _TextSums(leaves, one_table, betas, eps)
        for done, which in enumerate(torch.split(order, batch), 1):
            # the gradient is freed before the next one is computed
            sums.add(leaves.gradient(loss, which), len(which) / len(windows), is_full=done <= full)
            if done == full:
                mean = sums.norms_of_mean(len(windows) / (full * batch))
            report_progress("gradients", min(done * batch, len(windows)), len(windows))
        if not sums.is_finite():
            raise non_finite_error(f"{opened.folder.path}: the gradient")
        update = row_sums(*sums.moments.step(), sums.one_table)
    gradient = sums.gradient()
    seen = token_counts(windows.reshape(-1), gradient.rows)
    if counts is None:
        counts = seen
    longest = gradient.longest(TOP)
    measured = PathGradients(
        objective=loss.objective,
        length=int(windows.shape[1]),
        predicted=loss.per_window * len(windows),
        nll=sums.nll,
        batch=batch,
        batches=tuple(sums.batches),
        looked_up=tuple(sums.looked_up),
        mean=mean,
        gradient=gradient,
        update=update,
        null=sums.cosine_null(seed),
        seen=seen,
        counts=_padded_to(counts, len(seen)),
        longest=tuple(zip(longest, read_as(opened.folder, longest), strict=True)),
    )
    return measurement_of(measured)


class _TextSums:
    """Sums of both paths' gradients over the batches of a text."""

    def __init__(self, leaves: TwoLeaves, one_table: bool, betas: tuple[float, float], eps: float) -> None:
        """Start at zero, with the moments of an Adam of these settings."""
        self.one_table = one_table
        self.a, self.b = torch.zeros_like(leaves.a), torch.zeros_like(leaves.b)  # gradients of the mean loss so far
        self.moments = AdamPaths(self.a, self.b, one_table, betas, eps)
        self.nll = 0.0
        self.batches: list[PathSplit] = []  # full batches
        self.looked_up: list[tuple[float, float]] = []  # L2 and L1 norms of each batch at the lookups' outputs

    def add(self, batch: BatchGradient, weight: float, is_full: bool) -> None:
        """Add the gradient of a batch, whose share of the text is `weight`.

        Adam takes a step with full batches only.
        """
        self.nll += weight * batch.nll
        self.a.add_(batch.a, alpha=weight)
        self.b.add_(batch.b, alpha=weight)
        if is_full:
            self.batches.append(row_sums(batch.a, batch.b, self.one_table).split())
            self.looked_up.append((batch.rows_l2, batch.rows_l1))
            self.moments.add(batch.a, batch.b)

    def gradient(self) -> RowSums:
        """Return the sums over each row of both gradients so far."""
        return row_sums(self.a, self.b, self.one_table)

    def norms_of_mean(self, scale: float) -> tuple[float, float]:
        """Return (‖A‖, ‖B‖) of the sums so far times `scale`."""
        split = self.gradient().split()
        return split.a * scale, split.b * scale

    def is_finite(self) -> bool:
        """Return True if both gradients are finite."""
        return bool(self.a.isfinite().all() and self.b.isfinite().all())

    def cosine_null(self, seed: int) -> tuple[float, float]:
        """Return (lowest, highest) cosine with A's rows permuted among the text's tokens.

        Both are NaN for two tables.
        """
        if not self.one_table:
            return math.nan, math.nan
        # rows of the text's tokens, and of a mask or first token
        reached = torch.nonzero(torch.linalg.vector_norm(self.a, dim=1)).reshape(-1)
        return cosine_null(self.a, self.b, reached, seed, PERMUTATIONS)


def _padded_to(counts: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Return counts of exactly `rows` tokens: truncated, or extended by zeros."""
    lacking = max(0, rows - len(counts))
    return np.pad(counts, (0, lacking))[:rows]


# --- the report


def measurement_of(measured: PathGradients) -> Measurement:
    """Report which path has the longer gradient, and whether both agree.

    Batches, the full text, Adam's step and frequencies are reported.
    """
    alone = "get the head path alone"
    if measured.objective != NEXT:
        alone += ", but for a mask or first token"
    per_batch = _batch_quantities(measured)
    share = per_batch[0]
    bins = _frequency_bins(measured)
    by_frequency: list[Quantity] = []
    for of_bin in bins:
        if of_bin.rows:
            by_frequency += of_bin.quantities
    header = ("times in the text", "rows", "occurrences", "‖A‖", "‖B‖", SHARE, STEP, "of ‖A‖²", "of ‖B‖²")
    table_of_bins = Listing("By how often a token occurs", header, [of_bin.cells for of_bin in bins])
    absent, tokens = count((measured.seen == 0).sum()), count(len(measured.seen))
    return Measurement(
        answer=answer(share, measured.gradient.split(), measured.null),
        quantities=(*per_batch, *_quantities(measured), *by_frequency),
        curves=(*_batch_size_curves(measured), *_row_share_curves(measured)),
        listings=(table_of_bins, _longest_rows(measured)),
        notes=(
            f"{len(measured.batches)} batches of {measured.batch} windows, {measured.length} tokens each",
            f"{absent} of {tokens} tokens occur in no window and {alone}",
        ),
    )


def answer(share: Quantity, full_text: PathSplit, null: tuple[float, float]) -> str:
    """Return which path is longer in a batch, and how both relate in the full text."""
    if not math.isfinite(full_text.share_b):
        return "both gradients are zero on this text"
    longer = longer_path(share)
    if not math.isfinite(full_text.cosine):
        return f"{longer}; the two tables are separate"
    directions = _directions_in_words(full_text.cosine, null)
    return f"{longer}; over the whole text {directions} (cosine {plain(full_text.cosine, 3)})"


def _directions_in_words(cosine: float, null: tuple[float, float]) -> str:
    """Return how the gradients of both paths relate; `null` is the range of cosines by chance."""
    lowest, highest = null
    if abs(cosine) < NEARLY_PERPENDICULAR:
        return "both are nearly perpendicular"
    if lowest <= cosine <= highest:
        return "their directions are unrelated"
    if cosine > 0:
        return "both point the same way"
    return "they are opposed"


@dataclass(frozen=True)
class _FrequencyBin:
    """Rows of tokens with about equal counts in a text."""

    rows: int
    quantities: tuple[Quantity, ...]  # shares of the head path, in Adam's step, and of each path's norm
    cells: tuple[str, ...]  # the bin's row of the listing


def _frequency_bins(measured: PathGradients) -> list[_FrequencyBin]:
    """Measure the rows of tokens of similar frequency."""
    bin_of_row = frequency_bins(measured.counts)
    bins = []
    for index, label in enumerate(BINS):
        inside = bin_of_row == index
        rows = int(inside.sum())
        split = measured.gradient.split(inside)
        quantities = _bin_quantities(measured, f"{label} times", inside)
        occurrences = count(measured.counts[inside].sum())
        shares = [str(quantity) for quantity in quantities]
        cells = (label, count(rows), occurrences, plain(split.a), plain(split.b), *shares)
        bins.append(_FrequencyBin(rows, quantities, cells))
    return bins


def _bin_quantities(measured: PathGradients, name: str, inside: NDArray[np.bool_]) -> tuple[Quantity, ...]:
    """Return the shares of the rows of one bin, marked in `inside` [V].

    The head path's share comes first, then the same in Adam's step, then the part of each path that is in these rows.
    """
    gradient, step = measured.gradient, measured.update.split(inside)
    moved_a = ratio(float(gradient.a2[inside].sum()), gradient.a2.sum())
    moved_b = ratio(float(gradient.b2[inside].sum()), gradient.b2.sum())
    share = Quantity(
        name, gradient.split(inside).share_b, n=int(inside.sum()), chance=0.5, unit="%", main=False, figure=BY_COUNT
    )
    of_path = replace(share, chance=None, figure=MOVED)
    return (
        share,
        replace(share, name=f"{name}, {ADAM}", value=step.share_b),
        replace(of_path, name=f"lookup path: {name}", value=moved_a, why="of ‖A‖²"),
        replace(of_path, name=f"head path: {name}", value=moved_b, why="of ‖B‖²"),
    )


def _longest_rows(measured: PathGradients) -> Listing:
    """List the rows with the longest gradients."""
    gradient = measured.gradient
    energy = gradient.a2 + gradient.b2
    columns = gradient.share_b, measured.update.share_b, energy / (energy.sum() or math.nan)
    rows = []
    for row, text in measured.longest:
        norm_a, norm_b = math.sqrt(gradient.a2[row]), math.sqrt(gradient.b2[row])
        shares = [str(Quantity("", float(column[row]), unit="%")) for column in columns]
        rows.append((visible(text), str(row), count(int(measured.seen[row])), plain(norm_a), plain(norm_b), *shares))
    header = ("token", "row", "count", "‖A‖", "‖B‖", SHARE, STEP, "of ‖A‖² + ‖B‖²")
    return Listing("Rows with the longest gradients", header, rows)


def _batch_quantities(measured: PathGradients) -> list[Quantity]:
    """Return the quantities of batches, the head path's share first.

    The cosine (of one table), Adam's step and both norms follow.
    """
    splits = measured.batches
    shares = [split.share_b for split in splits]
    quantities = [mean_of(f"{SHARE} per batch", shares, unit="%", chance=0.5, why="‖B‖/(‖A‖ + ‖B‖)")]
    if not np.isnan(measured.gradient.ab).any():
        cosines = [split.cosine for split in splits]
        cosine = mean_of(
            "cosine of the two paths per batch", cosines, unit="cosine", chance=0.0,
            question="Do the two uses of the table pull the same way?", above=ONE,
            why="above zero they help each other, below they oppose",
        )  # fmt: skip
        quantities.append(cosine)
    step = measured.update.split().share_b
    quantities.append(Quantity("share in Adam's step", step, unit="%", chance=0.5, why="after all of the batches"))
    norms = {"lookup": [split.a for split in splits], "head": [split.b for split in splits]}
    for path, of_path in norms.items():
        quantities.append(mean_of(f"norm of the {path} path per batch", of_path, unit="norm", main=False))
    return quantities


def _quantities(measured: PathGradients) -> Iterator[Quantity]:
    """Yield the full text, Adam's step, the older convention, and shares within rows."""
    yield Quantity("loss", measured.nll, unit=NATS, main=False, n=measured.predicted)
    why = "permuted: other tokens' lookup path"
    yield from _split_quantities(FULL_TEXT, measured.gradient.split(), measured.null, why)
    yield from _split_quantities(ADAM, measured.update.split(), (), "Adam divides by the size of the sum")
    yield from _older_quantities(measured)
    yield from _row_quantities(measured)


def _split_quantities(where: str, split: PathSplit, null: tuple[float, ...], why: str) -> Iterator[Quantity]:
    """Yield the cosine (of one table's two paths), norms and shares of one gradient or step.

    `why` explains the cosine and its null.
    """
    if math.isfinite(split.cosine):
        name = f"cosine, {where}"
        yield Quantity(name, split.cosine, unit="cosine", chance=0.0, null=null, main=False, why=why)
    norms = {"lookup path": split.a, "head path": split.b, "both together": split.total}
    for name, value in norms.items():
        yield Quantity(f"norm of the {name}, {where}", value, unit="norm", main=False)
    shares = {"norms": split.share_b, "squares": split.energy_b, "L1 norms": split.share_b_l1}
    for name, value in shares.items():
        yield Quantity(f"{SHARE} of {name}, {where}", value, unit="%", main=False)


def _older_quantities(measured: PathGradients) -> Iterator[Quantity]:
    """Yield shares in the convention of arXiv:2603.26663.

    There the lookup's norm is one of positions, the head's one of the table.
    """
    shares, shares_l1, norms = [], [], []
    for split, (l2, l1) in zip(measured.batches, measured.looked_up, strict=True):
        shares.append(ratio(split.b, l2 + split.b))
        shares_l1.append(ratio(split.b_l1, l1 + split.b_l1))
        norms.append(l2)
    why = "for published figures"
    yield mean_of(f"{SHARE}, {OLDER}", shares, unit="%", main=False, why=why)
    yield mean_of(f"{SHARE} of L1 norms, {OLDER}", shares_l1, unit="%", main=False, why=why)
    yield mean_of(f"norm at the lookup's outputs, {OLDER}", norms, unit="norm", main=False, why=why)


def _row_quantities(measured: PathGradients) -> Iterator[Quantity]:
    """Yield the head path's share in rows, and the parts of absent tokens.

    Shares are those in the rows of tokens that occur in the windows.
    """
    absent, b2 = measured.seen == 0, measured.gradient.b2
    n = int(absent.sum())
    for where, sums in (("gradient", measured.gradient), (ADAM, measured.update)):
        shares = _shares(measured, sums)
        for at in QUANTILES:
            quantile = math.nan
            if len(shares):
                quantile = float(np.quantile(shares, at))
            name = f"{SHARE} in a row, {at:.0%} quantile, {where}"
            yield Quantity(name, quantile, unit="%", main=False, n=len(absent) - n)
    part = ratio(float(b2[absent].sum()), float(b2.sum()))
    yield Quantity("absent tokens' part of the head path", part, unit="%", main=False, n=n, why="of ‖B‖²")
    part = ratio(measured.update.split(absent).total ** 2, measured.update.split().total ** 2)
    yield Quantity(f"absent tokens' part of {ADAM}", part, unit="%", main=False, n=n, why="of ‖u‖²")


def _shares(measured: PathGradients, sums: RowSums) -> NDArray[np.float64]:
    """Return the head path's finite shares in the rows of the windows' tokens."""
    shares = sums.share_b[measured.seen > 0]
    return shares[np.isfinite(shares)]


def _batch_size_curves(measured: PathGradients) -> Iterator[Curve]:
    """Yield the head path's share by batch size; nothing without an estimate."""
    norms = by_batch(measured.batches, measured.mean, measured.batch)
    if not norms:
        return
    *shares, limit = [ratio(b, a + b) for a, b in norms]
    sizes, finite_shares = [], []
    for windows, share in zip(SIZES, shares, strict=True):
        if math.isfinite(share):
            sizes.append(float(windows))
            finite_shares.append(share)
    if sizes:
        yield Curve(
            "Head path's share by batch size", tuple(sizes), tuple(finite_shares), along="windows in a batch",
            unit="%", log_x=True, mark=measured.batch, level=limit, level_name="without noise",
            why="Estimated from the marked size; noise lengthens both norms.",
        )  # fmt: skip


def _row_share_curves(measured: PathGradients) -> Iterator[Curve]:
    """Yield the distribution of the head path's share over single rows."""
    centres = tuple((k + 0.5) / HISTOGRAM for k in range(HISTOGRAM))
    for which, sums in (("gradient", measured.gradient), (ADAM, measured.update)):
        rows = _shares(measured, sums)
        counts, _ = np.histogram(rows, HISTOGRAM, (0.0, 1.0))
        heights = tuple(float(number) / max(len(rows), 1) for number in counts)
        why = "Tokens of the windows; others: 100 %."
        yield Curve("Head path's share in single rows", centres, heights, along=SHARE, unit="%", which=which, why=why)


def by_batch(splits: Sequence[PathSplit], mean: tuple[float, float], batch: int) -> list[tuple[float, float]]:
    """Estimate root mean square ‖A‖ and ‖B‖ of batches of 1, 2, 4 … 4,096 windows.

    The last pair is the limit of large batches. E‖g‖² at n windows = |G|² + tr Σ / n, both estimated without bias
    (McCandlish et al., arXiv:1812.06162, App. A). `mean` are the norms of the mean gradient of the same batches. An
    estimate of |G|² below zero is no result: NaN. One batch has no scatter: the list is empty.
    """
    if len(splits) < 2:
        return []
    of_a = _norms_by_size([split.a for split in splits], mean[0], batch)
    of_b = _norms_by_size([split.b for split in splits], mean[1], batch)
    return list(zip(of_a, of_b, strict=True))


def _norms_by_size(norms: Sequence[float], mean: float, batch: int) -> list[float]:
    """Estimate the norm for each of `SIZES` and the limit.

    `norms` are those of the batches, `mean` is that of their mean.
    """
    n = len(norms)
    scatter = (sum(norm**2 for norm in norms) / n - mean**2) * n / (n - 1)  # trace of one batch's covariance
    sizes = (*SIZES, math.inf)
    squares = [mean**2 - scatter / n + scatter * batch / windows for windows in sizes]
    return [math.sqrt(square) if square > 0 else math.nan for square in squares]
