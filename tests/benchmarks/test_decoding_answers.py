"""Check exact top-k answers on the inputs of the decoding benchmark: three spectra and a trained model."""

import pytest
import torch
from benchmarks.decoding import count_wrong, draw_table, train_llama

from tiewise.boundary.ops.exact_top import ExactTop


@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("name", ["flat", "zipf", "peaked"])
def test_exact_top_answers_every_query_of_named_spectrum(name, k):
    table, hidden = draw_table(name, 5000, 96)
    assert count_wrong(ExactTop(table), hidden, k) == 0
    assert count_wrong(ExactTop(table.bfloat16()), hidden.bfloat16(), k) == 0


def test_wrong_counts_incorrect_answers():
    table, hidden = draw_table("flat", 500, 32)
    top = ExactTop(table)
    top.top = lambda h, k: (torch.zeros(len(h), k), torch.zeros(len(h), k, dtype=torch.long))
    assert count_wrong(top, hidden, 1) > 60


@pytest.mark.slow
def test_exact_top_answers_10000_queries_of_trained_model():
    table, hidden = train_llama(10_000)
    top = ExactTop(table)
    assert count_wrong(top, hidden, 1) == 0
    assert top.counts.full_scans == 0
    assert count_wrong(top, hidden[:2_000], 50) == 0
