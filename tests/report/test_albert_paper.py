"""Comparisons of ALBERTs beside the paper: what layers share (Table 4), and both judgements of pairs (Table 5)."""

from dataclasses import replace

import pytest
from tests.report.albert_sample import ARMS, NLL, SHARINGS, albert_comparison
from tests.report.comparison_sample import sample_comparison
from tests.report.opened_page import Page

from tiewise.core.errors import RunError
from tiewise.report import faces
from tiewise.report.albert_paper import (
    AGREES,
    DISAGREES,
    OPEN,
    objectives,
    order_lines,
    order_table,
    orders,
    table_4,
    table_5,
)
from tiewise.report.objectives_page import write_objectives
from tiewise.training.results import Share

# Lan et al. 2020 (arXiv:1909.11942), Table 4, column Avg
TABLE_4 = {
    "E = 768": {"all": 79.8, "attention": 81.6, "ffn": 79.5, "none": 82.3},
    "E = 128": {"all": 80.1, "attention": 81.7, "ffn": 80.2, "none": 81.6},
}
# Table 5, intrinsic tasks: MLM, NSP, SOP
TABLE_5 = {"none": (54.9, 52.4, 53.3), "nsp": (54.5, 90.5, 52.0), "sop": (54.0, 78.9, 86.5)}
ALIKE = {("none", "ffn"), ("none", "all"), ("attention", "ffn"), ("attention", "all")}


def test_the_paper_s_figures():
    assert table_4() == TABLE_4
    assert {name: tuple(own.values()) for name, own in table_5().items()} == TABLE_5


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
    assert sum(f"4 {verdict}" in line for line in order_lines(found)) == 2
    assert [row[0] for row in order_table(found).rows] == list(SHARINGS)


def test_differences_whose_mean_is_zero_are_not_told_apart():
    sample = albert_comparison()
    runs = [replace(run, heldout_nll=4 + (ARMS.index(run.arm) + run.seed) % 3 / 100) for run in sample.runs]
    found = orders(replace(sample, runs=runs))
    assert {pair.verdict for order in found for pair in order.pairs} == {OPEN}


def test_two_that_the_paper_orders_both_ways_are_not_judged():
    (order,) = orders(albert_comparison(ARMS[:2]))
    assert not order.pairs
    assert "orders no two of these alike" in order_lines([order])[1]


@pytest.mark.parametrize(
    "comparison",
    [sample_comparison(), albert_comparison(("factored:64+share=none", "factored:128+share=all"))],
    ids=["nothing shared", "one sharing of each boundary"],
)
def test_nothing_to_hold_beside_the_paper(comparison):
    assert orders(comparison) == []


def test_one_seed_tells_nothing_apart():
    assert {pair.verdict for order in orders(albert_comparison(seeds=(1,))) for pair in order.pairs} == {OPEN}


@pytest.fixture(scope="module")
def runs():
    return [albert_comparison(ARMS[3:4], objective=name) for name in TABLE_5]


def test_every_judgement_stands_beside_the_paper_s(runs):
    found = objectives(runs)
    rows = faces.summary(found).rows
    assert [row[0] for row in rows[:4]] == ["without pairs", "without pairs, the paper", "on nsp", "on nsp, the paper"]
    for one, ours, (row, theirs) in zip(
        runs, list(found.values())[::2], zip(rows[1::2], TABLE_5.values(), strict=True), strict=True
    ):
        shares = [[run.shares[name].share for run in one.runs] for name in ("masked", "nsp", "sop")]
        assert [q.value for q in ours.quantities] == pytest.approx([sum(each) / len(each) for each in shares])
        assert row[1:] == [f"{value} %" for value in theirs]


def test_chance_is_told_from_what_was_learnt(runs):
    none, nsp, sop = [one.answer for one in objectives(runs).values()][::2]
    assert nsp.startswith("nsp 8")
    assert "above chance; sop" in nsp
    assert sop.count("above chance") == 2
    assert "not told from chance" in none


def test_seeds_that_guess_alike_are_not_told_from_chance(runs):
    """A guess that is always the same has the same share in every seed: an interval of no width, on few rows."""
    few = {"sop": Share.of(14, 20, 0.7), "nsp": Share.of(19, 20, 0.1)}
    alike = replace(runs[2], runs=[replace(run, shares=few) for run in runs[2].runs])
    said = objectives([alike])["on sop"].answer
    assert said == "nsp 95.0 % [95.0, 95.0], above chance; sop 70.0 % [70.0, 70.0], not told from chance"


def test_page_of_objectives(runs, tmp_path):
    page = Page(write_objectives(runs, tmp_path / "objectives.html").read_text(encoding="utf-8"))
    words = page.words.replace("\u00a0", " ")
    for said in ("SOP beside NSP", "Pairs judged right", "86.5", "Pretrained on sop: nsp ", "Table 5"):
        assert said in words


@pytest.mark.parametrize(
    ("given", "says"),
    [([sample_comparison()], "without an objective"), ([albert_comparison(ARMS[:1])] * 2, "objective sop twice")],
)
def test_comparisons_that_have_no_objective_are_refused(given, says):
    with pytest.raises(RunError, match=says):
        objectives(given)
