"""A repeated block applied more or less often than in training, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tiewise.numerals import NONE, count, size
from tiewise.report.grid import Table
from tiewise.report.inspected.refinement import shown

if TYPE_CHECKING:
    from tiewise.internals.application_sweep import Applied, Sweep

TITLE = "The shared block, applied more or less often"
TRAINING = 16  # bytes of fp32 training by parameter: weight, gradient, AdamW's two moments


def lines(found: Mapping[str, Sweep]) -> list[str]:
    """Say what other numbers of applications give, and what the sharing saves."""
    return [line for label, one in found.items() for line in _lines(label, one)]


def tables(found: Mapping[str, Sweep]) -> list[tuple[str, Table]]:
    """Every number of applications of every model."""
    return [(f"The block applied n times, {label}", _table(one)) for label, one in found.items()]


def _lines(label: str, found: Sweep) -> Iterator[str]:
    own, best, last = found.own, found.best, found.course[-1]
    block = "one layer" if found.layers == 1 else f"one block of {found.layers} layers"
    yield (
        f"{label} applies {block} {found.trained} times; the nll of {_predicted(found)} is then {shown(own.nll)} nats. "
        f"The tokens' frequencies alone give {shown(found.unigram)}."
    )
    if best is own:
        yield f"No other number of applications from 1 to {last.times} gives {label} a lower nll."
    else:
        how = "one window gives no interval"
        if best.more is not None and best.more.rows > 1:
            how = "its interval leaves out 0" if best.more.high < 0 else "its interval holds 0"
        yield (
            f"{label}'s nll is lowest after {_times(best)}: {shown(best.nll)}, a difference of {shown(best.more)} "
            f"to its own, window by window; {how}, and to choose the best of {last.times} flatters it."
        )
    said = " and ".join(f"{shown(one.nll)} after {_times(one)}" for one in (found.course[0], last) if one is not own)
    worse = [one.times for one in found.course if one.nll is None or one.nll.value >= found.unigram.value]
    beaten = f"frequencies alone do no worse than {_counts(worse)}" if worse else "frequencies alone do worse than any"
    yield f"{label}'s nll is {said}; {beaten}."
    yield (
        f"{label} has {count(found.parameters)} parameters, {count(found.separate)} if each application had its own: "
        f"weights, gradients and AdamW's moments take {size(TRAINING * found.parameters)} in fp32 instead of "
        f"{size(TRAINING * found.separate)}. Activations and arithmetic are the same."
    )


def _predicted(found: Sweep) -> str:
    what = "next tokens" if found.objective == "next token" else "hidden tokens"
    return f"{count(found.predicted)} {what} in {found.windows} windows"


def _times(one: Applied) -> str:
    return "one application" if one.times == 1 else f"{one.times} applications"


def _counts(times: list[int]) -> str:
    """Name numbers as runs: 1, 17 to 24 applications."""
    runs: list[list[int]] = []
    for n in times:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"{said} application{'' if times == [1] else 's'}"


def _table(found: Sweep) -> Table:
    header = ["applications", "nll", "more than as trained", "change by the last application"]
    rows = [_row(found, one) for one in found.course]
    return Table(header, [*rows, ["token frequencies", shown(found.unigram), NONE, NONE]])


def _row(found: Sweep, one: Applied) -> list[str]:
    own = one is found.own
    name = f"{one.times} (as trained)" if own else str(one.times)
    return [name, shown(one.nll), NONE if own else shown(one.more), shown(one.change)]
