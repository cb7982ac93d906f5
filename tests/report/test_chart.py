"""Test static charts: they draw the data of the interactive figures, with ticks at their values."""

import json
import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from tests.report.drawn_points import SVG_LEVELS, bars, cells, class_elements, drawn, expected, is_close, svg_of
from tests.report.opened_page import Page
from tests.report.page_samples import sample_pages

from tiewise.core.measurement import DIVERGING
from tiewise.report.chart.axis import axis_of
from tiewise.report.chart.chart import static_chart
from tiewise.report.chart.symbols import OUTLINES, definitions, symbol_path
from tiewise.report.chart.tick_text import tick_text
from tiewise.report.drawing import DASHES, MARKERS

PLOT = re.compile(r'<div class="plot" id="plot-(\d+)">(.*?)</div>\s*<figcaption>', re.DOTALL)


@pytest.fixture(scope="module")
def pages():
    return sample_pages()


def charts_of(page):
    """Return (static chart, record of the interactive figure) of every figure of a page."""
    records = json.loads(Page(page).scripts[0])["figures"]
    charts = PLOT.findall(page)
    assert [int(place) for place, _ in charts] == list(range(len(records)))
    return [(chart, record) for (_, chart), record in zip(charts, records, strict=True)]


@pytest.mark.parametrize("name", ["compare", "albert", "plan", "sweep", "inspect"])
def test_static_chart_and_interactive_figure_have_the_same_data(pages, name):
    charts = charts_of(pages[name])
    assert len(charts) >= 4
    for chart, record in charts:
        found, wanted = drawn(chart, record), expected(record)
        assert found.keys() == wanted.keys()
        for key, points in wanted.items():
            assert is_close(chart, found[key], points, record["layout"]), (record["layout"], key)
        lengths, wanted_lengths, tolerance = bars(chart, record)
        assert lengths.keys() == wanted_lengths.keys()
        for index, of_trace in wanted_lengths.items():
            assert lengths[index] == pytest.approx(of_trace, abs=tolerance)
        for trace in record["data"]:
            if trace["type"] == "heatmap":
                check_cells(cells(chart), trace["z"], record["layout"]["coloraxis"]["cmax"])


def check_cells(found, values, top):
    """Check that every number of a map is drawn in its place, in the colour next to its value."""
    numbers = {(i, j): value for i, row in enumerate(values) for j, value in enumerate(row) if value is not None}
    assert found.keys() == numbers.keys()
    for place, value in numbers.items():
        share = max(-1, min(1, value / top))
        assert abs(found[place] - share) <= 0.5 / SVG_LEVELS + 1e-9


def test_a_changed_point_of_a_figure_changes_the_static_chart(pages):
    """The comparison above notices a wrong point."""
    chart, record = charts_of(pages["compare"])[2]
    key, points = next(iter(expected(record).items()))
    moved = [(x, y + 0.1) for x, y in points]
    assert is_close(chart, drawn(chart, record)[key], points, record["layout"])
    assert not is_close(chart, drawn(chart, record)[key], moved, record["layout"])


def test_every_text_and_reference_of_a_page_has_its_place(pages):
    for page in pages.values():
        parsed = Page(page)
        ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        references = {attributes["href"] for attributes in parsed.all("use")}
        references |= set(re.findall(r"url\((#[^)]+)\)", page))
        assert {reference.removeprefix("#") for reference in references} <= set(ids)


@pytest.mark.parametrize(
    ("value", "step", "options", "text"),
    [
        (0.25, 0.25, {"tickformat": ".0%"}, "25%"),
        (0.005, 0.005, {"tickformat": ".0%"}, "0.5%"),
        (0.125, 0.125, {"tickformat": ".1~%"}, "12.5%"),
        (0.5, 0.5, {"tickformat": ".1~%"}, "50%"),
        (1e-6, 1e-6, {"exponentformat": "power"}, "10⁻⁶"),
        (1e-9, 1e-9, {"tickformat": "~g"}, "1e−09"),
        (2e9, 1e9, {"tickformat": "~s", "ticksuffix": "B"}, "2GB"),
        (2e9, 1e9, {"exponentformat": "B"}, "2B"),
        (1500, 500, {}, "1,500"),
        (-0.05, 0.05, {}, "−0.05"),
        (0, 0.25, {}, "0.00"),
    ],
)
def test_tick_text_follows_the_formats_of_plotly(value, step, options, text):
    assert tick_text(value, step, options) == text


@pytest.mark.parametrize(
    ("options", "values", "texts"),
    [
        ({}, [0, 1], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ({}, [-3, 803], ["0", "200", "400", "600", "800"]),
        ({"dtick": 1}, [0, 4], ["0", "1", "2", "3", "4"]),
        ({"type": "log"}, [1, 1e4], ["1", "10", "100", "1,000", "10k"]),
        ({"type": "log", "dtick": math.log10(4)}, [4, 256], ["4", "16", "64", "256"]),
        ({"type": "log", "dtick": "D2"}, [1e7, 1e8], ["10M", "20M", "50M", "100M"]),
        ({"range": [3.6, -0.6], "tickvals": [0, 3], "ticktext": ["a<br>b", "&lt;c&gt;"]}, [], ["a\nb", "<c>"]),
    ],
)
def test_ticks_are_round_numbers_at_their_places(options, values, texts):
    axis = axis_of(options, values)
    assert [tick.text for tick in axis.ticks] == texts
    places = [tick.place for tick in axis.ticks]
    assert all(0 <= place <= 100 for place in places)
    gaps = [abs(b - a) for a, b in pairwise(places)]
    if options.get("dtick") != "D2":
        assert max(gaps) - min(gaps) < 1e-6


def test_every_marker_and_dash_of_the_styles_is_drawn():
    for marker in MARKERS:
        assert symbol_path(f"{marker}-open", 9) == OUTLINES[marker](4.5)
    trace = {"type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1]}
    figure = {"data": [{**trace, "line": {"color": "red", "dash": dash}} for dash in DASHES], "layout": {}}
    lines = class_elements(svg_of(static_chart(figure, "label")), "line")
    assert len({line.get("stroke-dasharray") for line in lines}) == len(DASHES)


def test_chart_refuses_a_trace_that_it_cannot_draw():
    marker = {"type": "scatter", "mode": "markers", "x": [0], "y": [0], "marker": {"symbol": "hexagon", "size": 3}}
    with pytest.raises(KeyError):
        definitions([{"data": [marker], "layout": {}}])


def test_missing_points_interrupt_a_line():
    trace = {"type": "scatter", "mode": "lines", "x": [0, 1, 2, 3], "y": [0, None, 1, 2], "line": {"color": "red"}}
    (line,) = class_elements(svg_of(static_chart({"data": [trace], "layout": {}}, "label")), "line")
    assert re.sub(r"[\d. -]+", "", line.get("d")) == "MML"


def test_names_in_a_chart_are_text():
    trace = {"type": "bar", "orientation": "h", "x": [1], "y": ["&lt;script&gt;"], "name": "&lt;b&gt;"}
    figure = {"data": [{**trace, "marker": {"color": "#123456"}}], "layout": {}}
    chart = ElementTree.fromstring(static_chart(figure, '"<i>'))
    texts = list(chart.itertext())
    assert (texts[0], texts[-1]) == ("<b>", "<script>")
    assert chart.find("div/svg").get("aria-label") == '"<i>'


def test_colours_of_maps_are_those_of_the_figures(pages):
    style = pages["compare"].partition("</style>")[0]
    for low, zero, high in DIVERGING.values():
        assert f"--low: {low}; --zero: {zero}; --high: {high};" in style
