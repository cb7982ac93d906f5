"""The augmented loss alone draws the output table into the input table's span, which cross-entropy does not."""

import itertools

import pytest
import torch
from benchmarks.subspace import Training, measure, numbered

from tiewise.data.sources import builtin_documents


@pytest.fixture(scope="module")
def ids():
    """The first 4,000 words of the text that every CPython carries."""
    words = itertools.chain.from_iterable(document.text.split() for document in builtin_documents())
    return numbered(list(itertools.islice(words, 4000)))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_augmented_loss_alone_draws_the_output_table_into_the_input_table_s_span(beta, ids):
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
