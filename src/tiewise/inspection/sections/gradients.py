"""Which use of the table pulls harder, and do both pull the same way?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from tiewise.analysis.estimates import Estimate
from tiewise.core.found import ONE, Curve, Found, Listing, Quantity, visible
from tiewise.core.frequency import token_counts
from tiewise.core.numerals import count, plain
from tiewise.inspection.section import section
from tiewise.inspection.subject import Subject
from tiewise.inspection.workbench import Workbench
from tiewise.internals.path_gradients import HISTOGRAM, QUANTILES, PathGradients, path_gradients
from tiewise.internals.two_paths import PathSplit

SHARE = "head path's share"
BY_COUNT = "Head path's share by how often a token occurs"
MOVED = "Which tokens each path moves"
REST = (
    "above zero a step for one use helps the other; below zero they work against each other, as in any tied model "
    "where training comes to rest: there the two cancel"
)
OLDER = "the lookup's norm is one of positions, not of the table's gradient; for comparison with published figures"
BY_BATCH = (
    "Noise makes both norms longer, by different factors, so a share belongs to a batch size. Estimated from the "
    "scatter of the batches that were run, whose size is marked."
)
BY_ROW = "Rows of tokens that occur in the windows, in twenty bins; rows of all others would stand at 100 %."


@section(asks="Which use of the table pulls harder, and do both pull the same way?", place=70, text=True)
def gradients(subject: Subject, bench: Workbench) -> Found:
    """Divide the gradient of a text's loss between lookup path and head path, and Adam's step with it."""
    opened = bench.opened(subject)
    counts = token_counts(bench.ids(subject), opened.vocab)
    return found_of(path_gradients(opened, bench.windows(subject)[0], seed=bench.request.seed, counts=counts))


def found_of(found: PathGradients) -> Found:
    """Say which path is longer and whether they agree: in batches, in the whole text, in Adam's step, by token."""
    batch, rows = found.per_batch, found.rows
    alone = "get the head path alone" + ("" if found.objective == "next token" else ", but for a mask or first token")
    return Found(
        answer=_answer(found),
        quantities=(*_per_batch(found), *_whole(found), *_older(found), *_rows(found), *_by_count(found)),
        curves=tuple(_curves(found)),
        listings=(_bins(found), _longest(found)),
        notes=(
            f"a batch is {batch.windows} windows of {found.length} tokens; {batch.batches} were run",
            f"{count(rows.absent)} of {count(found.vocab)} tokens occur in no window and {alone}",
        ),
    )


def _answer(found: PathGradients) -> str:
    if not math.isfinite(found.whole.share_b):
        return "neither: both gradients are zero on this text"
    share, (low, high) = _share(found.per_batch.share_b), found.cosine_null
    said = "the head" if share.low > 0.5 else "the lookup" if share.high < 0.5 else "neither clearly"
    if not math.isfinite(found.whole.cosine):
        return f"{said}, in a table of its own"
    if low <= found.whole.cosine <= high:
        return f"{said}, in unrelated directions"
    return f"{said}, {'the same way' if found.whole.cosine > high else 'opposed'}"


def _share(share: Estimate) -> Quantity:
    return Quantity.of_estimate(f"{SHARE} per batch", share, unit="%", chance=0.5, why="of both norms, ‖B‖/(‖A‖ + ‖B‖)")


def _per_batch(found: PathGradients) -> Iterator[Quantity]:
    batch = found.per_batch
    yield _share(batch.share_b)
    if found.tied:
        yield Quantity.of_estimate(
            "cosine of the two paths per batch", batch.cosine, unit="cosine", chance=0.0, why=REST,
            question="Do the two uses of the table pull the same way?", above=ONE,
        )  # fmt: skip
    yield Quantity("share in Adam's step", found.update.share_b, unit="%", chance=0.5, why="after all of the batches")
    for path, norm in (("lookup", batch.a), ("head", batch.b)):
        yield Quantity.of_estimate(f"norm of the {path} path per batch", norm, unit="norm", main=False)


def _whole(found: PathGradients) -> Iterator[Quantity]:
    """The gradient of the text's mean loss, and Adam's step after the batches."""
    yield Quantity("loss", found.nll, n=found.predicted, unit="nats per token", main=False)
    for where, split, null in (("whole text", found.whole, found.cosine_null), ("Adam's step", found.update, ())):
        yield from _split(where, split, null)


def _split(where: str, split: PathSplit, null: tuple[float, ...]) -> Iterator[Quantity]:
    if math.isfinite(split.cosine):
        said = "permuted: the lookup path given to other tokens" if null else "Adam divides by the size of the sum"
        yield Quantity(f"cosine, {where}", split.cosine, chance=0.0, null=null, unit="cosine", main=False, why=said)
    for name, value in (("lookup path", split.a), ("head path", split.b), ("both together", split.total)):
        yield Quantity(f"norm of the {name}, {where}", value, unit="norm", main=False)
    for name, value in (("norms", split.share_b), ("squares", split.energy_b), ("L1 norms", split.share_b_l1)):
        yield Quantity(f"{SHARE} of {name}, {where}", value, unit="%", main=False)


def _older(found: PathGradients) -> Iterator[Quantity]:
    older = found.activation
    for name, value, unit in (
        (SHARE, older.share_b, "%"),
        (f"{SHARE} of L1 norms", older.share_b_l1, "%"),
        ("norm at the lookup's outputs", older.a, "norm"),
    ):
        yield Quantity.of_estimate(f"{name}, {older.convention}", value, unit=unit, main=False, why=OLDER)


def _rows(found: PathGradients) -> Iterator[Quantity]:
    """Shares within rows, and what rows of tokens that do not occur get."""
    rows = found.rows
    for where, values in (("gradient", rows.quantiles), ("Adam's step", rows.update_quantiles)):
        for at, value in zip(QUANTILES, values, strict=True):
            yield Quantity(f"{SHARE} in a row, {at:.0%} quantile, {where}", value, n=rows.tokens, unit="%", main=False)
    absent: dict[str, Any] = {"n": rows.absent, "unit": "%", "main": False}
    yield Quantity("absent tokens' part of the head path", rows.absent_of_b, why="of ‖B‖²", **absent)
    yield Quantity("absent tokens' part of Adam's step", rows.absent_of_update, why="of ‖u‖²", **absent)


def _by_count(found: PathGradients) -> Iterator[Quantity]:
    for part in found.bins:
        if part.tokens:
            shown: dict[str, Any] = {"n": part.tokens, "unit": "%", "main": False}
            times = f"{part.label} times"
            yield Quantity(times, part.gradient.share_b, chance=0.5, figure=BY_COUNT, **shown)
            yield Quantity(f"{times}, Adam's step", part.update.share_b, chance=0.5, figure=BY_COUNT, **shown)
            yield Quantity(f"lookup path: {times}", part.of_a, figure=MOVED, why="of ‖A‖²", **shown)
            yield Quantity(f"head path: {times}", part.of_b, figure=MOVED, why="of ‖B‖²", **shown)


def _curves(found: PathGradients) -> Iterator[Curve]:
    sizes = [at for at in found.by_batch if at.windows is not None and math.isfinite(at.share_b)]
    if sizes:
        yield Curve(
            "Head path's share by batch size",
            tuple(float(at.windows or 0) for at in sizes), tuple(at.share_b for at in sizes),
            along="windows in a batch", unit="%", log_x=True, mark=found.per_batch.windows,
            level=found.by_batch[-1].share_b, level_name="without noise", why=BY_BATCH,
        )  # fmt: skip
    places = tuple((k + 0.5) / HISTOGRAM for k in range(HISTOGRAM))
    for which, values in (("gradient", found.rows.histogram), ("Adam's step", found.rows.update_histogram)):
        yield Curve("Head path's share in single rows", places, values, along=SHARE, unit="%", which=which, why=BY_ROW)


def _bins(found: PathGradients) -> Listing:
    header = ("times in the text", "rows", "occurrences", "‖A‖", "‖B‖", SHARE, "in Adam's step", "of ‖A‖²", "of ‖B‖²")
    rows = []
    for part in found.bins:
        norms = (plain(part.gradient.a), plain(part.gradient.b))
        shares = map(_percent, (part.gradient.share_b, part.update.share_b, part.of_a, part.of_b))
        rows.append((part.label, count(part.tokens), count(part.occurrences), *norms, *shares))
    return Listing("By how often a token occurs", header, tuple(rows))


def _longest(found: PathGradients) -> Listing:
    header = ("token", "row", "count", "‖A‖", "‖B‖", SHARE, "in Adam's step", "of ‖A‖² + ‖B‖²")
    rows = []
    for row in found.rows.top:
        shares = map(_percent, (row.share_b, row.update_share_b, row.of_all))
        rows.append((visible(row.text), str(row.token), count(row.count), plain(row.a), plain(row.b), *shares))
    return Listing("Rows with the longest gradients", header, tuple(rows))


def _percent(share: float) -> str:
    return str(Quantity("", share, unit="%"))
