"""Test token counts, frequency bins and asymmetric bigrams against counts by hand."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiewise.core.errors import DataError
from tiewise.core.text import BINS, asymmetric_bigrams, frequency_bins, token_counts

tokens_lists = st.lists(st.integers(0, 9), max_size=80)


@given(tokens_lists, st.integers(1, 9))
def test_token_counts_are_exact_for_any_chunk_size(tokens, chunk):
    counts = token_counts(np.array(tokens, np.uint16), 12, chunk)
    assert counts.dtype == np.int64
    assert counts.tolist() == [tokens.count(i) for i in range(12)]


def test_token_counts_refuses_token_outside_vocabulary():
    with pytest.raises(DataError, match="token 12 in a vocabulary of 10"):
        token_counts(np.array([1, 12], np.uint16), 10)


def test_frequency_bins_are_decades():
    counts = np.array([0, 1, 9, 10, 99, 100, 999, 1000, 9999, 10_000, 5_000_000, 0])
    assert frequency_bins(counts).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0]
    assert frequency_bins(counts).dtype == np.int64
    assert BINS == ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")


@given(tokens=tokens_lists, minimum=st.integers(1, 4), eos=st.sampled_from([None, 0, 3]), chunk=st.integers(1, 9))
def test_asymmetric_bigrams_match_counts_by_hand(tokens, minimum, eos, chunk):
    bigrams = asymmetric_bigrams(np.array(tokens, np.uint16), 12, top=1000, minimum=minimum, eos_id=eos, chunk=chunk)
    pairs = Counter(pairwise(tokens))
    expected = {}
    for (left, right), count in pairs.items():
        p, q = count / tokens.count(left), pairs[right, left] / tokens.count(right)
        if left != right and eos not in (left, right) and count >= minimum and p > q:
            expected[left, right] = (count, pairs[right, left], p, q)
    assert {(b.left, b.right): (b.forward, b.backward, b.p_forward, b.p_backward) for b in bigrams} == expected
    gains = [b.p_forward - b.p_backward for b in bigrams]
    assert gains == sorted(gains, reverse=True)


def test_asymmetric_bigrams_limits_tokens_and_number_of_results():
    tokens = np.array([1, 2] * 50 + [3, 4] * 20 + [5, 6] * 10)
    assert {(b.left, b.right) for b in asymmetric_bigrams(tokens, 9, minimum=5)} >= {(5, 6)}
    assert {b.left for b in asymmetric_bigrams(tokens, 9, minimum=5, paired=4)} <= {1, 2, 3, 4}
    assert len(asymmetric_bigrams(tokens, 9, top=1, minimum=5)) == 1


def test_asymmetric_bigrams_omits_pairs_below_minimum_count():
    tokens = np.array([1, 2, 0] * 4 + [3, 4, 0] * 5)
    assert [(b.left, b.right) for b in asymmetric_bigrams(tokens, 9, eos_id=0)] == [(3, 4)]
    assert len(asymmetric_bigrams(tokens, 9, eos_id=0, minimum=4)) == 2
