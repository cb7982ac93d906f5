"""Test the figures of measurements: styles, contrast, traces and data tables."""

import math
import re
from dataclasses import replace
from importlib.resources import files

import pytest
from tests.report.comparison_sample import sample_comparison

from tiewise.core import measurement as colours
from tiewise.core.measurement import Curve, Grid, Measurement, Quantity
from tiewise.planning.plan import plan
from tiewise.report import drawing, line_plot, plan_page, report_page
from tiewise.report.comparison_panels import training_panels
from tiewise.report.drawing import styles, token_label
from tiewise.report.figures import panels
from tiewise.report.training_curves import TUNING


def test_arms_differ_in_colour_dash_and_marker():
    first = [drawing.style(i) for i in range(6)]
    for field in ("colour", "dash", "marker"):
        assert len({getattr(style, field) for style in first}) == 6
    assert len({drawing.style(i) for i in range(168)}) == 168


def luminance(colour):
    """Return the relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    """Return the WCAG contrast ratio: 21 for black on white, 4.48 for #777777 on white."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("mode", "template"), [("light", report_page.LIGHT), ("dark", report_page.DARK)])
def test_arm_colours_and_text_contrast_with_the_page_background(mode, template):
    page = colours.BACKGROUNDS[mode]
    assert all(contrast(colour, page) >= 3 for colour in colours.COLOURS)
    assert contrast(template.layout.font.color, page) >= 7
    assert contrast(template.layout.xaxis.tickfont.color, page) >= 4.5
    css = (files("tiewise.report") / "templates" / "report.css").read_text()
    assert set(re.findall(r"--page: (#\w+)", css)) == set(colours.BACKGROUNDS.values())


def test_a_boundary_has_one_colour_in_every_figure():
    """Comparisons, plans and inspections agree, whatever the other arms and their order."""
    blue, orange = colours.COLOURS[:2]

    def colours_of(*names):
        by_name = styles(names)
        return [by_name[name].colour for name in names]

    assert colours_of("tied", "untied") == colours_of("untied", "tied")[::-1] == [blue, orange]
    assert colours_of("factored:64", "tied") == [*colours_of("tied", "untied", "factored:128")[2:], blue]
    assert colours_of("runs/untied/seed-1", "runs/tied/seed-1") == colours_of("untied, output", "tied, both ends")
    assert colours_of("untied, input")[0] == orange
    for names in (("a model", "another"), ("tied-up", "untied+bias", "untied+softcap=3"), tuple("abcdefgh")):
        colours_found = colours_of(*names)
        others = [c for name, c in zip(names, colours_found, strict=True) if "tied" not in name]
        assert not {blue, orange} & set(others)
    assert len(set(styles(["tied", *(f"tied+share={n}" for n in range(40))]).values())) == 41
    for panel in (plan_page.growth_panels(plan("gpt2"))[0], *training_panels(sample_comparison(), TUNING)):
        drawn = {trace.name: trace.line.color for trace in panel.figure.data if trace.name in ("tied", "untied")}
        assert drawn == {"tied": blue, "untied": orange}


def make_curve(label, y, which="", **more):
    low, high = (tuple(value + by for value in y) for by in (-0.5, 0.5))
    return Curve("Loss", tuple(range(1, len(y) + 1)), y, low, high, "step", "nats", label, which, **more)


def test_panels_join_curves_of_one_name_into_a_figure_with_a_table():
    curves = (
        make_curve("<i>", (4.0, 3.0), mark=2, level=3.5, level_name="chance"),
        make_curve("<i>", (5.0, 0.0, 1.0), "logit", log=True),
    )
    (panel,) = panels({"<i>": Measurement("", curves=curves)})
    traces = {trace.name: trace for trace in panel.figure.data if trace.name}
    assert set(traces) == {"&lt;i&gt;", "&lt;i&gt;, logit", "chance"}
    assert list(traces["&lt;i&gt;"].y) == [4.0, 3.0]
    assert traces["&lt;i&gt;, logit"].line.dash == "dash"
    assert min(traces["&lt;i&gt;, logit"].y) > 0  # a logarithmic axis cannot show 0
    assert set(traces["chance"].y) == {3.5}
    marked = [trace for trace in panel.figure.data if trace.mode == "markers"]
    assert [(list(trace.x), list(trace.y)) for trace in marked] == [([2], [3.0])]
    band = next(trace for trace in panel.figure.data if trace.fill)
    assert list(band.y) == [4.5, 3.5, 2.5, 3.5]
    assert panel.table.header == ["step", "<i>", "<i>, logit"]
    assert panel.table.rows[2] == ["3", "–", "1.000 [0.500, 1.500]"]


def test_panels_omit_a_level_that_is_not_a_number():
    lost, kept = (
        make_curve("tied", (4.0, 3.0), level=math.nan, level_name="none"),
        make_curve("b", (4.0, 3.0), level=2.0),
    )
    both = {"tied": Measurement("", curves=(lost,)), "b": Measurement("", curves=(replace(kept, level_name="one"),))}
    levels = [trace for trace in panels(both)[0].figure.data if trace.name and len(set(trace.y)) == 1]
    assert [(trace.name, set(trace.y)) for trace in levels] == [("one", {2.0})]


def test_curve_without_numbers_gives_an_empty_figure():
    empty = Curve.through(
        "loss", [(1, Quantity("", math.nan)), (2, None)], along="step", unit="nats", level=0.0, of="a"
    )
    (panel,) = panels({"a": Measurement("", curves=(empty,))})
    assert not any(trace.x for trace in panel.figure.data)
    assert panel.table.rows == []


def test_grid_is_drawn_as_a_heat_map_with_empty_cells_for_missing_numbers():
    grid = Grid("Alike", ("2024", " <b>"), ("0", "1"), ((1.0, math.nan), (0.5, 1.0)), axes=("before", "after"), of="a")
    (panel,) = panels({"a": Measurement("", grids=(grid,))})
    assert panel.title == "Alike: a"
    assert [list(row) for row in panel.figure.data[0].z] == [[1.0, None], [0.5, 1.0]]
    assert list(panel.figure.data[0].x) == [0, 1]  # labels may repeat, and plotly would parse one as a date
    assert panel.figure.layout.xaxis.ticktext == ("0", "1")
    assert panel.figure.layout.yaxis.ticktext == ("2024", "␣&lt;b&gt;")
    assert panel.table.rows == [["2024", "1.000", "–"], ["␣<b>", "0.500", "1.000"]]


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" the", "␣the"), ("\n", "⏎"), ("<b>", "&lt;b&gt;"), ("a&b", "a&amp;b"), ("\x00", "\\x00"), ("", "(empty)")],
)
def test_token_label_shows_whitespace_and_escapes_markup(token, shown):
    assert token_label(token) == shown


def test_panels_draw_quantities_as_dots_if_a_section_has_no_curve():
    def dots_of(label, value):
        q = Quantity("cosine", value, value - 0.1, value + 0.1, 40, 0.0, (-0.02, 0.03), unit="cosine")
        return Measurement("", (q,)).about(label)

    (panel,) = panels({"a": dots_of("a", 0.5), "b": dots_of("b", 0.25)})
    dots = {trace.name: trace for trace in panel.figure.data}
    assert {name: list(dots[name].x) for name in ("a", "b")} == {"a": [0.5], "b": [0.25]}
    assert list(dots["permuted"].x) == [-0.02, 0.03, -0.02, 0.03]
    assert dots["a"].error_x.array[0] == pytest.approx(0.1)
    assert panel.table.rows[1] == ["cosine", "b", "0.250 [0.150, 0.350]", "0.000, permuted up to 0.030"]


@pytest.mark.parametrize("count", [1, line_plot.MOST_ROWS, line_plot.MOST_ROWS + 1, 1000])
def test_table_of_a_long_curve_keeps_both_ends_and_few_rows(count):
    x = [float(step) for step in range(count)]
    thinned = line_plot._thinned(x)
    assert (thinned[0], thinned[-1]) == (x[0], x[-1])
    assert len(thinned) <= line_plot.MOST_ROWS + 1
    assert count > line_plot.MOST_ROWS or thinned == x
