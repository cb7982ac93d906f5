"""A plan's figures and page: the numbers are the plan's, every figure is named, nothing comes from outside."""

import json
import math
from dataclasses import replace

import pytest
from tests.report.opened_page import EVIL, Page

from tiewise.core.errors import RunError
from tiewise.planning.architecture import COMPONENTS
from tiewise.planning.costs import Setting
from tiewise.planning.plan import plan
from tiewise.planning.plan_rows import rows
from tiewise.report import plan_page
from tiewise.report.plan_page import WIDTHS, render, write_plan

COMMAND = "tiewise plan --like gpt2"


@pytest.fixture(scope="module")
def made():
    return plan("gpt2", ("tied", "untied", "factored:128"), ("none", "all"), Setting(2, 128, world=8, tp=4))


@pytest.fixture(scope="module")
def page(made):
    return Page(render(made, COMMAND))


def bars(panel):
    """{bar: {part: value}} of stacked bars."""
    names = panel.figure.data[0].y
    return {bar: {trace.name: trace.x[i] for trace in panel.figure.data} for i, bar in enumerate(names)}


def test_shares_are_of_the_whole(made):
    found = bars(plan_page.share_panel(made.record()))
    assert [sum(parts.values()) for parts in found.values()] == pytest.approx([1] * 6)
    assert found["tied, share none"]["input table"] == pytest.approx(38_597_376 / 124_439_808)
    assert sorted(part for group in plan_page.GROUPS.values() for part in group) == sorted(COMPONENTS)


def test_growth_and_tables_are_the_textbook_formulas(made):
    vocab, layers = 50_257, 12
    tables, models = ({t.name: t.y for t in panel.figure.data} for panel in plan_page.growth_panels(made))
    assert list(models["tied, share none"]) == [vocab * d + 12 * layers * d * d for d in WIDTHS]
    assert list(models["factored:128, share all"]) == [128 * vocab + 2 * 128 * d + 12 * d * d for d in WIDTHS]
    assert list(tables["untied"]) == [2 * vocab * d for d in WIDTHS]
    assert list(tables["tied"]) == [vocab * d for d in WIDTHS]
    assert list(tables["factored:128"]) == [128 * vocab + 2 * 128 * d for d in WIDTHS]


@pytest.mark.parametrize(("width", "is_drawn"), [(64, False), (WIDTHS[0], True), (WIDTHS[-1], True), (16_384, False)])
def test_a_line_for_the_model_is_announced_where_it_is_drawn(width, is_drawn):
    panel = plan_page._width_panel({"plain": [1] * len(WIDTHS)}, "tables", "", "Counts.", width)
    assert bool(panel.figure.layout.shapes) is is_drawn
    assert panel.caption == "Counts." + " Dotted: this model's width." * is_drawn


def test_presets_are_the_published_sizes():
    assert {name: sum(parts.values()) for name, parts in bars(plan_page.preset_panel()).items()} == {
        "BERT-base": 109_482_240,
        "BERT-large": 335_141_888,
        "ALBERT-base": 11_683_584,
        "ALBERT-large": 17_683_968,
        "ALBERT-xlarge": 58_724_864,
        "ALBERT-xxlarge": 222_595_584,
    }


def test_memory_is_that_of_the_rows(made):
    tied = bars(plan_page.memory_panel(made.record()))["tied, share none"]
    assert tied["weights"] + tied["gradients"] + tied["optimizer state"] == 16 * 124_439_808
    assert tied["activations (estimate)"] == made.record()["activation_bytes"]["kept"]


def test_a_model_whose_layers_are_not_told_apart_has_no_figure_of_layers(made):
    bare = replace(made, architecture=replace(made.architecture, stacks=()))
    assert plan_page.sharing_panels(bare) == []
    assert len(plan_page.growth_panels(bare)) == 1


def test_every_figure_is_named_and_has_its_numbers(page):
    plots = [a for a in page.all("div") if a.get("role") == "img"]
    record = json.loads(page.scripts[0])
    assert len(plots) == len(record["figures"]) == len(page.all("details")) == 5
    assert all(len(a["aria-label"]) > 40 for a in plots)
    for trace in (trace for figure in record["figures"] for trace in figure["data"]):
        assert trace["x"]
        assert all(math.isfinite(v) for v in trace["x"] if not isinstance(v, str))


def test_published_encoders_stand_beside_plans_of_them_only():
    other_size = {"model_type": "albert", "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    for model, beside in (("albert-base-v2", True), ("llama-3-8b", False), (other_size, False)):
        assert ("Quality and parameters in the ALBERT paper" in render(plan(model), COMMAND)) == beside


def test_headings_of_rows_are_no_rows_of_values(page, made):
    heads = [a for a in page.all("th") if a.get("scope") == "colgroup"]
    assert len(heads) == sum(len(row) == 1 for row in rows(made.record())) > 3
    assert {int(a["colspan"]) for a in heads} == {1 + len(made.choices)}


def test_billions_are_b():
    (panel,) = plan_page.sharing_panels(plan("llama-3-8b"))
    assert (panel.figure.layout.xaxis.exponentformat, panel.figure.layout.xaxis.tickformat) == ("B", None)


def test_the_page_says_what_the_terminal_says(page, made):
    said = ("124,439,808", "38,597,376", "What each choice costs", "Thresholds", "roberta-base", COMMAND)
    for text in (*said, *made.record()["notes"]):
        assert text in page.words


def test_what_a_user_wrote_is_text():
    config = {"_name_or_path": EVIL, "model_type": EVIL, "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 1}
    page = Page(render(plan({**config, "num_attention_heads": 1}), EVIL))
    assert len(page.scripts) == 3
    assert page.all("img") == []
    assert "<" not in page.scripts[0]
    assert EVIL in page.text


@pytest.mark.parametrize("place", ["missing/plan.html", ""])
def test_a_place_that_cannot_be_written_is_one_line(made, tmp_path, place):
    with pytest.raises(RunError, match=r"^cannot write [^\n]+; choose another place with --plot$") as caught:
        write_plan(made, tmp_path / place, COMMAND)
    assert str(tmp_path / place) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
