"""Do the layers refine one state, and does a repeated one come to rest?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tiewise.analysis.estimates import Estimate
from tiewise.core.found import Curve, Found, Grid, Listing, Quantity
from tiewise.core.numerals import NONE
from tiewise.inspection.section import section
from tiewise.inspection.subject import Subject
from tiewise.inspection.workbench import Workbench
from tiewise.internals.refinement import Application, Refinement, Rest, Trajectory
from tiewise.internals.refinement import refinement as follow

CONTROL = "Dashed: the same architecture with fresh weights."
PER_LAYER: tuple[tuple[str, str, bool, Callable[[Application], Estimate | None], str], ...] = (
    ("Change per application", "relative change", True, lambda one: one.change,
     "‖h after − h before‖ / ‖h before‖, mean over tokens."),
    ("Cosine of output and input", "cosine", False, lambda one: one.cosine,
     "Of a layer's output and input (as figure 1 of Lan et al. 2020); 1 where nothing turns, 0 where nothing is kept."),
    ("Does a layer go on or turn back?", "cosine of successive changes", False, lambda one: one.turn,
     "Above 0 a layer goes on where the one before it was heading, below 0 it turns back."),
    ("Change if the same layer is applied again", "relative change", True, lambda one: one.again,
     "Each layer applied a second time to its own output: small where it had already done its work."),
)  # fmt: skip


@section(asks="Do the layers refine one state, and does a repeated one come to rest?", place=110, text=True)
def refinement(subject: Subject, bench: Workbench) -> Found:
    """Follow a text's states from layer to layer, and a repeated block beyond where the model leaves it."""
    return found_of(follow(bench.opened(subject), bench.windows(subject)[1], bench.request.seed))


def found_of(found: Refinement) -> Found:
    """Say how far each layer moves the states, and where repeating leads, beside fresh weights."""
    trained, control = found.trained, found.untrained
    return Found(
        answer=_answer(trained, found.further),
        quantities=(*_ends(trained), *(q for rest in trained.repeats for q in _rest(rest)), *_controls(control)),
        curves=(*_curves(trained, False), *(_curves(control, True) if control is not None else ())),
        grids=(_alike(trained, ""), *((_alike(control, ", fresh weights"),) if control is not None else ())),
        listings=(_listing(trained, control),),
    )


def _answer(layers: Trajectory, further: int) -> str:
    if not layers.repeats:
        if layers.shared:
            most = max(one.shared for one in layers.applications)
            return f"layers share up to {most:.0%} of their parameters, and none is repeated whole"
        return "each layer is applied once: there is no fixed point to look for"
    said = []
    for rest in layers.repeats:
        block = "a layer" if rest.period == 1 else f"a block of {rest.period} layers"
        end = f"does not come to rest within {further} more"
        if rest.converged:
            end = f"comes to rest in {rest.converged} of {rest.windows} windows if it is applied {further} times more"
        elif rest.alternating:
            end = f"alternates between two states in {rest.alternating} of {rest.windows} windows"
        said.append(f"{block} is applied {rest.times} times and {end}")
    return "; ".join(said)


def _ends(layers: Trajectory, main: bool = True) -> Iterator[Quantity]:
    for name, one in (
        ("first layer's change", layers.applications[0]),
        ("last layer's change", layers.applications[-1]),
    ):
        yield Quantity.of_estimate(name, one.change, unit="of the state's norm", main=main)


def _rest(rest: Rest, main: bool = True) -> Iterator[Quantity]:
    where = f", applications {rest.first + 1} to {rest.first + rest.period * rest.times}"
    yield Quantity.of_estimate(
        "small differences grow by",
        rest.growth,
        chance=1.0,
        unit="× per application",
        main=main,
        why=f"below 1 near-by states come together, above 1 they are driven apart{where}",
    )
    yield Quantity.of_estimate("distance from rest", rest.from_end, unit="of the resting norm", main=main)
    yield Quantity.of_estimate("successive changes shrink by", rest.ratio, unit="× per application", main=False)
    for name, windows in (("windows at rest", rest.converged), ("windows that alternate", rest.alternating)):
        yield Quantity(name, windows, n=rest.windows, main=False, why=f"of {rest.windows}{where}")


def _controls(control: Trajectory | None) -> Iterator[Quantity]:
    if control is not None:
        parts = (*_ends(control, False), *(q for rest in control.repeats for q in _rest(rest, False)))
        yield from (replace(q, name=f"{q.name}, fresh weights") for q in parts)


def _curves(layers: Trajectory, control: bool) -> Iterator[Curve]:
    look: dict[str, Any] = {"which": "fresh weights" if control else ""}
    for name, unit, log, value, why in PER_LAYER:
        points = list(enumerate(map(value, layers.applications), 1))
        if any(e is not None for _, e in points) and not (control and "again" in name):
            yield Curve.through(name, points, along="application", unit=unit, log=log, why=f"{why} {CONTROL}", **look)
    for rest in layers.repeats:
        yield Curve.through(
            "Does the repeated block come to rest?", enumerate(rest.residual, 1), along="application of the block",
            unit="relative change", log=True, mark=rest.times, **look,
            why="‖f(h) − h‖ / ‖h‖ of the block f that the model repeats; the open marker is where the model stops. "
            f"A straight fall is a fixed point that is approached at a constant rate, a level line is none. {CONTROL}",
        )  # fmt: skip


def _alike(layers: Trajectory, which: str) -> Grid:
    states = tuple(str(i) for i in range(len(layers.alike)))
    why = (
        "Cosine of the states after so many applications, mean over tokens; 0 is what the first layer reads. A square "
        "of one colour is a stretch in which little changes."
    )
    return Grid(f"How alike the states are{which}", states, states, layers.alike, axes=("applications",) * 2, why=why)


def _listing(layers: Trajectory, control: Trajectory | None) -> Listing:
    header = ("layer", "change", "cosine", "turn", "norm", "applied twice", "shared", "change, fresh weights")
    fresh = control.applications if control is not None else (None,) * len(layers.applications)
    rows = []
    for number, (one, null) in enumerate(zip(layers.applications, fresh, strict=True), 1):
        values = (one.change, one.cosine, one.turn, one.norm, one.again)
        shared = f"{one.shared:.0%}" if one.shared else "no"
        shared = f"all, as {one.same_as + 1}" if one.same_as is not None else shared
        last = NONE if null is None else _shown(null.change)
        rows.append((f"{number} · {one.layer}", *map(_shown, values), shared, last))
    return Listing("Each application of a layer", header, tuple(rows))


def _shown(value: Estimate | None) -> str:
    return str(Quantity.of_estimate("", value, unit="value"))
