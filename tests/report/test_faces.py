"""A section's sentence, tables and figures are functions of what it found, whatever section that is."""

import math
from dataclasses import replace

import pytest

from tiewise.core.found import NEITHER, ONE, TWO, Curve, Found, Grid, Listing, Quantity
from tiewise.inspection.evidence import Evidence, TieOrNot
from tiewise.inspection.section import SectionFound
from tiewise.report import faces
from tiewise.report.figures_of_found import panels


def measured(value=0.5, **more):
    return Quantity("cosine of rows", value, value - 0.1, value + 0.1, 40, 0.0, (-0.02, 0.03), unit="cosine", **more)


def found(answer="yes: they do", quantities=(), **more):
    return Found(answer, tuple(quantities), **more)


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        (Quantity("x", 0.19249, 0.1844, 0.1996, unit="cosine"), "0.192 [0.184, 0.200]"),
        (Quantity("x", 0.6181, 0.6012, 0.6299, unit="%"), "61.8 % [60.1, 63.0]"),
        (Quantity("x", -0.00234, -0.0199, 0.0123, unit="nats"), "−0.002 [−0.020, 0.012]"),
        (Quantity("x", -0.001234, unit="nats"), "−0.00123"),
        (Quantity("x", 3e-7, unit="of the norm"), "0.00000030"),
        (Quantity("x", 1_234_567), "1,234,567"),
        (Quantity("x", 5.28512, unit="nats per token", digits=4, deviation=0.00418), "5.2851 ± 0.0042"),
        (Quantity("x", -0.0123, -0.03, 0.01, unit="points", digits=2), "−1.23 [−3.00, 1.00]"),
        (Quantity("x", 15.8e6, unit="bytes"), "15.8 MB"),
        (Quantity("x", math.inf, unit="nats per token"), "diverged"),
        (Quantity("x", math.nan, unit="nats"), "–"),
        (Quantity("x", 0.0, unit="nats"), "0.000"),
    ],
)
def test_a_number_with_its_interval_is_written_in_one_form(quantity, text):
    assert str(quantity) == text


@pytest.mark.parametrize(
    ("value", "null", "speaks"),
    [
        (0.5, (), ONE),
        (-0.5, (), TWO),
        (0.05, (), NEITHER),  # the interval holds 0
        (0.5, (0.45,), NEITHER),  # and what permuted data gave
        (0.5, (0.39,), ONE),
    ],
)
def test_a_quantity_speaks_only_where_its_interval_leaves_out_all_that_no_effect_gives(value, null, speaks):
    assert Quantity("q", value, value - 0.1, value + 0.1, 9, 0.0, null, below=TWO, above=ONE).speaks == speaks


def test_a_quantity_without_an_interval_speaks_for_neither():
    assert Quantity("q", 5.0, below=TWO, above=ONE).speaks == NEITHER


def test_an_answer_that_all_models_give_is_said_once():
    assert faces.sentence({"a": found(), "b": found()}) == "Yes: they do."
    assert faces.sentence({"a": found(), "b": found("no")}) == "a: yes: they do; b: no."


def test_the_summary_has_a_row_for_each_model_and_a_column_for_each_main_quantity():
    both = {"a": found(quantities=[measured(), measured(0.25, main=False)]), "b": found()}
    table = faces.summary(both)
    assert table.header == ["model", "cosine of rows"]
    assert table.rows == [["a", "0.500 [0.400, 0.600]"], ["b", "–"]]
    assert faces.summary({"a": found()}) is None


def test_every_number_is_in_the_tables_with_its_chance_and_how_to_read_it():
    one = found(quantities=[measured(main=False, why="of rows")], listings=(Listing("Rows", ("row",), (("x",),)),))
    (_, every), (caption, listed) = faces.every({"a": one.about("a")})
    assert every.rows == [
        ["cosine of rows", "a", "0.500 [0.400, 0.600]", "cosine", "0.000, permuted up to 0.030", "of rows"]
    ]
    assert (caption, listed.rows) == ("Rows, a", [["x"]])


def test_notes_that_several_models_share_are_said_once():
    both = {"a": found(notes=("of all", "of a")), "b": found(notes=("of all",))}
    assert faces.notes(SectionFound("x", both, {})) == ["of all", "a: of a"]
    assert faces.notes(SectionFound("x", {"a": found()}, {"b": "why", "c": "why"})) == ["left out of b, c: why"]


def test_sections_without_anything_are_named_with_their_reason():
    none = [SectionFound(name, {}, {"a": "no text", "b": "no text"}) for name in ("lens", "tokens")]
    assert faces.absent([*none, SectionFound("x", {"a": found()}, {})]) == ["lens, tokens: no text"]


def test_numbers_that_the_summary_leaves_out_have_a_row_each_and_a_column_for_each_model():
    both = {"a": found(quantities=[measured(), measured(0.25, main=False)]), "b": found()}
    assert faces.numbers(both).rows == [["cosine of rows", "0.250 [0.150, 0.350]", "–"]]
    assert faces.numbers({"b": found()}) is None


def row(about, speaks, value=0.5):
    numbers = (value, value - 0.1, value + 0.1, 0.0, 0.01)
    return Evidence("Alike?", "cosine", about, *numbers, speaks, "why", "alignment")


def test_what_can_decide_has_a_row_for_each_question_and_a_column_for_each_model():
    loss = replace(row("untied − tied", NEITHER), question="Lower loss?")
    table = faces.deciding(TieOrNot((loss, row("tied, other", ONE)), "no verdict"), ["tied", "untied", "other"])
    assert table.header == ["", "tied", "untied", "other"]
    value = "0.500 [0.400, 0.600]"
    assert table.rows == [
        ["Lower loss? (untied − tied)", "–", value, "–"],
        ["Alike?", f"{value} → one table", "–", f"{value} → one table"],
    ]
    assert faces.deciding(TieOrNot((), "no verdict"), ["tied"]) is None
    assert faces.verdict(TieOrNot((), "no verdict")) == "No verdict."


def line(label, y, which="", **more):
    low, high = (tuple(value + by for value in y) for by in (-0.5, 0.5))
    return Curve("Loss", tuple(range(1, len(y) + 1)), y, low, high, "step", "nats", label, which, **more)


def test_curves_of_one_name_are_one_figure_and_their_points_a_table():
    curves = (
        line("<i>", (4.0, 3.0), mark=2, level=3.5, level_name="chance"),
        line("<i>", (5.0, 0.0, 1.0), "logit", log=True),
    )
    (panel,) = panels({"<i>": found(curves=curves)})
    traces = {trace.name: trace for trace in panel.figure.data if trace.name}
    assert set(traces) == {"&lt;i&gt;", "&lt;i&gt;, logit", "chance"}
    assert list(traces["&lt;i&gt;"].y) == [4.0, 3.0]
    assert traces["&lt;i&gt;, logit"].line.dash == "dash"
    assert min(traces["&lt;i&gt;, logit"].y) > 0  # an axis of orders of magnitude has no place for 0
    assert set(traces["chance"].y) == {3.5}
    marked = [trace for trace in panel.figure.data if trace.mode == "markers"]
    assert [(list(trace.x), list(trace.y)) for trace in marked] == [([2], [3.0])]
    band = next(trace for trace in panel.figure.data if trace.fill)
    assert list(band.y) == [4.5, 3.5, 2.5, 3.5]
    assert panel.table.header == ["step", "<i>", "<i>, logit"]
    assert panel.table.rows[2] == ["3", "–", "1.000 [0.500, 1.500]"]


def test_a_level_that_could_not_be_estimated_is_not_drawn():
    lost, kept = line("a", (4.0, 3.0), level=math.nan, level_name="none"), line("b", (4.0, 3.0), level=2.0)
    (panel,) = panels({"a": found(curves=(lost,)), "b": found(curves=(replace(kept, level_name="one"),))})
    levels = [trace for trace in panel.figure.data if trace.line.dash == "dot"]
    assert [(trace.name, set(trace.y)) for trace in levels] == [("one", {2.0})]


def test_a_grid_is_a_heat_map_with_empty_cells_where_there_is_no_number():
    grid = Grid("Alike", ("0", "1"), ("0", "1"), ((1.0, math.nan), (0.5, 1.0)), axes=("before", "after"), of="a")
    (panel,) = panels({"a": found(grids=(grid,))})
    assert panel.title == "Alike: a"
    assert [list(row) for row in panel.figure.data[0].z] == [[1.0, None], [0.5, 1.0]]
    assert panel.table.rows == [["0", "1.000", "–"], ["1", "0.500", "1.000"]]


def test_quantities_are_drawn_as_dots_where_a_section_has_no_curve():
    both = {"a": found(quantities=[measured()]).about("a"), "b": found(quantities=[measured(0.25)]).about("b")}
    (panel,) = panels(both)
    dots = {trace.name: trace for trace in panel.figure.data}
    assert {name: list(dots[name].x) for name in ("a", "b")} == {"a": [0.5], "b": [0.25]}
    assert list(dots["permuted"].x) == [-0.02, 0.03, -0.02, 0.03]
    assert dots["a"].error_x.array[0] == pytest.approx(0.1)
    assert panel.table.rows[1] == ["cosine of rows", "b", "0.250 [0.150, 0.350]", "0.000, permuted up to 0.030"]
