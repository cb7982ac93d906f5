"""What layers share beside the paper's Table 4: both directions are found, and neither where the paper has none."""

from dataclasses import replace

import pytest
from tests.report.albert_sample import ARMS, NLL, SHARINGS, albert_comparison
from tests.report.comparison_sample import sample_comparison

from tiewise.report.sharing_order import AGREES, DISAGREES, OPEN, lines, orders, published, table

# Lan et al. 2020 (arXiv:1909.11942), Table 4, column Avg
TABLE_4 = {
    "E = 768": {"all": 79.8, "attention": 81.6, "ffn": 79.5, "none": 82.3},
    "E = 128": {"all": 80.1, "attention": 81.7, "ffn": 80.2, "none": 81.6},
}
ALIKE = {("none", "ffn"), ("none", "all"), ("attention", "ffn"), ("attention", "all")}


def test_the_paper_s_figures():
    assert published() == TABLE_4


@pytest.mark.parametrize(
    ("nll", "verdict"),
    [(NLL, AGREES), ({name: 8 - value for name, value in NLL.items()}, DISAGREES)],
    ids=["as in the paper", "turned round"],
)
def test_the_direction_that_was_planted_is_stated(nll, verdict):
    found = orders(albert_comparison(nll=nll))
    assert [order.boundary for order in found] == ["factored:64", "factored:128"]
    for order in found:
        assert {(pair.better, pair.worse) for pair in order.pairs} == ALIKE
        assert {pair.verdict for pair in order.pairs} == {verdict}
        for pair in order.pairs:
            assert pair.difference == pytest.approx(nll[pair.worse] - nll[pair.better], abs=0.02)
    assert sum(f"4 {verdict}" in line for line in lines(found)) == 2
    assert [row[0] for row in table(found).rows] == list(SHARINGS)


def test_differences_whose_mean_is_zero_are_not_told_apart():
    sample = albert_comparison()
    runs = [replace(run, heldout_nll=4 + (ARMS.index(run.arm) + run.seed) % 3 / 100) for run in sample.runs]
    found = orders(replace(sample, runs=runs))
    assert {pair.verdict for order in found for pair in order.pairs} == {OPEN}


def test_two_that_the_paper_orders_both_ways_are_not_judged():
    (order,) = orders(albert_comparison(ARMS[:2]))
    assert not order.pairs
    assert "orders no two of these alike" in lines([order])[1]


@pytest.mark.parametrize(
    "comparison",
    [sample_comparison(), albert_comparison(("factored:64+share=none", "factored:128+share=all"))],
    ids=["nothing shared", "one sharing of each boundary"],
)
def test_nothing_to_hold_beside_the_paper(comparison):
    assert orders(comparison) == []


def test_one_seed_tells_nothing_apart():
    assert {pair.verdict for order in orders(albert_comparison(seeds=(1,))) for pair in order.pairs} == {OPEN}
