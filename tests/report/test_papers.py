"""Beside what was published: figures of recurrent recipes, and ALBERT's order of what layers share (Table 4)."""

from dataclasses import replace

import pytest
from tests.report.comparison_sample import ALBERT_ARMS, NLL, SHARINGS, albert_comparison, sample_comparison

from tiewise.core.spec import BoundarySpec
from tiewise.planning.ledger import results
from tiewise.report.comparison_measurement import published_results
from tiewise.report.papers import TEXTS, paper_figures
from tiewise.report.sharing_order import (
    AGREES,
    DISAGREES,
    OPEN,
    compare_with_table_4,
    direction,
    sharing_orders,
    table_4,
)

# Lan et al. 2020 (arXiv:1909.11942), Table 4, column Avg
TABLE_4 = {
    "E = 768": {"all": 79.8, "attention": 81.6, "ffn": 79.5, "none": 82.3},
    "E = 128": {"all": 80.1, "attention": 81.7, "ffn": 80.2, "none": 81.6},
}
ALIKE = {"ffn − none": ("ffn", "none"), "all − none": ("all", "none")}
ALIKE |= {"ffn − attention": ("ffn", "attention"), "all − attention": ("all", "attention")}


def beside(recipe="pytorch-200", changed=(), own=None, text="PTB"):
    words, vocab = TEXTS.get(text, (1000, 50))
    data = {"splits": {"train": {"tokens": words}}, "tokenizer": {"vocab": vocab}}
    return paper_figures(recipe, changed, own or {"untied": [117.0, 118.0], "tied": [110.5]}, data)


FIGURES, SMALL = ["Test perplexity"], "press-wolf-small"


@pytest.mark.parametrize(
    ("given", "rows", "said"),
    [
        ({}, ["untied | PTB | 117.61 | – | 117.50 ± 0.71", "tied | PTB | 110.44 | – | 110.50"], FIGURES),
        ({"recipe": SMALL, "own": {"tied": [111.0]}}, ["tied | PTB | 112.40 | 110.27, 110.25 | 111.00"], FIGURES),
        ({"changed": ["epochs=40"]}, ["tied | PTB | 87.17 | – | 110.50"], FIGURES),
        ({"changed": ["width=20"]}, [], ["No published figure is known for pytorch-200 with width=20."]),
        (
            {"recipe": SMALL, "own": {"tied": [99.0]}, "text": "elsewhere"},
            ["tied | PTB | 112.40 | 110.27, 110.25 | 99.00"],
            [*FIGURES, "Another text (1,000 words, vocabulary 50)"],
        ),
        ({"text": "WikiText-2"}, [], ["No published figure is known for pytorch-200."]),
        ({"own": {"tied": [float("nan")]}}, ["tied | PTB | 110.44 | – | diverged"], FIGURES),
    ],
    ids=["both arms", "reproductions", "settings", "other settings", "another text", "a known text", "diverged"],
)
def test_published_and_own_side_by_side(given, rows, said):
    """Figures of the recipe, boundary, settings and text of the run, and no others."""
    lines, table = beside(**given)
    assert [line.startswith(start) for line, start in zip(lines, said, strict=True)] == [True] * len(said)
    assert [" | ".join(row) for row in table.rows] == rows


@pytest.mark.parametrize(("text", "figure"), [("PTB", "82.70 (PTB)"), ("WikiText-2", "98.90 (WikiText-2)")])
def test_figures_of_a_setting_known_in_part_are_named_and_match_no_run(text, figure):
    (said,), table = beside("inan-200", own={"tied": [99.0]}, text=text)
    assert not table.rows
    assert "no repetition" in said
    assert figure in said
    assert said.count("(PTB)") + said.count("(WikiText-2)") == 1
    assert all(r.status == "open" for r in results() if r.recipe.startswith("inan-"))


def test_every_figure_belongs_to_an_arm():
    for result in (r for r in results() if r.recipe):
        assert str(BoundarySpec.parse(result.arm)) == result.arm
        assert result.status in ("published", "reproduced", "open")


def test_the_paper_s_figures():
    assert table_4() == TABLE_4


@pytest.mark.parametrize(
    ("nll", "verdict"),
    [(NLL, AGREES), ({name: 8 - value for name, value in NLL.items()}, DISAGREES)],
    ids=["as in the paper", "turned round"],
)
def test_the_direction_that_was_planted_is_stated(nll, verdict):
    found, pairs = sharing_orders(albert_comparison(nll=nll))
    assert list(found) == ["factored:64", "factored:128"]
    assert {(pair.metric, pair.arm) for pair in pairs} == {(boundary, pair) for boundary in found for pair in ALIKE}
    assert {direction(pair) for pair in pairs} == {verdict}
    for pair in pairs:
        worse, better = ALIKE[pair.arm]
        assert pair.mean == pytest.approx(nll[worse] - nll[better], abs=0.02)
    lines, table = compare_with_table_4(found, pairs)
    assert sum(f"4 {verdict}" in line for line in lines) == 2
    assert [row[0] for row in table.rows] == list(SHARINGS)


def test_each_boundary_is_judged_by_its_own_pairs():
    found, pairs = sharing_orders(albert_comparison(nll=NLL))
    turned = [replace(pair, mean=-pair.mean) if pair.metric == "factored:64" else pair for pair in pairs]
    lines, _ = compare_with_table_4(found, turned)
    (narrow,) = [line for line in lines if line.startswith("factored:64:")]
    (wide,) = [line for line in lines if line.startswith("factored:128:")]
    assert f"4 {DISAGREES}" in narrow
    assert f"4 {AGREES}" in wide


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_one_seed_or_a_mean_of_zero_tells_nothing_apart(seeds):
    sample = albert_comparison(seeds=seeds)
    runs = [replace(run, heldout_nll=4 + (ALBERT_ARMS.index(run.arm) + run.seed) % 3 / 100) for run in sample.runs]
    _, pairs = sharing_orders(replace(sample, runs=runs))
    assert {direction(pair) for pair in pairs} == {OPEN}


def test_two_that_the_paper_orders_both_ways_are_not_judged():
    nll, pairs = sharing_orders(albert_comparison(ALBERT_ARMS[:2]))
    assert not pairs
    assert "orders no two of these alike" in compare_with_table_4(nll, pairs)[0][1]


@pytest.mark.parametrize(
    "comparison",
    [sample_comparison(), albert_comparison(("factored:64+share=none", "factored:128+share=all"))],
    ids=["nothing shared", "one sharing of each boundary"],
)
def test_nothing_to_hold_beside_the_paper(comparison):
    assert published_results(comparison) == {}
