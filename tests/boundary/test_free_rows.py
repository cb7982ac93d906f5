"""Separate output rows of frequent tokens: `+free=K`, compared with autograd on real logits."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.boundary.ops.test_cross_entropy import OPTIONS, error, options_of
from tests.boundary.ops.test_divergence import plain as plain_divergence
from tests.boundary.ops.test_log_prob import plain as plain_statistics

from tiewise.boundary.boundary import Boundary
from tiewise.boundary.free_rows import FreeRows
from tiewise.boundary.ops.cross_entropy import oracle
from tiewise.boundary.ops.log_prob import vocabulary_statistics
from tiewise.boundary.ops.soft_targets import linear_divergence
from tiewise.core.errors import SpecError
from tiewise.core.frequent_tokens import most_frequent
from tiewise.core.spec import BoundarySpec, Vocabularies

V, D, N, K = 57, 12, 23, 5
COUNTS = np.random.default_rng(0).permutation(V)
IDS = sorted(np.argsort(-COUNTS)[:K].tolist())
CAST = {"float64": 1e-12, "float32": 1e-6}


def boundary_of(text="", dtype=torch.float64, vocab=V, counts=COUNTS):
    torch.manual_seed(0)
    boundary = Boundary(f"tied+free={K}{text}", vocab, D, counts=counts).double()
    with torch.no_grad():
        for parameter in boundary.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if boundary.spec.pad is not None:
            boundary.table_in[boundary.spec.pad] = 0
    return boundary.to(dtype)


def inputs_of(dtype=torch.float64, vocab=V):
    g = torch.Generator().manual_seed(1)
    targets = torch.randint(0, vocab, (N,), generator=g)
    targets[:3] = torch.tensor(IDS[:3])
    targets[::5] = -100
    return torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype), targets


def untied_rows(table, delta, ids=IDS):
    """Return the head's rows [V, D] by indexing with a matrix of ones and zeros."""
    return table + F.one_hot(torch.tensor(ids), len(table)).to(table.dtype).T @ delta


def gradients(function, *tensors):
    """Return results and the gradients of each tensor, summed with upstream gradients of both signs."""
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    results = function(*leaves)
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
    return [x.detach() for x in results], torch.autograd.grad(total, leaves)


def compare(boundary, hidden, ours, theirs, tolerance):
    """Compare `ours(hidden)` and its gradients with `theirs(hidden, rows of the head)` in fp64."""
    hidden = hidden.detach().requires_grad_()
    leaves = [hidden, boundary.table_in, boundary.free.rows]
    results = ours(hidden)
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
    found = torch.autograd.grad(total, leaves)
    expected, true = gradients(lambda h, table, delta: theirs(h, untied_rows(table, delta)), *leaves)
    for one, other in zip((*results, *found), (*expected, *true), strict=True):
        assert error(one, other) < tolerance


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda o: "+".join(o) or "plain")
@pytest.mark.parametrize("dtype", CAST)
def test_loss_and_gradients_equal_autograd_on_real_logits(dtype, chosen, reduction):
    boundary = boundary_of(dtype=getattr(torch, dtype))
    hidden, targets = inputs_of(getattr(torch, dtype))
    chosen = options_of(chosen, V) | {"reduction": reduction}
    compare(
        boundary,
        hidden,
        lambda h: [boundary.loss(h, targets, chunk=7, **chosen)],
        lambda h, rows: [oracle(h, rows, targets, **chosen)],
        CAST[dtype],
    )


@pytest.mark.parametrize("dtype", CAST)
@pytest.mark.parametrize("chosen", [{}, {"softcap": 2.0, "temperature": 0.7}], ids=["plain", "softcap"])
def test_log_probabilities_and_entropies_equal_autograd_on_real_logits(chosen, dtype):
    boundary = boundary_of(dtype=getattr(torch, dtype))
    hidden, targets = inputs_of(getattr(torch, dtype))
    compare(
        boundary,
        hidden,
        lambda h: vocabulary_statistics(
            h, boundary.free.table(boundary.table_in), targets, entropy=True, chunk=7, **chosen
        ),
        lambda h, rows: plain_statistics(h, rows, targets, **chosen),
        CAST[dtype],
    )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence_equals_autograd_on_real_logits(beta):
    boundary = boundary_of()
    hidden, targets = inputs_of()
    g = torch.Generator().manual_seed(2)
    teacher = [torch.randn(rows, 4, generator=g, dtype=torch.float64) for rows in (N, V)]
    compare(
        boundary,
        hidden,
        lambda h: [linear_divergence(h, boundary.free.table(boundary.table_in), *teacher, targets, beta=beta, chunk=7)],
        lambda h, rows: [plain_divergence((h, rows, None), (*teacher, None), targets, beta)],
        1e-12,
    )


@pytest.mark.parametrize(
    "option", ["", "+bias", "+output_scale=1/sqrt_d+input_scale=sqrt_d", "+softcap=3+bias", "+alpha=0.3", "+pad=2"]
)
def test_whole_step_equals_autograd_with_every_option_of_the_spec(option):
    boundary = boundary_of(option)
    ids, targets = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(4)), inputs_of()[1]
    spec, (input_scale, output_scale) = boundary.spec, boundary.spec.scales(D)
    ids[:2] = torch.tensor([2, IDS[0]])
    leaves = {name: p.detach().clone().requires_grad_() for name, p in boundary.named_parameters()}
    table = leaves["table_in"]
    lookup = table * spec.alpha + table.detach() * (1 - spec.alpha)
    kept = torch.ones(V, 1, dtype=torch.float64)
    if spec.pad is not None:
        kept[spec.pad] = 0
    rows, lookup = (x * kept + (x * (1 - kept)).detach() for x in (table, lookup))
    hidden = torch.tanh(lookup[ids] * input_scale)
    logits = hidden @ untied_rows(rows, leaves["free.rows"]).T * output_scale + leaves.get("bias", 0)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    expected = F.cross_entropy(logits, targets)
    expected.backward()

    torch.testing.assert_close(boundary.logits(torch.tanh(boundary.embed(ids))), logits)
    loss = boundary(ids, torch.tanh, targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in boundary.named_parameters():
        torch.testing.assert_close(parameter.grad, leaves[name].grad, msg=name)


def test_bf16_error_is_at_most_that_of_plain_torch():
    boundary = boundary_of(dtype=torch.bfloat16)
    hidden, targets = inputs_of(torch.bfloat16)
    tensors = (hidden, boundary.table_in, boundary.free.rows)
    _, truth = gradients(lambda h, e, d: [F.cross_entropy(h @ untied_rows(e, d).T, targets)], *tensors)
    errors = []
    for loss_of in (
        lambda h, e, d: boundary.loss(h, targets),
        lambda h, e, d: F.cross_entropy(h @ untied_rows(e, d).T, targets),
    ):
        leaves = [hidden.detach().requires_grad_(), boundary.table_in, boundary.free.rows]
        found = torch.autograd.grad(loss_of(*leaves), leaves)
        errors.append([error(one, other) for one, other in zip(found, truth, strict=True)])
    assert all(ours <= 1.05 * plain for ours, plain in zip(*errors, strict=True)), errors


def test_one_buffer_holds_both_gradients_of_the_tied_table():
    """Δ's gradient is the head path's alone: a buffer shared with the lookup would add its rows."""
    boundary = boundary_of()
    ids = torch.tensor(IDS)
    boundary(ids, torch.tanh, ids).backward()
    lookup = boundary.table_in.grad[IDS] - boundary.free.rows.grad
    hidden = torch.tanh(boundary.embed(ids)).detach()
    boundary.zero_grad()
    boundary.loss(hidden, ids).backward()
    torch.testing.assert_close(boundary.table_in.grad[IDS], boundary.free.rows.grad)
    assert lookup.norm() > 0


def test_start_is_exactly_tied_and_dense_tables_compute_the_same():
    start = Boundary(f"tied+free={K}", V, D, counts=COUNTS)
    assert not start.free.rows.any()
    assert torch.equal(start.dense()[1], start.table_in)
    boundary = boundary_of("+output_scale=1/d+input_scale=2")
    hidden, _ = inputs_of()
    dense_in, dense_out = boundary.dense()
    torch.testing.assert_close(hidden @ dense_out.T, boundary.logits(hidden))
    torch.testing.assert_close(dense_out, untied_rows(boundary.table_in, boundary.free.rows) / D)
    torch.testing.assert_close(dense_in, boundary.table_in * 2)
    other = Boundary(f"tied+free={K}", V, D, counts=torch.zeros(V)).double()
    other.load_state_dict(boundary.state_dict())
    assert other.free.ids.tolist() == IDS


def test_vocabularies_of_another_order_count_output_tokens():
    mixed = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:15].tolist()
    vocab = Vocabularies(20, 17, (*mixed, -1, -1))
    counts = np.arange(17)
    boundary = boundary_of(f"+pad={mixed[14]}", vocab=vocab, counts=counts)
    ids = [11, 12, 13, 15, 16]  # output token 14 has the padding row
    assert boundary.free.ids.tolist() == ids
    hidden, _ = inputs_of()
    rows = boundary.table_in[[*mixed, 20, 21]]
    torch.testing.assert_close(boundary.logits(hidden), hidden @ untied_rows(rows, boundary.free.rows, ids).T)


def test_most_frequent_tokens_are_sorted_and_ties_take_the_lower_id():
    spec = BoundarySpec.parse("tied+free=3")
    assert most_frequent(spec, [1, 7, 7, 0, 7, 7], Vocabularies.same(6)) == (1, 2, 4)
    assert most_frequent(BoundarySpec.parse("tied+free=3+pad=2"), [0, 0, 9, 0], Vocabularies.same(4)) == (0, 1, 3)


REFUSED = [
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=0")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=-3")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=2.5")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free=many")),
    ("must be a whole number, 1 or more", lambda: BoundarySpec.parse("tied+free")),
    ("free = 0 in tied", lambda: BoundarySpec("tied", free=0)),
    ("free = 2.0 in tied", lambda: BoundarySpec("tied", free=2.0)),
    ("free = True in tied", lambda: BoundarySpec("tied", free=True)),
    ("free on untied: only a tied table", lambda: BoundarySpec.parse("untied+free=2")),
    ("free on factored: only a tied table", lambda: BoundarySpec.parse("factored:2+free=2")),
    ("untie_at, which frees all rows", lambda: BoundarySpec.parse("tied+free=2+untie_at=5")),
    ("the vocabulary has 57 tokens; choose K ≤ 57", lambda: Boundary("tied+free=58", V, D, counts=COUNTS)),
    ("the vocabulary has 56 tokens", lambda: Boundary("tied+free=57+pad=1", V, D, counts=COUNTS)),
    ("is not known; give the tokens' counts", lambda: Boundary("tied+free=2", V, D)),
    (r"counts of shape \[3\] for 57 tokens", lambda: Boundary("tied+free=2", V, D, counts=[1, 2, 3])),
    ("counts of type str", lambda: Boundary("tied+free=2", V, D, counts="many")),
    ("negative or not finite", lambda: Boundary("tied+free=2", V, D, counts=[-1.0, *[0.0] * 56])),
    ("not 2 ascending tokens below 57", lambda: FreeRows([3, 3], D).check_ids(V)),
    ("not 2 ascending tokens below 57", lambda: FreeRows([3, 57], D).check_ids(V)),
    ("into with free=5", lambda: boundary_of()(inputs_of()[1].relu(), torch.tanh, inputs_of()[1], into=rows())),
    ("into with free=5", lambda: boundary_of().loss(*inputs_of(), into=rows())),
]


def rows():
    return torch.zeros(V, D, dtype=torch.float64)


@pytest.mark.parametrize(("says", "call"), REFUSED)
def test_wrong_counts_and_numbers_are_refused_in_one_line(says, call):
    with pytest.raises(SpecError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
