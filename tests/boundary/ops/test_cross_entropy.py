"""The fused loss and its gradients, compared with the formula in fp64 for every option."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

N, V, E = 23, 57, 12
OPTIONS = [
    {},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05},
    {"class_weight": True},
    {"label_smoothing": 0.1, "class_weight": True, "z_loss": 0.01},
    {"softcap": 3.0, "label_smoothing": 0.1, "class_weight": True, "z_loss": 0.01, "scale": 1.7},
]


def problem(dtype=torch.float64, n=N, v=V, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(n, E, generator=g, dtype=torch.float64) * spread
    w = torch.randn(v, E, generator=g, dtype=torch.float64)
    b = torch.randn(v, generator=g, dtype=torch.float64)
    t = torch.randint(0, v, (n,), generator=g)
    t[::5] = -100
    return [x.to(dtype) for x in (h, w, b)], t


def options_of(chosen, v=V):
    chosen = dict(chosen)
    if chosen.get("class_weight"):
        chosen["class_weight"] = torch.rand(v, generator=torch.Generator().manual_seed(7), dtype=torch.float64) + 0.1
    return chosen


def gradients(function, inputs, *args, upstream=None, **kw):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    h, w, b = leaves
    out = function(h, w, *args, bias=b, **kw)
    out.backward(upstream)
    return out.detach(), [x.grad for x in leaves if x is not None]


def plain_cross_entropy(h, w, targets, bias):
    """Return the mean cross-entropy as most code computes it, in the dtype of the inputs."""
    return F.cross_entropy(F.linear(h, w, bias), targets)


def error(got, truth):
    return ((got.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30)).item()


def assert_near(got, truth, tolerance):
    assert all(error(one, true) < tolerance for one, true in zip(got, truth, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_cross_entropy_equals_the_formula_in_fp64(chosen, with_bias, reduction):
    (h, w, b), t = problem()
    inputs = (h, w, b if with_bias else None)
    kw = options_of(chosen) | {"reduction": reduction}
    up = (torch.linspace(-1, 2, N) if reduction == "none" else torch.tensor(0.7)).double()
    truth, true_grads = gradients(oracle, inputs, t, upstream=up, **kw)
    got, grads = gradients(linear_cross_entropy, inputs, t, upstream=up, chunk=7, **kw)
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)
    assert_near(grads, true_grads, 1e-12)


def test_oracle_equals_torch_with_class_weights_and_label_smoothing():
    (h, w, b), t = problem()
    kw = options_of({"class_weight": True})
    theirs = F.cross_entropy(h @ w.T + b, t, weight=kw["class_weight"], label_smoothing=0.2)
    ours = oracle(h, w, t, bias=b, label_smoothing=0.2, **kw)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(2, 80), st.integers(0, 10_000))
def test_cross_entropy_does_not_depend_on_chunks_or_vocabulary_order(n, chunk, v, seed):
    (h, w, b), t = problem(n=n, v=v, seed=seed)
    loss, (dh, dw, db) = gradients(linear_cross_entropy, (h, w, b), t, chunk=chunk)
    order = torch.randperm(v, generator=torch.Generator().manual_seed(seed))
    t2 = t.where(t < 0, order.argsort()[t.clamp(min=0)])
    loss2, grads2 = gradients(linear_cross_entropy, (h, w[order], b[order]), t2)
    torch.testing.assert_close(loss, loss2)
    torch.testing.assert_close([dh, dw[order], db[order]], grads2)


@pytest.mark.parametrize(
    ("dtype", "cast"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16)],
)
def test_cross_entropy_error_is_at_most_that_of_the_plain_computation(dtype, cast):
    inputs, t = problem(dtype, n=512, v=1000, spread=0.5)
    truth, true_grads = gradients(oracle, [x.double() for x in inputs], t)
    with torch.autocast("cpu", cast, enabled=cast is not None):
        reference, reference_grads = gradients(plain_cross_entropy, inputs, t)
        got, grads = gradients(linear_cross_entropy, inputs, t, chunk=100)
    assert got.dtype == torch.float32
    eps = torch.finfo(torch.float32).eps
    assert error(got, truth) <= error(reference, truth) + 4 * eps
    for g, plain_g, true in zip(grads, reference_grads, true_grads, strict=True):
        assert g.dtype == dtype
        assert error(g, true) <= 1.05 * error(plain_g, true) + 4 * eps
        assert cast is None or error(g, true) > 1e-6  # the product was computed in bf16


def test_bf16_loss_does_not_depend_on_the_chunk():
    # an accumulator in bf16 is 11 % off here
    inputs, t = problem(torch.bfloat16, n=4096, v=800)
    losses = [linear_cross_entropy(inputs[0], inputs[1], t, chunk=c).item() for c in (16, 64, 4096)]
    truth = oracle(inputs[0], inputs[1], t).item()
    assert max(abs(x - truth) for x in losses) < 2e-3 * truth


def test_fp16_gradients_stay_accurate_under_a_loss_scale():
    inputs, t = problem(torch.float16, n=2048, v=300, spread=0.3)
    _, true_grads = gradients(oracle, [x.double() for x in inputs], t)
    _, grads = gradients(linear_cross_entropy, inputs, t, upstream=torch.tensor(1024.0))
    assert_near([g / 1024 for g in grads], true_grads, 2e-3)


def test_autocast_keeps_fp64_inputs_in_fp64():
    (h, w, b), t = problem()
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(h, w, t, b)
    torch.testing.assert_close(got, oracle(h, w, t, b), rtol=1e-12, atol=0)


def test_repeated_backward_is_exact_and_inputs_are_never_changed():
    (h, w, b), t = problem()
    leaves = [x.clone().requires_grad_() for x in (h, w, b)]
    loss = linear_cross_entropy(leaves[0], leaves[1], t, bias=leaves[2])
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.add_(1)  # changing a returned gradient must not change the next one
    second = torch.autograd.grad(3 * loss, leaves)
    torch.testing.assert_close([3 * g for g in kept], list(second))
    assert all(map(torch.equal, leaves, (h, w, b)))
    with pytest.raises(RuntimeError, match=r"already differentiated|second time"):
        torch.autograd.grad(loss, leaves)


def test_loss_and_gradients_stay_accurate_for_huge_logits():
    (h, w, b), t = problem(torch.float32)
    truth, true_grads = gradients(oracle, (h * 1e3, w, b), t)
    got, grads = gradients(linear_cross_entropy, (h * 1e3, w, b), t)
    assert error(got, truth) < 1e-5
    assert_near(grads, true_grads, 1e-4)


@pytest.mark.parametrize("kind", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_target_logit_of_minus_infinity_gives_the_loss_of_torch(smoothing, z_loss, kind):
    (h, w, b), t = problem()
    t = t.where(t != 0, 1)
    b[0] = -torch.inf  # no token's target, but the class that replaces the target of ignored tokens
    b[9] = -torch.inf
    t[[2, 7]] = 9

    def by_torch(h, w, targets, bias):
        logits = F.linear(h, w, bias)
        lse = logits.logsumexp(1).where(targets != -100, 0)
        penalty = z_loss * lse.square() if kind == "none" else z_loss * lse.square().sum()
        penalty = penalty / (targets != -100).sum() if kind == "mean" else penalty
        return F.cross_entropy(logits, targets, reduction=kind, label_smoothing=smoothing) + penalty

    up = torch.linspace(1, 2, N, dtype=torch.float64) if kind == "none" else None
    wanted, true_grads = gradients(by_torch, (h, w, b), t, upstream=up)
    kw = {"reduction": kind, "label_smoothing": smoothing, "z_loss": z_loss, "chunk": 7}
    got, grads = gradients(linear_cross_entropy, (h, w, b), t, upstream=up, **kw)
    assert (wanted[2] if kind == "none" else wanted) == torch.inf
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(oracle(h, w, t, bias=b, **kw), wanted, rtol=1e-12, atol=1e-12)
    assert_near(grads, true_grads, 1e-12)


@pytest.mark.parametrize(
    ("class_weight", "n", "kind", "bound"),
    [
        (torch.full((11,), 200.0, dtype=torch.float16), 512, torch.float32, 1e-5),  # the sum exceeds the range of fp16
        (torch.ones(11, dtype=torch.float16), 70_000, torch.float32, 1e-5),
        (torch.rand(V), 4000, torch.float64, 1e-13),
        (torch.rand(V, dtype=torch.bfloat16), 4000, torch.float64, 1e-13),
    ],
)
def test_class_weights_are_summed_in_the_accumulation_dtype(class_weight, n, kind, bound):
    (h, w, b), t = problem(kind, n=n, v=len(class_weight))
    inputs = (h, w, b if kind == torch.float64 else None)
    truth, true_grads = gradients(oracle, inputs, t, class_weight=class_weight)
    got, grads = gradients(linear_cross_entropy, inputs, t, class_weight=class_weight)
    assert error(got, truth) < bound
    assert_near(grads, true_grads, max(bound, 1e-12))


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"features": torch.ones(N, E, dtype=torch.long)}, UnsupportedError, "features of type torch.int64"),
        ({"weight": torch.ones(V, E, dtype=torch.int8)}, UnsupportedError, "weight of type torch.int8"),
        ({"targets": torch.rand(N)}, UnsupportedError, "probability targets"),
        ({"targets": torch.zeros(N + 1, dtype=torch.long)}, ValueError, "shapes do not meet"),
        ({"targets": torch.full((N,), V)}, IndexError, f"target {V} is outside the vocabulary of {V}"),
        ({"targets": torch.full((N,), -3)}, IndexError, "target -3"),
        ({"bias": torch.zeros(3)}, ValueError, "bias has shape"),
        ({"class_weight": torch.zeros(3)}, ValueError, "class_weight has shape"),
        ({"reduction": "max"}, ValueError, "unknown reduction 'max'"),
        ({"targets": torch.zeros(N, dtype=torch.bool)}, UnsupportedError, r"targets of type torch\.bool"),
        ({"targets": torch.zeros(N, dtype=torch.complex64)}, UnsupportedError, r"targets of type torch\.complex64"),
        ({"features": torch.ones(()), "targets": torch.ones((), dtype=torch.long)}, ValueError, "shapes do not meet"),
        ({"weight": torch.ones(V, E, device="meta")}, ValueError, "weight is on meta and features on cpu"),
        ({"targets": torch.zeros(N, dtype=torch.long, device="meta")}, ValueError, "targets is on meta"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing"),
        ({"label_smoothing": torch.nan}, ValueError, r"label_smoothing must be in \[0, 1\], not nan"),
        ({"z_loss": torch.nan}, ValueError, "z_loss must be at least 0 and finite, not nan"),
        ({"z_loss": torch.inf}, ValueError, "z_loss must be at least 0 and finite, not inf"),
        ({"z_loss": -1.0}, ValueError, r"z_loss must be at least 0 and finite, not -1\.0"),
        ({"scale": torch.nan}, ValueError, "scale must be finite, not nan"),
        ({"scale": -torch.inf}, ValueError, "scale must be finite, not -inf"),
        ({"scale": torch.tensor(2.0)}, UnsupportedError, "scale as a tensor, which would get no gradient"),
        ({"softcap": "30"}, TypeError, "softcap must be a number, not a str"),
        ({"chunk": 2.5}, TypeError, "chunk must be a whole number, not a float"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1 token, not 0"),
        ({"ignore_index": None}, TypeError, "ignore_index must be a whole number, not a NoneType"),
        ({"softcap": torch.nan}, ValueError, "softcap must be positive and finite, not nan"),
        ({"upstream": torch.nan}, ValueError, "upstream must be finite, not nan"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"softcap": torch.inf}, ValueError, "softcap must be positive and finite, not inf"),
        ({"logits": "bf16"}, ValueError, "unknown logits 'bf16'"),
    ],
)
def test_cross_entropy_refuses_invalid_input(change, kind, says):
    (h, w, b), t = problem()
    with pytest.raises(kind, match=says):
        linear_cross_entropy(**({"features": h, "weight": w, "targets": t, "bias": b} | change))


def test_options_object_and_keywords_give_the_same_loss():
    (h, w, _), t = problem()
    one = linear_cross_entropy(h, w, t, options=LossOptions(softcap=2.0, reduction="sum"))
    assert torch.equal(one, linear_cross_entropy(h, w, t, softcap=2.0, reduction="sum"))


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_fp32_logits_give_losses_near_fp64(compiled, dtype, scale, monkeypatch):
    monkeypatch.setattr("tiewise.boundary.ops.chunk_products.WIDENED", 100 * E)  # ten blocks of a vocabulary of 1,000
    (h, w, _), t = problem(dtype, n=512, v=1000, spread=3.0)
    truth = oracle(h, w, t, reduction="none", scale=scale)

    def step(h, w, targets, bias, logits):
        return linear_cross_entropy(h, w, targets, bias, scale=scale, reduction="none", logits=logits)

    step = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    up = torch.linspace(0, 1, 512)
    _, true_grads = gradients(oracle, (h.double(), w.double(), None), t, upstream=up, reduction="none", scale=scale)
    got, grads = gradients(step, (h, w, None), t, upstream=up, logits="fp32")
    rounded, rounded_grads = gradients(step, (h, w, None), t, upstream=up, logits=None)
    assert (got - truth).abs().max() < 1e-4 < 1e-3 < (rounded - truth).abs().max()
    assert error(got, truth) < 1e-6
    for one, other, true in zip(grads, rounded_grads, true_grads, strict=True):
        assert error(one, true) <= error(other, true)


INTO = [{}, {"label_smoothing": 0.2, "class_weight": True}, {"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.1}]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chosen", INTO, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_into_accumulates_the_table_gradient(dtype, chosen, reduction):
    (h, w, b), t = problem(dtype)
    kw = options_of(chosen) | {"reduction": reduction, "chunk": 5}
    truth, true = gradients(oracle, [x.double() for x in (h, w, b)], t, upstream=torch.tensor(0.25).double(), **kw)
    wide = torch.promote_types(dtype, torch.float32)
    standing = torch.linspace(-0.01, 0.01, w.numel(), dtype=wide).view_as(w)
    h, w, b, into = (*(x.requires_grad_() for x in (h, w, b)), standing.clone())
    loss = linear_cross_entropy(h, w, t, b, into=into, upstream=0.25, **kw)
    (loss / 4).backward()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    assert w.grad is None
    assert error(loss.detach(), truth) < tolerance
    assert_near((h.grad, into - standing, b.grad), true, tolerance)


def test_into_sums_the_gradient_of_a_bf16_table_in_fp32():
    (h, w, _), t = problem(torch.bfloat16)
    into, leaf, true = torch.zeros(w.shape), w.clone().requires_grad_(), w.double().requires_grad_()
    for i in range(64):
        x = h * (1 + i / 64)
        linear_cross_entropy(x, w, t, into=into)  # no input requires a gradient, so no backward is needed
        linear_cross_entropy(x, leaf, t).backward()
        oracle(x, true, t).backward()
    assert error(into, true.grad) < 0.3 * error(leaf.grad, true.grad)


def test_cross_entropy_refuses_invalid_uses_of_into():
    (h, w, b), t = problem(torch.float32)
    h.requires_grad_()
    into = torch.zeros_like(w)

    def loss(h, **kw):
        return linear_cross_entropy(h, w, t, b, **({"into": into} | kw))

    for wrong in (into[1:], into.double(), into.T.contiguous().T, into.clone().requires_grad_(), 3):
        with pytest.raises(ValueError, match="into must be"):
            loss(h, into=wrong)
    with pytest.raises(ValueError, match="scalar"):
        loss(h, reduction="none")
    with torch.no_grad():
        loss(h)
    assert not into.any()
    with pytest.raises(UnsupportedError, match=r"upstream=0\.5"):
        (loss(h) / 2).backward()
    once = loss(h)
    once.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="already differentiated"):
        once.backward()
    for reentrant in (False, True):
        with pytest.raises(UnsupportedError, match="checkpoint"):
            torch.utils.checkpoint.checkpoint(lambda h: loss(h).square(), h, use_reentrant=reentrant).backward()
    with pytest.raises(UnsupportedError, match="fp16"):
        linear_cross_entropy(h.half(), w.half(), t, into=into)
    with pytest.raises(UnsupportedError, match="liger"):
        loss(h, backend="liger")
    with pytest.raises(Exception, match="into"):
        torch.compile(loss, fullgraph=True, backend="eager")(h)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("divisor", [0.0, float("nan")])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_tokens_have_zero_gradients_even_if_the_loss_is_divided_by_zero(reduction, divisor, compiled):
    """torch's cross-entropy does the same; a training step without labels relies on it."""
    (h, w, _), t = problem()
    ours = torch.compile(linear_cross_entropy, backend="aot_eager") if compiled else linear_cross_entropy
    for loss_of in (ours, lambda x, table, t, **how: F.cross_entropy(x @ table.T, t, **how)):
        features, weight = h.clone().requires_grad_(), w.clone().requires_grad_()
        loss = loss_of(features, weight, torch.full_like(t, -100), reduction=reduction)
        (loss.sum() / divisor).backward()
        assert not features.grad.any()
        assert not weight.grad.any()
