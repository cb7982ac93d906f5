"""Both judgements of pairs, beside the paper's Table 5."""

from dataclasses import replace

import pytest
from tests.report.comparison_sample import ALBERT_ARMS, albert_comparison, sample_comparison
from tests.report.opened_page import Page

from tiewise.core.errors import RunError
from tiewise.report import faces
from tiewise.report.objectives_page import objectives, table_5, write_objectives
from tiewise.training.results import Share

# Lan et al. 2020 (arXiv:1909.11942), Table 5, intrinsic tasks: MLM, NSP, SOP
TABLE_5 = {"none": (54.9, 52.4, 53.3), "nsp": (54.5, 90.5, 52.0), "sop": (54.0, 78.9, 86.5)}


@pytest.fixture(scope="module")
def runs():
    return [albert_comparison(ALBERT_ARMS[3:4], objective=name) for name in TABLE_5]


def test_every_judgement_stands_beside_the_paper_s(runs):
    assert {name: tuple(own.values()) for name, own in table_5().items()} == TABLE_5
    found = objectives(runs)
    rows = faces.summary(found).rows
    assert [row[0] for row in rows[:4]] == ["without pairs", "without pairs, the paper", "on nsp", "on nsp, the paper"]
    for one, ours, row, theirs in zip(runs, list(found.values())[::2], rows[1::2], TABLE_5.values(), strict=True):
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


def test_the_page(runs, tmp_path):
    page = Page(write_objectives(runs, tmp_path / "objectives.html").read_text(encoding="utf-8"))
    words = page.words.replace("\u00a0", " ")
    for said in ("SOP beside NSP", "Pairs judged right", "86.5", "Pretrained on sop: nsp ", "Table 5"):
        assert said in words


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([sample_comparison()], "without an objective"),
        ([albert_comparison(ALBERT_ARMS[:1])] * 2, "objective sop twice"),
    ],
)
def test_comparisons_that_have_no_objective_are_refused(given, says):
    with pytest.raises(RunError, match=says):
        objectives(given)
