"""The divergence from a teacher, compared with `F.kl_div` of all logits in fp64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.boundary.ops.test_cross_entropy import N, V, assert_near, error, problem

from tiewise.boundary.ops.soft_targets import linear_divergence
from tiewise.core.backends import LossOptions

BETAS = [0.0, 0.3, 0.5, 1.0]


def teachers(dtype=torch.float64, n=N, v=V, width=5):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((n, width), (v, width), (v,))]


def plain(student, teacher, targets, beta=0.5, temperature=1.0, reduction="mean", options=None, their_options=None):
    """Return GKD's divergence from logits by its definition, where `F.kl_div(x, y)` is KL(y ‖ x)."""

    def log_softmax(features, weight, bias, scale=1.0, softcap=None):
        z = scale * F.linear(features, weight)
        z = z if bias is None else z + bias
        return ((z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature).log_softmax(-1)

    def kl(a, b):
        return F.kl_div(b, a, reduction="none", log_target=True).where(a > -torch.inf, 0).sum(-1)

    q, p = log_softmax(*student, **(options or {})), log_softmax(*teacher, **(their_options or options or {}))
    if beta in (0, 1):
        each = kl(p, q) if beta == 0 else kl(q, p)
    else:
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        each = beta * kl(p, m) + (1 - beta) * kl(q, m)
    valid = targets != -100
    each = each.where(valid, 0)
    return {"none": each, "sum": each.sum(), "mean": each.sum() / valid.sum().clamp(min=1)}[reduction]


def ours(student, teacher, targets, options=None, **kw):
    (h, w, b), (x, u, c) = student, teacher
    theirs = kw.pop("their_options", None)
    theirs = None if theirs is None else LossOptions(**theirs)
    return linear_divergence(h, w, x, u, targets, b, c, teacher_options=theirs, **(options or {}), **kw)


def run(function, student, *args, upstream=1.0, **kw):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in student]
    out = function(leaves, *args, **kw)
    (out * upstream).sum().backward()
    return out.detach(), [x.grad for x in leaves if x is not None]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"temperature": 0.7},
        {"options": {"softcap": 2.0, "scale": 0.5}, "temperature": 1.6},
        {"options": {"scale": 0.5}, "their_options": {"softcap": 3.0}},
    ],
    ids=["as it is", "temperature", "cap", "another teacher"],
)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_divergence_equals_the_definition_in_fp64(beta, with_bias, chosen, reduction):
    student, t = problem()
    teacher = teachers()
    if not with_bias:
        student[2] = teacher[2] = None
    up = torch.linspace(-1, 2, N, dtype=torch.float64) if reduction == "none" else 0.7
    kw = {"beta": beta, "reduction": reduction, **chosen}
    truth, true_grads = run(plain, student, teacher, t, upstream=up, **kw)
    got, grads = run(ours, student, teacher, t, upstream=up, chunk=7, **kw)
    torch.testing.assert_close(got, truth, rtol=1e-11, atol=1e-13)
    assert_near(grads, true_grads, 1e-11)


@given(st.integers(2, 60), st.just(0.0) | st.just(1.0) | st.floats(0.01, 0.99), st.integers(0, 10_000))
def test_divergence_is_nonnegative_bounded_and_mirrored_in_beta(v, beta, seed):
    (h, w, b), _ = problem(n=3, v=v, seed=seed)
    (x, u, c) = teachers(n=3, v=v)
    each = linear_divergence(h, w, x, u, None, b, c, beta=beta, reduction="none")
    mirrored = linear_divergence(x, u, h, w, None, c, b, beta=1 - beta, reduction="none")
    assert (each >= -1e-12).all()
    torch.testing.assert_close(each, mirrored, rtol=1e-9, atol=1e-12)
    if 0 < beta < 1:
        assert (each <= -(beta * torch.tensor(beta).log() + (1 - beta) * torch.tensor(1 - beta).log()) + 1e-6).all()
    itself = linear_divergence(h.requires_grad_(), w, h.detach(), w, None, b, b, beta=beta)
    itself.backward()
    assert abs(itself) < 1e-12 > h.grad.abs().max()


@pytest.mark.parametrize("beta", BETAS)
def test_the_teacher_gets_no_gradient(beta):
    (h, w, _), t = problem()
    x, u, _ = (leaf.requires_grad_() for leaf in teachers())
    linear_divergence(h.requires_grad_(), w, x, u, t, beta=beta).backward()
    assert x.grad is u.grad is None


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_divergence_error_is_at_most_that_of_the_plain_computation(dtype, beta):
    student, t = problem(dtype, n=256, v=500, spread=0.3)
    teacher = teachers(dtype, n=256, v=500)
    wide = [[x.double() for x in side] for side in (student, teacher)]
    truth, true_grads = run(plain, *wide, t, beta=beta, reduction="none")
    reference, reference_grads = run(plain, student, teacher, t, beta=beta, reduction="none")
    got, grads = run(ours, student, teacher, t, beta=beta, reduction="none")
    assert got.dtype == torch.float32
    assert [g.dtype for g in grads] == [dtype] * 3
    for one, other, true in zip([got, *grads], [reference, *reference_grads], [truth, *true_grads], strict=True):
        assert error(one, true) <= 1.1 * error(other, true) + 2e-6


@pytest.mark.parametrize("beta", BETAS)
def test_fp32_logits_of_bf16_tables_give_divergences_near_fp64(beta):
    student, t = problem(torch.bfloat16, n=256, v=500)
    teacher = teachers(torch.bfloat16, n=256, v=500)
    wide = [[x.double() for x in side] for side in (student, teacher)]
    truth = plain(*wide, t, beta=beta, reduction="none")
    got = ours(student, teacher, t, beta=beta, reduction="none", logits="fp32")
    assert (got - truth).abs().max() < 1e-4


@pytest.mark.parametrize("beta", BETAS)
def test_temperature_does_not_round_narrow_biases(beta):
    (_, _, b), t = problem(torch.bfloat16)
    student, teacher = ([torch.zeros(n, 4).bfloat16() for n in (N, V)] for _ in "ab")
    sides = [*student, b], [*teacher, teachers(torch.bfloat16)[2]]
    wide = [[x.double() for x in side] for side in sides]
    truth = plain(*wide, t, beta=beta, temperature=0.7, reduction="none")
    assert (ours(*sides, t, beta=beta, temperature=0.7, reduction="none") - truth).abs().max() < 2e-6


@pytest.mark.parametrize("teacher_type", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("student_type", [torch.float64, torch.float32])
def test_divergence_accepts_a_teacher_of_another_dtype(student_type, teacher_type):
    student, t = problem(student_type)
    teacher = teachers(teacher_type)
    got = ours(student, teacher, t, logits="fp32")
    assert got.dtype == student_type
    truth = plain([x.double() for x in student], [x.double() for x in teacher], t)
    assert error(got, truth) < 1e-6


@pytest.mark.parametrize("beta", BETAS)
def test_token_of_zero_probability_for_both_adds_no_divergence(beta):
    (h, w, b), t = problem()
    x, u, c = teachers()
    rest = [j for j in range(V) if j not in (0, 9)]
    cut = [[h, w[rest], b[rest]], [x, u[rest], c[rest]]]
    b[[0, 9]] = c[[0, 9]] = -torch.inf
    truth, true_grads = run(plain, *cut, t, beta=beta)
    got, (dh, dw, db) = run(ours, [h, w, b], [x, u, c], t, beta=beta)
    torch.testing.assert_close(got, truth)
    assert_near([dh, dw[rest], db[rest]], true_grads, 1e-11)
    assert not dw[[0, 9]].any()


@pytest.mark.parametrize("beta", BETAS)
def test_token_of_zero_probability_for_one_side_gives_an_infinite_divergence(beta):
    (h, w, b), t = problem()
    x, u, c = teachers()
    without = torch.zeros(V, dtype=torch.float64).index_fill_(0, torch.tensor([3]), -torch.inf)
    for student, teacher, infinite in (((h, w, b + without), (x, u, c), 0), ((h, w, b), (x, u, c + without), 1)):
        got = ours(student, teacher, t, beta=beta, reduction="none")
        torch.testing.assert_close(got, plain(student, teacher, t, beta=beta, reduction="none"))
        assert got[1].isinf() == (beta == infinite)


def test_divergence_without_labels_averages_over_all_tokens():
    (h, w, _), t = problem()
    x, u, _ = teachers()
    each = linear_divergence(h, w, x, u, t.clamp(min=0), reduction="none")
    torch.testing.assert_close(linear_divergence(h, w, x, u, ignore_index=0), each.mean())


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"teacher_features": None}, TypeError, "teacher_features must be a tensor, not a NoneType"),
        (
            {"teacher_weight": torch.zeros(V + 1, 5)},
            ValueError,
            r"the teacher does not meet.*need \[23, 'F'\] and \[57",
        ),
        ({"teacher_features": torch.zeros(N - 1, 5)}, ValueError, "the teacher does not meet the student"),
        ({"teacher_weight": torch.zeros(V, 4)}, ValueError, "shapes do not meet"),
        ({"teacher_bias": torch.zeros(3)}, ValueError, "bias has shape"),
        ({"targets": torch.zeros(2, dtype=torch.long)}, ValueError, "shapes do not meet"),
        ({"beta": 1.5}, ValueError, r"beta must be in \[0, 1\], not 1.5"),
        ({"temperature": 0}, ValueError, "temperature must be positive"),
        ({"label_smoothing": 0.1}, ValueError, "of cross-entropies alone"),
        ({"reduction": "batchmean"}, ValueError, "unknown reduction 'batchmean'"),
    ],
)
def test_divergence_refuses_invalid_input(change, kind, says):
    (h, w, _), t = problem()
    x, u, _ = teachers()
    given = {"features": h, "weight": w, "teacher_features": x, "teacher_weight": u, "targets": t}
    with pytest.raises(kind, match=says):
        linear_divergence(**(given | change))
