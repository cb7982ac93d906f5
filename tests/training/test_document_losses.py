"""Losses by held-out document: units of a text, and their sums against a plain loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiewise.training.document_losses import text_units
from tiewise.training.kinds.decoder import KIND, measure

END = 0


def text_of(sizes):
    """Return tokens of documents of these sizes, each ended by END."""
    return np.concatenate([[*range(1, size), END] for size in sizes])


def test_every_document_is_a_unit():
    sizes = [3, 1, 7, 2, 5]
    units = text_units(text_of(sizes), END)
    assert units.name == "documents"
    assert units.of_token.tolist() == [i for i, size in enumerate(sizes) for _ in range(size)]


def test_a_text_without_end_of_its_last_document_counts_it():
    units = text_units(text_of([2, 2, 2, 2, 2])[:-1], END)
    assert (units.name, units.of_token.tolist()) == ("documents", [0, 0, 1, 1, 2, 2, 3, 3, 4])


@pytest.mark.parametrize(("sizes", "end"), [([400], END), ([100] * 4, END), ([4] * 100, None)])
def test_text_of_few_or_unmarked_documents_is_cut_into_equal_blocks(sizes, end):
    units = text_units(text_of(sizes), end)
    assert units.name == "blocks"
    assert np.bincount(units.of_token).tolist() == [20] * 20
    assert np.all(np.diff(units.of_token) >= 0)


def test_many_documents_form_groups_of_whole_neighbours():
    units = text_units(text_of([3] * 450), END)
    assert (units.name, len(set(units.of_token.tolist()))) == ("groups of documents", 200)
    documents = units.of_token.reshape(450, 3)
    assert np.all(documents == documents[:, :1])
    assert set(np.bincount(documents[:, 0]).tolist()) == {2, 3}


def test_measured_blocks_sum_to_the_loss_of_each_document(tiny_settings, job):
    settings, length = tiny_settings(), 8
    installed = KIND.build(job(settings))
    tokens = text_of([11, 3, 19, 8, 6, 9])
    found = measure(installed, tokens, length, np.ones(300, np.int64), units=text_units(tokens, END))
    expected, counts, document = [0.0] * 6, [0] * 6, np.cumsum(tokens == END) - (tokens == END)
    for start in range(0, len(tokens) - length + 1, length):
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
        with torch.no_grad():
            losses = F.cross_entropy(installed.model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        for position, loss in enumerate(losses.tolist(), start + 1):
            expected[document[position]] += loss
            counts[document[position]] += 1
    assert found.documents.unit == "documents"
    assert found.documents.tokens == [count for count in counts if count]
    assert found.documents.nats == pytest.approx([nats for nats in expected if nats], abs=1e-3)
    assert sum(found.documents.nats) / found.tokens == pytest.approx(found.nll, abs=1e-5)


def test_measured_sample_of_blocks_keeps_the_units_of_its_tokens(tiny_settings, job):
    installed = KIND.build(job(tiny_settings()))
    tokens, counts = text_of([16] * 6), np.ones(300, np.int64)
    found = measure(installed, tokens, 8, counts, blocks=3, units=text_units(tokens, END)).documents
    assert (found.unit, found.tokens) == ("documents", [7, 7, 7])
    every_fourth = np.concatenate([tokens[start : start + 8] for start in (0, 32, 64)])
    alone = measure(installed, every_fourth, 8, counts)
    assert sum(found.nats) == pytest.approx(alone.nll * alone.tokens, abs=1e-3)
