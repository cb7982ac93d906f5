"""One buffer for two gradients: equal to plain autograd's in every graph that can be built, and separable by path."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tiewise.core.errors import UnsupportedError
from tiewise.ops.cross_entropy import linear_cross_entropy
from tiewise.ops.path_gradient import LookupOptions, PathRecord, path_norms, tied_lookup

V, E, N = 31, 6, 40


def setup(seed=0, n=N, v=V):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(v, E, generator=g, dtype=torch.float64)
    body = torch.randn(E, E, generator=g, dtype=torch.float64)
    ids, targets = torch.randint(0, v, (2, n), generator=g)
    return table, body, ids, targets


def ours(table, body, ids, targets, options=LookupOptions()):  # noqa: B008
    rows, after = tied_lookup(table, ids, options)
    return linear_cross_entropy(torch.tanh(rows @ body), after, targets)


def theirs(table, body, ids, targets):
    return F.cross_entropy(torch.tanh(F.embedding(ids, table) @ body) @ table.T, targets)


def separate(table, body, ids, targets):
    """The lookup path and the head path by two leaves: what the paths are by definition."""
    a, b = table.clone().requires_grad_(), table.clone().requires_grad_()
    F.cross_entropy(torch.tanh(F.embedding(ids, a) @ body) @ b.T, targets).backward()
    return a.grad, b.grad


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(2, 50))
@settings(deadline=None, max_examples=30)
def test_both_paths_sum_to_autograds_gradient_in_every_row(seed, n, v):
    table, body, ids, targets = setup(seed, n, v)
    leaf = table.clone().requires_grad_()
    record = PathRecord()
    ours(leaf, body, ids, targets, LookupOptions(record=record)).backward()
    a, b = separate(table, body, ids, targets)
    torch.testing.assert_close(leaf.grad, a + b, rtol=1e-12, atol=1e-14)
    got = path_norms(leaf.grad, record)
    expected = (a.norm(), b.norm(), (a + b).norm(), F.cosine_similarity(a.flatten(), b.flatten(), dim=0))
    for value, true in zip((got.a, got.b, got.total, got.cosine), expected, strict=True):
        assert value == pytest.approx(true.item(), rel=1e-6, abs=1e-9)
    assert got.share_b == pytest.approx((b.norm() / (a.norm() + b.norm())).item(), rel=1e-6)


def test_accumulated_over_micro_batches():
    table, body, ids, targets = setup()
    leaf, record = table.clone().requires_grad_(), PathRecord()
    total_a, total_b = torch.zeros_like(table), torch.zeros_like(table)
    for i in range(12):  # more pieces than the record keeps apart
        part = slice(3 * i, 3 * i + 3)
        ours(leaf, body, ids[part], targets[part], LookupOptions(record=record)).backward()
        a, b = separate(table, body, ids[part], targets[part])
        total_a, total_b = total_a + a, total_b + b
    torch.testing.assert_close(leaf.grad, total_a + total_b)
    norms = path_norms(leaf.grad, record)
    assert norms.a == pytest.approx(total_a.norm().item())
    assert norms.b == pytest.approx(total_b.norm().item(), rel=1e-6)
    record.clear()
    assert path_norms(leaf.grad, record).a == 0


def test_three_forwards_then_one_backward():
    table, body, ids, targets = setup()
    leaf, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    parts = [(ids[i::3], targets[i::3]) for i in range(3)]
    sum(ours(leaf, body, *p) for p in parts).backward()
    sum(theirs(plain, body, *p) for p in parts).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_one_table_at_three_places():
    table, body, ids, targets = setup()
    leaf, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    first, t1 = tied_lookup(leaf, ids)
    second, t2 = tied_lookup(t1, targets)
    linear_cross_entropy(torch.tanh((first + second) @ body), t2, targets).backward()
    both = F.embedding(ids, plain) + F.embedding(targets, plain)
    F.cross_entropy(torch.tanh(both @ body) @ plain.T, targets).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_a_lookup_off_the_gradient_path_loses_nothing():
    table, body, ids, targets = setup()
    leaf, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    rows, after = tied_lookup(leaf, ids)
    linear_cross_entropy(rows.detach() @ body, after, targets).backward()
    F.cross_entropy(F.embedding(ids, plain).detach() @ body @ plain.T, targets).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_a_head_that_is_not_used_loses_nothing():
    table, body, ids, _ = setup()
    leaf, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    rows, _after = tied_lookup(leaf, ids)
    (rows @ body).square().sum().backward()
    (F.embedding(ids, plain) @ body).square().sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_retained_graph_gives_the_same_gradient_twice():
    table, body, ids, targets = setup()
    leaf = table.clone().requires_grad_()
    loss = ours(leaf, body, ids, targets)
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0].clone()
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], first)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_checkpointing(use_reentrant):
    table, body, ids, targets = setup()
    leaf, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    loss = torch.utils.checkpoint.checkpoint(lambda w: ours(w, body, ids, targets), leaf, use_reentrant=use_reentrant)
    loss.backward()
    theirs(plain, body, ids, targets).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_frozen_table_is_a_plain_lookup():
    table, _, ids, _ = setup()
    rows, after = tied_lookup(table, ids)
    assert after is table
    assert torch.equal(rows, table[ids])


@pytest.mark.parametrize("compiled", [False, True])
def test_alpha_scales_path_a_alone(compiled):
    table, body, ids, targets = setup()
    leaf = table.clone().requires_grad_()
    step = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    step(leaf, body, ids, targets, LookupOptions(alpha=0.25)).backward()
    a, b = separate(table, body, ids, targets)
    torch.testing.assert_close(leaf.grad, 0.25 * a + b)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", ["stop_lookup", "stop_both"])
def test_a_padding_row_is_spared_by_one_path_or_by_both(which, compiled):
    table, body, ids, targets = setup()
    row = int(ids[0])
    leaf = table.clone().requires_grad_()
    step = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    step(leaf, body, ids, targets, LookupOptions(**{which: row})).backward()
    a, b = separate(table, body, ids, targets)
    assert a[row].norm() > 0  # padding_idx of torch stops this one alone
    assert b[row].norm() > 0
    expected = a + b
    expected[row] = b[row] if which == "stop_lookup" else 0
    torch.testing.assert_close(leaf.grad, expected)


def test_one_buffer():
    """The head's own gradient becomes the table's: no second [V, E] tensor is ever allocated."""
    v = 50_000
    leaf = torch.randn(v, E).requires_grad_()
    ids = torch.randint(0, v, (8,))
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor) and x.shape == (v, E):
                    sizes.append(x.untyped_storage().data_ptr())
            return out

    with Watch():
        rows, after = tied_lookup(leaf, ids)
        linear_cross_entropy(rows, after, ids).backward()
    assert set(sizes) - {leaf.untyped_storage().data_ptr()} == {leaf.grad.untyped_storage().data_ptr()}


def test_an_expanded_gradient_is_not_written_into():
    table, _, ids, _ = setup()
    leaf, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    rows, after = tied_lookup(leaf, ids)
    (rows.sum() + after.sum()).backward()
    (F.embedding(ids, plain).sum() + plain.sum()).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_refusals():
    table, _, ids, _ = setup()
    leaf = table.clone().requires_grad_()
    rows, _ = tied_lookup(leaf, ids)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(rows.square().sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda w: tied_lookup(w, ids)[0].sum())(table)


def test_norms_of_nothing():
    norms = path_norms(torch.zeros(V, E), PathRecord())
    assert (norms.a, norms.b, norms.total) == (0, 0, 0)
    assert math.isnan(norms.cosine)
    assert math.isnan(norms.share_b)
