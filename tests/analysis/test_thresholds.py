"""Formulas against brute force and against the figures of the textbooks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiewise.core.errors import PlanError
from tiewise.planning.thresholds import largest_rank, thresholds, tied_share, tying_saves, tying_threshold


@given(st.floats(0.01, 0.49), st.floats(1, 2000))
def test_at_the_threshold_tying_saves_exactly_the_share(share, c):
    ratio, d = tying_threshold(share, c), 10_000
    assert ratio * d * d / (2 * ratio * d * d + c * d * d) == pytest.approx(share)


def test_textbook_figures():
    assert tying_threshold(0.3, 12 * 12) == pytest.approx(108)
    assert tying_saves(32_000, 1024, 12 * 12 * 1024**2) == pytest.approx(0.1513317191283293)
    assert tied_share(32_000, 1024, 12 * 12 * 1024**2) == pytest.approx(0.1783166904422254)
    assert largest_rank(30_000, 1024, 1) == 990
    assert tying_threshold(0.5, 144) == math.inf


@given(st.integers(1, 400), st.integers(1, 80), st.integers(1, 2))
def test_largest_rank_is_the_last_that_saves(vocab, d, maps):
    saving = [k for k in range(1, d + 1) if k * (vocab + maps * d) < vocab * d]
    assert largest_rank(vocab, d, maps) == max(saving, default=0)


def test_every_formula_has_its_value():
    found = thresholds(50_257, 768, 85_056_000)
    assert found[0].name.endswith("5%")
    assert all(t.formula and t.value > 0 for t in found)


def test_a_share_outside_zero_to_one_is_refused():
    with pytest.raises(PlanError):
        tying_threshold(1.5, 144)
