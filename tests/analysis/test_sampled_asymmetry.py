"""Asymmetry on sampled tokens against the dense matrix, and its interval against simulation."""

import numpy as np
import pytest

from tiewise.analysis import path_matrix as module
from tiewise.analysis.path_matrix import sampled_asymmetry
from tiewise.core.errors import DataError
from tiewise.core.progress import doing, heard


def dense(s):
    """(ratio, ratio of the centred matrix) by definition."""
    middle = np.eye(len(s)) - 1 / len(s)
    return [((m - m.T) ** 2).sum() / (m**2).sum() for m in (s, middle @ s @ middle)]


@pytest.mark.parametrize("block", [7, 1024])
def test_blocks_equal_dense(block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    generator = np.random.default_rng(0)
    first, second, right = generator.normal(size=(3, 40, 6)) + 0.5
    told = []
    with heard(lambda what, done, total: told.append(done)), doing("rows", 80):
        (a, b), change = sampled_asymmetry([first, second], right, resamples=60)
    for found, left in ((a, first), (b, second)):
        raw, centred = dense(left @ right.T)
        assert found.ratio.value == pytest.approx(raw, abs=1e-10)
        assert found.centred.value == pytest.approx(centred, abs=1e-10)
        assert found.ratio.low <= found.ratio.high
    assert change.ratio.value == pytest.approx(b.ratio.value - a.ratio.value, abs=1e-12)
    assert change.centred.low < change.centred.value < change.centred.high
    assert told[-1] == 80
    assert told == sorted(told)


def test_draws_are_those_of_repeated_rows():
    """One resample by hand: pairs of two different tokens, and each draw's own diagonal; none with its copy."""
    generator = np.random.default_rng(1)
    left, right = generator.normal(size=(2, 9, 3))
    weights = np.random.default_rng(5).multinomial(9, np.full(9, 1 / 9), 1)[0]
    s = left @ right.T
    energy = turned = 0.0
    for i in range(9):
        for j in range(9):
            count = weights[i] if i == j else weights[i] * weights[j]
            energy += count * s[i, j] ** 2
            turned += count * s[i, j] * s[j, i]
    found = module._ratios(left, right, weights[:, None].astype(float))
    assert found[0, 0] == pytest.approx(2 - 2 * turned / energy, abs=1e-12)


def test_a_symmetric_path_has_no_spread():
    table = np.random.default_rng(2).normal(size=(30, 4))
    (found,), change = sampled_asymmetry([table], table)
    assert (found.ratio.value, found.ratio.high) == (0.0, 0.0)
    assert change.ratio.value == 0.0


def test_the_interval_covers():
    """Samples of a large population: its own ratio lies inside most intervals."""
    generator = np.random.default_rng(3)
    table = generator.normal(size=(1500, 8))
    other = table + generator.normal(size=(1500, 8))
    s = table @ other.T
    whole = ((s - s.T) ** 2).sum() / (s**2).sum()
    inside = 0
    for seed in range(40):
        rows = np.random.default_rng(100 + seed).choice(1500, 100, replace=False)
        (found,), _ = sampled_asymmetry([table[rows]], other[rows], seed)
        inside += found.ratio.low <= whole <= found.ratio.high
    assert inside >= 32  # 38 expected; fewer than 32 come once in 1,000 times or less


def test_too_few_tokens_are_refused():
    with pytest.raises(DataError, match="3 tokens, 200 resamples"):
        sampled_asymmetry([np.ones((3, 2))], np.ones((3, 2)))
