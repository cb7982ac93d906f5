"""From layer to layer, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tiewise.analysis.estimates import Estimate
from tiewise.numerals import NONE, plain
from tiewise.report.grid import Table

if TYPE_CHECKING:
    from tiewise.internals.refined import Application, Course, Refinement, Rest

TITLE = "From layer to layer"


def lines(found: Mapping[str, Refinement]) -> list[str]:
    """Say what repeated layers come to, then how far the layers move the representation, beside fresh weights."""
    return [line for label, one in found.items() for line in _lines(label, one)]


def tables(found: Mapping[str, Refinement]) -> list[tuple[str, Table]]:
    """Every application of every model, and every block that is applied repeatedly."""
    made = [(f"Each application of a layer, {label}", _applications(one)) for label, one in found.items()]
    repeated = [row for label, one in found.items() for row in _rests(label, one)]
    if repeated:
        header = ["block", "applied", "at rest", "alternating", "from the end", "ratio", "growth"]
        made.append(
            ("Blocks that are applied repeatedly, and what applying them further gives", Table(header, repeated))
        )
    return made


def courses(label: str, found: Refinement) -> list[tuple[str, Course]]:
    """Return a model's course, and its untrained control's if there is one, each with its label."""
    control = [] if found.untrained is None else [(f"{label}, untrained", found.untrained)]
    return [(label, found.trained), *control]


def shown(value: Estimate | None) -> str:
    """0.123 [0.110, 0.136], without an interval where one window gives none, a dash where nothing was measured."""
    if value is None:
        return NONE
    digits = 3 if abs(value.value) >= 0.1 else 8 if 0 < abs(value.value) < 1e-4 else 5
    text = plain(value.value, digits)
    if value.rows < 2:
        return text
    return f"{text} [{plain(value.low, digits)}, {plain(value.high, digits)}]"


def _lines(label: str, found: Refinement) -> Iterator[str]:
    course, null = found.trained, found.untrained
    if course.repeats:
        for index, rest in enumerate(course.repeats):
            control = null.repeats[index] if null is not None and index < len(null.repeats) else None
            yield from _rest_lines(label, rest, control, found.further)
    elif course.shared:
        fraction = max(one.shared for one in course.applications)
        yield (
            f"{label} uses parameters in more than one layer (up to {fraction:.0%} of a layer's), but no whole layer "
            "is repeated, so there is no map whose fixed point could be looked for."
        )
    else:
        yield (
            f"{label} applies each of its {len(course.applications)} layers once, with parameters of its own: "
            "there is no repeated map, and no fixed point to look for."
        )
    yield from _course_lines(label, course, null)


def _rest_lines(label: str, rest: Rest, control: Rest | None, further: int) -> Iterator[str]:
    where = f"{label} applies {_block(rest)} {rest.times} times (applications {rest.first + 1} to {_last(rest)})"
    if rest.converged:
        yield (
            f"{where}; applied {further} times more it comes to rest in {rest.converged} of {rest.windows} windows, "
            f"and the model stops {shown(rest.from_end)} of that fixed point's norm away from it."
        )
    elif rest.alternating:
        yield (
            f"{where}; applied {further} times more it alternates between two states in {rest.alternating} of "
            f"{rest.windows} windows and comes to rest in none."
        )
    else:
        yield (
            f"{where}, and no fixed point is reached within {further} further applications: the last still changes "
            f"the state by {shown(rest.residual[-1])} of its norm."
        )
    if rest.growth is not None:
        side = "above 1, so near-by states are driven apart" if rest.growth.low > 1 else "not clearly on one side of 1"
        side = "below 1, so near-by states come together" if rest.growth.high < 1 else side
        beside = "" if control is None else f"; with fresh weights {shown(control.growth)}"
        yield (
            f"One more application of {label}'s repeated {_noun(rest)} multiplies a small difference of two states by "
            f"{shown(rest.growth)}, {side}{beside}."
        )


def _course_lines(label: str, course: Course, null: Course | None) -> Iterator[str]:
    parts = course.applications
    first, last = parts[0].change, parts[-1].change
    if len(parts) > 1 and first is not None and last is not None:
        beside = ""
        if null is not None:
            ends = shown(null.applications[0].change), shown(null.applications[-1].change)
            beside = f"; with fresh weights {ends[0]} and {ends[1]}"
        yield (
            f"The first application in {label} changes the representation by {shown(first)} of its norm, the last of "
            f"{len(parts)} by {shown(last)}{beside}."
        )
    turns = [one.turn.value for one in parts if one.turn is not None]
    if len(turns) > 1:
        against = sum(turn < 0 for turn in turns)
        yield (
            f"Successive changes in {label} have a cosine between {plain(min(turns), 2)} and {plain(max(turns), 2)}; "
            f"{against} of {len(turns)} go against the one before (steady refinement goes on in one direction, "
            "oscillation turns back)."
        )
    again = [(one.again.value, one.change.value) for one in parts[1:] if one.again and one.change]
    if again and not course.shared:
        less = sum(second < once for second, once in again)
        yield (
            f"Applied a second time to their own output, {less} of {len(again)} layers of {label} after the first "
            "change it less than their own first application changed the representation."
        )


def _block(rest: Rest) -> str:
    return "one layer" if rest.period == 1 else f"one block of {rest.period} layers"


def _noun(rest: Rest) -> str:
    return "layer" if rest.period == 1 else "block"


def _last(rest: Rest) -> int:
    return rest.first + rest.period * rest.times


def _applications(found: Refinement) -> Table:
    header = ["layer", "change", "cosine", "turn", "norm", "applied twice", "shared", "change, untrained"]
    null = found.untrained
    rows = []
    for index, one in enumerate(found.trained.applications):
        fresh = None if null is None else null.applications[index].change
        measured = [shown(value) for value in (one.change, one.cosine, one.turn, one.norm, one.again)]
        rows.append([f"{index + 1} · {one.layer}", *measured, _shared(one), shown(fresh)])
    return Table(header, rows)


def _shared(one: Application) -> str:
    if one.same_as is not None:
        return f"all, as {one.same_as + 1}"
    return f"{one.shared:.0%}" if one.shared else "no"


def _rests(label: str, found: Refinement) -> Iterator[list[str]]:
    for name, course in courses(label, found):
        for rest in course.repeats:
            yield [
                f"{name}: applications {rest.first + 1} to {_last(rest)}, {_block(rest)}",
                str(rest.times),
                f"{rest.converged} of {rest.windows}",
                f"{rest.alternating} of {rest.windows}",
                shown(rest.from_end),
                shown(rest.ratio),
                shown(rest.growth),
            ]
