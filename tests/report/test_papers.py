"""Test comparisons with published results: perplexities of recurrent recipes, and ALBERT's Table 4."""

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
COMPARED_PAIRS = {"ffn − none": ("ffn", "none"), "all − none": ("all", "none")}
COMPARED_PAIRS |= {"ffn − attention": ("ffn", "attention"), "all − attention": ("all", "attention")}


def compare_with_papers(recipe="pytorch-200", changed=(), own=None, text="PTB"):
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
def test_paper_figures_lists_published_next_to_measured_perplexities(given, rows, said):
    """The table lists only results with the recipe, boundary, settings and text of the run."""
    lines, table = compare_with_papers(**given)
    assert [line.startswith(start) for line, start in zip(lines, said, strict=True)] == [True] * len(said)
    assert [" | ".join(row) for row in table.rows] == rows


@pytest.mark.parametrize(("text", "figure"), [("PTB", "82.70 (PTB)"), ("WikiText-2", "98.90 (WikiText-2)")])
def test_paper_figures_names_incomplete_settings_without_comparing(text, figure):
    (sentence,), table = compare_with_papers("inan-200", own={"tied": [99.0]}, text=text)
    assert not table.rows
    assert "no repetition" in sentence
    assert figure in sentence
    assert sentence.count("(PTB)") + sentence.count("(WikiText-2)") == 1
    assert all(r.status == "open" for r in results() if r.recipe.startswith("inan-"))


def test_every_published_result_names_a_valid_arm_and_status():
    for result in (r for r in results() if r.recipe):
        assert str(BoundarySpec.parse(result.arm)) == result.arm
        assert result.status in ("published", "reproduced", "open")


def test_table_4_equals_the_averages_of_the_paper():
    assert table_4() == TABLE_4


@pytest.mark.parametrize(
    ("nll", "verdict"),
    [(NLL, AGREES), ({name: 8 - value for name, value in NLL.items()}, DISAGREES)],
    ids=["as in the paper", "turned round"],
)
def test_direction_states_whether_planted_differences_agree_with_table_4(nll, verdict):
    orders, pairs = sharing_orders(albert_comparison(nll=nll))
    assert list(orders) == ["factored:64", "factored:128"]
    assert {(pair.metric, pair.arm) for pair in pairs} == {
        (boundary, pair) for boundary in orders for pair in COMPARED_PAIRS
    }
    assert {direction(pair) for pair in pairs} == {verdict}
    for pair in pairs:
        worse, better = COMPARED_PAIRS[pair.arm]
        assert pair.mean == pytest.approx(nll[worse] - nll[better], abs=0.02)
    lines, table = compare_with_table_4(orders, pairs)
    assert sum(f"4 {verdict}" in line for line in lines) == 2
    assert [row[0] for row in table.rows] == list(SHARINGS)


def test_table_4_comparison_judges_each_boundary_by_its_pairs():
    orders, pairs = sharing_orders(albert_comparison(nll=NLL))
    turned = [replace(pair, mean=-pair.mean) if pair.metric == "factored:64" else pair for pair in pairs]
    lines, _ = compare_with_table_4(orders, turned)
    (narrow,) = [line for line in lines if line.startswith("factored:64:")]
    (wide,) = [line for line in lines if line.startswith("factored:128:")]
    assert f"4 {DISAGREES}" in narrow
    assert f"4 {AGREES}" in wide


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_direction_stays_open_for_one_seed_or_a_mean_of_zero(seeds):
    sample = albert_comparison(seeds=seeds)
    runs = [replace(run, heldout_nll=4 + (ALBERT_ARMS.index(run.arm) + run.seed) % 3 / 100) for run in sample.runs]
    _, pairs = sharing_orders(replace(sample, runs=runs))
    assert {direction(pair) for pair in pairs} == {OPEN}


def test_sharing_orders_skip_pairs_that_the_paper_orders_both_ways():
    nll, pairs = sharing_orders(albert_comparison(ALBERT_ARMS[:2]))
    assert not pairs
    assert "orders no two of these alike" in compare_with_table_4(nll, pairs)[0][1]


@pytest.mark.parametrize(
    "comparison",
    [sample_comparison(), albert_comparison(("factored:64+share=none", "factored:128+share=all"))],
    ids=["nothing shared", "one sharing of each boundary"],
)
def test_published_results_are_empty_without_comparable_arms(comparison):
    assert published_results(comparison) == {}
