"""Test the summary of a comparison (shares, intervals, verdicts) against Student's t and the terminal output."""

import io
import math
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from tests.report.comparison_sample import ALBERT_ARMS, ARMS, albert_comparison, sample_comparison

from tiewise.report import comparison_measurement as measurement_module
from tiewise.report.comparison_measurement import (
    DEMO,
    SHARES,
    difference,
    measure_arms,
    results,
    share,
    verdict,
)
from tiewise.training.finding import sentences
from tiewise.training.results import Comparison, Difference

T_OF_2 = 4.302652729749464  # 97.5 % quantile of Student's t with two degrees of freedom, from a printed table


@pytest.fixture(scope="module")
def comparison():
    return albert_comparison()


def student(values):
    """Return the mean of three seeds and its 95 % interval."""
    mean, half = statistics.fmean(values), T_OF_2 * statistics.stdev(values) / math.sqrt(3)
    return mean, mean - half, mean + half


def test_share_has_the_student_interval_over_seeds(comparison):
    runs = comparison.of(ALBERT_ARMS[3])
    for name in SHARES:
        q = share(runs, name)
        assert (q.value, q.low, q.high) == pytest.approx(student([run.shares[name].share for run in runs]))
    one, of_rows = share(runs[:1], "sop"), runs[0].shares["sop"]
    assert (one.low, one.high) == (of_rows.low, of_rows.high)
    assert share(sample_comparison().runs, "sop") is None


def test_difference_pairs_shares_by_seed(comparison):
    pairs = zip(comparison.of(ALBERT_ARMS[0]), comparison.of(ALBERT_ARMS[2]), strict=True)
    difference_of_shares = comparison.difference(ALBERT_ARMS[2], "share:nsp")
    paired = student([b.shares["nsp"].share - a.shares["nsp"].share for a, b in pairs])
    assert (difference_of_shares.mean, difference_of_shares.low, difference_of_shares.high) == pytest.approx(paired)
    assert comparison.difference(ALBERT_ARMS[2], "bits_per_byte") is None  # masked tokens have no bits per byte


def test_comparison_survives_a_round_trip_through_its_record(comparison):
    again = Comparison.from_dict(comparison.record())
    assert [run.shares for run in again.runs] == [run.shares for run in comparison.runs]
    assert again.differences == comparison.differences


def test_terminal_shows_every_share_and_difference(comparison):
    text = print_view(comparison)
    words = text.split()
    assert max(map(len, text.splitlines())) <= 80
    for arm, one in measure_arms(comparison).items():
        for name in SHARES:
            assert str(share(comparison.of(arm), name)).split()[0] in words
            d = comparison.difference(arm, f"share:{name}")
            assert d is None or f"{100 * d.mean:.2f}".replace("-", "−") in words
        assert "bits per byte" not in [q.name for q in one.quantities]


def test_results_have_one_row_for_each_arm_with_mean_and_deviation():
    comparison = sample_comparison()
    rows = {row[0]: dict(zip(results(comparison).header, row, strict=True)) for row in results(comparison).rows}
    for arm in ("tied", "untied", "factored:64"):
        losses = [run.heldout_nll for run in comparison.of(arm)]
        mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
        assert rows[arm]["validation nll"] == f"{mean:.4f} ± {deviation:.4f}"
        assert rows[arm]["perplexity"] == f"{math.exp(mean):.2f}"
        assert rows[arm]["parameters"] == f"{comparison.of(arm)[0].total_parameters:,}"
    assert rows["tied"]["validation − tied"] == "–"
    d = comparison.difference("untied", "heldout_nll")
    assert rows["untied"]["validation − tied"] == f"{d.mean:.4f} [{d.low:.4f}, {d.high:.4f}]".replace("-", "−")
    one_seed = results(sample_comparison(seeds=(0,)))
    assert "tokens/s" not in one_seed.header
    assert "±" not in one_seed.rows[0][2]


@pytest.mark.parametrize(("mean", "low", "said"), [(-0.2, -0.3, "lower than tied"), (0.2, 0.1, "higher than tied")])
def test_verdict_names_every_arm_by_its_detected_difference(mean, low, said):
    sample = sample_comparison()
    d = Difference("untied", "heldout_nll", 3, mean, low, low + 0.2, 0.05, True, 0.001)
    equal = replace(d, arm="factored:64", mean=0.01, low=-0.01, detected=False)
    lines = sentences(replace(sample, differences=[d, equal]))
    assert any(f"validation loss 0.200 nats/token {said} (95 % CI 0.1" in line for line in lines)
    assert any(line.startswith("No difference detected: validation loss factored:64 − tied is ") for line in lines)
    assert not any("no difference" in line.lower() and "detected" not in line for line in lines)
    unknown = sentences(replace(sample, differences=[replace(d, low=None, high=None)]))
    assert unknown[0].startswith("One seed cannot show which is better: untied")
    assert unknown[1].startswith("factored:64 and tied have no finished seed in common")


def test_difference_prints_as_a_value_with_its_interval():
    d = Difference("untied", "heldout_nll", 3, 0.00701, -0.0042, 0.0181, 0.01, False)
    assert str(difference(d)) == "0.0070 [−0.0042, 0.0181]"
    assert str(difference(replace(d, low=None, high=None))) == "0.0070"


def test_diverged_seed_makes_the_validation_loss_diverged():
    sample = sample_comparison()
    bad = replace(sample.runs[0], heldout_nll=math.nan)
    first = measure_arms(replace(sample, runs=[bad, *sample.runs[1:]]))["tied"]
    assert str(first["validation nll"]) == "diverged"


def print_view(comparison, width=80):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(measurement_module.comparison_view(comparison))
    return console.file.getvalue()


def test_terminal_shows_every_number_of_the_page_in_80_columns():
    comparison = sample_comparison()
    text = print_view(comparison)
    assert max(map(len, text.splitlines())) <= 80
    for cell in (*results(comparison).header, *(cell for row in results(comparison).rows for cell in row)):
        assert all(part in text for part in cell.split(" ["))  # the terminal may wrap an interval to the next line
    assert " ".join(text.split()).startswith(verdict(comparison))
    assert all(line in " ".join(text.split()) for line in comparison.finding.splitlines())
    assert DEMO in " ".join(text.split())
    assert DEMO not in print_view(sample_comparison(demo=False))


def test_terminal_shows_markup_in_an_arm_name_as_text():
    comparison = sample_comparison()
    name = "tied+vectors=[bold]x[/bold].txt"
    runs = [replace(run, arm=name) if run.arm == "tied" else run for run in comparison.runs]
    assert name in print_view(replace(comparison, runs=runs, arms=[name, *ARMS[1:]], reference=name), 160)


@pytest.mark.parametrize("module", ["tiewise.report.comparison_measurement", "tiewise.training.results"])
def test_terminal_imports_neither_torch_nor_plotly(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'plotly', 'scipy.special') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
