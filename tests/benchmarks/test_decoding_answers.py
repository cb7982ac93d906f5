"""Check exact top-k answers on the inputs of the decoding benchmark: three spectra and a trained model."""

import pytest
import torch
from benchmarks.decoding import table_of, trained, wrong

from tiewise.boundary.ops.exact_top import ExactTop


@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("name", ["flat", "zipf", "peaked"])
def test_exact_top_answers_every_query_of_named_spectrum(name, k):
    table, hidden = table_of(name, 5000, 96)
    assert wrong(ExactTop(table), hidden, k) == 0
    assert wrong(ExactTop(table.bfloat16()), hidden.bfloat16(), k) == 0


def test_wrong_counts_incorrect_answers():
    table, hidden = table_of("flat", 500, 32)
    top = ExactTop(table)
    top.top = lambda h, k: (torch.zeros(len(h), k), torch.zeros(len(h), k, dtype=torch.long))
    assert wrong(top, hidden, 1) > 60


@pytest.mark.slow
def test_exact_top_answers_10000_queries_of_trained_model():
    table, hidden = trained(10_000)
    top = ExactTop(table)
    assert wrong(top, hidden, 1) == 0
    assert top.counts.full_scans == 0
    assert wrong(top, hidden[:2_000], 50) == 0
