"""Batches whose labels are all ignored: loss and gradients are zero for any `num_items_in_batch`."""

import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from tests.training.models.albert_tools import TINY
from tests.training.models.rnn_tools import tiny
from tests.training.models.rnn_tools import words as words_of_rnn
from tiny_models import V, batch, build, trainer, variant
from transformers.trainer_pt_utils import LabelSmoother

from tiewise.boundary.installation import install
from tiewise.training.models import OpenAlbertConfig, OpenAlbertForPreTraining

ITEMS = [None, 0, torch.tensor(0), 5]
FAMILIES = ("llama", "gpt2", "gemma2", "t5", "bart", "bert", "albert", "open_albert", "rnn")
SPECS = [*((name, None) for name in FAMILIES), ("llama", "factored:4"), ("gpt2", "untied"), ("bert", "tied+bias")]


def _model(name):
    if name == "rnn":
        return tiny(ar=2.0, tar=1.0).train()  # with penalties on activations, which are part of the loss
    if name == "open_albert":
        return OpenAlbertForPreTraining(OpenAlbertConfig(**TINY)).train()
    if name == "albert":
        settings = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
        return tr.AlbertForMaskedLM(tr.AlbertConfig(vocab_size=V, **settings)).train()
    return build(name).train()


def _unlabelled(name, model):
    ids = words_of_rnn() if name == "rnn" else batch(model)["input_ids"]
    return {"input_ids": ids, "labels": torch.full_like(ids, -100)}


def _assert_zero(model):
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found
    assert all(not gradient.any() for gradient in found)  # a nan would count as nonzero


@pytest.mark.parametrize("items", ITEMS, ids=repr)
@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_loss_and_gradients_are_zero_without_labels(name, spec, items):
    model = _model(name)
    installed = install(model, spec)
    inputs = _unlabelled(name, model)
    loss = model(**inputs, **({} if items is None else {"num_items_in_batch": items})).loss
    assert installed.counts.materialised == 0
    if items is None and name == "rnn":
        return  # its penalties are a mean over all tokens, also unlabelled ones
    assert loss == 0
    loss.backward()
    _assert_zero(model)


def test_pretraining_albert_has_zero_loss_without_positions_to_predict():
    """The pretraining ALBERT computes logits only at given positions, here at none."""
    model = _model("open_albert")
    install(model)
    inputs = _unlabelled("open_albert", model)
    loss = model(**inputs, predict=inputs["labels"] != -100).loss
    assert loss == 0
    loss.backward()
    _assert_zero(model)


@pytest.mark.parametrize("items", [0, torch.tensor(0)], ids=repr)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradients_are_zero_if_a_loss_without_labels_is_divided_by_zero(name, reduction, items):
    """Division by zero makes the loss nan, as in plain torch; the gradients are zero in both."""
    for installs in (False, True):
        model = _model(name)
        if installs:
            install(model)
        inputs = _unlabelled(name, model)
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction=reduction)
        (loss.sum() / torch.as_tensor(items)).backward()
        _assert_zero(model)


@pytest.mark.parametrize("items", ITEMS, ids=repr)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_label_smoothers_give_zero_gradients_without_labels(name, items):
    model = _model(name)
    installed = install(model)
    inputs = _unlabelled(name, model)
    own = installed.label_smoother(0.2)(
        model(input_ids=inputs["input_ids"]), inputs["labels"], num_items_in_batch=items
    )
    assert own == 0
    own.backward()
    _assert_zero(model)
    LabelSmoother(0.2)(model(input_ids=inputs["input_ids"]), inputs["labels"], num_items_in_batch=items).backward()
    _assert_zero(model)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_trainer_step_without_labels_changes_no_parameter(name, tmp_path):
    model = _model(name)
    install(model)
    inputs = _unlabelled(name, model)
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(*inputs.values(), strict=True)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    settings = {"per_device_train_batch_size": 3, "max_steps": 1, "optim": "sgd", "learning_rate": 0.1}
    made = trainer(model, tmp_path, rows, logging_steps=1, logging_nan_inf_filter=False, **settings)
    made.train()
    assert made.state.log_history[0]["loss"] == 0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_plain_rnn_divides_no_penalty_by_zero():
    model = tiny(ar=2.0, tar=1.0).train()
    loss = model(**_unlabelled("rnn", model), num_items_in_batch=0).loss
    assert loss == 0
    loss.backward()
    _assert_zero(model)


@pytest.mark.parametrize("name", ["bert", "albert", "t5"])
def test_loss_is_divided_by_a_nonzero_number_of_items(name):
    model = _model(name).eval()
    install(model)
    inputs = batch(model)
    one, four = (model(**inputs, num_items_in_batch=torch.tensor(n)).loss for n in (1, 4))
    torch.testing.assert_close(one, 4 * four)


def test_bart_decoder_has_zero_loss_without_labels():
    model = variant("bart", tr.BartForCausalLM).train()
    install(model)
    loss = model(**_unlabelled("bart", model), num_items_in_batch=torch.tensor(0)).loss
    assert loss == 0
    loss.backward()
    _assert_zero(model)
