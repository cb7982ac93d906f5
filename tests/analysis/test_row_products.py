"""CKA with frequency taken out, beside dense regressions and tables whose common part is planted."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from tiewise.analysis.align_tables import AlignSettings, align
from tiewise.analysis.row_pairs import Pairs, one_vocabulary
from tiewise.analysis.row_products import CURVE, LINE, Products, directions
from tiewise.analysis.similarity import similarity
from tiewise.analysis.table_maps import (
    cka_chance,
    linear_chance,
    nuclear,
    orthogonal,
    orthogonal_chance,
    pseudo_inverse,
    reduced_chance,
)
from tiewise.core.errors import DataError

QUICK = AlignSettings(permutations=0, neighbours=0, subspaces=(4,))
ROWS = 900


def gaussian(seed, d=10, rows=ROWS):
    return np.random.default_rng(seed).standard_normal((rows, d))


def zipf(rows=ROWS, seed=7):
    """Counts as of a text: few tokens often, many rarely, some never; in no order."""
    drawn = np.random.default_rng(seed).zipf(1.4, 30_000)
    return np.random.default_rng(seed + 1).permutation(np.bincount(drawn[drawn <= rows], minlength=rows + 1)[1:])


def dense(a, b, counts, powers):
    """CKA and its chance from kernels over tokens, regressing every column by least squares; no products of d × d."""
    f = np.log(counts + 1.0)
    x = np.column_stack([f**power for power in range(powers + 1)])
    a, b = (t - x @ scipy.linalg.lstsq(x, t)[0] for t in (a, b))
    ka, kb = a @ a.T, b @ b.T
    norms = np.linalg.norm(ka) * np.linalg.norm(kb)
    degrees = len(a) - 1 - powers
    return (ka * kb).sum() / norms, np.trace(ka) * np.trace(kb) / degrees / norms


def without(a, b, counts, powers, **options):
    found = align(a, b, one_vocabulary(len(a), len(b)), QUICK, counts=counts, **options).similarity.without
    return next(x for x in found if x.powers == powers)


@pytest.mark.parametrize("powers", [LINE, CURVE])
@pytest.mark.parametrize("piece", [2**30, 64 * 40])
def test_it_equals_the_dense_regression(powers, piece, monkeypatch):
    monkeypatch.setattr("tiewise.analysis.row_pairs.CHUNK_BYTES", piece)  # also when summed over many pieces
    counts = zipf()
    shape = np.log1p(counts)[:, None] * gaussian(3, 10, 1) + np.sqrt(counts)[:, None] * gaussian(4, 10, 1)
    a, b = gaussian(0) + shape + 5, (gaussian(0) + 2 * gaussian(1) + shape)[:, :7] - 3
    found = without(a, b, counts, powers)
    value, chance = dense(a, b, counts, powers)
    assert found.cka.value == pytest.approx(value, abs=1e-10)
    assert found.cka.chance == pytest.approx(chance, abs=1e-10)
    centred = a - a.mean(0)
    f = np.column_stack([np.log(counts + 1.0) ** power for power in range(powers + 1)])
    left = np.square(a - f @ scipy.linalg.lstsq(f, a)[0]).sum() / np.square(centred).sum()
    assert found.share_a == pytest.approx(1 - left, abs=1e-10)


def test_rows_are_those_of_the_pairs():
    a, b, counts = gaussian(0), gaussian(0) + gaussian(1), zipf()
    first, second = np.random.default_rng(2).permutation(ROWS)[:300], np.random.default_rng(3).permutation(ROWS)[:300]
    found = align(a, b, Pairs(first, second, "by token text"), QUICK, counts=counts[first]).similarity.without[-1]
    assert found.cka.value == pytest.approx(dense(a[first], b[second], counts[first], CURVE)[0], abs=1e-10)


def test_tables_that_share_frequency_alone_have_nothing_in_common_without_it():
    counts = zipf()
    f = np.log1p(counts)
    f = (f - f.mean()) / f.std()
    curve = f + f**2 - f**3 / 4
    for course, powers in ((f, LINE), (curve, CURVE)):
        a, b = (gaussian(seed) + 6 * np.outer(course, gaussian(seed + 10, 10, 1)) for seed in (0, 1))
        whole = align(a, b, one_vocabulary(ROWS, ROWS), QUICK).similarity.cka
        left = without(a, b, counts, powers)
        assert whole.value - whole.chance > 0.9
        assert min(left.share_a, left.share_b) > 0.5
        assert abs(left.cka.value - left.cka.chance) < 0.02
    a, b = (gaussian(seed) + 6 * np.outer(curve, gaussian(seed + 10, 10, 1)) for seed in (0, 1))
    line = without(a, b, counts, LINE).cka
    assert line.value - line.chance > 0.3  # a line leaves what is curved


def test_what_tables_share_beyond_frequency_stays():
    counts, common = zipf(), gaussian(5)
    f = np.log1p(counts) - np.log1p(counts).mean()
    a, b = (common @ scipy.linalg.qr(gaussian(s, 10, 10))[0] + 5 * np.outer(f, gaussian(s, 10, 1)) for s in (0, 1))
    assert without(a, b, counts, CURVE).cka.value > 0.999
    unlike = without(a, gaussian(6) + 5 * np.outer(f, gaussian(1, 10, 1)), counts, CURVE).cka
    assert abs(unlike.value - unlike.chance) < 0.02


def test_chance_is_the_mean_for_unrelated_tables():
    counts = zipf(rows=60)
    found = [without(gaussian(2 * s, 6, 60), gaussian(2 * s + 1, 6, 60), counts, CURVE).cka for s in range(300)]
    apart = np.array([cka.value - cka.chance for cka in found])
    assert abs(apart.mean()) < 4 * apart.std() / np.sqrt(len(apart))
    assert np.mean([cka.chance for cka in found]) * 3 / 60 > 4 * apart.std() / np.sqrt(len(apart)) / 2  # it can be seen


def test_a_table_that_is_a_function_of_frequency_leaves_nothing():
    counts = zipf()
    a = np.outer(np.log1p(counts), gaussian(0, 10, 1)) + 4
    found = align(a + 0, gaussian(1), one_vocabulary(ROWS, ROWS), AlignSettings(maps=("identity",)), counts=counts)
    assert [x.cka.value for x in found.similarity.without] == [0.0, 0.0]
    json.dumps(asdict(found), allow_nan=False)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40))
def test_directions_are_orthonormal_centred_and_span_the_powers(counts):
    q = directions(counts)
    assert q.shape[1] <= min(CURVE, len(set(counts)) - 1)
    np.testing.assert_allclose(q.T @ q, np.eye(q.shape[1]), atol=1e-12)
    np.testing.assert_allclose(q.sum(0), 0, atol=1e-12)
    if q.shape[1]:
        f = np.log1p(np.array(counts, float))
        rounding = 1e-14 * f.max() / np.ptp(f) * len(f)  # of log(count + 1), where all counts are nearly one
        f -= f.mean()
        np.testing.assert_allclose(np.abs(q[:, 0]), np.abs(f) / np.linalg.norm(f), atol=1e-12 + rounding)


def test_counts_that_say_nothing_take_nothing_out():
    assert directions(np.full(30, 4)).shape == (30, 0)
    assert directions([0] * 20 + [9] * 20).shape == (40, 1)
    assert directions([0] * 20 + [9] * 20 + [50]).shape == (41, 2)
    found = align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK, counts=np.ones(ROWS)).similarity
    assert found.without == ()
    assert align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK).similarity.without == ()


@pytest.mark.parametrize("counts", [[-1, 2, 3], [1.0, np.nan, 2], np.ones((3, 2))])
def test_counts_that_are_none_are_one_line(counts):
    with pytest.raises(DataError, match="counts of tokens must be one number of 0 or more"):
        directions(counts)


def test_counts_of_other_tokens_are_one_line():
    with pytest.raises(DataError, match=r"counts of shape \[3\] for 900 pairs"):
        align(gaussian(0), gaussian(1), one_vocabulary(ROWS, ROWS), QUICK, counts=[1, 2, 3])


def test_the_two_known_levels():
    assert orthogonal_chance(50304, 2048, 2048) == pytest.approx(0.171, abs=5e-4)
    assert linear_chance(50304, 2048) == pytest.approx(0.202, abs=5e-4)
    assert orthogonal_chance(10**6, 300, 300) == pytest.approx(8 / (3 * math.pi) * math.sqrt(300 / 10**6), rel=1e-6)


@pytest.mark.parametrize(("d1", "d2"), [(400, 400), (400, 160), (160, 400), (300, 280)])
def test_nuclear_norm_matches_random_matrices(d1, d2):
    """Four draws of the smallest size have a deviation of 0.14 % of their mean."""
    draw = np.random.default_rng(1)
    drawn = np.mean([np.linalg.norm(draw.normal(size=(d1, d2)), "nuc") for _ in range(4)])
    assert nuclear(d1, d2) == pytest.approx(drawn, rel=5e-3)


@pytest.mark.parametrize(("d1", "d2"), [(60, 60), (60, 25), (25, 60)])
def test_levels_match_simulation(d1, d2):
    """Whole fits to noise, n/d = 100: the law's own error there is below a hundredth of the level."""
    draw, n, rank = np.random.default_rng(2), 6000, 7
    seen = {"orthogonal": [], "linear": [], "rank": []}
    for _ in range(3):
        a, b = draw.normal(size=(n, d1)), draw.normal(size=(n, d2))
        left, _, right = np.linalg.svd(a.T @ b, full_matrices=False)
        linear = a @ np.linalg.lstsq(a, b, rcond=None)[0]
        _, _, axes = np.linalg.svd(linear, full_matrices=False)
        for name, x in (
            ("orthogonal", a @ left @ right),
            ("linear", linear),
            ("rank", linear @ axes[:rank].T @ axes[:rank]),
        ):
            seen[name].append(((x * b).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(b, axis=1)).mean())
    assert orthogonal_chance(n, d1, d2) == pytest.approx(np.mean(seen["orthogonal"]), rel=0.03)
    assert linear_chance(n, d1) == pytest.approx(np.mean(seen["linear"]), rel=0.03)
    assert reduced_chance(n, d1, d2, rank) == pytest.approx(np.mean(seen["rank"]), rel=0.05)


def test_full_rank_is_linear():
    for d1, d2 in [(60, 60), (60, 25), (25, 60)]:
        assert reduced_chance(6000, d1, d2, min(d1, d2)) == pytest.approx(linear_chance(6000, d1), rel=1e-9)


def test_cka_chance_is_the_mean_over_every_permutation():
    draw = np.random.default_rng(3)
    a, b = draw.normal(size=(6, 3)) + 1, draw.normal(size=(6, 2))
    a, b = a - a.mean(0), b - b.mean(0)
    scale = np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b)
    every = [np.square(a.T @ b[list(order)]).sum() / scale for order in itertools.permutations(range(6))]
    assert cka_chance(6, a.T @ a, b.T @ b) == pytest.approx(np.mean(every), abs=1e-12)


def test_subspace_chance_matches_random_tables():
    draw = np.random.default_rng(4)
    found = []
    for _ in range(10):
        products = Products.nothing(50, 50)
        products.add(*draw.normal(size=(2, 400, 50)))
        found.append(similarity(products, (20,)).subspaces)
    for side in (0, 1):
        assert np.mean([f[side].value for f in found]) == pytest.approx(found[0][side].chance, rel=0.05)


def test_large_procrustes_equals_the_small_one(monkeypatch):
    cross = np.random.default_rng(5).normal(size=(40, 30))
    slow = orthogonal(cross)
    monkeypatch.setattr("tiewise.analysis.table_maps.SMALL", 4)
    fast = orthogonal(cross)
    np.testing.assert_allclose(fast, slow, atol=1e-10)
    np.testing.assert_allclose(fast.T @ fast, np.eye(30), atol=1e-12)
    np.testing.assert_allclose(orthogonal(cross.T), slow.T, atol=1e-10)
    cross[:, :2] = 0  # singular: eigenvectors would not do
    made = orthogonal(cross)
    np.testing.assert_allclose(made.T @ made, np.eye(30), atol=1e-12)
    assert np.trace(made.T @ cross) == pytest.approx(np.linalg.norm(cross, "nuc"))


def test_directions_within_the_products_error_are_left_out():
    gram = np.diag([1.0, 0.5, 1e-8])
    np.testing.assert_allclose(pseudo_inverse(gram), np.diag([1.0, 2.0, 1e8]))
    np.testing.assert_allclose(pseudo_inverse(gram, error=1e-7), np.diag([1.0, 2.0, 0.0]))
