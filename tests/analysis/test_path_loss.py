"""The loss of a table's own path on a chain against the dense formula."""

import numpy as np
import pytest
from scipy.special import log_softmax

from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.bigram_paths import path_loss
from tiewise.analysis.path_matrix import DirectPath
from tiewise.analysis.token_table import HeldTable
from tiewise.core.errors import DataError


def example(vocabulary=30):
    generator = np.random.default_rng(0)
    e, u = generator.normal(size=(2, vocabulary, 4))
    text = generator.integers(0, vocabulary, 3000) ** 2 // vocabulary
    path, chain = DirectPath(HeldTable(e), HeldTable(u)), Chain.of([text], vocabulary)
    return path, chain, -(chain.dense() * log_softmax(e @ u.T, axis=1)).sum()


def test_all_pairs_are_exact():
    path, chain, truth = example()
    found = path_loss(path, chain)
    assert found.nll == pytest.approx(truth, abs=1e-12)
    assert found.nll > chain.entropy
    assert (found.exact, found.low, found.high) == (True, found.nll, found.nll)
    assert found.sampled == len(chain.keys)


def test_a_sample_covers_the_truth():
    path, chain, truth = example()
    found = [path_loss(path, chain, 200, seed) for seed in range(60)]
    assert not any(f.exact for f in found)
    assert sum(f.low <= truth <= f.high for f in found) >= 52
    assert found[3] == path_loss(path, chain, 200, 3)


def test_the_best_symmetric_path_pays_the_irreversibility():
    _, chain, _ = example(12)
    q = chain.dense() + 1e-12  # no pair unseen: its logit would be infinite
    path = DirectPath(HeldTable(np.eye(12)), HeldTable(np.log(q + q.T)))
    assert path_loss(path, chain).nll == pytest.approx(chain.entropy + chain.irreversibility, abs=1e-8)


def test_refused():
    path, chain, _ = example()
    with pytest.raises(DataError, match="a sample of 1"):
        path_loss(path, chain, 1)
    short = DirectPath(HeldTable(np.ones((4, 2))), HeldTable(np.ones((4, 2))))
    with pytest.raises(DataError, match="outside the table's 4 rows"):
        path_loss(short, chain)
