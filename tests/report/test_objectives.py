"""SOP beside NSP: both judgements of models pretrained on either, beside the paper's Table 5."""

from dataclasses import replace

import pytest
from tests.report.albert_sample import ARMS, albert_comparison
from tests.report.comparison_sample import sample_comparison
from tests.report.opened_page import Page

from tiewise.core.errors import RunError
from tiewise.report.comparison_found import share
from tiewise.report.objectives import finding, objectives_figure, objectives_table, published, write_objectives
from tiewise.training.results import Share

# Lan et al. 2020 (arXiv:1909.11942), Table 5, intrinsic tasks: MLM, NSP, SOP
TABLE_5 = {"none": (54.9, 52.4, 53.3), "nsp": (54.5, 90.5, 52.0), "sop": (54.0, 78.9, 86.5)}


@pytest.fixture(scope="module")
def runs():
    return [albert_comparison(ARMS[3:4], objective=name) for name in TABLE_5]


def test_the_paper_s_figures():
    assert {name: tuple(own.values()) for name, own in published().items()} == TABLE_5


def test_table(runs):
    for row, one, (objective, theirs) in zip(objectives_table(runs).rows, runs, TABLE_5.items(), strict=True):
        own = [str(share(one.runs, name)) for name in ("masked", "nsp", "sop")]
        assert row == [objective, *own, *map(str, theirs)]


def test_figure(runs):
    figure = objectives_figure(runs)
    ours, paper = figure.data[::2], figure.data[1::2]
    for trace, one in zip(ours, runs, strict=True):
        assert list(trace.y) == [share(one.runs, name).value for name in ("nsp", "sop")]
    assert [list(trace.y) for trace in paper] == [[nsp / 100, sop / 100] for _, nsp, sop in TABLE_5.values()]


def test_finding_tells_chance_from_what_was_learnt(runs):
    none, nsp, sop = finding(runs).splitlines()
    assert nsp.startswith("Pretrained on nsp: nsp 8")
    assert "above chance; sop" in nsp
    assert sop.count("above chance") == 2
    assert "not told from chance" in none


def test_seeds_that_guess_alike_are_not_told_from_chance(runs):
    """A guess that is always the same has the same share in every seed: an interval of no width, on few rows."""
    few = {"sop": Share.of(14, 20, 0.7), "nsp": Share.of(19, 20, 0.1)}
    alike = replace(runs[2], runs=[replace(run, shares=few) for run in runs[2].runs])
    said = finding([alike])
    assert "nsp 95.0 % [95.0, 95.0], above chance" in said
    assert "sop 70.0 % [70.0, 70.0], not told from chance" in said


def test_page(runs, tmp_path):
    page = Page(write_objectives(runs, tmp_path / "objectives.html").read_text(encoding="utf-8"))
    for words in (
        "SOP beside NSP",
        "Pairs judged right",
        "86.5",
        str(share(runs[2].runs, "sop")),
    ):
        assert words.replace("\u00a0", " ") in page.words.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("given", "says"),
    [([sample_comparison()], "without an objective"), ([albert_comparison(ARMS[:1])] * 2, "objective sop twice")],
)
def test_refused(given, says):
    with pytest.raises(RunError, match=says):
        objectives_table(given)
