"""Tests of the change of a cost between two studies, against sums by hand."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from benchmarks import cost_change
from tiewise.core.estimates import critical_t
from tiewise.training.document_losses import DocumentLosses

TOKENS = [100, 300]


@dataclass
class Run:
    """Result of a run: its loss, and that of both documents."""

    nats: list[float]
    tokens: list[int]

    @property
    def heldout_nll(self):
        return sum(self.nats) / sum(self.tokens)

    @property
    def documents(self):
        return DocumentLosses("documents", self.tokens, self.nats)


def comparison(costs, tokens=TOKENS):
    """Return a comparison of three seeds; `costs` has the nats of tied less untied by seed and document."""
    runs = {
        "untied": [Run([500.0, 1500.0], tokens) for _ in costs],
        "tied": [Run([500.0 + first, 1500.0 + second], tokens) for first, second in costs],
    }
    return SimpleNamespace(seeds=[1, 2, 3], of=runs.get)


OLD = comparison([(10.0, 30.0), (12.0, 28.0), (8.0, 32.0)])
NEW = comparison([(30.0, 90.0), (36.0, 96.0), (24.0, 84.0)])


def test_change_is_cost_in_new_study_less_cost_in_old_one():
    row = cost_change.table({"a": OLD}, {"a": NEW, "b": NEW})
    assert [one["cell"] for one in row] == ["a"]
    [only] = row
    assert float(only["old"]) == pytest.approx(40 / 400, abs=1e-5)
    assert float(only["new"]) == pytest.approx(120 / 400, abs=1e-5)
    assert float(only["change"]) == pytest.approx(80 / 400, abs=1e-5)
    assert (only["seeds"], only["documents"]) == ("3", "2")


def test_interval_of_change_pairs_seeds():
    """Both documents change by the same per token, so seeds alone spread: 0.17, 0.2 and 0.23."""
    old = comparison([(10.0, 30.0)] * 3)
    new = comparison([(27.0, 81.0), (30.0, 90.0), (33.0, 99.0)])
    d = cost_change.change(old, new)
    assert d.mean == pytest.approx(0.2)
    assert d.high - d.mean == pytest.approx(critical_t(2) * 0.03 / 3**0.5)


def test_other_documents_are_refused():
    with pytest.raises(ValueError, match="differ in held-out documents"):
        cost_change.change(OLD, comparison([(30.0, 90.0)] * 3, tokens=[200, 200]))
