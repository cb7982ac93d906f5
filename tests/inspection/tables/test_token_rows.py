"""Norms, directions and planes of tables against dense numpy, scipy and simulation; planted untrained rows."""

import math

import numpy as np
import pytest
import scipy.stats
from tiny_tables import gaussian, llama

from tiewise.core.errors import DataError
from tiewise.inspection.tables import token_rows
from tiewise.inspection.tables.model_tables import ArrayTable, StoredTable
from tiewise.inspection.tables.token_rows import directions, mean_cosine, moments, near_unused, norms_by_count, plane


def cone_rows(rows=400, width=12):
    """Return rows that share a direction and have a decreasing spectrum."""
    generator = np.random.default_rng(0)
    return 0.5 + generator.standard_normal((rows, width)) / np.arange(1, width + 1)


def measure_directions(values, seed=0):
    """Return the direction quantities of a table named x, by name."""
    table = ArrayTable(values)
    return {q.name.removesuffix(", x"): q for q in directions("x", table, moments(table), seed, main=True)}


def cosines(values):
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    return (unit @ unit.T)[~np.eye(len(values), dtype=bool)]


def test_mean_cosine_matches_all_pairs_and_its_interval_the_jackknife():
    values = cone_rows(120)
    found = mean_cosine(moments(ArrayTable(values)))
    assert found.value == pytest.approx(cosines(values).mean(), abs=1e-13)
    without = np.array([cosines(np.delete(values, row, axis=0)).mean() for row in range(len(values))])
    deviation = np.sqrt((len(values) - 1) * without.var())
    assert (found.high - found.low) / 2 / 1.959964 == pytest.approx(deviation, rel=0.03)
    with_zeros = mean_cosine(moments(ArrayTable(np.vstack([values, np.zeros((3, 12))]))))  # zero rows have no direction
    assert (with_zeros.rows, with_zeros.value) == (120, pytest.approx(found.value, abs=1e-12))


def test_mean_cosine_of_random_rows_has_the_predicted_spread():
    drawn = [mean_cosine(moments(ArrayTable(gaussian(40, 10, seed)))).value for seed in range(400)]
    assert np.std(drawn) == pytest.approx(math.sqrt(2 / (40 * 39 * 10)), rel=0.15)
    assert measure_directions(gaussian(40, 10))["mean cosine"].why.startswith(f"0 ± {1.96 * math.sqrt(2 / 15600):.4f}")
    assert abs(np.mean(drawn)) < 5 * np.std(drawn) / 20


def test_moments_and_directions_match_a_dense_svd():
    values = cone_rows()
    found = measure_directions(values)
    squares = np.linalg.svd(values - values.mean(0), compute_uv=False) ** 2
    assert moments(ArrayTable(values)).shares == pytest.approx(squares / squares.sum(), abs=1e-12)
    assert found["variance in 10 directions"].value == pytest.approx((squares / squares.sum())[:10].sum())
    assert found["directions filled"].value == pytest.approx(squares.sum() ** 2 / (squares**2).sum())
    of_mean = len(values) * (values.mean(0) ** 2).sum() / (values**2).sum()
    assert found["mean row's energy"].value == pytest.approx(of_mean)


@pytest.mark.parametrize(("rows", "width"), [(600, 60), (80, 60), (40, 60)])
def test_gaussian_chance_levels_match_simulated_tables(rows, width):
    found = [measure_directions(gaussian(rows, width, seed)) for seed in range(12)]
    shares = np.mean([moments(ArrayTable(gaussian(rows, width, seed))).shares for seed in range(12)], axis=0)
    assert token_rows.gaussian_shares(rows, width) == pytest.approx(shares, abs=0.12 * shares[0])
    assert token_rows.gaussian_spectrum(rows, width).sum() == pytest.approx(width, rel=1e-3)
    off = {"directions filled": 0.03, "variance in 1 direction": 0.08, "variance in 10 directions": 0.08}
    for name, tolerance in off.items():
        assert found[0][name].chance == pytest.approx(np.mean([one[name].value for one in found]), rel=tolerance)


def test_isotropy_matches_the_ratio_of_partition_functions():
    values = cone_rows(300, 8).astype(np.float32).astype(np.float64)
    found = measure_directions(values)
    _, axes = np.linalg.eigh(values.T @ values)
    for scale, name in ((1.0, "isotropy as stored"), (1 / np.sqrt((values**2).mean()), "isotropy")):
        sums = np.exp(scale * values @ np.hstack([axes, -axes])).sum(0)
        assert found[name].value == pytest.approx(sums.min() / sums.max(), rel=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(2000, 40), (400, 60)])
def test_isotropy_chance_level_matches_gaussian_tables(rows, width):
    found = [measure_directions(gaussian(rows, width, seed))["isotropy"] for seed in range(12)]
    assert found[0].chance == pytest.approx(np.mean([one.value for one in found]), rel=0.06)


def test_moments_refuses_nan_values_and_tables_of_zero_rows():
    values = cone_rows(20)
    values[3, 1] = np.nan
    with pytest.raises(DataError, match="values that are no numbers"):
        moments(ArrayTable(values))
    with pytest.raises(DataError, match="a table of 0 rows that are not zero"):
        moments(ArrayTable(np.zeros((5, 3))))


def test_norms_by_count_matches_scipy_and_permuted_counts():
    generator = np.random.default_rng(4)
    counts = generator.zipf(1.4, 500).clip(max=10**6) * (generator.random(500) > 0.2)
    norms = 1 / (1 + np.log1p(counts)) + 0.1 * generator.random(500)
    by_value, by_rank = norms_by_count(norms, counts)
    seen = counts > 0
    assert by_rank.estimate.value == pytest.approx(scipy.stats.spearmanr(norms[seen], counts[seen])[0], abs=1e-12)
    assert by_value.estimate.value == pytest.approx(np.corrcoef(norms[seen], np.log(counts[seen]))[0, 1], abs=1e-12)
    permuted = [scipy.stats.spearmanr(generator.permutation(norms[seen]), counts[seen])[0] for _ in range(600)]
    assert by_rank.deviation == pytest.approx(np.std(permuted), rel=0.12)


@pytest.mark.parametrize("counts", [np.zeros(9, int), np.full(9, 3), np.array([1, 2, 3, 0, 0, 0, 0, 0, 0])])
def test_norms_by_count_returns_none_with_too_few_or_equal_counts(counts):
    assert norms_by_count(np.arange(9.0), counts) is None


def test_plane_matches_the_first_two_principal_components():
    values = cone_rows()
    table = ArrayTable(values)
    ids = np.array([0, 7, 399])
    found = plane(table, moments(table), ids)
    centred = values - values.mean(0)
    _, s, axes = np.linalg.svd(centred, full_matrices=False)
    assert np.abs(found) == pytest.approx(np.abs(centred[ids] @ axes[:2].T), abs=1e-9)
    said = measure_directions(values)
    assert said["variance along the second axis"].value == pytest.approx((s**2 / (s**2).sum())[1], abs=1e-12)
    assert said["variance of a row"].value == pytest.approx((centred**2).sum(1).mean())


def test_plane_aligns_with_its_reference():
    values = cone_rows()
    first = plane(ArrayTable(values), moments(ArrayTable(values)), np.arange(50))
    turned = values * np.where(np.arange(12) % 2, 1, -1)
    second = plane(ArrayTable(turned), moments(ArrayTable(turned)), np.arange(50), reference=first)
    assert second == pytest.approx(first, abs=1e-9)


V = 60


def test_untrained_rows_finds_zero_equal_and_unused_rows(tmp_path):
    values = gaussian(V, 8)
    values[[4, 9]] = 0
    values[[11, 30, 31]] = values[10]
    values[50] = values[2]
    stored = llama(tmp_path / "m", values, gaussian(V, 8, 1)).tensors["model.embed_tokens.weight"]
    counts = np.ones(V, np.int64)
    counts[[1, 2, 3]] = 0
    found, named = token_rows.untrained_rows("x", StoredTable(stored), np.empty(0, np.int64), counts)
    assert {q.name: q.value for q in found} == {
        "rows of zeros, x": 2,
        "rows equal to another, x": 6,
        "rows whose token the text lacks, x": 3,
    }
    assert found[1].why == "in 2 groups"
    assert named == [("x", "zero", "#4, #9"), ("x", "equal", "#10, #11, #30, #31"), ("x", "equal", "#2, #50")]


def test_near_unused_finds_rows_close_to_unused_rows():
    generator = np.random.default_rng(3)
    values = 3 * generator.standard_normal((200, 16))
    unused, left = np.arange(180, 200), np.array([17, 40, 99])
    values[unused] = 5 + 0.1 * generator.standard_normal((20, 16))
    values[left] = 5 + 0.05 * generator.standard_normal((3, 16))
    reach, rows, cosines = near_unused(ArrayTable(values), unused)
    assert set(rows.tolist()) == set(left.tolist())
    own = [np.linalg.norm(values[row] - values[unused[unused != row]].mean(0)) for row in unused]
    assert reach == pytest.approx(np.quantile(own, 0.95))
    centre, mean = values[unused].mean(0), values.mean(0)
    nearest = values[rows[0]]
    away = np.linalg.norm(values - centre, axis=1)
    assert away[rows].tolist() == sorted(away[left])
    row, direction = nearest - mean, centre - mean
    assert cosines[0] == pytest.approx(row @ direction / np.linalg.norm(row) / np.linalg.norm(direction))


def test_near_unused_finds_no_row_in_a_random_table():
    values = np.random.default_rng(4).standard_normal((400, 32))
    values[:30] *= 0.1
    assert len(near_unused(ArrayTable(values), np.arange(30))[1]) == 0
