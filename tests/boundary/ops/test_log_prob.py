"""Log-probabilities, log-sum-exps and entropies, compared with `log_softmax` of all logits in fp64."""

import multiprocessing

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.boundary.ops.test_cross_entropy import N, V, assert_near, error, problem

from tiewise.boundary.ops import statistics_operators
from tiewise.boundary.ops.log_prob import linear_log_prob, vocabulary_statistics
from tiewise.boundary.ops.path_gradient import tied_lookup
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

PARTS = ("log_prob", "lse", "entropy")


def plain(h, w, targets, bias=None, temperature=1.0, scale=1.0, softcap=None):
    """Return (log-probability, lse, entropy) by their formulas from all logits; 0 for ignored tokens."""
    z = scale * F.linear(h, w)
    z = z if bias is None else z + bias
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.where(log_p > -torch.inf, 0)).sum(-1)
    valid = targets != -100
    log_prob = log_p.gather(-1, targets.where(valid, 0)[..., None])[..., 0]
    return tuple(x.where(valid, 0) for x in (log_prob, z.logsumexp(-1), entropy))


def ours(h, w, targets, bias=None, **kw):
    return vocabulary_statistics(h, w, targets, bias, entropy=True, **kw)


def run(function, inputs, targets, parts=PARTS, **kw):
    """Return results and gradients, with upstream gradients of both signs for each of `parts`."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    found = function(*leaves[:2], targets, leaves[2], **kw)
    up = torch.linspace(-1, 2, targets.numel(), dtype=torch.float64).view(targets.shape)
    weights = {"log_prob": up, "lse": up.flip(0) * 0.5, "entropy": up.square() - 0.3}
    total = sum((x.double() * weights[part]).sum() for x, part in zip(found, PARTS, strict=True) if part in parts)
    total.backward()
    return [x.detach() for x in found], [x.grad for x in leaves if x is not None]


@pytest.mark.parametrize("parts", [("log_prob",), ("lse",), ("entropy",), ("log_prob", "entropy"), PARTS], ids="+".join)
@pytest.mark.parametrize(
    "chosen",
    [{}, {"scale": 0.3}, {"temperature": 0.7}, {"softcap": 2.0}, {"softcap": 3.0, "temperature": 1.6, "scale": 1.7}],
    ids=lambda o: "+".join(o) or "as it is",
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_statistics_equal_the_formulas_in_fp64(with_bias, chosen, parts):
    (h, w, b), t = problem()
    inputs = (h, w, b if with_bias else None)
    truth, true_grads = run(plain, inputs, t, parts, **chosen)
    got, grads = run(ours, inputs, t, parts, chunk=7, **chosen)
    assert_near(got, truth, 1e-13)
    assert_near(grads, true_grads, 1e-12)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(2, 80), st.integers(1, 500), st.integers(0, 10_000))
def test_statistics_do_not_depend_on_chunks_or_blocks(n, chunk, v, cached, seed):
    (h, w, b), t = problem(n=n, v=v, seed=seed)
    truth, true_grads = run(plain, (h, w, b), t)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiewise.boundary.ops.chunk_products.CACHED", cached)
        got, grads = run(ours, (h, w, b), t, chunk=chunk)
    torch.testing.assert_close(got, list(truth), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, true_grads, rtol=1e-11, atol=1e-12)


@given(st.integers(2, 80), st.floats(0.1, 10), st.integers(0, 10_000))
def test_probabilities_sum_to_one_and_entropies_are_bounded(v, temperature, seed):
    (h, w, b), _ = problem(n=1, v=v, seed=seed)
    each, entropy = linear_log_prob(h.expand(v, -1), w, torch.arange(v), b, temperature=temperature, entropy=True)
    assert each.exp().sum() == pytest.approx(1, rel=1e-12)
    assert entropy[0].item() == pytest.approx(-(each.exp() * each).sum().item(), rel=1e-9, abs=1e-12)
    assert 0 <= entropy[0] <= torch.tensor(v).double().log() * (1 + 1e-12)


def test_fp32_statistics_are_within_a_millionth_of_fp64():
    (h, w, _), t = problem(torch.float32, n=256, v=1000)
    truth, true_grads = run(plain, (h.double(), w.double(), None), t)
    got, grads = run(ours, (h, w, None), t)
    assert all(x.dtype == torch.float32 for x in got)
    assert all((one - true).abs().max() < 1e-5 for one, true in zip(got, truth, strict=True))
    assert (got[1] - truth[1]).abs().max() < 4e-6  # lse
    assert_near(got, truth, 1e-6)
    assert_near(grads, true_grads, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_statistics_errors_are_at_most_those_of_the_plain_computation(dtype, autocast):
    inputs, t = problem(torch.float32 if autocast else dtype, n=512, v=1000, spread=0.5)
    truth, true_grads = run(plain, [x.double() for x in inputs], t)
    with torch.autocast("cpu", dtype, enabled=autocast):
        reference, reference_grads = run(plain, inputs, t)
        got, grads = run(ours, inputs, t, chunk=100)
    assert all(x.dtype == torch.float32 for x in got)
    for one, other, true in zip(got + grads, reference + reference_grads, [*truth, *true_grads], strict=True):
        assert error(one, true) <= 1.1 * error(other, true) + 1e-6
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_temperature_does_not_round_a_narrow_bias(dtype):
    _, t = problem()
    h, w, b = torch.zeros(N, 4, dtype=dtype), torch.zeros(V, 4, dtype=dtype), problem(dtype)[0][2]
    truth, true_grads = run(plain, [x.double() for x in (h, w, b)], t, temperature=0.7)
    got, grads = run(ours, (h, w, b), t, temperature=0.7)
    assert all((one - true).abs().max() < 2e-6 for one, true in zip(got, truth, strict=True))
    assert grads[2].dtype == dtype
    assert error(grads[2], true_grads[2]) < torch.finfo(dtype).eps / 2  # of the last rounding alone


def test_fp16_gradients_stay_accurate_for_small_upstream_gradients():
    (h, w, _), t = problem(torch.float16, n=2048, v=300, spread=0.3)
    leaves, true_leaves = ([x.clone().to(kind).requires_grad_() for x in (h, w)] for kind in (h.dtype, torch.float64))
    for x, function in ((leaves, linear_log_prob), (true_leaves, lambda *a, entropy: plain(*a)[::2])):
        log_prob, entropy = function(*x, t, entropy=True)
        (log_prob.double().sum() / 8 + entropy.double().sum() * 0.01).backward()
    assert_near([x.grad for x in leaves], [x.grad for x in true_leaves], 3e-3)


def test_strides_and_a_tied_lookup_do_not_change_the_gradient():
    (_, w, _), t = problem()
    ids = torch.arange(N) % V
    found = []
    for tied, function in ((False, plain), (True, ours)):
        leaf = w.T.contiguous().requires_grad_()  # a table that is transposed in memory
        rows, table = tied_lookup(leaf.T, ids) if tied else (F.embedding(ids, leaf.T), leaf.T)
        log_prob, _, entropy = function(rows.sin(), table, t)
        (log_prob.sum() + entropy.square().sum()).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_statistics_without_targets_count_every_token():
    inputs, t = problem()
    t = t.clamp(min=0)
    (_, *truth), true_grads = run(plain, inputs, t, ("lse", "entropy"))

    def untargeted(h, w, targets, bias):
        assert vocabulary_statistics(h, w, None, bias)[::2] == (None, None)
        return (torch.zeros(N), *vocabulary_statistics(h, w, None, bias, entropy=True, ignore_index=0)[1:])

    (_, *got), grads = run(untargeted, inputs, t, ("lse", "entropy"))
    assert_near(got, truth, 1e-13)
    assert_near(grads, true_grads, 1e-12)


def test_token_with_a_logit_of_minus_infinity_has_zero_probability():
    (h, w, b), t = problem()
    b[[0, 9]] = -torch.inf
    t = t.where(t != 0, 1)
    t[[2, 7]] = 9
    truth, true_grads = run(plain, (h, w, b), t)
    got, grads = run(ours, (h, w, b), t, chunk=7)
    assert got[0][2] == -torch.inf
    torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)
    assert_near(grads, true_grads, 1e-12)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_nan_and_infinity_affect_only_their_own_token(odd):
    (h, w, _), t = problem(torch.float32)
    w = w.abs()
    h[3, 0] = odd
    t[3] = 5
    got, truth = ours(h, w, t), plain(h, w, t)
    for one, true in zip((got.log_prob, got.entropy), truth[::2], strict=True):
        assert one[3].isnan()
        assert torch.equal(one.isnan(), true.isnan())


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"features": [1.0]}, TypeError, "features must be a tensor"),
        ({"targets": torch.rand(N)}, UnsupportedError, "probability targets"),
        ({"targets": torch.zeros(N + 1, dtype=torch.long)}, ValueError, "shapes do not meet"),
        ({"targets": torch.full((N,), V)}, IndexError, f"target {V} is outside"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"temperature": torch.inf}, ValueError, "temperature must be positive and finite"),
        ({"z_loss": 0.1}, ValueError, "label_smoothing, z_loss, class_weight and backend"),
        ({"reduction": "sum"}, ValueError, "not reduced"),
        ({"options": LossOptions(label_smoothing=0.1)}, ValueError, "label_smoothing, z_loss"),
    ],
)
def test_log_prob_refuses_invalid_input(change, kind, says):
    (h, w, b), t = problem()
    with pytest.raises(kind, match=says):
        linear_log_prob(**({"features": h, "weight": w, "targets": t, "bias": b} | change))


@pytest.mark.parametrize("targeted", [True, False])
def test_statistics_operators_pass_torch_opcheck(targeted):
    (h, w, b), t = problem(torch.float32)
    arguments = (h.requires_grad_(), w.requires_grad_(), b.requires_grad_(), t if targeted else None, True)
    how = (torch.float32, 1.0, 3.0, -100, 7, None)
    torch.library.opcheck(statistics_operators._statistics, (*arguments, *how))
    _, _, *saved = (x.detach() for x in statistics_operators._statistics(*arguments, *how))
    upstream = (torch.ones(N) if targeted else None, None, torch.ones(N))
    tests = ("test_schema", "test_faketensor")
    given = (*(x if x is None else x.detach() for x in arguments[:4]), *saved, *upstream, [True, False, True], *how)
    torch.library.opcheck(statistics_operators._gradients, given, test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("log-probabilities and entropy, tiewise", "fp32"),
        ("divergence from a teacher, Jensen–Shannon, tiewise", "fp32"),
        ("tiewise, logits in fp32", "bf16"),
    ],
)
def test_peak_memory_is_less_than_half_of_the_logits(name, kind):
    from benchmarks.loss import measure_peak  # imported late, because it loads JAX

    n, v, d = 8192, 20_000, 16
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(measure_peak, ([n, v, d], kind, name)) < 0.5 * n * v * 4 / 1e6
