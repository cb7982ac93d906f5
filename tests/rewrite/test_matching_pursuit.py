"""Orthogonal matching pursuit against its definition: each step's least squares by numpy's own solver."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiewise.core.long_work import heard
from tiewise.rewrite.transplant import pursue


def by_definition(anchors, x, most):
    """Anchors chosen and their coefficients, with a least-squares problem of its own at every step."""
    unit = anchors / np.linalg.norm(anchors, axis=1, keepdims=True)
    chosen, rest, c = [], x, np.zeros(0)
    for _ in range(most):
        alike = np.abs(unit @ rest)
        alike[chosen] = -1
        chosen.append(int(alike.argmax()))
        c = np.linalg.lstsq(anchors[chosen].T, x, rcond=None)[0]
        rest = x - c @ anchors[chosen]
    return chosen, c


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(2, 12), st.integers(1, 5))
def test_it_is_what_its_definition_says(seed, count, width, most):
    draw = np.random.default_rng(seed)
    anchors, targets = draw.normal(size=(count, width)) * draw.uniform(0.1, 9, (count, 1)), draw.normal(size=(3, width))
    places, coefficients = pursue(anchors, targets, most)
    assert places.shape == (3, min(most, count, width))
    for x, chosen, c in zip(targets, places, coefficients, strict=True):
        assert len(set(chosen)) == len(chosen)
        wanted, its = by_definition(anchors, x, len(chosen))
        assert chosen.tolist() == wanted
        np.testing.assert_allclose(c @ anchors[chosen], its @ anchors[wanted], rtol=1e-6, atol=1e-9)


def test_a_sparse_combination_is_found_again():
    draw = np.random.default_rng(0)
    anchors = np.linalg.qr(draw.normal(size=(64, 64)))[0] * draw.uniform(1, 3, (64, 1))
    chosen = np.stack([draw.choice(64, 4, replace=False) for _ in range(20)])
    c = draw.normal(size=(20, 4)) + 2
    targets = np.einsum("nk,nkd->nd", c, anchors[chosen])
    places, coefficients = pursue(anchors, targets, 9)
    found, wanted = np.zeros((2, 20, 64))
    np.put_along_axis(found, places, coefficients, 1)
    np.put_along_axis(wanted, chosen, c, 1)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert (coefficients != 0).sum(axis=1).max() == 4  # what four make needs no fifth


def test_equal_anchors_and_zero_targets_make_no_nonsense():
    anchors = np.array([[1.0, 0, 0], [2, 0, 0], [1, 1e-9, 0]])
    places, coefficients = pursue(anchors, np.array([[3.0, 0, 0], [0, 0, 0], [1, 0, 5]]), 3)
    made = np.einsum("nk,nkd->nd", coefficients, anchors[places])
    np.testing.assert_allclose(made, [[3, 0, 0], [0, 0, 0], [1, 0, 0]], atol=1e-6)
    assert np.abs(coefficients).max() < 10


@pytest.mark.parametrize("size", [1, 10**9])
def test_blocks_change_nothing_and_tell_how_far_they_are(size, monkeypatch):
    draw, said = np.random.default_rng(1), []
    anchors, targets = draw.normal(size=(40, 8)), draw.normal(size=(7, 8))
    whole = pursue(anchors, targets, 3)
    monkeypatch.setitem(pursue.__globals__, "BLOCK_BYTES", size)
    with heard(lambda what, done, total: said.append((what, done, total))):
        found = pursue(anchors, targets, 3, "rows")
    np.testing.assert_array_equal(found[0], whole[0])
    np.testing.assert_allclose(found[1], whole[1], rtol=1e-9)
    assert said[-1] == ("rows", 7, 7)
    assert len(said) == (7 if size == 1 else 1)
