"""Properties that every loss of a head shares: leading dimensions, frozen inputs, ignored tokens and refusals."""

from functools import partial

import pytest
import torch
from tests.boundary.ops.test_cross_entropy import E, N, gradients, problem

from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.log_prob import linear_log_prob, vocabulary_statistics
from tiewise.boundary.ops.soft_targets import augmented_cross_entropy, linear_divergence
from tiewise.core.errors import UnsupportedError


def divergence(h, w, targets, bias=None, **options):
    return linear_divergence(h, w, h.detach()[..., :5].cos(), w.detach()[:, :5], targets, bias, **options)


BENT = {"softcap": 5.0, "scale": 0.8}
# losses per token; each key starts with the name that the loss uses in its error messages
EACH = {
    "linear_cross_entropy": partial(linear_cross_entropy, reduction="none", z_loss=0.1, **BENT),
    "log-probabilities": partial(linear_log_prob, temperature=0.7, **BENT),
    "log-probabilities, lse": lambda *given, **more: vocabulary_statistics(*given, temperature=0.7, **BENT, **more).lse,
    "entropies": lambda *given, **more: linear_log_prob(*given, entropy=True, temperature=0.7, **BENT, **more)[1],
    "linear_divergence": partial(divergence, reduction="none"),
    "augmented_cross_entropy": partial(augmented_cross_entropy, reduction="none"),
}
EVERY = EACH | {
    "linear_cross_entropy, mean": partial(linear_cross_entropy, z_loss=0.1),
    "linear_cross_entropy, sum": partial(linear_cross_entropy, reduction="sum", label_smoothing=0.1, **BENT),
    "linear_divergence, mean, forward": partial(divergence, beta=0),
    "linear_divergence, sum, reverse": partial(divergence, beta=1, reduction="sum"),
    "augmented_cross_entropy, mean": augmented_cross_entropy,
}
every_loss = pytest.mark.parametrize("name", EVERY)


def summed(name):
    """Return a function that sums the losses of all tokens with a different weight for each."""

    def loss(*given, **more):
        each = EVERY[name](*given, **more)
        return (each * torch.linspace(1, 2, each.numel()).view_as(each)).sum()

    return loss


@pytest.mark.parametrize("name", EACH)
def test_losses_accept_any_leading_dimensions(name):
    (h, w, _), t = problem(n=24)
    flat = EACH[name](h, w, t)
    assert torch.equal(EACH[name](h.view(2, 3, 4, E), w, t.view(2, 3, 4)), flat.view(2, 3, 4))
    torch.testing.assert_close(EACH[name](h[1], w, t[1]), flat[1])


@pytest.mark.parametrize("frozen", [0, 1])
@every_loss
def test_frozen_side_gets_no_gradient_and_the_other_side_gets_its_gradient(name, frozen):
    (h, w, _), t = problem()
    leaves = [h.clone(), w.clone()]
    leaves[1 - frozen].requires_grad_()
    summed(name)(*leaves, t).backward()
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[1 - frozen].grad, gradients(summed(name), (h, w, None), t)[1][1 - frozen])
    with torch.no_grad():
        assert not EVERY[name](*leaves, t).requires_grad


@pytest.mark.parametrize("n", [0, N])
@every_loss
def test_loss_and_gradients_are_zero_without_counted_tokens(name, n):
    inputs, t = problem(torch.float32, n=n)
    loss, grads = gradients(summed(name), inputs, t.fill_(-100))
    assert loss == 0
    assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(grads, inputs, strict=True))


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.int8, torch.uint8])
@every_loss
def test_losses_accept_targets_of_any_integer_dtype(name, kind):
    (h, w, _), t = problem()
    t = t.clamp(min=0)
    assert torch.equal(EVERY[name](h, w, t.to(kind)), EVERY[name](h, w, t))


@every_loss
def test_losses_refuse_a_table_without_rows(name):
    (h, w, _), t = problem()
    for targets in (t, torch.full_like(t, -100)):
        with pytest.raises(ValueError, match=r"has no rows; a vocabulary needs V ≥ 1 words"):
            EVERY[name](h, w[:0], targets)


@every_loss
def test_table_without_columns_gives_the_distribution_of_its_bias(name):
    """If E = 0, every product is 0, as with a table of zeros [V, 1]."""
    (h, w, b), t = problem()
    found, grads = gradients(summed(name), (h[:, :0], w[:, :0], b), t)
    wanted, true = gradients(summed(name), (h[:, :1], torch.zeros_like(w[:, :1]), b), t)
    torch.testing.assert_close(found, wanted)
    assert [x.shape for x in grads] == [h[:, :0].shape, w[:, :0].shape, b.shape]
    torch.testing.assert_close(grads[2], true[2])


@pytest.mark.parametrize("kind", [torch.bool, torch.complex64])
@every_loss
def test_losses_refuse_bool_and_complex_targets(name, kind):
    (h, w, _), t = problem()
    with pytest.raises(UnsupportedError, match=f"targets of type {kind}; pass class indices"):
        EVERY[name](h, w, t.to(kind))


# the losses read the processor's name through a cache; Dynamo warns that it traces the cached function
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@every_loss
def test_compiled_losses_equal_eager_ones(name):
    inputs, t = problem(torch.float32)

    def step(h, w, targets, bias):
        return summed(name)(h * 2, w, targets, bias=bias)

    in_one = not name.startswith(("linear_divergence", "augmented"))
    compiled = torch.compile(step, fullgraph=in_one, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, inputs, t), gradients(step, inputs, t))


@every_loss
def test_losses_refuse_second_derivatives_and_function_transforms(name):
    (h, w, _), t = problem()
    with pytest.raises(UnsupportedError, match=f"{name.partition(',')[0]}.* no second derivative"):
        torch.autograd.grad(summed(name)(h.requires_grad_(), w, t), h, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: summed(name)(x, w, t))(h.detach())
