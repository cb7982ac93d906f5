"""Tests of recurrent dropout: share, place and extent of each mask, and no mask in evaluation."""

import pytest
import torch
from rnn_tools import tiny, words

P = 0.3


def assert_masked(x, of=1.0):
    """Check that a share P is zero and the rest equals `of` / (1 − P)."""
    assert (x == 0).double().mean().item() == pytest.approx(P, abs=5 * (P * (1 - P) / x.numel()) ** 0.5)
    torch.testing.assert_close(x[x != 0], torch.full_like(x[x != 0], of / (1 - P)))


def constant_model(width=400, **settings):
    """Return a model whose first layer outputs 1 and whose other layers are identities."""
    model = tiny(cell="relu", lstm_bias="one", hidden_size=width, **settings).train()
    with torch.no_grad():
        model.embed.weight.fill_(1)
        for layer in model.rnn.layers:
            for parameter in layer.parameters():
                parameter.zero_()
        model.rnn.layers[0].bias_ih.fill_(1)
        for layer in list(model.rnn.layers)[1:]:
            layer.weight_ih.copy_(torch.eye(*layer.weight_ih.shape))
    return model


def module_input(model, module, ids=None):
    """Return the input of a module in one forward pass. The default is 3 sequences of 6 words."""
    kept = []
    with torch.no_grad():
        handle = module.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        model(words() if ids is None else ids)
        handle.remove()
    return kept[0]


# each setting and the module that reads the masked values; layers of two widths take two calls
PLACES = {"input_dropout": "rnn", "layer_dropout": "head", "output_dropout": "head"}
CASES = [(name, {}) for name in PLACES] + [("layer_dropout", {"last_hidden_size": 200})]


@pytest.mark.parametrize("variational", [True, False])
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_each_dropout_setting_masks_activations_at_one_place_only(name, sizes, variational):
    model = constant_model(**{name: P}, **sizes, variational=variational)
    behind = model.get_submodule(PLACES[name])
    torch.manual_seed(1)
    found = module_input(model, behind)
    assert_masked(found[:, 0] if variational else found)
    assert torch.equal(found[:, 0], found[:, 1]) == variational
    assert torch.equal(found, found[:, :1].expand_as(found)) == variational
    assert not torch.equal(found[0], found[1])
    clean = model.head if name == "input_dropout" else model.rnn
    assert module_input(model, clean).unique().tolist() == [1.0]
    assert torch.equal(module_input(model.eval(), behind), torch.ones_like(found))


def test_embedding_dropout_zeroes_whole_words_at_every_position():
    model = constant_model(embedding_dropout=P, width=3, vocab_size=2000)
    ids = torch.arange(2000).repeat(2, 2)[:, torch.randperm(4000)]
    found = module_input(model, model.rnn, ids)
    by_word = torch.zeros(2000, 3, dtype=torch.double).index_copy_(0, ids[0], found[0])
    assert torch.equal(found, by_word[ids])
    assert torch.equal(by_word, by_word[:, :1].expand_as(by_word))
    assert_masked(by_word[:, 0])
    assert torch.equal(module_input(model.eval(), model.rnn, ids), torch.ones_like(found))


@pytest.mark.parametrize("input_matrix", [True, False])
def test_recurrent_dropout_uses_one_mask_per_sequence(input_matrix):
    sizes = {"hidden_size": 400, "num_hidden_layers": 1, "input_matrix": input_matrix}
    model = tiny(cell="relu", lstm_bias="one", recurrent_dropout=P, **sizes)
    with torch.no_grad():
        model.embed.weight.fill_(0)
        layer = model.rnn.layers[0]
        layer.weight_hh.copy_(torch.eye(400))
        layer.bias_ih.fill_(1)
    torch.manual_seed(1)
    h = module_input(model.train(), model.head)
    mask = h[:, 1] - 1  # h₁ = 1, h₂ = 1 + m, h₃ = 1 + m·h₂ …
    assert_masked(mask)
    for t in range(1, h.shape[1]):
        torch.testing.assert_close(h[:, t], 1 + mask * h[:, t - 1])
    assert not torch.equal(mask[0], mask[1])
    torch.testing.assert_close(
        module_input(model.eval(), model.head)[0, :, 0], torch.arange(1.0, 7, dtype=torch.double)
    )


def test_weight_dropout_uses_one_mask_for_all_sequences_and_words():
    width = 60
    model = tiny(cell="relu", lstm_bias="one", hidden_size=width, num_hidden_layers=1, weight_dropout=P)
    with torch.no_grad():
        model.embed.weight.zero_()
        layer = model.rnn.layers[0]
        layer.bias_ih.zero_()
        layer.weight_hh.fill_(1 / width)
    model.train()
    torch.manual_seed(1)
    units = torch.eye(width, dtype=torch.double)  # sequence j starts from the j-th unit vector, so it reads column j
    kept = []
    model.head.register_forward_pre_hook(lambda _, given: kept.append(given[0].detach()))
    for _ in range(2):
        model(torch.zeros(width, 3, dtype=torch.long), state=((units,),))
    dropped = kept[0][:, 0].T  # W ∘ M
    assert_masked(dropped, of=1 / width)
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


def test_ar_and_tar_match_published_formulas_and_apply_only_in_training():
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


def test_losses_with_ar_and_tar_sum_over_micro_batches_to_full_batch_loss():
    model = tiny(ar=2.0, tar=1.5).train()
    labels = words(4)
    whole = model(labels, labels=labels).loss
    items = torch.tensor(4 * 5)
    parts = [model(part, labels=part, num_items_in_batch=items).loss for part in labels.split(1)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    shifted = [model(part, shift_labels=part, num_items_in_batch=torch.tensor(24)).loss for part in labels.split(1)]
    assert sum(shifted).item() == pytest.approx(model(labels, shift_labels=labels).loss.item(), rel=1e-6)
