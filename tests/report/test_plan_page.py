"""A plan's figures and page: the numbers are the plan's, every figure is named, nothing comes from outside."""

import json
import math
from dataclasses import replace

import pytest
from tests.report.opened_page import EVIL, Page

from tiewise.core.errors import RunError
from tiewise.planning.architecture import COMPONENTS
from tiewise.planning.costs import Tokens, World
from tiewise.planning.plan import Setting, plan
from tiewise.planning.plan_rows import rows
from tiewise.report import plan_page
from tiewise.report.plan_page import render, write_plan

COMMAND = "tiewise plan --like gpt2"


@pytest.fixture(scope="module")
def made():
    return plan("gpt2", ("tied", "untied", "factored:128"), ("none", "all"), Setting(Tokens(2, 128), world=World(8, 4)))


@pytest.fixture(scope="module")
def page(made):
    return Page(render(made, COMMAND))


def test_shares_are_of_the_whole(made):
    for parts in plan_page.shares(made.record()).values():
        assert sum(parts.values()) == pytest.approx(1)
    tied = plan_page.shares(made.record())["tied, share none"]
    assert tied["input table"] == pytest.approx(38_597_376 / 124_439_808)


def test_every_component_belongs_to_one_group():
    held = [part for group in plan_page.GROUPS.values() for part in group]
    assert sorted(held) == sorted(COMPONENTS)


def test_growth_and_tables_are_the_textbook_formulas(made):
    vocab, layers = 50_257, 12
    for d, total in plan_page.growth(made)["tied, share none"].items():
        assert total == vocab * d + 12 * layers * d * d
    for d, total in plan_page.growth(made)["factored:128, share all"].items():
        assert total == 128 * vocab + 2 * 128 * d + 12 * d * d
    tables = plan_page.tables_by_width(made)
    assert tables["untied"][1024] == 2 * tables["tied"][1024] == 2 * vocab * 1024
    assert tables["factored:128"][1024] == 128 * vocab + 2 * 128 * 1024


def test_presets_are_the_published_sizes():
    found = {name: sum(parts.values()) for name, parts in plan_page.presets().items()}
    assert found["BERT-base"] == 109_482_240
    assert found["BERT-large"] == 335_141_888
    assert found["ALBERT-base"] == 11_683_584
    assert found["ALBERT-large"] == 17_683_968
    assert found["ALBERT-xlarge"] == 58_724_864
    assert found["ALBERT-xxlarge"] == 222_595_584


def test_memory_is_that_of_the_rows(made):
    tied = plan_page.memory(made.record())["tied, share none"]
    assert tied["weights"] + tied["gradients"] + tied["optimizer state"] == 16 * 124_439_808
    assert tied["activations (estimate)"] == made.activations.kept


def test_a_model_whose_layers_are_not_told_apart_has_no_sharing_figure():
    made = plan("gpt2")
    bare = replace(made, architecture=replace(made.architecture, stacks=()))
    assert plan_page.sharing(bare) == {}


def test_every_figure_is_named_and_has_its_numbers(page):
    plots = [a for a in page.all("div") if a.get("role") == "img"]
    record = json.loads(page.scripts[0])
    assert len(plots) == len(record["figures"]) == 5
    assert all(len(a["aria-label"]) > 40 for a in plots)
    assert len(page.all("details")) == 5
    for figure in record["figures"]:
        for trace in figure["data"]:
            assert trace["x"] or trace["x"] == 0
            assert all(math.isfinite(v) for v in trace["x"] if not isinstance(v, str))


def test_published_encoders_stand_beside_plans_of_them_only():
    assert "Quality and parameters in the ALBERT paper" in render(plan("albert-base-v2"), COMMAND)
    other_size = {"model_type": "albert", "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    for model in ("llama-3-8b", other_size):
        assert "Quality and parameters in the ALBERT paper" not in render(plan(model), COMMAND)


def test_headings_of_rows_are_no_rows_of_values(page, made):
    heads = [a for a in page.all("th") if a.get("scope") == "colgroup"]
    assert len(heads) == sum(len(row) == 1 for row in rows(made.record())) > 3
    assert {int(a["colspan"]) for a in heads} == {1 + len(made.choices)}


def test_billions_are_b():
    made = plan("llama-3-8b")
    figure = next(panel for panel in plan_page._own(made, made.record()) if "sharing" in panel.title).figure
    assert (figure.layout.xaxis.exponentformat, figure.layout.xaxis.tickformat) == ("B", None)


def test_the_page_says_what_the_terminal_says(page, made):
    for text in ("124,439,808", "38,597,376", "What each choice costs", "Thresholds", "roberta-base", COMMAND):
        assert text in page.words
    for remark in made.record()["notes"]:
        assert remark in page.words


def test_nothing_from_outside(page, made):
    assert not page.all("link") + page.all("iframe") + page.all("img")
    assert not [a for _, a in page.elements if a.keys() & {"src", "href", "action", "background"}]
    assert len(render(made, COMMAND).encode()) < 6_000_000


def test_what_a_user_wrote_is_text():
    config = {"_name_or_path": EVIL, "model_type": EVIL, "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 1}
    page = Page(render(plan({**config, "num_attention_heads": 1}), EVIL))
    assert len(page.scripts) == 3
    assert page.all("img") == []
    assert "<" not in page.scripts[0]
    assert EVIL in page.text


def test_a_place_that_cannot_be_written(made, tmp_path):
    with pytest.raises(RunError, match="choose another place with --plot"):
        write_plan(made, tmp_path / "no" / "plan.html", COMMAND)
    assert list(tmp_path.iterdir()) == []
