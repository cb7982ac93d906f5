"""Installed models of every named family, compared with the plain models: loss, gradients, logits, generated tokens."""

import copy

import numpy as np
import pytest
import torch
import transformers as tr
from tiny_models import (
    FAMILIES,
    V,
    assert_same_gradients,
    assert_same_step,
    batch,
    build,
    gradients,
    pair,
    step,
    without_dropout,
)
from torch._dynamo.testing import CompileCounter

import tiewise.hf
from tiewise.boundary.installation import install

CASES = [(name, tied) for name in FAMILIES for tied in (True, False)]


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_installed_model_keeps_the_loss_and_gradients_of_its_family(name, tied):
    model, plain, installed = pair(name, tied=tied)
    assert_same_step(model, plain, batch(model))
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    one = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert one == (installed.spec.kind == "tied")


@pytest.mark.parametrize("spec", ["tied", "untied", "factored:6"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "t5", "bart"])
def test_installed_model_generates_the_same_tokens(name, spec):
    model = build(name)
    install(model, spec)
    plain = tiewise.hf.plain_copy(copy.deepcopy(model))  # the original class of the family
    ids = batch(model)["input_ids"][:, :4]
    for training in (False, True):  # training mode has dropout
        for how in ({}, {"do_sample": True, "top_k": 20}, {"num_beams": 2}):
            torch.manual_seed(0)
            wanted = plain.train(training).generate(ids, max_new_tokens=3, **how)
            torch.manual_seed(0)
            assert torch.equal(model.train(training).generate(ids, max_new_tokens=3, **how), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_installed_model_returns_the_same_logits_in_evaluation(name):
    model = build(name).eval()
    inputs = batch(model)
    with torch.no_grad():
        wanted = model(**inputs)
        installed = install(model)
        got = model(**inputs)
        torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-6, atol=0)
        assert installed.counts.materialised == 0
        assert got.logits.shape == wanted.logits.shape
        assert installed.counts.materialised == 0
        assert torch.equal(got.logits + 0, wanted.logits)
        assert installed.counts.materialised == 1


def test_install_keeps_the_attention_type_of_bigbird():
    """BigBird switches permanently to full attention on a short batch. Install runs the model on one."""
    settings = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings |= {"intermediate_size": 24, "block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 128}
    torch.manual_seed(0)
    model = tr.BigBirdForMaskedLM(tr.BigBirdConfig(**settings)).eval()
    plain, ids = copy.deepcopy(model), torch.arange(3, 51)[None].repeat(1, 2)
    install(model)
    assert model.bert.attention_type == "block_sparse"
    np.random.seed(0)
    wanted = plain(input_ids=ids).logits
    np.random.seed(0)
    torch.testing.assert_close(model(input_ids=ids).logits + 0, wanted, rtol=1e-5, atol=1e-6)


# --- under torch.compile loss and gradients are the same, and no logits are computed


COMPILED = [*((name, None) for name in ("llama", "gemma2", "cohere", "bert", "bart")), ("llama", "factored:6+pad=3")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spec"), COMPILED)
def test_compiled_loss_and_gradients_equal_eager_ones(name, spec):
    torch._dynamo.reset()
    model = without_dropout(build(name))  # compiled dropout draws different random numbers
    install(model, spec)
    eager, inputs = copy.deepcopy(model), batch(model)
    loss = torch.compile(model.train())(**inputs).loss
    loss.backward()
    wanted_loss, wanted = step(eager, inputs)
    torch.testing.assert_close(loss.detach(), wanted_loss, rtol=1e-5, atol=0)
    assert_same_gradients(gradients(model), wanted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_installed_model_compiles_in_one_graph(name):
    torch._dynamo.reset()
    model = build(name)
    install(model)
    counter = CompileCounter()
    out = torch.compile(model.train(), backend=counter, fullgraph=True)(**batch(model))
    out.loss.backward()
    assert counter.frame_count == 1
    assert "logits" not in out


@pytest.mark.slow
def test_compiled_evaluation_returns_computed_logits():
    torch._dynamo.reset()
    model = build("llama").eval()
    inputs = batch(model)
    wanted = model(**inputs)
    install(model)
    with torch.no_grad():
        got = torch.compile(model)(**inputs)
    torch.testing.assert_close(got.loss, wanted.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
