"""Chance levels against simulation and every permutation; maps of large and of singular products."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tiewise.inspection.tables.align_tables import cka, spectra
from tiewise.inspection.tables.table_maps import (
    LARGE,
    AlignSettings,
    Products,
    fitted_chance,
    orthogonal,
    pseudo_inverse,
)


def test_fitted_chance_matches_known_values():
    assert fitted_chance("orthogonal", 50304, 2048, 2048) == pytest.approx(0.171, abs=5e-4)
    assert fitted_chance("linear", 50304, 2048, 2048) == pytest.approx(0.202, abs=5e-4)
    limit = 8 / (3 * math.pi) * math.sqrt(300 / 10**6)
    assert fitted_chance("orthogonal", 10**6, 300, 300) == pytest.approx(limit, rel=1e-6)
    for d1, d2 in [(60, 60), (60, 25), (25, 60)]:  # at full rank the level equals that of the linear map
        full = fitted_chance(f"rank {min(d1, d2)}", 6000, d1, d2)
        assert full == pytest.approx(fitted_chance("linear", 6000, d1, d2), rel=1e-9)


@pytest.mark.parametrize(("d1", "d2"), [(400, 400), (400, 160), (160, 400), (300, 280)])
def test_fitted_chance_matches_the_nuclear_norm_of_random_matrices(d1, d2):
    """The mean of four draws of the smallest size has a standard deviation of 0.14 %."""
    draw = np.random.default_rng(1)
    nuclear = fitted_chance("orthogonal", 10**9, d1, d2) * math.sqrt(10**9 * d2 * min(d1, d2))
    drawn = np.mean([np.linalg.norm(draw.normal(size=(d1, d2)), "nuc") for _ in range(4)])
    assert nuclear == pytest.approx(drawn, rel=5e-3)


@pytest.mark.parametrize(("d1", "d2"), [(60, 60), (60, 25), (25, 60)])
def test_fitted_chance_matches_simulated_fits(d1, d2):
    """At n/d = 100 the asymptotic formula is within 1 % of the level."""
    draw, n, rank = np.random.default_rng(2), 6000, 7
    seen = {"orthogonal": [], "linear": [], f"rank {rank}": []}
    for _ in range(3):
        a, b = draw.normal(size=(n, d1)), draw.normal(size=(n, d2))
        left, _, right = np.linalg.svd(a.T @ b, full_matrices=False)
        linear = a @ np.linalg.lstsq(a, b, rcond=None)[0]
        axes = np.linalg.svd(linear, full_matrices=False)[2][:rank]
        for name, x in zip(seen, (a @ left @ right, linear, linear @ axes.T @ axes), strict=True):
            seen[name].append(((x * b).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(b, axis=1)).mean())
    for name, found in seen.items():
        assert fitted_chance(name, n, d1, d2) == pytest.approx(np.mean(found), rel=0.05 if "rank" in name else 0.03)


def test_cka_chance_equals_the_mean_over_every_permutation():
    draw = np.random.default_rng(3)
    a, b = draw.normal(size=(6, 3)) + 1, draw.normal(size=(6, 2))
    a, b = a - a.mean(0), b - b.mean(0)
    products = Products.nothing(3, 2)
    products.add(a, b, np.zeros((6, 0)))
    orders = (list(order) for order in itertools.permutations(range(6)))
    every = [cka(replace(products, cross=a.T @ b[order]))[0] for order in orders]
    assert every[0] == np.square(a.T @ b).sum() / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
    assert cka(products)[1] == pytest.approx(np.mean(every), abs=1e-12)


def test_subspace_chance_matches_random_tables():
    draw = np.random.default_rng(4)
    found = []
    for _ in range(10):
        products = Products.nothing(50, 50)
        products.add(*draw.normal(size=(2, 400, 50)), np.zeros((400, 0)))
        found.append(spectra(products, (20,))[1])
    for side in (0, 1):
        assert np.mean([f[side].value for f in found]) == pytest.approx(found[0][side].chance, rel=0.05)


def test_orthogonal_agrees_between_its_fast_and_slow_algorithms(monkeypatch):
    cross = np.random.default_rng(5).normal(size=(40, 30))
    slow = orthogonal(cross)
    monkeypatch.setattr("tiewise.inspection.tables.table_maps.SMALL", 4)
    fast = orthogonal(cross)
    np.testing.assert_allclose(fast, slow, atol=1e-10)
    np.testing.assert_allclose(fast.T @ fast, np.eye(30), atol=1e-12)
    np.testing.assert_allclose(orthogonal(cross.T), slow.T, atol=1e-10)
    cross[:, :2] = 0  # singular: an eigendecomposition is not sufficient
    made = orthogonal(cross)
    np.testing.assert_allclose(made.T @ made, np.eye(30), atol=1e-12)
    assert np.trace(made.T @ cross) == pytest.approx(np.linalg.norm(cross, "nuc"))


def test_pseudo_inverse_drops_directions_below_the_error():
    gram = np.diag([1.0, 0.5, 1e-8])
    np.testing.assert_allclose(pseudo_inverse(gram), np.diag([1.0, 2.0, 1e8]))
    np.testing.assert_allclose(pseudo_inverse(gram, error=1e-7), np.diag([1.0, 2.0, 0.0]))


def test_align_settings_use_one_permutation_for_large_tables():
    assert AlignSettings.sized(1000, 64, 5) == AlignSettings(seed=5)
    assert AlignSettings.sized(int(LARGE / 1024**2) + 1, 1024).permutations == 1
