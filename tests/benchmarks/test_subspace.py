"""Test the distance of two column spans against scipy, and the effect of the augmented loss on it."""

import itertools
import math

import numpy as np
import pytest
import torch
from benchmarks.column_spans import subspace_distance
from benchmarks.subspace import Training, measure, number_words
from scipy.linalg import subspace_angles

from tiewise.core.errors import DataError
from tiewise.training.data.sources import builtin_texts


@pytest.fixture(scope="module")
def ids():
    """The first 4,000 words of the text that every CPython carries."""
    words = itertools.chain.from_iterable(text.split() for _, text in builtin_texts())
    return number_words(list(itertools.islice(words, 4000)))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_only_augmented_loss_moves_output_table_into_span_of_input_table(beta, ids):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        before, after, _ = measure(ids, 100, beta, 10.0, Training(epochs=10))
    finally:
        torch.set_num_threads(threads)
    assert before.residual_b == pytest.approx(before.chance, abs=0.01)
    if beta:
        assert after.residual_b < 0.2
        assert after.distance < 0.7
    else:
        assert after.residual_b > 0.9
        assert after.distance > 0.9


RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(200, 7)), RNG.normal(size=(200, 7))


def projector(table):
    return table @ np.linalg.pinv(table)


def test_subspace_distance_matches_projectors_and_principal_angles():
    result = subspace_distance(A, B)
    assert math.isclose(result.distance, np.linalg.norm(projector(A) - projector(B)) / math.sqrt(14), rel_tol=1e-10)
    sines = np.sin(subspace_angles(A, B))
    assert math.isclose(result.largest, sines.max(), rel_tol=1e-10)
    assert math.isclose(result.distance, math.sqrt(np.mean(sines**2)), rel_tol=1e-10)
    assert math.isclose(result.residual_a, np.linalg.norm(A - projector(B) @ A) / np.linalg.norm(A), rel_tol=1e-10)


def test_subspace_distance_is_zero_for_one_span_in_two_bases():
    result = subspace_distance(A, 100 * A @ RNG.normal(size=(7, 7)))
    assert result.distance < 1e-12
    assert result.residual_b < 1e-12


def test_subspace_distance_is_exact_for_small_angle():
    q = np.linalg.qr(RNG.normal(size=(80, 6)))[0]
    turned = math.cos(1e-9) * q[:, :3] + math.sin(1e-9) * q[:, 3:]
    assert math.isclose(subspace_distance(q[:, :3], turned).distance, 1e-9, rel_tol=1e-5)


def test_subspace_distance_of_random_tables_equals_chance():
    result = [subspace_distance(RNG.normal(size=(200, 40)), RNG.normal(size=(200, 40))) for _ in range(30)]
    squares = [f.distance**2 for f in result]
    assert abs(np.mean(squares) - result[0].chance ** 2) < 4 * np.std(squares) / math.sqrt(30)


def test_subspace_distance_counts_ranks_and_uses_the_smaller_one():
    result = subspace_distance(A, A[:, [0, 1, 1]])
    assert result.ranks == (7, 2)
    assert result.distance < 1e-12
    assert result.record()["ranks"] == [7, 2]


@pytest.mark.parametrize(
    ("a", "said"),
    [(A[:100], "common words"), (A[0], "common words"), (0 * A, "spans nothing"), (A * np.nan, "not finite")],
)
def test_subspace_distance_refuses_tables_it_cannot_compare(a, said):
    with pytest.raises(DataError, match=said):
        subspace_distance(a, B)
