"""Gradients of installed models, compared with plain models under checkpointing, autocast, hooks and other dtypes."""

import copy
import math

import pytest
import torch
from tiny_models import Allocations, V, assert_same_gradients, assert_same_step, batch, build, gradients, pair, step
from torch import nn
from torch.utils._pytree import tree_leaves

from tiewise.boundary.installation import install
from tiewise.boundary.saved import link_of


def _interleaved(model):
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        losses.append(model(**batch(model, seed=seed)).loss)
    (losses[0] + losses[2]).backward(retain_graph=True)
    losses[1].backward()
    losses[2].backward()


def _checkpointed(model):
    inputs = batch(model)
    torch.utils.checkpoint.checkpoint(lambda: model(**inputs).loss, use_reentrant=False).backward()


def _looked_up_before(model):
    inputs, lookup = batch(model), model.get_input_embeddings()
    rows = lookup(inputs["input_ids"]) * 2
    (model(inputs_embeds=rows, labels=inputs["labels"]).loss + lookup(torch.arange(5)).sum()).backward()


def _embeddings_given(model):
    inputs = batch(model)
    inputs["inputs_embeds"] = torch.randn(*inputs.pop("input_ids").shape, 16)
    model(**inputs).loss.backward()


def _frozen(model):
    model.get_input_embeddings().weight.requires_grad_(False)
    model(**batch(model)).loss.backward()


def _forward_called_directly(model):
    model.eval().forward(**batch(model)).loss.backward()
    assert link_of(model) is None or link_of(model).counts.fused == 0


WAYS = [(_interleaved, "llama"), (_interleaved, "bart"), (_checkpointed, "llama"), (_looked_up_before, "llama")]
WAYS += [(_embeddings_given, "llama"), (_embeddings_given, "bart"), (_frozen, "llama"), (_frozen, "bart")]
WAYS += [(_forward_called_directly, "bart")]


@pytest.mark.parametrize(("train", "name"), WAYS)
def test_installed_gradients_equal_plain_ones_in_every_way_of_training(train, name):
    model, plain, _ = pair(name)
    for other in (model, plain):
        torch.manual_seed(5)
        train(other.train())
    assert_same_gradients(gradients(model), gradients(plain), 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_gradient_checkpointing_keeps_the_step_of_the_plain_model(name, reentrant):
    model, plain, installed = pair(name)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(model, plain, batch(model))
    assert installed.counts.materialised == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_autocast_error_is_near_that_of_the_plain_model(name):
    model, plain, installed = pair(name)
    _, truth = step(copy.deepcopy(plain), batch(plain))

    def run(other):
        with torch.autocast("cpu", torch.bfloat16):
            loss, got = step(other, batch(other))
        got, true = (torch.cat([found[name].flatten() for name in truth]) for found in (got, truth))
        return loss, (got - true).norm() / true.norm()

    (loss, error), (wanted_loss, wanted_error) = run(model), run(plain)
    assert loss.dtype == torch.float32
    assert installed.counts.materialised == 0
    assert error <= 1.2 * wanted_error
    assert abs(loss - wanted_loss) <= 0.01 * wanted_loss


def test_bf16_model_has_an_fp32_loss_and_bf16_gradients():
    model, truth, _ = pair("llama")
    model.to(torch.bfloat16)
    truth.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    wanted, _ = step(truth, batch(truth))
    loss, got = step(model, batch(model))
    assert loss.dtype == torch.float32
    assert abs(loss - wanted) <= 0.01 * wanted
    assert {gradient.dtype for gradient in got.values()} == {torch.bfloat16}


HOOKS = ["register_full_backward_hook", "register_full_backward_pre_hook", "register_module_full_backward_hook"]
HOOKS += ["register_forward_pre_hook"]


def _seen_by_hooks(model, inputs, kind):
    """Return the tensors that a hook sees in a training step, and the step."""
    seen, head = [], model.get_output_embeddings()

    def see(module, *given):
        if module is head:
            seen.extend(x.detach().clone() for x in tree_leaves(given) if torch.is_tensor(x))

    everywhere = kind.startswith("register_module")
    handle = getattr(nn.modules.module, kind)(see) if everywhere else getattr(head, kind)(see)
    with handle:
        return seen, step(model, inputs)


@pytest.mark.filterwarnings("ignore:.*ackward hook")
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "bart"])
def test_hooks_on_the_head_see_the_tensors_of_the_plain_model(name, kind):
    model, plain, installed = pair(name)
    inputs = batch(model)
    wanted_seen, (wanted_loss, wanted) = _seen_by_hooks(plain, inputs, kind)
    seen, (loss, got) = _seen_by_hooks(model, inputs, kind)
    assert wanted_seen
    torch.testing.assert_close(seen, wanted_seen, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-6, atol=0)
    assert_same_gradients(got, wanted, 1e-5)
    assert installed.counts.materialised == (kind != "register_forward_pre_hook")
    step(model, inputs)
    assert installed.counts.materialised == (
        kind != "register_forward_pre_hook"
    )  # no longer, because the hook is removed


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "t5", "bert"])
def test_fp64_model_takes_the_step_of_the_plain_model(name):
    model, plain, installed = pair(name)
    inputs = batch(model.double())
    plain.double()
    exact = name in ("t5", "bert")
    loss, _ = assert_same_step(model, plain, inputs, *((1e-13, 1e-14) if exact else (1e-6, 2e-7)))
    assert (installed.counts.fused, installed.counts.materialised) == (1, 0)
    assert loss.dtype == (torch.float64 if exact else torch.float32)


def test_failed_forward_leaves_the_model_usable():
    model, plain, _ = pair("llama")
    inputs = batch(model)
    with pytest.raises(IndexError):
        model(input_ids=inputs["input_ids"], labels=inputs["labels"] + V)
    assert not link_of(model).is_running
    assert_same_gradients(step(model, inputs)[1], step(plain, inputs)[1], 1e-5)


def test_recorded_path_norms_equal_those_of_autograd():
    model, plain, handle = pair("llama")
    record = handle.track()
    split = build("llama", tied=False)
    split.load_state_dict(plain.state_dict())
    for seed in range(3):
        inputs = batch(model, seed=seed)
        torch.manual_seed(seed)
        model.train()(**inputs).loss.backward()
        torch.manual_seed(seed)
        split.train()(**inputs).loss.backward()
    parts = split.model.embed_tokens.weight.grad, split.lm_head.weight.grad
    got = handle.path_norms()
    assert got.a == pytest.approx(parts[0].norm().item(), rel=1e-5)
    assert got.b == pytest.approx(parts[1].norm().item(), rel=1e-5)
    assert got.cosine == pytest.approx(torch.cosine_similarity(*(p.flatten() for p in parts), dim=0).item(), abs=1e-5)
    assert install(model).record is record
    assert install(model).track(False) is None
    two = install(split).path_norms()  # two tables need no record
    assert (two.a, two.b) == pytest.approx((got.a, got.b), rel=1e-5)
    assert math.isnan(two.cosine)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5", "bert"])
def test_training_step_allocates_no_logits_and_one_gradient_buffer(name):
    vocabulary, rows, length = 30011, 4, 512
    model = build(name, vocab_size=vocabulary, max_position_embeddings=length)
    install(model)
    inputs = batch(model, rows, length)
    with Allocations(vocabulary * 16) as memory:
        model.train()(**inputs).loss.backward()
    assert memory.largest < rows * length * vocabulary / 2
    assert len(memory.made) == 1, memory.made
