"""Which use of the table pulls harder as training goes on?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tiewise.core.found import Curve, Found, Listing, Quantity
from tiewise.core.numerals import count
from tiewise.inspection.section import NotHere, section
from tiewise.inspection.subject import Subject
from tiewise.inspection.workbench import Workbench
from tiewise.internals.paths_over_training import ArmPaths, paths_over_training

SHARE = "share of the two norms"
WHY = (
    "The thick line is the mean over seeds, its band their 95 % interval; a point is the mean over its logging window."
)
FIELDS = {
    "Head path's share over training": ("share_b", SHARE, False),
    "Norm of the lookup path's gradient": ("a", "norm", True),
    "Norm of the head path's gradient": ("b", "norm", True),
    "Do both paths pull the same way over training?": ("cosine", "cosine", False),
}


@section(asks="Which use of the table pulls harder as training goes on?", place=80)
def gradients_over_training(subject: Subject, bench: Workbench) -> Found:
    """Follow both paths' gradients over the training of one arm of a comparison."""
    if subject.run is None:
        raise NotHere("needs a comparison of several seeds", "give the folder of `tiewise compare`")
    found = paths_over_training(subject.run)
    arm = next((arm for arm in found.arms if arm.arm == subject.label), None)
    if arm is None:
        raise NotHere(f"{subject.label} measured no gradients by path", "run the comparison again, longer")
    return found_of(arm)


def found_of(arm: ArmPaths) -> Found:
    """Say what the head path's share is, and whether it moved."""
    change = arm.change()
    share = Quantity.of_estimate("head path's share of both norms", arm.whole.share_b, unit="%", chance=0.5)
    moved = Quantity.of_estimate("last tenth − first tenth", change, unit="%", chance=0.0, why="in points of a hundred")
    return Found(
        answer=_answer(share, moved),
        quantities=(share, moved, *_cosines(arm)),
        curves=tuple(_curves(arm)),
        listings=(_tenths(arm),),
        notes=(f"over {len(arm.seeds)} seed{'s' if len(arm.seeds) > 1 else ''}, before clipping",),
    )


def _answer(share: Quantity, moved: Quantity) -> str:
    side = "the head" if share.low > 0.5 else "the lookup" if share.high < 0.5 else "neither clearly"
    if not math.isfinite(moved.value):
        return side
    way = "falls" if moved.high < 0 else "rises" if moved.low > 0 else "is not shown to move"
    return f"{side}; the head's share {way} over training"


def _cosines(arm: ArmPaths) -> Iterator[Quantity]:
    cosines = [one.value for one in arm.means("cosine") if math.isfinite(one.value)]
    for name, value in (("lowest cosine of the two paths", min), ("highest cosine of the two paths", max)):
        if cosines:
            yield Quantity(name, value(cosines), unit="cosine", main=False, why="means over seeds, by logging window")


def _curves(arm: ArmPaths) -> Iterator[Curve]:
    for name, (field, unit, log) in FIELDS.items():
        points = [(point.step, value) for point, value in zip(arm.points, arm.means(field), strict=True)]
        if any(math.isfinite(value.value) for _, value in points):
            level = 0.5 if field == "share_b" else 0.0 if field == "cosine" else None
            yield Curve.through(name, points, along="step", unit=unit, log=log, level=level, why=WHY)


def _tenths(arm: ArmPaths) -> Listing:
    rows = [
        (f"{count(part.first)}–{count(part.last)}", str(Quantity.of_estimate("", part.share_b, unit="%")))
        for part in (*arm.tenths, arm.whole)
    ]
    return Listing("Head path's share by tenths of the run, and in all", ("steps", "share [95 %]"), tuple(rows))
