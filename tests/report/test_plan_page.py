"""A plan's rows, figures and page: the numbers are the plan's, every figure is named, nothing comes from outside."""

import json
import math
from dataclasses import replace

import pytest
from tests.report.opened_page import EVIL, Page

from tiewise.core.errors import RunError
from tiewise.planning.memory import Tokens
from tiewise.planning.plan import Setting, plan
from tiewise.planning.read_config import Sizes
from tiewise.planning.world import World
from tiewise.report import plan_figures as figures
from tiewise.report.plan_page import render, write_plan
from tiewise.report.plan_rows import columns, near, operations, remarks, rows, scale, subject, thresholds

COMMAND = "tiewise plan --like gpt2"


@pytest.fixture(scope="module")
def made():
    return plan("gpt2", ("tied", "untied", "factored:128"), ("none", "all"), Setting(Tokens(2, 128), world=World(8, 4)))


@pytest.fixture(scope="module")
def page(made):
    return Page(render(made, COMMAND))


def test_every_row_has_a_cell_for_every_choice(made):
    assert len(columns(made)) == 6
    assert {len(row.cells) for row in rows(made)} == {0, 6}
    names = [row.name for row in rows(made) if not row.cells]
    assert names[0] == "parameters"
    assert names[-3:] == ["data parallel, 1 of 8", "fsdp, 1 of 8", "vocabulary parallel, tp 4"]


def test_components_sum_to_the_total(made):
    shown = rows(made)
    first = next(i for i, row in enumerate(shown) if row.name == "total")
    numbers = [[int(c.replace(",", "").replace("–", "0")) for c in row.cells] for row in shown[1 : first + 1]]
    assert [sum(column) for column in zip(*numbers[:-1], strict=True)] == numbers[-1]
    assert numbers[-1] == [choice.budget.total for choice in made.choices]


def test_a_single_rank_has_no_picture_of_ranks():
    assert not any("of 1" in row.name or "parallel" in row.name for row in rows(plan("gpt2")))


def test_one_sharing_is_not_repeated_in_every_column():
    assert columns(plan("gpt2")) == ["tied", "untied"]
    assert columns(plan("gpt2", share=("none", "all")))[1] == "tied\nshare all"


def test_what_is_not_known_is_said():
    assert subject(plan("opt-350m")) == "opt-350m: V 50,272, D 1,024, tables of width 512, L 24; as it is tied"
    assert "sharing all" in subject(plan("albert-base-v2"))
    assert any("matrices alone are counted" in line for line in remarks(plan(Sizes(1000, 64, 2))))
    assert any("about 31 billion parameters by its name" in line for line in remarks(plan("gemma-4-31b")))
    assert any("nobody was seen to say whether" in line for line in remarks(plan("starcoder2-15b")))
    assert not any("catalogue" in line or "nobody" in line for line in remarks(plan("gpt2")))
    other = replace(plan(Sizes(1000, 64, 2)), name="gpt2")
    assert any(
        "gpt2 has 124,439,808 parameters by the catalogue; 162,304 are counted here" in r for r in remarks(other)
    )


def test_a_schedule_is_counted_as_it_starts():
    (tied,) = plan("gpt2", ["tied+untie_at=400"]).choices
    assert tied.budget.total == 124_439_808
    assert any("counted as it starts" in line for line in remarks(plan("gpt2", ["tied+untie_at=400"])))
    assert not any("as it starts" in line for line in remarks(plan("gpt2")))


def test_thresholds_come_with_what_they_stand_on():
    made = plan(Sizes(32_000, 1024, 12))
    assert scale(made).startswith("V/d = 31.25, c = B/d² = 144 ")
    found = {name: value for name, value, _ in thresholds(made)}
    assert found["V/d above which tying saves more than 30 %"] == "108"
    assert found["share of the untied model that tying saves"] == "0.1513"


def test_a_model_without_a_head_is_one_table_wherever_it_is_told():
    made = plan({"model_type": "bert", "architectures": ["BertModel"]})
    assert subject(made).endswith("as it is one table and no head")
    assert {choice.saved for choice in made.choices} == {0}
    assert made.record()["model"]["boundary"] is None
    assert scale(made).startswith("V/d = 39.74, c = B/d² = ")
    said = [*remarks(made), *(name for name, _, _ in thresholds(made))]
    assert [line for line in said if "tying" in line] == [line for line in said if "tying saves nothing" in line] != []


def test_neighbours_leave_the_model_out(made):
    assert "gpt2" not in {model.name for model in near(made)}


@pytest.mark.parametrize(("value", "text"), [(15.5e9, "15.5 GFLOP"), (999.6e3, "1 MFLOP"), (3e15, "3 PFLOP")])
def test_operations_in_words(value, text):
    assert operations(value) == text


def test_shares_are_of_the_whole(made):
    for parts in figures.shares(made).values():
        assert sum(parts.values()) == pytest.approx(1)
    tied = figures.shares(made)["tied, share none"]
    assert tied["input table"] == pytest.approx(38_597_376 / 124_439_808)


def test_every_component_belongs_to_one_group():
    from tiewise.planning.parts import COMPONENTS

    held = [part for group in figures.GROUPS.values() for part in group]
    assert sorted(held) == sorted(COMPONENTS)


def test_growth_and_tables_are_the_textbook_formulas(made):
    vocab, layers = 50_257, 12
    for d, total in figures.growth(made)["tied, share none"].items():
        assert total == vocab * d + 12 * layers * d * d
    for d, total in figures.growth(made)["factored:128, share all"].items() if 128 in figures.WIDTHS else ():
        assert total == 128 * vocab + 2 * 128 * d + 12 * d * d
    tables = figures.tables_by_width(made)
    assert tables["untied"][1024] == 2 * tables["tied"][1024] == 2 * vocab * 1024
    assert tables["factored:128"][1024] == 128 * vocab + 2 * 128 * 1024


def test_presets_are_the_published_sizes():
    found = {name: sum(parts.values()) for name, parts in figures.presets().items()}
    assert found["BERT-base"] == 109_482_240
    assert found["BERT-large"] == 335_141_888
    assert found["ALBERT-base"] == 11_683_584
    assert found["ALBERT-large"] == 17_683_968
    assert found["ALBERT-xlarge"] == 58_724_864
    assert found["ALBERT-xxlarge"] == 222_595_584


def test_memory_is_that_of_the_rows(made):
    tied = figures.memory(made)["tied, share none"]
    assert tied["weights"] + tied["gradients"] + tied["optimizer state"] == 16 * 124_439_808
    assert tied["activations (estimate)"] == made.activations.kept


def test_a_model_whose_layers_are_not_told_apart_has_no_sharing_figure():
    made = plan("gpt2")
    bare = replace(made, architecture=replace(made.architecture, stacks=()))
    assert figures.sharing(bare) == {}


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


def test_published_encoders_stand_beside_encoders_only():
    assert "Quality and parameters in the ALBERT paper" not in render(plan("llama-3-8b"), COMMAND)
    assert "Quality and parameters in the ALBERT paper" in render(plan("albert-base-v2"), COMMAND)


def test_headings_of_rows_are_no_rows_of_values(page, made):
    heads = [a for a in page.all("th") if a.get("scope") == "colgroup"]
    assert len(heads) == sum(not row.cells for row in rows(made)) > 3
    assert {int(a["colspan"]) for a in heads} == {1 + len(made.choices)}


def test_billions_are_b():
    figure = figures.sharing_figure(plan("llama-3-8b"))
    assert (figure.layout.xaxis.exponentformat, figure.layout.xaxis.tickformat) == ("B", None)


def test_the_page_says_what_the_terminal_says(page, made):
    for text in ("124,439,808", "38,597,376", "What each choice costs", "Thresholds", "roberta-base", COMMAND):
        assert text in page.words
    for remark in remarks(made):
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
