"""`torch.autograd.grad(loss, logits)` of an installed model, compared with the graph of the plain model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import FAMILIES, V, batch, build

import tiewise

grad = torch.autograd.grad


def _pair(name, training=False, dtype=torch.float64):
    """Return an installed model, the plain model and their inputs."""
    model = build(name).to(dtype).train(training)
    plain = copy.deepcopy(model)
    tiewise.install(model)
    return model, plain, batch(model)


def _run(model, inputs):
    """Run a forward with fixed dropout."""
    torch.manual_seed(0)
    return model(**inputs)


def _assert_close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_logit_gradient_of_the_model_loss_equals_the_plain_one(name, training):
    model, plain, inputs = _pair(name, training, torch.float32)
    got, wanted = (_run(one, inputs) for one in (model, plain))
    (found,) = grad(3 * got.loss, got.logits, retain_graph=True)
    _assert_close(found, grad(3 * wanted.loss, wanted.logits, retain_graph=True)[0])
    got.loss.backward(), wanted.loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


OTHER = {
    "smoothing": lambda z, t: F.cross_entropy(z.view(-1, V), t, label_smoothing=0.2),
    "sum": lambda z, t: F.cross_entropy(z.view(-1, V), t, reduction="sum"),
    "none": lambda z, t: F.cross_entropy(z.view(-1, V), t, reduction="none") @ torch.arange(len(t)).to(z.dtype),
    "weights": lambda z, t: F.cross_entropy(z.view(-1, V), t, weight=torch.arange(1, V + 1).to(z.dtype)),
    "ignored index": lambda z, t: F.cross_entropy(z.view(-1, V), t, ignore_index=int(t[0])),
    "rows": lambda z, t: sum(F.cross_entropy(row, t[: len(row)]) for row in z),
    "two losses": lambda z, t: F.cross_entropy(z.view(-1, V), t) * F.cross_entropy(z.view(-1, V), t.roll(1)),
    "a loss and the logits": lambda z, t: F.cross_entropy(z.view(-1, V), t) + (z * z).mean(),
    "in place": lambda z, t: F.cross_entropy(z.view(-1, V), t).mul_(7),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("loss", OTHER)
def test_logit_gradient_of_other_losses_equals_the_plain_one(loss, training):
    model, plain, inputs = _pair("llama", training)
    targets = inputs["labels"].flatten().clamp(min=0)
    found = []
    for one in (model, plain):
        logits = _run(one, inputs).logits
        found.append(grad(OTHER[loss](logits, targets), logits)[0])
    _assert_close(*found)


def test_logit_gradient_uses_the_labels_of_the_forward():
    model, plain, inputs = _pair("bert")
    labels = inputs.pop("labels")
    found = []
    for one in (model, plain):
        own = labels.clone()
        output = one(**inputs, labels=own)
        if one is model:
            own.fill_(3)
        found.append(grad(output.loss, output.logits)[0])
    _assert_close(*found)


def test_logit_gradient_of_ignored_labels_equals_the_plain_one():
    model, plain, inputs = _pair("bert")
    some, none = inputs["labels"].clone(), torch.full_like(inputs["labels"], -100)
    some[:, ::2] = -100
    found = []
    for one in (model, plain):
        output = one(**inputs | {"labels": some})
        found.append(grad(output.loss, output.logits)[0])
    _assert_close(*found)
    output = model(**inputs | {"labels": none})
    assert torch.equal(grad(output.loss, output.logits)[0], torch.zeros_like(found[0]))


def test_logit_gradient_is_computed_together_with_other_inputs():
    model, plain, inputs = _pair("t5")
    found = []
    for one in (model, plain):
        output = _run(one, inputs)
        found.append(grad((output.loss,), [one.get_input_embeddings().weight, output.logits]))
    _assert_close(found[0], found[1])


def test_second_derivative_by_logits_equals_the_plain_one():
    model, plain, inputs = _pair("gpt2")
    found = []
    for one in (model, plain):
        logits = _run(one, inputs).logits
        loss = F.cross_entropy(logits.view(-1, V), inputs["labels"].flatten().clamp(min=0))
        (first,) = grad(loss, logits, create_graph=True)
        found.append(grad(first.square().sum(), logits)[0])
    _assert_close(*found)


def test_unused_logits_raise_or_give_none_as_in_torch():
    model, _, inputs = _pair("llama")
    one, other = model(**inputs), model(**inputs)
    with pytest.raises(RuntimeError, match="allow_unused=True"):
        grad(one.loss, other.logits, retain_graph=True)
    assert grad(one.loss, other.logits, retain_graph=True, allow_unused=True) == (None,)
    assert not grad(one.loss, other.logits, materialize_grads=True)[0].any()
