"""A comparison's tied tables beside its untied ones, as figures: scores over seeds, differences, published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.table_maps import ORTHOGONAL
from tiewise.core.numerals import plain
from tiewise.inspection.run_alignment import CKA, CKA_CURVE, CKA_LINE, Leaning, OverSeeds, RunAlignment
from tiewise.report import theme
from tiewise.report.grid import Table
from tiewise.report.inspected.dots import QUIET, Dot, Series, dot_plot
from tiewise.report.inspected.run_alignment import again, published, shown, told
from tiewise.report.sheet import Panel

_UNIT = "mean cosine, share or CKA above chance"


def panels(found: Mapping[str, RunAlignment]) -> list[Panel]:
    """Return, for each arm with one table, its scores and their differences; then the published ones beside them."""
    made = []
    for one in found.values():
        for arm in one.arms:
            chosen = told(one, arm)
            if chosen:
                made += [*_corrected(one, arm), _scores(one, arm, chosen), _differences(one, arm)]
        made.append(_published(one))
    return made


def _corrected(one: RunAlignment, arm: str) -> Iterator[Panel]:
    """Shares in common with either table, as they stand and with frequency taken out."""
    found = [x for m in (CKA, CKA_LINE, CKA_CURVE) if (x := one.leaning(arm, m)) and x.corrected_difference]
    if not found:
        return
    names = {CKA: "as it stands", CKA_LINE: "a line in log frequency out", CKA_CURVE: "frequency out"}
    series = []
    for end, place in theme.ENDS.items():
        look = theme.style(place)
        scored = ((x.measure, getattr(x, f"corrected_{end}")) for x in found)
        dots = [_dot(names[measure], value) for measure, value in scored]
        series.append(Series(f"{arm} – {one.untied} {end}", dots, look.colour, look.marker))
    rows = [
        [
            names[x.measure],
            shown(x.corrected_input),
            shown(x.corrected_output),
            shown(x.corrected_difference, sign=True),
        ]
        for x in found
    ]
    read = (
        "CKA of models of another seed as a share of what each table reaches with itself, trained again: 1 is the same "
        "but for noise and a rotation, 0 unrelated. Tokens of one frequency have rows alike whatever they mean. "
        "Frequency out: three powers of log(count + 1) in the training text are regressed out of every column first. "
        "Bars are 95 % intervals over pairs of models."
    )
    figure = dot_plot(
        series, f"What {arm} has in common with either table, with and without frequency", "share (corrected CKA)"
    )
    yield Panel(figure, read, Table(["CKA", "with the input", "with the output", "output − input"], rows))


def _scores(one: RunAlignment, arm: str, chosen: list[Leaning]) -> Panel:
    beside = chosen[0].seeds
    chance = [Dot(x.measure, one.chance[x.measure]) for x in chosen]
    series = [Series("by chance", chance, QUIET, "line-ns-open", 16)]
    rows = []
    for end, place in theme.ENDS.items():
        look = theme.style(place)
        dots = [_dot(x.measure, getattr(x, end)) for x in chosen]
        ceiling = [_dot(x.measure, e) for x in chosen if (e := again(one, one.untied, end, x.measure)) is not None]
        series.append(Series(f"{arm} – {one.untied} {end}", dots, look.colour, look.marker, offset=-0.12))
        name = f"{one.untied} {end} – {end}, trained again"
        series.append(Series(name, ceiling, look.colour, f"{look.marker}-open", offset=0.16))
    for x in chosen:
        ceilings = [shown(again(one, one.untied, end, x.measure)) for end in ("input", "output")]
        rows.append([x.measure, shown(x.input), ceilings[0], shown(x.output), ceilings[1]])
    header = ["measure", "with the input", "input again", "with the output", "output again"]
    read = (
        f"Filled: the table of {arm} against the tables of {one.untied}, models of the {beside}. Open: what a table of "
        f"{one.untied} reaches with itself, trained with another seed. Bars are 95 % intervals over pairs of models, "
        "grey strokes are what unrelated tables give."
    )
    title = f"Which end does the table of {arm} resemble?"
    return Panel(dot_plot(series, title, _UNIT), read, Table(header, rows))


def _differences(one: RunAlignment, arm: str) -> Panel:
    series, rows = [], []
    for position, kind in enumerate(dict.fromkeys(x.seeds for x in one.leanings)):
        look = theme.style((2, 4)[position % 2])
        chosen = sorted(
            (x for x in one.leanings if (x.arm, x.seeds) == (arm, kind)), key=lambda x: x.measure != ORTHOGONAL
        )
        dots = [_dot(x.measure, x.difference) for x in chosen]
        series.append(Series(f"models of the {kind}", dots, look.colour, look.marker, offset=0.14 * (2 * position - 1)))
        rows += [[f"{x.measure}, {kind}", shown(x.difference, sign=True), x.toward] for x in chosen]
    read = (
        "Right of zero the table is closer to the output. Models of the same seed start from the same input table, so "
        "only pairs of another seed answer the question. Bars are 95 % intervals over pairs of models."
    )
    figure = dot_plot(series, f"Output less input, for {arm}", "output − input")
    return Panel(figure, read, Table(["measure", "output − input", "closer to"], rows))


def _published(one: RunAlignment) -> Panel:
    """The run's own scores, filled, above the published ones, open; the same measures only."""
    series, rows = [], []
    for side, (end, place) in enumerate(theme.ENDS.items()):
        look = theme.style(place)
        dots = [_dot(f"{x.measure} · {x.arm}, this run", getattr(x, end)) for x in _same_measures(one)]
        series.append(Series(f"with the {end}, this run", dots, look.colour, look.marker))
        printed = [Dot(f"{measure} · {model}", values[side]) for model, measure, *values in published()]
        series.append(Series(f"with the {end}, published", printed, look.colour, f"{look.marker}-open"))
    rows += [[f"{x.measure} · {x.arm}, this run", shown(x.input), shown(x.output)] for x in _same_measures(one)]
    rows += [[f"{measure} · {model}", plain(a, 3), plain(b, 3)] for model, measure, a, b in published()]
    read = (
        "Open: published scores of large models (Lopardo, Harish, Arnett & Gupta, arXiv:2603.26663), one pair of models"
        " each, on the rows that the map was fitted on, where noise alone gives 0.17 (orthogonal) and 0.20 (linear) "
        "for OLMo-1B. Filled: this run, on held-out rows, with intervals over seeds. Compare sides, not heights."
    )
    figure = dot_plot(series, "Beside published scores", "mean cosine, or share of neighbours")
    return Panel(figure, read, Table(["measure · tied model", "with the input", "with the output"], rows))


def _same_measures(one: RunAlignment) -> Iterator[Leaning]:
    names = {measure for _, measure, *_ in published()}
    return (x for arm in one.arms for x in told(one, arm) if x.measure in names)


def _dot(row: str, value: OverSeeds) -> Dot:
    return Dot(row, value.value, value.low, value.high)
