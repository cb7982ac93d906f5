"""Test the page of a plan against the plan's record, textbook formulas and published counts."""

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
def gpt2_plan():
    return plan("gpt2", ("tied", "untied", "factored:128"), ("none", "all"), Setting(2, 128, world=8, tp=4))


@pytest.fixture(scope="module")
def page(gpt2_plan):
    return Page(render(gpt2_plan, COMMAND))


def bars(panel):
    """Return {bar: {part: value}} of a panel of stacked bars."""
    names = panel.figure.data[0].y
    return {bar: {trace.name: trace.x[i] for trace in panel.figure.data} for i, bar in enumerate(names)}


def test_shares_of_the_parameters_sum_to_one(gpt2_plan):
    shares = bars(plan_page.share_panel(gpt2_plan.record()))
    assert [sum(parts.values()) for parts in shares.values()] == pytest.approx([1] * 6)
    assert shares["tied, share none"]["input table"] == pytest.approx(38_597_376 / 124_439_808)
    assert sorted(part for group in plan_page.GROUPS.values() for part in group) == sorted(COMPONENTS)


def test_growth_panels_equal_the_textbook_formulas(gpt2_plan):
    vocab, layers = 50_257, 12
    tables, models = ({t.name: t.y for t in panel.figure.data} for panel in plan_page.growth_panels(gpt2_plan))
    assert list(models["tied, share none"]) == [vocab * d + 12 * layers * d * d for d in WIDTHS]
    assert list(models["factored:128, share all"]) == [128 * vocab + 2 * 128 * d + 12 * d * d for d in WIDTHS]
    assert list(tables["untied"]) == [2 * vocab * d for d in WIDTHS]
    assert list(tables["tied"]) == [vocab * d for d in WIDTHS]
    assert list(tables["factored:128"]) == [128 * vocab + 2 * 128 * d for d in WIDTHS]


@pytest.mark.parametrize(("width", "is_drawn"), [(64, False), (WIDTHS[0], True), (WIDTHS[-1], True), (16_384, False)])
def test_width_panel_mentions_the_dotted_line_only_if_it_is_drawn(width, is_drawn):
    panel = plan_page._width_panel({"plain": [1] * len(WIDTHS)}, "tables", "", "Counts.", width)
    assert bool(panel.figure.layout.shapes) is is_drawn
    assert panel.caption == "Counts." + " Dotted: this model's width." * is_drawn


def test_presets_have_the_published_parameter_counts():
    assert {name: sum(parts.values()) for name, parts in bars(plan_page.preset_panel()).items()} == {
        "BERT-base": 109_482_240,
        "BERT-large": 335_141_888,
        "ALBERT-base": 11_683_584,
        "ALBERT-large": 17_683_968,
        "ALBERT-xlarge": 58_724_864,
        "ALBERT-xxlarge": 222_595_584,
    }


def test_memory_panel_equals_the_bytes_of_the_record(gpt2_plan):
    tied = bars(plan_page.memory_panel(gpt2_plan.record()))["tied, share none"]
    assert tied["weights"] + tied["gradients"] + tied["optimizer state"] == 16 * 124_439_808
    assert tied["activations (estimate)"] == gpt2_plan.record()["activation_bytes"]["kept"]


def test_plan_without_separate_layers_has_no_sharing_panel(gpt2_plan):
    bare = replace(gpt2_plan, architecture=replace(gpt2_plan.architecture, stacks=()))
    assert plan_page.sharing_panels(bare) == []
    assert len(plan_page.growth_panels(bare)) == 1


def test_every_figure_has_a_label_and_a_data_table(page):
    plots = [a for a in page.all("svg") if a.get("role") == "img"]
    record = json.loads(page.scripts[0])
    assert len(plots) == len(record["figures"]) == len(page.all("details")) == 5
    assert all(len(a["aria-label"]) > 40 for a in plots)
    for trace in (trace for figure in record["figures"] for trace in figure["data"]):
        assert trace["x"]
        assert all(math.isfinite(v) for v in trace["x"] if not isinstance(v, str))


def test_plan_page_cites_the_albert_paper_only_for_its_models():
    other_size = {"model_type": "albert", "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    for model, beside in (("albert-base-v2", True), ("llama-3-8b", False), (other_size, False)):
        assert ("Quality and parameters in the ALBERT paper" in render(plan(model), COMMAND)) == beside


def test_row_headings_span_every_column(page, gpt2_plan):
    heads = [a for a in page.all("th") if a.get("scope") == "colgroup"]
    assert len(heads) == sum(len(row) == 1 for row in rows(gpt2_plan.record())) > 3
    assert {int(a["colspan"]) for a in heads} == {1 + len(gpt2_plan.choices)}


def test_axis_labels_abbreviate_billions_as_b():
    (panel,) = plan_page.sharing_panels(plan("llama-3-8b"))
    assert (panel.figure.layout.xaxis.exponentformat, panel.figure.layout.xaxis.tickformat) == ("B", None)


def test_plan_page_shows_the_numbers_and_notes_of_the_terminal(page, gpt2_plan):
    expected = ("124,439,808", "38,597,376", "What each choice costs", "Thresholds", "roberta-base", COMMAND)
    for text in (*expected, *gpt2_plan.record()["notes"]):
        assert text in page.words


def test_plan_page_shows_markup_in_names_and_command_as_text():
    config = {"_name_or_path": EVIL, "model_type": EVIL, "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 1}
    page = Page(render(plan({**config, "num_attention_heads": 1}), EVIL))
    assert len(page.scripts) == 3
    assert page.all("img") == []
    assert "<" not in page.scripts[0]
    assert EVIL in page.text


@pytest.mark.parametrize("place", ["missing/plan.html", ""])
def test_write_plan_refuses_an_unwritable_path_in_one_line(gpt2_plan, tmp_path, place):
    with pytest.raises(RunError, match=r"^cannot write [^\n]+; choose another place with plot$") as caught:
        write_plan(gpt2_plan, tmp_path / place, COMMAND)
    assert str(tmp_path / place) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
