"""Gradient by path, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tiewise.analysis.estimates import Estimate
from tiewise.core.numerals import NONE, count, plain
from tiewise.report.grid import Table
from tiewise.report.labels import visible

if TYPE_CHECKING:
    from tiewise.internals.path_gradients import PathGradients
    from tiewise.internals.path_rows import Split

TITLE = "Gradient by path"


def percent(value: float) -> str:
    """61.8 %, or a dash where there is no number."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else NONE


def with_interval(value: Estimate) -> str:
    """61.8 % [60.1 %, 63.0 %]; without an interval where one value gives none."""
    text = percent(value.value)
    return f"{text} [{percent(value.low)}, {percent(value.high)}]" if math.isfinite(value.low) else text


def lines(found: Mapping[str, PathGradients]) -> list[str]:
    """Say which path is longer, whether they agree, what rare rows get, and what the optimizer makes of it."""
    return [line for label, one in found.items() for line in _lines(label, one)]


def tables(found: Mapping[str, PathGradients]) -> list[tuple[str, Table]]:
    """Both paths as gradient and as step, by frequency, by batch size, and the rows with the longest gradients."""
    made = [("Path A (lookup) and Path B (output) of the whole table", _whole(found))]
    for label, one in found.items():
        made.append((f"By token frequency, {label}", _bins(one)))
    made.append(("Path B's share in single rows", _rows(found)))
    if any(one.by_batch for one in found.values()):
        made.append(("Path B's share by batch size, from the scatter of batches", by_batch(found)))
    for label, one in found.items():
        made.append((f"Rows with the longest gradients, {label}", _top(one)))
    return made


def by_batch(found: Mapping[str, PathGradients]) -> Table:
    """Path B's share at every batch size, a column per model."""
    sizes = next(([at.windows for at in one.by_batch] for one in found.values() if one.by_batch), [])
    shares = {label: {at.windows: percent(at.share_b) for at in one.by_batch} for label, one in found.items()}
    rows = [
        ["no noise" if size is None else count(size), *(column.get(size, NONE) for column in shares.values())]
        for size in sizes
    ]
    return Table(["windows in a batch", *shares], rows)


def _lines(label: str, one: PathGradients) -> Iterator[str]:
    batch = f"batches of {one.per_batch.windows} windows of {one.length} tokens"
    whole = one.whole.share_b
    if not math.isfinite(whole):
        yield f"Both paths' gradients of {label} are zero on this text."
        return
    yield (
        f"Path B, through the output, is {with_interval(one.per_batch.share_b)} of ‖A‖ + ‖B‖ in {label} on {batch}, "
        f"and {percent(whole)} in the gradient of all {count(one.windows)} windows' mean loss."
    )
    if math.isfinite(one.whole.cosine):
        low, high = one.cosine_null
        inside = low <= one.whole.cosine <= high
        said = "within" if inside else "outside"
        yield (
            f"The two paths of {label} have a cosine of {plain(one.whole.cosine, 3)}, {said} the range "
            f"{plain(low, 3)} to {plain(high, 3)} of Path A given to other tokens."
        )
    step = one.update
    yield (
        f"In Adam's step after {one.per_batch.batches} of these batches Path B is {percent(step.share_b)} of the "
        f"parts' norms in {label}; the gradient has {percent(whole)}."
    )
    if math.isfinite(step.cosine):
        yield (
            f"The parts of that step in {label} have a cosine of {plain(step.cosine, 2)}; Adam divides by the size of "
            "the sum, so that entries where the two paths nearly cancel weigh more than in the gradient."
        )
    alone = "get Path B alone" if one.objective == "next token" else "get Path B alone, but for a mask or first token"
    yield (
        f"{count(one.rows.absent)} of {count(one.vocab)} tokens of {label} occur in no window and {alone}: "
        f"{percent(one.rows.absent_of_b)} of Path B's energy, {percent(one.rows.absent_of_update)} of the step's."
    )
    older = one.activation
    yield (
        f"By the older {older.convention} the share in {label} is {with_interval(older.share_b)}: "
        "the input side is a norm of positions, not of the table's gradient."
    )


def _whole(found: Mapping[str, PathGradients]) -> Table:
    header = ["", "‖A‖", "‖B‖", "‖A + B‖", "cosine", "share of B", "B² share", "L1 share"]
    rows = []
    for label, one in found.items():
        batch = one.per_batch
        rows.append([f"{label}: all windows", *_cells(one.whole)])
        means = [plain(x.value) for x in (batch.a, batch.b)]
        share = with_interval(batch.share_b)
        rows.append([f"{label}: mean over batches", *means, NONE, plain(batch.cosine.value, 3), share, NONE, NONE])
        rows.append([f"{label}: Adam's step", *_cells(one.update)])
        older = one.activation
        means = [plain(x.value) for x in (older.a, older.b)]
        shares = [with_interval(older.share_b), NONE, with_interval(older.share_b_l1)]
        rows.append([f"{label}: {older.convention}", *means, NONE, NONE, *shares])
    return Table(header, rows)


def _cells(split: Split) -> list[str]:
    norms = [plain(x) for x in (split.a, split.b, split.total)]
    return [*norms, plain(split.cosine, 3), *map(percent, (split.share_b, split.energy_b, split.share_b_l1))]


def _bins(one: PathGradients) -> Table:
    header = ["count in the text", "rows", "occurrences", "share of B", "in the step", "of ‖A‖²", "of ‖B‖²"]
    rows = []
    for part in one.bins:
        shares = (part.gradient.share_b, part.update.share_b, part.of_a, part.of_b)
        rows.append([part.label, count(part.tokens), count(part.occurrences), *map(percent, shares)])
    return Table(header, rows)


def _rows(found: Mapping[str, PathGradients]) -> Table:
    header = ["rows of tokens that occur", "rows", "5 %", "25 %", "median", "75 %", "95 %"]
    rows = []
    for label, one in found.items():
        tokens = count(one.rows.tokens)
        rows.append([f"{label}: gradient", tokens, *map(percent, one.rows.quantiles)])
        rows.append([f"{label}: Adam's step", tokens, *map(percent, one.rows.update_quantiles)])
    return Table(header, rows)


def _top(one: PathGradients) -> Table:
    header = ["token", "row", "count", "‖A‖", "‖B‖", "share of B", "in the step", "of ‖A‖² + ‖B‖²"]
    rows = []
    for row in one.rows.top:
        norms = [plain(x) for x in (row.a, row.b)]
        shares = map(percent, (row.share_b, row.update_share_b, row.of_all))
        rows.append([visible(row.text), str(row.token), count(row.count), *norms, *shares])
    return Table(header, rows)
