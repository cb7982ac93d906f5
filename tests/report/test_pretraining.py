"""ALBERTs in the table and on the page: shares with intervals over seeds, bytes as counted, both orders."""

import math
import statistics

import pytest
from tests.report.albert_sample import ARMS, UNIGRAM, albert_comparison
from tests.report.comparison_sample import sample_comparison
from tests.report.test_page import Page
from tests.report.test_table import shown

from tiewise.report import shares
from tiewise.report.page import render
from tiewise.report.pretraining import label, memory_panel, share_figure
from tiewise.training.results import Comparison

T_OF_2 = 4.302652729749464  # 97.5 % quantile of Student's t with two degrees of freedom, from tables


@pytest.fixture(scope="module")
def comparison():
    return albert_comparison()


def test_shares_over_seeds(comparison):
    for name in shares.NAMES:
        runs = comparison.of(ARMS[3])
        values = [run.shares[name].share for run in runs]
        half = T_OF_2 * statistics.stdev(values) / math.sqrt(3)
        found = shares.over_seeds(runs, name)
        assert (found.value, found.low, found.high) == pytest.approx(
            (statistics.fmean(values), statistics.fmean(values) - half, statistics.fmean(values) + half)
        )
    one = shares.over_seeds(comparison.of(ARMS[0])[:1], "sop")
    assert (one.low, one.high) == (
        comparison.of(ARMS[0])[0].shares["sop"].low,
        comparison.of(ARMS[0])[0].shares["sop"].high,
    )
    assert shares.over_seeds(sample_comparison().runs, "sop") is None


def test_paired_differences_of_shares(comparison):
    pairs = zip(comparison.of(ARMS[0]), comparison.of(ARMS[2]), strict=True)
    d = [b.shares["nsp"].share - a.shares["nsp"].share for a, b in pairs]
    found = comparison.difference(ARMS[2], "share:nsp")
    half = T_OF_2 * statistics.stdev(d) / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx(
        (statistics.fmean(d), statistics.fmean(d) - half, statistics.fmean(d) + half)
    )
    assert comparison.difference(ARMS[2], "bits_per_byte") is None  # masked tokens are not a text


def test_there_and_back(comparison):
    again = Comparison.from_dict(comparison.record())
    assert [run.shares for run in again.runs] == [run.shares for run in comparison.runs]
    assert again.differences == comparison.differences


def test_the_terminal_shows_every_share_and_difference(comparison):
    text = shown(comparison)
    words = text.split()
    assert max(map(len, text.splitlines())) <= 80
    for arm in ARMS:
        for name in shares.NAMES:
            assert shares.percent(shares.over_seeds(comparison.of(arm), name)).split()[0] in words
            difference = comparison.difference(arm, f"share:{name}")
            assert difference is None or shares.points(difference).split()[0] in words
    assert "bits per byte" not in text


def test_the_page_shows_shares_bytes_and_orders(comparison):
    page = Page(render(comparison))
    for words in ("Masked tokens right", "Pairs right (sop)", "Pairs right (nsp)", "Memory of training", "Table 4"):
        assert words in page.words
    assert f"{UNIGRAM:.4f} by the training text’s frequencies alone" in page.words
    for name in shares.NAMES:
        assert shares.percent(shares.over_seeds(comparison.of(ARMS[5]), name)) in page.words
        assert shares.points(comparison.difference(ARMS[5], f"share:{name}")) in page.words
    assert "Masked tokens" not in Page(render(sample_comparison())).words


def test_figures_hold_the_intervals(comparison):
    figure = share_figure(comparison, "sop")
    for trace, arm in zip(figure.data, ARMS, strict=True):
        found = shares.over_seeds(comparison.of(arm), "sop")
        assert trace.y == (label(arm),)
        assert trace.x[0] - trace.error_x.arrayminus[0] == pytest.approx(found.low)
        assert trace.x[0] + trace.error_x.array[0] == pytest.approx(found.high)


def test_sixteen_bytes_for_each_parameter(comparison):
    figure = memory_panel(comparison).figure
    together = [sum(trace.x[i] for trace in figure.data) for i in range(len(ARMS))]
    assert together == [16 * comparison.of(arm)[0].total_parameters for arm in ARMS]
    assert memory_panel(sample_comparison()) is None
