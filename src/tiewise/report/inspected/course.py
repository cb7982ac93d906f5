"""Both paths' gradients over the training of a comparison, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tiewise.analysis.estimates import Estimate
from tiewise.internals.course import PUBLISHED, Arm, Course, Range
from tiewise.numerals import NONE, count, plain, signed
from tiewise.report.grid import Table
from tiewise.report.inspected.gradients import percent, with_interval

TITLE = "Gradient by path over training"


def lines(found: Mapping[str, Course]) -> list[str]:
    """Say how Path B's share moved in every arm, and what others printed of another model by another convention."""
    said = [line for one in found.values() for arm in one.arms for line in _lines(arm)]
    for one in found.values():
        figures = ", ".join(f"{percent(r.value)} over steps 1–{count(n)}" for n, r in one.published)
        said.append(
            f"Published of a tied OLMo-1B (arXiv:2603.26663, recomputed from its per-step norms): {figures}, as "
            f"{one.convention} with a gradient's share, and of another model and batch."
        )
        break
    return said


def tables(found: Mapping[str, Course]) -> list[tuple[str, Table]]:
    """Path B's share by tenths of the run, and over the ranges that others printed."""
    made = []
    for one in found.values():
        header = ["steps", *(arm.arm for arm in one.arms)]
        made.append(
            ("Path B's share by tenths of the run, mean over seeds [95 % interval]", Table(header, _tenths(one)))
        )
        header = ["steps", *(arm.arm for arm in one.arms), f"OLMo-1B, published ({one.convention})"]
        made.append(("Path B's share over the ranges that are published", Table(header, _published(one))))
    return made


def shown(one: Range) -> str:
    """1–60."""
    return f"{count(one.first)}–{count(one.last)}"


def _lines(arm: Arm) -> Iterator[str]:
    seeds = f"{len(arm.seeds)} seeds" if len(arm.seeds) > 1 else "one seed"
    yield (
        f"Path B is {with_interval(arm.whole.share_b)} of ‖A‖ + ‖B‖ over steps {shown(arm.whole)} of {arm.arm} "
        f"({seeds})."
    )
    change = arm.change()
    if math.isfinite(change.value):
        first, last = arm.tenths[0], arm.tenths[-1]
        moved = "falls" if change.value < 0 else "rises"
        sure = math.isfinite(change.low) and (change.low > 0 or change.high < 0)
        yield (
            f"In {arm.arm} Path B's share {moved} from {percent(first.share_b.value)} (steps {shown(first)}) to "
            f"{percent(last.share_b.value)} (steps {shown(last)}): {_points(change)}"
            f"{'' if sure else ', not told apart from no change'}."
        )
    cosines = [c for c in arm.mean("cosine") if math.isfinite(c)]
    if cosines:
        yield (
            f"The cosine of the two paths in {arm.arm} lies between {plain(min(cosines), 3)} and "
            f"{plain(max(cosines), 3)} (means over seeds by logging window)."
        )


def _points(change: Estimate) -> str:
    text = f"{signed(100 * change.value, 1)} points"
    if not math.isfinite(change.low):
        return text
    return f"{text} [{signed(100 * change.low, 1)}, {signed(100 * change.high, 1)}]"


def _tenths(one: Course) -> list[list[str]]:
    shares = [{shown(part): with_interval(part.share_b) for part in arm.tenths} for arm in one.arms]
    names = dict.fromkeys(shown(part) for arm in one.arms for part in arm.tenths)
    rows = [[name, *(values.get(name, NONE) for values in shares)] for name in names]
    return [*rows, ["all", *(with_interval(arm.whole.share_b) for arm in one.arms)]]


def _published(one: Course) -> list[list[str]]:
    printed, rows = dict(one.published), []
    for place, last in enumerate(PUBLISHED):
        cells = []
        for arm in one.arms:
            part = arm.published[place] if place < len(arm.published) else None
            note = "" if part is None or part.last == last else f" (steps {shown(part)})"
            cells.append(NONE if part is None else f"{with_interval(part.share_b)}{note}")
        rows.append([f"1–{count(last)}", *cells, percent(printed[last].value) if last in printed else NONE])
    return rows
