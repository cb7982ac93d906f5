"""The one-buffer gradient of a tied table, compared with plain autograd in sum and by path."""

from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu_branch import gpu_branch
from hypothesis import given
from hypothesis import strategies as st
from tests.boundary.tiny_models import Allocations

from tiewise.boundary.ops import path_gradient
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, path_norms, path_sums, tied_lookup
from tiewise.core.errors import UnsupportedError

V, E, N = 31, 6, 40


def make_problem(seed=0, n=N, v=V):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(v, E, generator=g, dtype=torch.float64)
    body = torch.randn(E, E, generator=g, dtype=torch.float64)
    ids, targets = torch.randint(0, v, (2, n), generator=g)
    return table, body, ids, targets


def ours(table, body, ids, targets, options=LookupOptions()):  # noqa: B008
    rows, after = tied_lookup(table, ids, options)
    return linear_cross_entropy(torch.tanh(rows @ body), after, targets)


def plain_loss(hidden, table, targets):
    return F.cross_entropy(hidden @ table.T, targets)


def gradients_by_two_leaves(table, body, ids, targets):
    """Return the gradients of lookup path and head path by two leaves of plain autograd."""
    a, b = table.clone().requires_grad_(), table.clone().requires_grad_()
    plain_loss(torch.tanh(F.embedding(ids, a) @ body), b, targets).backward()
    return a.grad, b.grad


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(2, 50))
def test_both_paths_sum_to_autograds_gradient_in_every_row(seed, n, v):
    table, body, ids, targets = make_problem(seed, n, v)
    leaf = table.clone().requires_grad_()
    record = PathRecord()
    ours(leaf, body, ids, targets, LookupOptions(record=record)).backward()
    a, b = gradients_by_two_leaves(table, body, ids, targets)
    torch.testing.assert_close(leaf.grad, a + b, rtol=1e-12, atol=1e-14)
    got = path_norms(leaf.grad, record)
    expected = (a.norm(), b.norm(), (a + b).norm(), F.cosine_similarity(a.flatten(), b.flatten(), dim=0))
    for value, true in zip((got.a, got.b, got.total, got.cosine), expected, strict=True):
        assert value == pytest.approx(true.item(), rel=1e-6, abs=1e-9)
    assert got.share_b == pytest.approx((b.norm() / (a.norm() + b.norm())).item(), rel=1e-6)


def test_gradient_and_norms_accumulate_over_micro_batches():
    table, body, ids, targets = make_problem()
    leaf, record = table.clone().requires_grad_(), PathRecord()
    total_a, total_b = torch.zeros_like(table), torch.zeros_like(table)
    for i in range(12):  # more pieces than the record keeps before it merges them
        part = slice(3 * i, 3 * i + 3)
        ours(leaf, body, ids[part], targets[part], LookupOptions(record=record)).backward()
        a, b = gradients_by_two_leaves(table, body, ids[part], targets[part])
        total_a, total_b = total_a + a, total_b + b
    torch.testing.assert_close(leaf.grad, total_a + total_b)
    norms = path_norms(leaf.grad, record)
    assert (norms.a, norms.b) == pytest.approx((total_a.norm().item(), total_b.norm().item()), rel=1e-6)
    record.clear()
    assert path_norms(leaf.grad, record).a == 0


def _at_three_places(table, body, ids, targets, lookup, loss):
    first, after = lookup(table, ids)
    second, after = lookup(after, targets)
    return loss(torch.tanh((first + second) @ body), after, targets)


def _off_the_gradient_path(table, body, ids, targets, lookup, loss):
    rows, after = lookup(table, ids)
    return loss(rows.detach() @ body, after, targets)


def _checkpointed(table, body, ids, targets, lookup, loss, reentrant=False):
    def model(leaf):
        rows, after = lookup(leaf, ids)
        return loss(torch.tanh(rows @ body), after, targets)

    return torch.utils.checkpoint.checkpoint(model, table, use_reentrant=reentrant)


def _three_forwards_then_one_backward(table, body, ids, targets, lookup, loss):
    return sum(_at_three_places(table, body, ids[i::3], targets[i::3], lookup, loss) for i in range(3))


def _a_head_that_is_not_used(table, body, ids, targets, lookup, loss):
    return lookup(table, ids)[0].square().sum()


def _a_gradient_without_memory_of_its_own(table, body, ids, targets, lookup, loss):
    rows, after = lookup(table, ids)
    return rows.sum() + after.sum()


GRAPHS = [_at_three_places, _off_the_gradient_path, _a_head_that_is_not_used, _three_forwards_then_one_backward]
GRAPHS += [_a_gradient_without_memory_of_its_own, _checkpointed, partial(_checkpointed, reentrant=True)]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: getattr(graph, "__name__", "reentrant"))
def test_gradient_equals_autograd_in_every_graph(graph):
    table, *rest = make_problem()
    leaf, plain = table.clone().requires_grad_(), table.clone().requires_grad_()
    graph(leaf, *rest, tied_lookup, linear_cross_entropy).backward()
    graph(plain, *rest, lambda table, ids: (F.embedding(ids, table), table), plain_loss).backward()
    torch.testing.assert_close(leaf.grad, plain.grad)


def test_tied_lookup_of_a_frozen_table_is_a_plain_lookup():
    table, _, ids, _ = make_problem()
    rows, after = tied_lookup(table, ids)
    assert after is table
    assert torch.equal(rows, table[ids])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", ["alpha", "stop_lookup", "stop_both"])
def test_options_scale_the_lookup_path_and_stop_the_padding_row(which, compiled):
    table, body, ids, targets = make_problem()
    row, leaf = int(ids[0]), table.clone().requires_grad_()
    step = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    step(leaf, body, ids, targets, LookupOptions(**{which: 0.25 if which == "alpha" else row})).backward()
    a, b = gradients_by_two_leaves(table, body, ids, targets)
    assert a[row].norm() > 0  # torch's padding_idx stops only this path
    assert b[row].norm() > 0
    expected = 0.25 * a + b if which == "alpha" else a + b
    if which != "alpha":
        expected[row] = b[row] if which == "stop_lookup" else 0
    torch.testing.assert_close(leaf.grad, expected)


def test_tied_step_allocates_one_gradient_buffer():
    """The gradient of the head becomes that of the table. No second [V, E] tensor is allocated."""
    v = 50_000
    leaf = torch.randn(v, E).requires_grad_()
    ids = torch.randint(0, v, (8,))
    with Allocations(v * E) as memory:
        rows, after = tied_lookup(leaf, ids)
        linear_cross_entropy(rows, after, ids).backward()
    assert len(memory.made) == 1


def test_micro_batches_add_to_an_existing_gradient_without_a_new_buffer():
    """Both paths of every batch are added to `weight.grad` in place. No [V, E] tensor is allocated."""
    table, body, ids, targets = make_problem()
    leaf, record = table.clone().requires_grad_(), PathRecord()
    leaf.grad = into = torch.zeros_like(table)
    with Allocations(V * E) as memory:
        for part in torch.arange(N).split(N // 4):
            rows, after = tied_lookup(leaf, ids[part], LookupOptions(record=record, into=into))
            loss = linear_cross_entropy(torch.tanh(rows @ body), after, targets[part], into=into, upstream=0.25)
            (loss / 4).backward()
    assert not memory.made
    assert leaf.grad is into
    parts = [gradients_by_two_leaves(table, body, ids[part], targets[part]) for part in torch.arange(N).split(N // 4)]
    path_a, path_b = (sum(paths) / 4 for paths in zip(*parts, strict=True))
    torch.testing.assert_close(leaf.grad, path_a + path_b)
    a, b = path_a.norm().item(), path_b.norm().item()
    norms = path_norms(leaf.grad, record)
    assert (norms.a, norms.b) == pytest.approx((a, b))


def test_tied_lookup_refuses_unsupported_derivatives_and_options():
    table, _, ids, _ = make_problem()
    leaf = table.clone().requires_grad_()
    rows, _ = tied_lookup(leaf, ids)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(rows.square().sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedError, match="stop_both"):
        tied_lookup(leaf, ids, LookupOptions(stop_both=1, into=torch.zeros_like(table)))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda w: tied_lookup(w, ids)[0].sum())(table)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"ids": torch.ones(3, dtype=torch.bool)}, UnsupportedError, r"ids of type torch\.bool; cast them"),
        ({"ids": torch.ones(3)}, UnsupportedError, r"ids of type torch\.float32; cast them"),
        ({"ids": torch.ones(3, dtype=torch.long, device="meta")}, UnsupportedError, "ids on meta and a table on cpu"),
        ({"table": torch.ones(V)}, UnsupportedError, r"in a table of shape \(31,\)"),
        ({"table": torch.ones(0, E)}, IndexError, "3 token ids for a table that has no rows"),
        ({"ids": torch.tensor([1, V])}, IndexError, "token 31 is outside the table of 31 rows"),
        ({"ids": torch.tensor([1, -1])}, IndexError, "token -1 is outside the table of 31 rows"),
        ({"options": LookupOptions(alpha=torch.nan)}, UnsupportedError, "alpha = nan; give a finite number"),
    ],
)
def test_tied_lookup_refuses_invalid_input(change, kind, says):
    given = {"table": torch.ones(V, E), "ids": torch.arange(3), "options": LookupOptions()}
    with pytest.raises(kind, match=says):
        tied_lookup(**(given | change))


def test_tied_lookup_accepts_a_table_without_rows_or_columns():
    rows, after = tied_lookup(torch.ones(0, E), torch.arange(0))
    assert (rows.shape, after.shape) == ((0, E), (0, E))
    leaf, record = torch.ones(V, 0, requires_grad=True), PathRecord()
    rows, after = tied_lookup(leaf, torch.arange(3), LookupOptions(record=record))
    (rows.sum() + after.sum()).backward()
    assert leaf.grad.shape == (V, 0)
    assert path_norms(leaf.grad, record).total == 0
    with pytest.raises(UnsupportedError, match="gradient on the meta device"):
        path_norms(torch.ones(V, E, device="meta"), record)


def test_path_norms_recorded_on_a_gpu_equal_those_of_a_cpu():
    """On a GPU the record keeps a row per token to avoid synchronisation; `path_norms` merges equal tokens."""
    table, body, ids, targets = make_problem()
    norms = []
    for branch in (nullcontext(), gpu_branch()):
        leaf, record = table.clone().requires_grad_(), PathRecord()
        with branch:
            for part in torch.arange(N).split(3):
                ours(leaf, body, ids[part], targets[part], LookupOptions(record=record)).backward()
            norms.append(path_norms(leaf.grad, record))
        assert len(record.pieces) < 9
    torch.testing.assert_close(asdict(norms[1]), asdict(norms[0]))


def test_recording_and_summing_both_paths_does_not_synchronise_the_gpu():
    """Reading a value raises an error on a meta tensor and synchronises on a CUDA tensor."""
    table, body, ids, targets = (x.to("meta") for x in make_problem())
    leaf, record = table.requires_grad_(), PathRecord()
    for part in torch.arange(N).split(1):  # more pieces than the record keeps before it merges them
        part = slice(int(part), int(part) + 1)
        ours(leaf, body, ids[part], targets[part], LookupOptions(record=record)).backward()
        sums = path_sums(leaf.grad, record)
        assert all(x.is_meta for x in (sums.a, sums.b, sums.total, sums.cosine))
    assert len(record.pieces) < 9
    with pytest.raises(NotImplementedError):
        record.merged()  # this one reads values


@given(st.lists(st.integers(0, V - 1), max_size=40), st.integers(0, 1000))
def test_merged_rows_are_the_sums_by_token_in_at_most_v_slots(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(tokens, dtype=torch.long)
    rows = torch.randn(len(ids), E, generator=generator, dtype=torch.float64)
    merged = PathRecord([(ids, rows)]).merged_rows(V)
    assert len(merged.ids) == min(len(ids), V)
    assert sorted(merged.ids[merged.is_used].tolist()) == sorted(set(tokens))
    assert not merged.rows[~merged.is_used].any()
    dense, expected = (torch.zeros(V, E, dtype=torch.float64) for _ in range(2))
    dense.index_add_(0, merged.ids, merged.rows)
    for token, row in zip(tokens, rows, strict=True):
        expected[token] += row
    torch.testing.assert_close(dense, expected)


def test_record_of_many_micro_batches_on_a_gpu_stays_as_small_as_the_table():
    record, total = PathRecord(), torch.zeros(V, E, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with gpu_branch():
        for _ in range(40):
            ids = torch.randint(0, V, (3 * V,), generator=generator)
            rows = torch.randn(3 * V, E, generator=generator, dtype=torch.float64)
            record.add(ids, rows, V)
            total.index_add_(0, ids, rows)
            assert sum(len(ids) for ids, _ in record.pieces) <= V + 8 * 3 * V
        gradient = torch.randn(V, E, generator=generator, dtype=torch.float64)
        norms = path_norms(gradient, record)
    assert (norms.a, norms.b) == pytest.approx((total.norm().item(), (gradient - total).norm().item()))


@pytest.mark.parametrize(
    ("home", "backend", "carrier"),
    [("cpu", "gloo", "cpu"), ("cuda:1", "gloo", "cpu"), ("cuda:1", "nccl", "cuda:3"), ("cpu", "nccl", "cuda:3")],
)
def test_rows_are_gathered_over_a_device_that_the_backend_supports(home, backend, carrier, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert path_gradient._collective_device(torch.device(home), backend) == torch.device(carrier)
    assert path_gradient._device_of_rank("cuda") == torch.device("cuda:3")  # also if nothing was recorded
    assert path_gradient._device_of_rank("cpu") == torch.device("cpu")


def test_path_norms_of_an_empty_record_are_zero():
    norms = path_norms(torch.zeros(V, E), PathRecord())
    assert (norms.a, norms.b, norms.total, repr(norms.cosine), repr(norms.share_b)) == (0, 0, 0, "nan", "nan")
