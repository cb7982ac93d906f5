"""Factored figures of the direct path against its dense fp64 matrix, and known examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from tiewise.core.errors import DataError
from tiewise.core.progress import listen_to_progress, progress_of
from tiewise.inspection.tables import model_tables as tables
from tiewise.inspection.tables import path_matrix as module
from tiewise.inspection.tables.model_tables import ArrayTable
from tiewise.inspection.tables.open_path import DirectPath, Norm
from tiewise.inspection.tables.path_matrix import (
    asymmetric_pairs,
    asymmetry,
    eigenvalues,
    grams,
    self_prediction,
    transitions,
)


def dense_matrix(path):
    """Return M [V, V] by its definition, from the values of the tables."""
    rows = path.input.values.astype(np.float64) * path.input_scale
    if path.norm.kind == "layer":
        rows = rows - rows.mean(1, keepdims=True)
        rows = rows / np.sqrt(rows.var(1, keepdims=True) + path.norm.eps)
    elif path.norm.kind == "rms":
        rows = rows / np.sqrt((rows**2).mean(1, keepdims=True) + path.norm.eps)
    gain = np.ones(rows.shape[1]) if path.norm.gain is None else path.norm.gain
    return path.output_scale * np.einsum("ie,e,je->ij", rows, gain, path.output.values.astype(np.float64))


def dense_logits(path):
    """Return the logits [V, V'] that the head computes."""
    found = dense_matrix(path)
    if path.norm.shift is not None:
        found = found + path.output_scale * path.output.values @ path.norm.shift
    if path.bias is not None:
        found = found + path.bias
    return found if path.softcap is None else path.softcap * np.tanh(found / path.softcap)


@st.composite
def paths(draw, rows=(2, 14), width=(1, 5)):
    """Draw a small path: tied or untied, any norm, gains of both signs, scales, bias, soft-cap."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    v, e = draw(st.integers(*rows)), draw(st.integers(*width))
    table = ArrayTable(generator.normal(size=(v, e)) + draw(st.sampled_from([0.0, 3.0])))
    other = table if draw(st.booleans()) else ArrayTable(generator.normal(size=(v, e)))
    kind = draw(st.sampled_from(["none", "rms", "layer"])) if e > 1 else "none"
    gain = generator.normal(size=e) if draw(st.booleans()) else None
    shift = generator.normal(size=e) if draw(st.booleans()) else None
    return DirectPath(
        table,
        other,
        Norm(kind, 1e-5, gain, shift),
        draw(st.sampled_from([1.0, 8.0])),
        draw(st.sampled_from([1.0, 0.25, -1.0])),
        generator.normal(size=v) if draw(st.booleans()) else None,
        draw(st.sampled_from([None, 2.0])),
    )


def check_energy(found, matrix, whole=0.0):
    """Compare with M; for a centred M, rounding is relative to the energy before centring."""
    energy, ratio = found
    scale, expected = max(1.0, whole, (matrix**2).sum()), (matrix**2).sum()
    assert abs(energy - expected) < 1e-10 * scale
    apart = ((matrix - matrix.T) ** 2).sum()
    assert abs(energy * ratio - apart) < 4e-10 * scale
    if expected > 1e-4 * scale:
        assert ratio == pytest.approx(apart / expected, abs=1e-10)


def check_eigenvalues(found, matrix):
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)
    np.testing.assert_allclose(found, values[abs(values) > 1e-9 * abs(values).max()], atol=1e-10 * abs(values).max())


@settings(max_examples=150)
@given(paths())
def test_asymmetry_and_self_prediction_match_the_dense_matrix(path):
    matrix = dense_matrix(path)
    found = grams(path)
    check_energy(asymmetry(found), matrix)
    v, size = len(matrix), max(1, np.abs(matrix).max())
    middle = np.eye(v) - 1 / v
    check_energy(asymmetry(found.centred), middle @ matrix @ middle, (matrix**2).sum())
    _, diagonal, _ = self_prediction(path, found)
    expected = matrix.diagonal().mean(), matrix[~np.eye(v, dtype=bool)].mean()
    assert (diagonal.value, diagonal.chance) == pytest.approx(expected, abs=1e-10 * size)


@settings(max_examples=100)
@given(paths(rows=(8, 16), width=(2, 3)))
def test_eigenvalues_match_the_dense_matrix(path):
    matrix, middle = dense_matrix(path), np.eye(path.rows) - 1 / path.rows
    centred, size = middle @ matrix @ middle, np.abs(matrix).max()
    if size > 1e-6:
        check_eigenvalues(eigenvalues(grams(path)), matrix)
        if np.abs(centred).max() > 1e-3 * size:
            check_eigenvalues(eigenvalues(grams(path).centred), centred)


def test_grams_and_transitions_are_independent_of_chunk_size(monkeypatch):
    generator = np.random.default_rng(3)
    path = DirectPath(ArrayTable(generator.normal(size=(50, 4))), ArrayTable(generator.normal(size=(53, 4))))
    whole, rows = grams(path), transitions(path, [(1, 2), (49, 52), (1, 52)])
    own = self_prediction(path, whole)
    monkeypatch.setattr(tables, "CHUNK_VALUES", 12)
    told = []
    with listen_to_progress(lambda what, done, total: told.append(done)), progress_of("rows", 50):
        parts = grams(path)
    assert told[-1] == whole.rows == 50
    assert len(told) == 17
    for name in ("left", "right", "cross", "left_sum", "right_sum", "diagonal"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-12)
    assert self_prediction(path, whole) == own
    for before, after in zip(rows, transitions(path, [(1, 2), (49, 52), (1, 52)]), strict=True):
        np.testing.assert_allclose(after, before, atol=1e-12)


@pytest.mark.parametrize("gain", [None, [0.5, -2.0, 1.5]])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tied_linear_path_is_exactly_symmetric(gain, dtype):
    table = ArrayTable(np.random.default_rng(0).normal(size=(900, 3)).astype(dtype))
    path = DirectPath(table, table, Norm("rms", 1e-6, None if gain is None else np.array(gain)), 3.0)
    assert asymmetry(grams(path.linear))[1] == asymmetry(grams(path.linear).centred)[1] == 0.0
    assert asymmetry(grams(path))[1] > 1e-3  # rows of unequal length: the norm alone makes it asymmetric
    values = eigenvalues(grams(path.linear))
    assert ((values < 0).any(), len(values)) == (gain is not None, 3)  # one gain is below zero


def test_transitions_give_equal_logits_the_same_rank():
    table = ArrayTable([[1, 0.5], [0.8, 0.9], [0.3, 1.2]])  # New, York, City
    path = DirectPath(table, table)
    logits, _, ranks = transitions(path, np.argwhere(np.ones((3, 3))))
    assert logits == pytest.approx([1.25, 1.25, 0.9, 1.25, 1.45, 1.32, 0.9, 1.32, 1.53])
    assert ranks.tolist() == [0, 0, 2, 2, 0, 1, 2, 1, 0]
    own = self_prediction(path, grams(path))[0]
    assert (own.value, own.n, own.chance) == (1.0, 3, 1 / 3)  # after New, New and York tie for the first rank


@settings(max_examples=100)
@given(paths())
def test_transitions_match_a_dense_softmax(path):
    dense_of = dense_logits(path)
    i, j = np.indices(dense_of.shape).reshape(2, -1)
    logits, logs, ranks = transitions(path, np.column_stack([i, j]))
    np.testing.assert_allclose(logs, log_softmax(dense_of, axis=1).ravel(), rtol=0, atol=1e-10)
    np.testing.assert_allclose(logits, dense_of.ravel(), rtol=0, atol=1e-10)
    above = dense_of[i] - dense_of[i, j][:, None]  # a soft-cap can bring logits close to each other
    assert (((above > 1e-10).sum(1) <= ranks) & (ranks <= (above > 1e-13).sum(1))).all()
    own = self_prediction(path, grams(path))[0].value
    behind = dense_of.max(1)[: path.rows] - dense_of.diagonal()
    assert (behind <= 1e-13).mean() - 1e-12 <= own <= (behind <= 1e-10).mean() + 1e-12


def test_transitions_do_not_overflow_with_large_logits():
    path = DirectPath(ArrayTable([[1e4], [-1e4]]), ArrayTable([[1.0], [-1.0]]))
    assert transitions(path, [(0, 0), (0, 1)])[1].tolist() == [0.0, -2e4]


@pytest.mark.parametrize("top", [1, 5, 10_000])
def test_asymmetric_pairs_match_a_dense_search(top):
    generator = np.random.default_rng(top)
    path = DirectPath(ArrayTable(generator.normal(size=(40, 4))), ArrayTable(generator.normal(size=(40, 4))))
    for ids in (np.arange(40), module.sampled(40, 25, seed=1)):
        found = asymmetric_pairs(path, ids, top, block=7)
        matrix = dense_matrix(path)
        difference = matrix - matrix.T
        wanted = sorted((difference[i, j] for i in ids for j in ids if difference[i, j] > 0), reverse=True)
        assert [there - back for _, _, there, back in found] == pytest.approx(wanted[:top])
        for i, j, there, back in found:
            assert (there, back) == pytest.approx((matrix[i, j], matrix[j, i]))


def test_path_of_unequal_tables_uses_common_rows_and_the_full_softmax():
    generator = np.random.default_rng(0)
    e, u = generator.normal(size=(6, 2)), generator.normal(size=(4, 2))
    path = DirectPath(ArrayTable(e), ArrayTable(u))
    assert grams(path).rows == path.rows == 4
    check_energy(asymmetry(grams(path)), e[:4] @ u.T)
    assert transitions(path, [(5, 1)])[1].item() == pytest.approx(log_softmax(e[5] @ u.T)[1])


ONES = ArrayTable(np.ones((3, 2)))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: DirectPath(ONES, ArrayTable(np.ones((3, 3)))), "2 wide, the output table 3"),
        (lambda: DirectPath(ONES, ONES, bias=np.ones(2)), "a bias of shape"),
        (lambda: DirectPath(ONES, ONES, Norm(gain=np.ones(3))), "a norm of shape"),
        (lambda: transitions(DirectPath(ONES, ONES), [(0, 3)]), "token 3 is outside"),
        (lambda: transitions(DirectPath(ONES, ONES), [(-1, 0)]), "token -1 is outside"),
        (lambda: grams(DirectPath(ArrayTable([[np.nan, 1.0]]), ONES)), "no numbers"),
        (lambda: self_prediction(DirectPath(ArrayTable([[1.0]]), ArrayTable([[1.0]])), None), "needs another"),
        (lambda: module.sampled_asymmetry([np.ones((3, 2))], np.ones((3, 2))), "3 tokens; sample 8 tokens or more"),
    ],
)
def test_path_functions_refuse_mismatched_shapes_and_unusable_values(ask, said):
    with pytest.raises(DataError, match=said):
        ask()


@pytest.mark.parametrize("block", [7, 1024])
def test_sampled_asymmetry_matches_the_dense_matrix_for_any_block_size(block):
    generator = np.random.default_rng(0)
    first, second, right = generator.normal(size=(3, 40, 6)) + 0.5
    told = []
    with listen_to_progress(lambda what, done, total: told.append(done)), progress_of("rows", 80):
        a, b, change = module.sampled_asymmetry([first, second], right, block=block)
    for found, left in ((a, first), (b, second)):
        s, middle = left @ right.T, np.eye(40) - 1 / 40
        expected = [((m - m.T) ** 2).sum() / (m**2).sum() for m in (s, middle @ s @ middle)]
        assert [view.value for view in found] == pytest.approx(expected, abs=1e-10)
        assert found[0].low <= found[0].high
    assert change[0].value == pytest.approx(b[0].value - a[0].value, abs=1e-12)
    assert change[1].low < change[1].value < change[1].high
    assert told[-1] == 80
    assert told == sorted(told)


def test_ratios_of_a_resample_match_a_loop_over_repeated_rows():
    """Sum one resample in a loop.

    The sum has pairs of different tokens and each draw's diagonal, but no pair of copies.
    """
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
    found = module._Ratios(left, right, weights[:, None].astype(float)).measure(0, module.BLOCK)
    assert found[0, 0] == pytest.approx(2 - 2 * turned / energy, abs=1e-12)


def test_sampled_asymmetry_has_no_spread_for_a_symmetric_path():
    table = np.random.default_rng(2).normal(size=(30, 4))
    (found, _), (change, _) = module.sampled_asymmetry([table], table)
    assert (found.value, found.high, change.value) == (0.0, 0.0, 0.0)


def test_sampled_asymmetry_interval_covers_the_population_ratio():
    """Most intervals from samples of a large population contain the population's ratio."""
    generator = np.random.default_rng(3)
    table = generator.normal(size=(1500, 8))
    other = table + generator.normal(size=(1500, 8))
    s = table @ other.T
    whole = ((s - s.T) ** 2).sum() / (s**2).sum()
    inside = 0
    for seed in range(40):
        rows = np.random.default_rng(100 + seed).choice(1500, 100, replace=False)
        (found, _), _ = module.sampled_asymmetry([table[rows]], other[rows], seed)
        inside += found.low <= whole <= found.high
    assert inside >= 32  # 38 expected; fewer than 32 occur at most once in 1,000 runs
