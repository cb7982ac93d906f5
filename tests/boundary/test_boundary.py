"""The `Boundary` module with every spec, compared with formulas on plain tensors."""

import math

import pytest
import torch
import torch.nn.functional as F

from tiewise.boundary.boundary import Boundary
from tiewise.boundary.ops.path_gradient import PathRecord, path_norms
from tiewise.core.errors import SpecError
from tiewise.core.spec import BoundarySpec, Vocabularies
from tiewise.planning.first_loss import first_step, predicted_nll, sound_std

V, D, N = 41, 12, 30
SPECS = ["untied", "tied", "factored:5", "factored-untied:in=4,out=6", "residual:3,s=0.5", "spd"]
SPECS += ["projected", "projected:20", "projected:7,untied,penalty=0.15", "projected:7,untied,out=none"]
OPTIONS = ["", "+bias", "+input_scale=sqrt_d+output_scale=1/sqrt_d", "+softcap=3+bias", "+alpha=0.3", "+pad=2"]


def build(text, vocab=V, width=D):
    torch.manual_seed(0)
    boundary = Boundary(text, vocab, width).double()
    with torch.no_grad():
        for parameter in boundary.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if boundary.spec.pad is not None:
            boundary.table_in[boundary.spec.pad] = 0
            boundary.table_out[boundary.spec.pad] = 0
    return boundary


def tokens(seed=0, vocab=V):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (N,), generator=g), torch.randint(0, vocab, (N,), generator=g)


def matrices(boundary):
    """Return (in_map [E, D], out_map [D, E]) as plain matrices, from the formulas of the design."""
    eye = torch.eye(D, dtype=torch.float64)
    kind = boundary.spec.kind
    if kind == "residual":
        return eye, eye + boundary.spec.strength * (boundary.out_map.p @ boundary.out_map.q).T
    if kind == "spd":
        f = boundary.out_map.factor
        c = torch.tril(f, -1) + torch.diag(torch.exp(torch.diagonal(f)))
        return torch.linalg.inv(c @ c.T), c @ c.T
    a = eye if boundary.in_map is None else boundary.in_map.weight.T
    b = eye if boundary.out_map is None else boundary.out_map.weight.T
    return a, b


def reference(boundary, ids, targets, w_in, w_out):
    in_matrix, out_matrix = matrices(boundary)
    s_in, s_out = boundary.spec.scales(D)
    h = torch.tanh(w_in[ids] @ in_matrix * s_in)
    h = h @ out_matrix
    h = h + boundary.out_map.bias if boundary.spec.out_bias else h
    z = h @ w_out.T * s_out
    z = z if boundary.bias is None else z + boundary.bias
    cap = boundary.spec.softcap
    z = z if cap is None else cap * torch.tanh(z / cap)
    return z, F.cross_entropy(z, targets)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", [*SPECS, "projected:7,out_bias"])
def test_boundary_equals_its_formula_for_every_spec_and_option(kind, option):
    boundary = build(kind + option)
    ids, targets = tokens()
    spec = boundary.spec
    w_in = boundary.table_in.detach().clone().requires_grad_()
    w_out = boundary.table_out.detach().clone().requires_grad_()
    logits, loss = reference(boundary, ids, targets, w_in, w_out)
    others = [p for p in boundary.parameters() if p is not boundary.table_in and p is not boundary.table_out]
    expected = torch.autograd.grad(loss, [w_in, w_out, *others])

    torch.testing.assert_close(boundary.logits(torch.tanh(boundary.embed(ids))), logits)
    verbs = boundary.loss(torch.tanh(boundary.embed(ids)), targets)  # separate calls: as exact, with one more buffer
    single = torch.autograd.grad(verbs, list(boundary.parameters()))
    boundary.record = PathRecord()
    got = boundary(ids, torch.tanh, targets)
    torch.testing.assert_close(got, loss)
    got.backward()
    torch.testing.assert_close(single, tuple(p.grad for p in boundary.parameters()))
    a, b = spec.alpha * expected[0], expected[1].clone()
    if spec.pad is not None:
        assert b[spec.pad].norm() > 0  # a plain padding_idx would not stop this gradient
        a[spec.pad], b[spec.pad] = 0, 0
    if boundary.tied:
        torch.testing.assert_close(boundary.table_in.grad, a + b)
        norms = path_norms(boundary.table_in.grad, boundary.record)
        assert (norms.a, norms.b) == pytest.approx((a.norm().item(), b.norm().item()))
    else:
        torch.testing.assert_close(boundary.table_in.grad, a)
        torch.testing.assert_close(boundary.table_out.grad, b)

    into = torch.ones_like(boundary.table_out)  # the gradient is added to this tensor instead
    if spec.pad is not None:
        with pytest.raises(SpecError, match="into with pad"):
            boundary(ids, torch.tanh, targets, into=into)
        return
    boundary.zero_grad()
    boundary(ids, torch.tanh, targets, into=into).backward()
    torch.testing.assert_close(into - 1, a + b if boundary.tied else b)
    assert boundary.table_out.grad is None
    if not boundary.tied:
        torch.testing.assert_close(boundary.table_in.grad, a)
    for parameter, gradient in zip(others, expected[2:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("kind", SPECS)
def test_dense_tables_compute_the_function_of_the_boundary(kind):
    boundary = build(kind + "+input_scale=2+output_scale=1/d")
    ids, _ = tokens()
    dense_in, dense_out = boundary.dense()
    hidden = torch.randn(N, D, dtype=torch.float64)
    torch.testing.assert_close(dense_in[ids], boundary.embed(ids))
    torch.testing.assert_close(hidden @ dense_out.T, boundary.logits(hidden))


MIXED = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:15].tolist()  # a different order of tokens
OUTPUT_ROWS = [((41, 30), range(30)), ((30, 41), range(41))]
OUTPUT_ROWS += [((20, 17, (*MIXED, -1, -1)), [*MIXED, 20, 21])]


@pytest.mark.parametrize(("sizes", "rows"), OUTPUT_ROWS)
@pytest.mark.parametrize("kind", ["tied", "untied", "factored:5"])
def test_boundary_supports_vocabularies_of_different_size_and_order(kind, sizes, rows):
    boundary = build(kind, Vocabularies(*sizes))
    ids, targets = tokens(vocab=min(sizes[:2]))
    w_in = boundary.table_in.detach().clone().requires_grad_()
    w_out = boundary.table_out.detach().clone().requires_grad_()
    loss = reference(boundary, ids, targets, w_in, w_out[list(rows)] if boundary.tied else w_out)[1]
    a, b = torch.autograd.grad(loss, [w_in, w_out])
    got = boundary(ids, torch.tanh, targets)
    torch.testing.assert_close(got, loss)
    got.backward()
    torch.testing.assert_close(boundary.table_in.grad, a + b if boundary.tied else a)


def test_tied_table_is_one_parameter_with_two_names_in_the_state_dict():
    boundary = Boundary("tied", V, D)
    assert [name for name, _ in boundary.named_parameters()] == ["table_in"]
    table_in, table_out = boundary.state_dict().values()
    assert table_in.data_ptr() == table_out.data_ptr() == boundary.table_out.data_ptr()


def test_projection_penalty_equals_the_paper_and_its_authors_code():
    assert build("tied").penalty() == 0
    for printed, decay in ((0.15, 0.0), (0.0, 0.0076923), (0.25, 0.5)):
        boundary = build(f"projected:penalty={printed},decay={decay}")
        p = boundary.out_map.weight.detach()
        boundary.penalty().backward()
        assert boundary.penalty().item() == pytest.approx(printed * p.norm().item() + decay / 2 * p.norm().item() ** 2)
        torch.testing.assert_close(boundary.out_map.weight.grad, printed * p / p.norm() + decay * p)


# --- starting values


@pytest.mark.parametrize(
    ("vocab", "tau", "own"), [(10_000, 0.226, None), (4096, 0.566, None), (10_000, 11.3, None), (4096, 1.0, 12.0)]
)
def test_predicted_nll_matches_simulation(vocab, tau, own):
    """With `own`, one logit is the self-similarity of the token in a tied table."""
    z = torch.randn(400, vocab, generator=torch.Generator().manual_seed(0)) * tau
    if own is not None:
        z[:, 0] = own
    found = z.logsumexp(1)
    within = 1e-3 if own is not None else 4 * found.std().item() / 20 + 1e-4
    assert predicted_nll(vocab, tau, self_logit=own) == pytest.approx(found.mean().item(), abs=within)


def test_predicted_nll_gives_tokens_without_an_output_row_no_self_logit():
    apart, joined = (
        Boundary(kind + "+init=1", Vocabularies(400, 100), 64).predicted_nll() for kind in ("untied", "tied")
    )
    met = Boundary("tied+init=1", 100, 64).predicted_nll()
    assert joined == pytest.approx(met / 4 + apart * 3 / 4)
    tokens = Vocabularies(3, 4, (2, -1, 0, 2))
    assert (tokens.read_and_predicted, Vocabularies(3, 5).read_and_predicted) == (2, 3)


@pytest.mark.parametrize("kind", SPECS)
def test_first_loss_is_near_the_predicted_one(kind):
    """Hidden states are random here; tests/training/kinds/test_decoder.py checks the loss with a body."""
    torch.manual_seed(1)
    d, v, n = 128, 3000, 400
    boundary = Boundary(kind.replace(":7", ":100"), v, d)
    hidden = F.normalize(torch.randn(n, d), dim=-1) * math.sqrt(d)
    got = boundary.loss(hidden, torch.randint(0, v, (n,)))
    predicted, _ = first_step(boundary.spec, v, d, boundary.spec.init or sound_std(d)).compute()
    assert got.item() == pytest.approx(predicted, abs=0.08)


@pytest.mark.parametrize("kind", ["tied", "untied", "factored:64", "factored-untied:64", "projected:400"])
def test_default_scale_gives_embeddings_of_unit_norm_and_a_zero_padding_row(kind):
    torch.manual_seed(0)
    boundary = Boundary(kind + "+pad=2", 5000, 256)
    width = boundary.table_in.shape[1]
    assert not boundary.table_in[2].any()
    assert not boundary.table_out[2].any()
    assert boundary.table_in.norm(dim=1).mean().item() == pytest.approx((width / 256) ** 0.5, rel=0.02)
    assert boundary.embed(torch.arange(5000)).square().sum(1).mean().item() == pytest.approx(1.0, rel=0.05)
    assert sound_std(256) == 0.0625


# --- refusals


REFUSED = [
    (SpecError, "exceeds the model width 12", lambda: Boundary("factored:13", V, D)),
    (SpecError, "pad=41 is outside", lambda: Boundary("tied+pad=41", V, D)),
    (SpecError, "changes during training", lambda: Boundary("tied+untie_at=5", V, D)),
    (SpecError, r"cannot meet a table.*two tables \(untied\)", lambda: Boundary("projected:20,out=none", V, D)),
    (SpecError, "out=none leaves out", lambda: Boundary("projected:out=none,out_bias", V, D)),
    (SpecError, "soft-cap", lambda: Boundary("tied+softcap=3", V, D).dense()),
    (SpecError, "bias is no table", lambda: Boundary("projected:7,out_bias", V, D).dense()),
    (SpecError, "do not fit the table", lambda: Boundary("tied", V, D).load_rows(torch.zeros(V, 3))),
    (SpecError, "leaves the input vocabulary", lambda: Vocabularies(3, 2, (0, 3))),
    (IndexError, "token 41 is outside the input vocabulary of 41", lambda: build("tied").embed(torch.tensor([1, 41]))),
    (SpecError, "float32", lambda: build("tied").embed(torch.tensor([0.0, 1.0]))),
    (SpecError, r"torch\.bool; cast", lambda: build("tied").embed(torch.tensor([False, True]))),
    (SpecError, r"torch\.complex64; cast", lambda: build("tied").embed(torch.zeros(2, dtype=torch.complex64))),
    (SpecError, "alpha = nan in tied; give a finite", lambda: Boundary(BoundarySpec("tied", alpha=torch.nan), V, D)),
    (SpecError, "softcap = inf in tied", lambda: Boundary(BoundarySpec("tied", softcap=torch.inf), V, D)),
]


def test_boundary_step_on_the_meta_device_has_the_usual_shapes():
    with torch.device("meta"):
        boundary, ids = Boundary("tied+bias+softcap=5", V, D), torch.zeros(3, 4, dtype=torch.long)
        loss = boundary(ids, torch.nn.Linear(D, D), ids)
        loss.backward()
    assert loss.shape == ()
    assert {x.grad.shape for x in boundary.parameters()} == {(V, D), (V,)}


@pytest.mark.parametrize(("kind", "says", "call"), REFUSED, ids=[says for _, says, _ in REFUSED])
def test_boundary_refuses_invalid_specs_and_inputs(kind, says, call):
    with pytest.raises(kind, match=says):
        call()


def test_embeddings_of_an_spd_boundary_can_be_scaled_in_place():
    """CTRL scales its embeddings in place."""
    boundary, ids = build("spd"), tokens()[0]
    rows = boundary.embed(ids)
    rows *= 2
    leaves = list(boundary.parameters())
    got, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (rows, boundary.embed(ids) * 2))
    torch.testing.assert_close(got, wanted)
