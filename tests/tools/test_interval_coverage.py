"""Coverage of the interval over seeds and documents, simulated with few draws; the tool itself draws 4,000."""

import runpy
from pathlib import Path

import numpy as np
import pytest

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "interval_coverage.py"))
Setting = TOOL["Setting"]


def test_drawn_differences_have_the_shares_of_their_mix():
    generator, setting = np.random.default_rng(0), Setting(3, 10, 0.0, "mostly documents")
    draws = np.array([TOOL["draw"](setting, generator)[0] for _ in range(2000)])
    assert np.var(draws.mean((1, 2))) == pytest.approx(1.0, rel=0.15)  # shares of the variance of the mean sum to 1
    nats, tokens = TOOL["draw"](Setting(3, 10, 1.0, "seeds"), generator)
    assert np.ptp(nats / tokens, axis=1).max() < 1e-12


def test_judgement_names_rows_outside_93_to_97_percent():
    shares = (0.929, 0.93, 0.97, 0.971)
    assert [TOOL["judgement"](share) for share in shares] == ["too short", "", "", "conservative"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "documents", "unequal", "mix"),
    [(3, 5, 1.0, "documents"), (3, 39, 1.8, "mostly documents"), (5, 40, 0.0, "both"), (5, 10, 1.0, "seeds")],
)
def test_interval_covers_the_true_difference(seeds, documents, unequal, mix):
    """With 1,000 draws the standard error of a coverage of 95 % is 0.7 points."""
    assert 0.925 <= TOOL["coverage"](Setting(seeds, documents, unequal, mix), 1000) <= 0.985


@pytest.mark.slow
def test_interval_of_an_interaction_alone_is_conservative():
    assert TOOL["coverage"](Setting(3, 40, 0.0, "interaction"), 1000) > 0.97
