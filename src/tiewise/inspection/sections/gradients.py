"""Which use of the table pulls harder, and do both pull the same way? Lookup path (A) and head path (B) on a text.

    windows ─ shuffled into batches → TwoLeaves → a, b [V, E] of each batch ┬ sums: the gradient of the text's mean loss
                                                                          ├ norms of each: what training sees
                                                                          └ AdamPaths: the optimizer's step by path

The norm of a mean gradient falls as the batch grows, and by different factors for the two paths, so a share belongs to
a batch size. Both are given: one batch (mean and interval over batches) and the whole text, and `by_batch` between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiewise.core.errors import DataError, no_numbers, progress
from tiewise.core.estimates import ratio
from tiewise.core.found import NATS, ONE, Curve, Found, Listing, Quantity, count, plain, visible
from tiewise.core.text import BINS, bin_of, token_counts
from tiewise.inspection.bench import Bench, Subject, mean_of, section
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.two_paths import (
    NEXT,
    AdamPaths,
    PathSplit,
    RowSums,
    TextLoss,
    cosine_null,
    parted,
    row_sums,
)
from tiewise.inspection.tables.token_texts import read_as
from tiewise.training.data.tokenizer import Ids

PERMUTATIONS = 19
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HISTOGRAM = 20  # bins of a row's share
TOP = 20  # rows that are listed
SIZES = tuple(2**k for k in range(13))  # windows of a batch
SHARE = "head path's share"
WHOLE, ADAM, STEP = "whole text", "Adam's step", "in Adam's step"
OLDER = "activation-norm convention (not commensurable)"
BY_COUNT = "Head path's share by how often a token occurs"
MOVED = "Which tokens each path moves"


@section(asks="Which use of the table pulls harder, and do both pull the same way?", place=70, text=True)
def gradients(subject: Subject, bench: Bench) -> Found:
    """Divide the gradient of a text's loss between lookup path and head path, and Adam's step with it."""
    opened = bench.opened(subject)
    counts = bench.counts(subject, opened.vocab)
    return gradients_of(opened, bench.windows(subject)[0], seed=bench.request.seed, counts=counts)


@dataclass(frozen=True)
class PathGradients:
    """What is measured, before anything is said of it."""

    objective: str  # what is predicted, as `two_paths` names it
    length: int  # tokens of a window
    predicted: int  # tokens, in all
    nll: float  # mean loss, nats per predicted token
    batch: int  # windows of a batch
    batches: tuple[PathSplit, ...]  # whole ones; a smaller last one is not among them
    looked_up: tuple[tuple[float, float], ...]  # of each: L2 and L1 norm at the lookups' outputs, a row per position
    mean: tuple[float, float]  # ‖A‖, ‖B‖ of the mean gradient of these batches
    gradient: RowSums  # of the mean loss over all windows
    update: RowSums  # Adam's step from the batches in order, weights held still
    null: tuple[float, float]  # lowest and highest cosine where A's rows are given to other tokens of the text
    seen: NDArray[np.int64]  # how often each token occurs in the windows [V]
    counts: NDArray[np.int64]  # the same of a longer text, for the bins
    longest: tuple[tuple[int, str], ...]  # rows with most of ‖A‖² + ‖B‖², and what their tokens read as


@leaves_model
def gradients_of(
    opened: Opened,
    windows: Ids,
    batch: int = 8,
    seed: int = 0,
    counts: NDArray | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Found:
    """Measure both paths' gradients on windows of token ids [n, T]; the model is left as it was.

    Memory: ten tables of the model's own size (gradients, their sums and moments) and logits of a few windows.

    Args:
        opened: the checkpoint, in the precision in which gradients are wanted.
        windows: run `batch` at a time.
        seed: of the order of windows, and of hidden tokens where the model predicts those.
        counts: how often each token occurs in a longer text [V], for the bins; None counts the windows.
        betas, eps: of the Adam whose step is divided.

    Raises:
        DataError: windows that this model cannot be run on, fewer than a batch, or gradients that are no numbers.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """
    loss = TextLoss(opened, windows, seed)
    if not 1 <= batch <= len(windows):
        raise DataError(f"batches of {batch} from {len(windows)} windows", "give a longer text or smaller batches")
    one, full = opened.ends.tied, len(windows) // batch
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(windows)))
    batches: list[PathSplit] = []
    looked_up: list[tuple[float, float]] = []
    mean, nll = (math.nan, math.nan), 0.0
    with parted(opened.ends) as leaves:
        a, b = torch.zeros_like(leaves.a), torch.zeros_like(leaves.b)
        moments = AdamPaths(a, b, one, betas, eps)
        for done, which in enumerate(order.split(batch), 1):
            found = leaves.gradient(loss, which)
            weight = len(which) / len(windows)
            nll += weight * found.nll
            a.add_(found.a, alpha=weight)
            b.add_(found.b, alpha=weight)
            if done <= full:
                batches.append(row_sums(found.a, found.b, one).split())
                looked_up.append((found.rows_l2, found.rows_l1))
                moments.add(found.a, found.b)
            if done == full:
                split, scale = row_sums(a, b, one).split(), len(windows) / (full * batch)
                mean = split.a * scale, split.b * scale
            del found
            progress("gradients", min(done * batch, len(windows)), len(windows))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise no_numbers(f"{opened.folder.path}: the gradient")
        update = row_sums(*moments.step(), one)
    gradient, seen = row_sums(a, b, one), token_counts(windows.reshape(-1), max(len(a), len(b)))
    reached = torch.nonzero(torch.linalg.vector_norm(a, dim=1)).reshape(-1)  # the text's tokens, a mask or first one
    best = [int(r) for r in np.argsort(-(gradient.a2 + gradient.b2), kind="stable")[:TOP]]
    return found_of(
        PathGradients(
            objective=loss.kind,
            length=int(windows.shape[1]),
            predicted=loss.per_window * len(windows),
            nll=nll,
            batch=batch,
            batches=tuple(batches),
            looked_up=tuple(looked_up),
            mean=mean,
            gradient=gradient,
            update=update,
            null=cosine_null(a, b, reached, seed, PERMUTATIONS) if one else (math.nan, math.nan),
            seen=seen,
            counts=seen if counts is None else np.pad(counts, (0, max(0, len(seen) - len(counts))))[: len(seen)],
            longest=tuple(zip(best, read_as(opened.folder, best), strict=True)),
        )
    )


def found_of(found: PathGradients) -> Found:
    """Say which path is longer and whether they agree: in batches, in the whole text, in Adam's step, by token."""
    alone = "get the head path alone" + ("" if found.objective == NEXT else ", but for a mask or first token")
    share, *others = _quantities(found)
    gradient, energy = found.gradient, found.gradient.a2 + found.gradient.b2
    # tokens of like frequency
    times = ("times in the text", "rows", "occurrences", "‖A‖", "‖B‖", SHARE, STEP, "of ‖A‖²", "of ‖B‖²")
    bins, where = [], bin_of(found.counts)
    for index, label in enumerate(BINS):
        its, name = where == index, f"{label} times"
        own, step = gradient.split(its), found.update.split(its)
        moved = [ratio(float(x[its].sum()), x.sum()) for x in (gradient.a2, gradient.b2)]
        one = Quantity(name, own.share_b, n=int(its.sum()), chance=0.5, unit="%", main=False, figure=BY_COUNT)
        of_path = replace(one, chance=None, figure=MOVED)
        told = [
            one,
            replace(one, name=f"{name}, {ADAM}", value=step.share_b),
            replace(of_path, name=f"lookup path: {name}", value=moved[0], why="of ‖A‖²"),
            replace(of_path, name=f"head path: {name}", value=moved[1], why="of ‖B‖²"),
        ]
        cells = (label, count(one.n), count(found.counts[its].sum()), plain(own.a), plain(own.b))
        bins.append((*cells, *map(str, told)))
        others += told if one.n else []
    # and the rows with the longest gradients
    header = ("token", "row", "count", "‖A‖", "‖B‖", SHARE, STEP, "of ‖A‖² + ‖B‖²")
    columns, rows = (gradient.share_b, found.update.share_b, energy / (energy.sum() or math.nan)), []
    for row, text in found.longest:
        norms = (plain(math.sqrt(squares[row])) for squares in (gradient.a2, gradient.b2))
        shares = (str(Quantity("", float(column[row]), unit="%")) for column in columns)
        rows.append((visible(text), str(row), count(int(found.seen[row])), *norms, *shares))
    return Found(
        answer=answer(share, found.gradient.split(), found.null),
        quantities=(share, *others),
        curves=tuple(_curves(found)),
        listings=(
            Listing("By how often a token occurs", times, bins),
            Listing("Rows with the longest gradients", header, rows),
        ),
        notes=(
            f"{len(found.batches)} batches of {found.batch} windows, {found.length} tokens each",
            f"{count((found.seen == 0).sum())} of {count(len(found.seen))} tokens occur in no window and {alone}",
        ),
    )


def answer(share: Quantity, whole: PathSplit, null: tuple[float, float]) -> str:
    """Which path is longer in a batch, and how the two lie to each other in the whole text."""
    if not math.isfinite(whole.share_b):
        return "neither: both gradients are zero on this text"
    said = "the head" if share.low > 0.5 else "the lookup" if share.high < 0.5 else "neither clearly"
    if not math.isfinite(whole.cosine):
        return f"{said}, in a table of its own"
    if null[0] <= whole.cosine <= null[1]:
        return f"{said}; over the whole text in unrelated directions"
    return f"{said}; over the whole text {'the same way' if whole.cosine > null[1] else 'opposed'}"


def _quantities(found: PathGradients) -> Iterator[Quantity]:
    """The share in a batch first; then the whole text, Adam's step, the older convention, and rows."""

    def aside(name: str, value: float, unit: str = "%", **more: Any) -> Quantity:
        return Quantity(name, value, unit=unit, main=False, **more)

    splits, step = found.batches, found.update.split()
    yield mean_of(f"{SHARE} per batch", [x.share_b for x in splits], unit="%", chance=0.5, why="‖B‖/(‖A‖ + ‖B‖)")
    if not np.isnan(found.gradient.ab).any():
        yield mean_of(
            "cosine of the two paths per batch", [x.cosine for x in splits], unit="cosine", chance=0.0,
            question="Do the two uses of the table pull the same way?", above=ONE,
            why="above zero they help each other, below they oppose",
        )  # fmt: skip
    yield Quantity("share in Adam's step", step.share_b, unit="%", chance=0.5, why="after all of the batches")
    for path, norms in (("lookup", [x.a for x in splits]), ("head", [x.b for x in splits])):
        yield mean_of(f"norm of the {path} path per batch", norms, unit="norm", main=False)
    yield aside("loss", found.nll, NATS, n=found.predicted)
    for where, split, null in ((WHOLE, found.gradient.split(), found.null), (ADAM, step, ())):
        if math.isfinite(split.cosine):
            why = "permuted: other tokens' lookup path" if null else "Adam divides by the size of the sum"
            yield aside(f"cosine, {where}", split.cosine, "cosine", chance=0.0, null=null, why=why)
        for name, value in (("lookup path", split.a), ("head path", split.b), ("both together", split.total)):
            yield aside(f"norm of the {name}, {where}", value, "norm")
        for name, value in (("norms", split.share_b), ("squares", split.energy_b), ("L1 norms", split.share_b_l1)):
            yield aside(f"{SHARE} of {name}, {where}", value)
    # the convention of arXiv:2603.26663: the lookup's norm is one of positions, the head's one of the table
    (l2, l1), why = zip(*found.looked_up, strict=True), "for published figures"
    for name, unit, values in (
        (SHARE, "%", [ratio(x.b, by_row + x.b) for x, by_row in zip(splits, l2, strict=True)]),
        (f"{SHARE} of L1 norms", "%", [ratio(x.b_l1, by_row + x.b_l1) for x, by_row in zip(splits, l1, strict=True)]),
        ("norm at the lookup's outputs", "norm", l2),
    ):
        yield mean_of(f"{name}, {OLDER}", values, unit=unit, main=False, why=why)
    # shares within rows of tokens that occur in the windows, and what the others get
    absent, b2 = found.seen == 0, found.gradient.b2
    n = int(absent.sum())
    for where, sums in (("gradient", found.gradient), (ADAM, found.update)):
        shares = _shares(found, sums)
        quantiles = np.quantile(shares, QUANTILES) if len(shares) else [math.nan] * len(QUANTILES)
        for at, value in zip(QUANTILES, quantiles, strict=True):
            yield aside(f"{SHARE} in a row, {at:.0%} quantile, {where}", float(value), n=len(absent) - n)
    part = ratio(float(b2[absent].sum()), float(b2.sum()))
    yield aside("absent tokens' part of the head path", part, n=n, why="of ‖B‖²")
    part = ratio(found.update.split(absent).total ** 2, step.total**2)
    yield aside(f"absent tokens' part of {ADAM}", part, n=n, why="of ‖u‖²")


def _shares(found: PathGradients, sums: RowSums) -> NDArray[np.float64]:
    """Head path's share in the rows of tokens that occur in the windows, where there is one."""
    shares = sums.share_b[found.seen > 0]
    return shares[np.isfinite(shares)]


def _curves(found: PathGradients) -> Iterator[Curve]:
    norms = by_batch(found.batches, found.mean, found.batch)
    *shares, limit = [ratio(b, a + b) for a, b in norms] or [math.nan]
    sizes = [(float(windows), share) for windows, share in zip(SIZES, shares, strict=False) if math.isfinite(share)]
    if sizes:
        x, y = zip(*sizes, strict=True)
        yield Curve(
            "Head path's share by batch size", x, y, along="windows in a batch", unit="%", log_x=True,
            mark=found.batch, level=limit, level_name="without noise",
            why="Estimated from the marked size; noise lengthens both norms.",
        )  # fmt: skip
    places = tuple((k + 0.5) / HISTOGRAM for k in range(HISTOGRAM))
    for which, sums in (("gradient", found.gradient), (ADAM, found.update)):
        rows = _shares(found, sums)
        heights = tuple(float(x) / max(len(rows), 1) for x in np.histogram(rows, HISTOGRAM, (0.0, 1.0))[0])
        why = "Tokens of the windows; others: 100 %."
        yield Curve("Head path's share in single rows", places, heights, along=SHARE, unit="%", which=which, why=why)


def by_batch(splits: Sequence[PathSplit], mean: tuple[float, float], batch: int) -> list[tuple[float, float]]:
    """Root mean square ‖A‖ and ‖B‖ of batches of 1, 2, 4 … 4,096 windows, and of ever larger ones last.

    E‖g‖² at k windows = |G|² + tr Σ / k, both estimated without bias (McCandlish et al., arXiv:1812.06162, App. A).
    `mean` are the norms of the mean gradient of the same batches. An estimate of |G|² below zero is no result: nan.
    One batch has no scatter.
    """
    n = len(splits)
    if n < 2:
        return []
    columns = []
    for norm, squares in zip(mean, ([s.a**2 for s in splits], [s.b**2 for s in splits]), strict=True):
        spread = (sum(squares) / n - norm**2) * n / (n - 1)  # trace of the covariance of one batch's gradient
        at = [norm**2 - spread / n + spread * batch / windows for windows in (*SIZES, math.inf)]
        columns.append([math.sqrt(x) if x > 0 else math.nan for x in at])
    return list(zip(*columns, strict=True))
