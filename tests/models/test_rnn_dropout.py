"""Masks: how much they drop, what they leave alone, over what they are shared, and that evaluation has none."""

import pytest
import torch
from rnn_tools import tiny, words

from tiewise.models.rnn import drop, drop_words

P = 0.3


def share_of(x):
    """Share of zeros, and how far it may be from the truth: five standard deviations."""
    return (x == 0).double().mean().item(), 5 * (P * (1 - P) / x.numel()) ** 0.5


def test_a_fresh_mask_is_of_every_token_and_a_locked_one_of_every_sequence():
    torch.manual_seed(0)
    ones = torch.ones(50, 20, 30)
    fresh, locked = drop(ones, P, locked=False), drop(ones, P, locked=True)
    for found, drawn in ((fresh, fresh), (locked, locked[:, 0])):
        share, slack = share_of(drawn)
        assert share == pytest.approx(P, abs=slack)
        torch.testing.assert_close(found[found != 0], torch.full_like(found[found != 0], 1 / (1 - P)))
    assert torch.equal(locked, locked[:, :1].expand_as(locked))
    assert not torch.equal(fresh[:, 0], fresh[:, 1])
    assert not torch.equal(locked[0], locked[1])
    assert drop(ones, 0.0, locked=True) is ones


def test_words_are_dropped_whole_and_wherever_they_stand():
    torch.manual_seed(0)
    ids = torch.arange(2000).repeat(2, 2)[:, torch.randperm(4000)]
    found = drop_words(torch.ones(2, 4000, 3), ids, 2000, P)
    by_word = torch.zeros(2000, 3).index_copy_(0, ids[0], found[0])
    assert torch.equal(found, by_word[ids])
    assert torch.equal(by_word, by_word[:, :1].expand_as(by_word))
    share, slack = share_of(by_word[:, 0])
    assert share == pytest.approx(P, abs=slack)
    assert by_word.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])


def constant(width=400, **settings):
    """A model whose first layer's h is 1 whatever it reads, and whose second hands on what it is given."""
    model = tiny(cell="relu", lstm_bias="one", hidden_size=width, **settings).train()
    with torch.no_grad():
        model.embed.weight.fill_(1)
        for layer in model.rnn.layers:
            for parameter in layer.parameters():
                parameter.zero_()
        model.rnn.layers[0].bias_ih.fill_(1)
        for layer in list(model.rnn.layers)[1:]:
            layer.weight_ih.copy_(torch.eye(width))
    return model


def seen(model, module):
    """What a module reads in one forward over 3 sequences of 6 words."""
    kept = []
    with torch.no_grad():
        handle = module.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        model(words())
        handle.remove()
    return kept[0]


PLACES = {
    "input_dropout": lambda model: seen(model, model.rnn),
    "layer_dropout": lambda model: seen(model, model.head),
    "output_dropout": lambda model: seen(model, model.head),
}


@pytest.mark.parametrize("variational", [True, False])
@pytest.mark.parametrize("name", PLACES)
def test_each_place_has_its_own_mask(name, variational):
    model = constant(**{name: P}, variational=variational)
    torch.manual_seed(1)
    found = PLACES[name](model)
    share, slack = share_of(found[:, 0] if variational else found)
    assert share == pytest.approx(P, abs=slack)
    assert found.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    assert torch.equal(found[:, 0], found[:, 1]) == variational
    others = {"input_dropout": "output_dropout", "layer_dropout": "input_dropout", "output_dropout": "input_dropout"}
    assert torch.equal(PLACES[others[name]](model), torch.ones_like(found))
    model.eval()
    assert torch.equal(PLACES[name](model), torch.ones_like(found))


@pytest.mark.parametrize("variational", [True, False])
def test_dropout_between_layers_of_other_widths(variational):
    model = tiny(cell="relu", hidden_size=300, last_hidden_size=200, layer_dropout=P, variational=variational).train()
    with torch.no_grad():
        for parameter in model.rnn.parameters():
            parameter.zero_()
        model.rnn.layers[0].bias_ih.fill_(1)
        model.rnn.layers[1].weight_ih.copy_(torch.eye(200, 300))
    torch.manual_seed(1)
    found = seen(model, model.head)
    share, slack = share_of(found[:, 0] if variational else found)
    assert share == pytest.approx(P, abs=slack)
    assert torch.equal(found[:, 0], found[:, 1]) == variational


def test_whole_words_are_dropped_from_what_the_layers_read():
    model = constant(embedding_dropout=P, width=7)
    torch.manual_seed(1)
    for _ in range(20):
        found, ids = seen(model, model.rnn), words()
        for word in ids.unique():
            assert len(found[ids == word].unique()) == 1
    model.eval()
    assert torch.equal(seen(model, model.rnn), torch.ones_like(found))


@pytest.mark.parametrize("input_matrix", [True, False])
def test_a_mask_on_h_is_one_per_sequence(input_matrix):
    sizes = {"hidden_size": 400, "num_hidden_layers": 1, "input_matrix": input_matrix}
    model = tiny(cell="relu", lstm_bias="one", recurrent_dropout=P, **sizes)
    with torch.no_grad():
        model.embed.weight.fill_(0)
        layer = model.rnn.layers[0]
        layer.weight_hh.copy_(torch.eye(400))
        layer.bias_ih.fill_(1)
    torch.manual_seed(1)
    h = seen(model.train(), model.head)
    mask = h[:, 1] - 1  # h₁ = 1, h₂ = 1 + m, h₃ = 1 + m·h₂ …
    share, slack = share_of(mask)
    assert share == pytest.approx(P, abs=slack)
    for t in range(1, h.shape[1]):
        torch.testing.assert_close(h[:, t], 1 + mask * h[:, t - 1])
    assert not torch.equal(mask[0], mask[1])
    torch.testing.assert_close(seen(model.eval(), model.head)[0, :, 0], torch.arange(1.0, 7, dtype=torch.double))


def test_dropped_weights_are_the_same_for_every_sequence_and_word():
    width = 60
    model = tiny(cell="relu", lstm_bias="one", hidden_size=width, num_hidden_layers=1, weight_dropout=P)
    with torch.no_grad():
        model.embed.weight.zero_()
        layer = model.rnn.layers[0]
        layer.bias_ih.zero_()
        layer.weight_hh.fill_(1 / width)
    model.train()
    torch.manual_seed(1)
    units = torch.eye(width, dtype=torch.double)  # sequence j begins with the j-th unit vector: it sees column j
    kept = []
    model.head.register_forward_pre_hook(lambda _, given: kept.append(given[0].detach()))
    for _ in range(2):
        model(torch.zeros(width, 3, dtype=torch.long), state=((units,),))
    dropped = kept[0][:, 0].T  # W ∘ M
    share, slack = share_of(dropped)
    assert share == pytest.approx(P, abs=slack)
    torch.testing.assert_close(dropped[dropped != 0], torch.full_like(dropped[dropped != 0], 1 / width / (1 - P)))
    torch.testing.assert_close(kept[0][:, 1].T, dropped @ dropped)
    torch.testing.assert_close(kept[0][:, 2].T, dropped @ dropped @ dropped)
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(layer.weight_hh, torch.full_like(layer.weight_hh, 1 / width))
    model.eval()(torch.zeros(width, 1, dtype=torch.long), state=((units,),))
    torch.testing.assert_close(kept[2][:, 0].T, layer.weight_hh.detach())


@pytest.mark.parametrize("cell", ["tanh", "gru", "lstm"])
@pytest.mark.parametrize("name", ["weight_dropout", "recurrent_dropout", "layer_dropout", "embedding_dropout"])
def test_every_cell_trains_under_every_mask(name, cell):
    model = tiny(**{"cell": cell, name: P}, variational=name == "layer_dropout", last_hidden_size=4).train()
    torch.manual_seed(0)
    first = model(words(), labels=words()).loss
    first.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert model(words(), labels=words()).loss != first
    torch.manual_seed(0)
    assert model(words(), labels=words()).loss == first
    model.eval()
    assert model(words(), labels=words()).loss == model(words(), labels=words()).loss


def test_ar_and_tar_are_the_papers_sums_and_of_training_alone():
    model = tiny(ar=2.0, tar=1.5, output_dropout=0.5).train()
    plain = tiny(output_dropout=0.5).train()
    kept = {}
    model.rnn.register_forward_hook(lambda _, given, found: kept.update(hidden=found[0].detach()))
    model.head.register_forward_pre_hook(lambda _, given: kept.update(read=given[0].detach()))
    torch.manual_seed(3)
    found = model(words(), labels=words())
    torch.manual_seed(3)
    wanted = plain(words(), labels=words()).loss
    read, hidden = kept["read"].numpy(), kept["hidden"].numpy()
    added = 2.0 * (read**2).mean() + 1.5 * ((hidden[:, 1:] - hidden[:, :-1]) ** 2).mean()
    assert (found.loss - wanted).item() == pytest.approx(added, rel=1e-12)
    assert found.regularisation.item() == pytest.approx(added, rel=1e-12)
    assert model.eval()(words(), labels=words()).loss == plain.eval()(words(), labels=words()).loss


def test_ar_and_tar_of_micro_batches_sum_to_their_mean():
    model = tiny(ar=2.0, tar=1.5).train()
    labels = words(4)
    whole = model(labels, labels=labels).loss
    items = torch.tensor(4 * 5)
    parts = [model(part, labels=part, num_items_in_batch=items).loss for part in labels.split(1)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    shifted = [model(part, shift_labels=part, num_items_in_batch=torch.tensor(24)).loss for part in labels.split(1)]
    assert sum(shifted).item() == pytest.approx(model(labels, shift_labels=labels).loss.item(), rel=1e-6)
