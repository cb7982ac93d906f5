"""The augmented loss and its gradients, compared with the formula in fp64 and limits from the paper."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.boundary.tiny_models import Allocations

from tiewise.boundary.ops.soft_targets import AugmentedOptions, augmented_cross_entropy
from tiewise.core.errors import UnsupportedError

N, V, E, WIDE = 19, 31, 6, 9


def oracle(h, w, t, table=None, b=None, **options):
    """Return the loss by its formula in fp64, from all logits and soft targets."""
    o = AugmentedOptions(**options)
    w, table = w.double(), w.double() if table is None else table.double()
    z = h.double() @ w.T + (0 if b is None else b.double())
    at, valid = t.clamp(min=0), t != o.ignore_index
    soft = torch.softmax(table[at] @ table.T / o.temperature, 1)
    soft = soft if o.through_targets else soft.detach()
    divergence = (soft * (soft.log() - torch.log_softmax(z / o.temperature, 1))).sum(1)
    each = (o.hard * F.cross_entropy(z, at, reduction="none") + o.alpha * divergence).where(valid, 0)
    if o.reduction == "none":
        return each
    return each.sum() / valid.sum().clamp(min=1) if o.reduction == "mean" else each.sum()


def problem(seed=0, dtype=torch.float64, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    h, w, table, b = (
        (spread * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)
        for shape in ((N, E), (V, E), (V, WIDE), (V,))
    )
    t = torch.randint(0, V, (N,), generator=g)
    t[::4] = -100
    t[1] = t[2]  # one target occurs twice
    return h, w, table, b, t


def gradients(function, h, w, table, b, t, upstream=None, **options):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in (h, w, table, b)]
    loss = function(leaves[0], leaves[1], t, leaves[2], leaves[3], **options)
    loss.backward(upstream)
    return loss.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves if x is not None]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("one_table", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "chosen", [{"alpha": 0.7, "temperature": 3.0}, {"hard": 0.0, "alpha": 40.0, "chunk": 4}, {"alpha": 0.0}]
)
def test_augmented_loss_equals_the_formula(reduction, through, one_table, with_bias, chosen):
    h, w, table, b, t = problem()
    case = (h, w, None if one_table else table, b if with_bias else None, t)
    options = chosen | {"reduction": reduction, "through_targets": through}
    upstream = torch.linspace(-1, 2, N, dtype=torch.float64) if reduction == "none" else torch.tensor(1.7).double()
    loss, got = gradients(augmented_cross_entropy, *case, upstream, **options)
    truth, wanted = gradients(oracle, *case, upstream, **options)
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@given(seed=st.integers(0, 10**6), chunk=st.integers(1, N + 3), tau=st.floats(0.5, 50), alpha=st.floats(0, 10))
def test_augmented_loss_does_not_depend_on_the_chunk_size(seed, chunk, tau, alpha):
    h, w, table, b, t = problem(seed)
    options = {"alpha": alpha, "temperature": tau, "through_targets": True}
    loss, got = gradients(augmented_cross_entropy, h, w, table, b, t, chunk=chunk, **options)
    truth, wanted = gradients(oracle, h, w, table, b, t, **options)
    torch.testing.assert_close(loss, truth, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def test_divergence_of_equal_distributions_is_zero():
    """If the features are the vectors of the targets, tied and without bias, then ŷ = ỹ."""
    _, w, *_, t = problem()
    h = w[t.where(t >= 0, 0)]
    loss = augmented_cross_entropy(h, w, t, hard=0.0, temperature=4.0)
    assert abs(float(loss)) < 1e-14


def test_high_temperature_gradient_tends_to_the_centred_logit_difference():
    """As τ grows, τ²V times the gradient by z tends to the centred z − table @ u (§4 of the paper)."""
    h, w, table, _, t = problem()
    t = t.where(t >= 0, 0)
    z = (h @ w.T).requires_grad_()
    tau = 1e5
    loss = augmented_cross_entropy(z, torch.eye(V, dtype=z.dtype), t, table, hard=0.0, temperature=tau, reduction="sum")
    loss.backward()
    apart = z.detach() - table[t] @ table.T
    torch.testing.assert_close(z.grad * tau**2 * V, apart - apart.mean(1, keepdim=True), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "spread", "near", "gradients_near"), [(torch.float32, 3.0, 1e-5, 2e-6), (torch.bfloat16, 1.0, 2e-2, 0.1)]
)
def test_augmented_loss_in_fp32_and_bf16_stays_near_fp64(dtype, spread, near, gradients_near):
    h, w, table, b, t = problem(1, dtype, spread)
    options = {"alpha": 2.0, "temperature": 5.0}
    loss, got = gradients(augmented_cross_entropy, h, w, table, b, t, **options)
    truth, wanted = gradients(oracle, *(x.double() for x in (h, w, table, b)), t, **options)
    assert loss.dtype == torch.float32
    assert abs(float(loss) - float(truth)) < near * abs(float(truth))
    for a, c in zip(got, wanted, strict=True):
        assert a.dtype == dtype
        assert float((a - c).norm()) <= gradients_near * float(c.norm())


def test_a_frozen_input_table_gets_no_gradient_through_the_targets():
    h, w, table, b, t = problem()
    augmented_cross_entropy(h, w.requires_grad_(), t, table, b, through_targets=True).backward()
    assert w.grad is not None
    assert table.grad is None


def test_augmented_loss_allocates_nothing_larger_than_a_chunk():
    h, w, table, b, t = problem()
    with Allocations() as memory:
        gradients(augmented_cross_entropy, h, w, table, b, t, chunk=5, through_targets=True)
    assert memory.largest <= V * max(5, WIDE)
    with Allocations() as memory:
        gradients(oracle, h, w, table, b, t)
    assert memory.largest >= N * V


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"alpha": -1.0}, "alpha"),
        ({"reduction": "max"}, "reduction"),
        ({"table": torch.zeros(V - 1, WIDE)}, "table has shape"),
        ({"targets": torch.full((N,), V)}, "outside the vocabulary"),
        ({"targets": torch.zeros(N)}, "probability"),
    ],
)
def test_augmented_loss_refuses_invalid_options_and_shapes(change, said):
    h, w, table, b, t = problem()
    with pytest.raises((ValueError, IndexError, UnsupportedError), match=said):
        augmented_cross_entropy(**({"features": h, "weight": w, "targets": t, "table": table, "bias": b} | change))
