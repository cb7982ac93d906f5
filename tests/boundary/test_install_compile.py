"""Installed models under `torch.compile`: the same loss and gradients, and the logits stay uncomputed."""

import copy

import pytest
import torch
from tiny_models import assert_same_gradients, batch, build, step
from torch._dynamo.testing import CompileCounter

from tiewise.boundary.install import install

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _step(compiled, model, inputs):
    model.train()
    torch.manual_seed(5)
    loss = compiled(**inputs).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


CASES = [*((name, None) for name in ("llama", "gemma2", "cohere", "bert", "bart")), ("llama", "factored:6+pad=3")]


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_loss_and_gradients(name, spec):
    model = build(name)
    for module in model.modules():  # compiled dropout draws other numbers
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for part in model.modules():
        for attribute in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
    install(model, spec)
    eager, inputs = copy.deepcopy(model), batch(model)
    loss, got = _step(torch.compile(model), model, inputs)
    wanted_loss, wanted = step(eager, inputs)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=0)
    assert_same_gradients(got, wanted, 1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_one_graph(name):
    model = build(name)
    install(model)
    counter = CompileCounter()
    compiled = torch.compile(model.train(), backend=counter, fullgraph=True)
    out = compiled(**batch(model))
    out.loss.backward()
    assert counter.frame_count == 1
    assert "logits" not in out


def test_evaluation_hands_out_real_logits():
    model = build("llama").eval()
    inputs = batch(model)
    wanted = model(**inputs)
    install(model)
    with torch.no_grad():
        got = torch.compile(model)(**inputs)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
