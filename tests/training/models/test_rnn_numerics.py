"""Tests of recurrent cells against torch modules and reference cells in double precision."""

import pytest
import torch
from rnn_tools import KINDS, tiny, torch_modules, words
from torch import nn

from tiewise.training.models import detached
from tiewise.training.models.rnn import CELLS, run_fused, run_stepped

EXACT = {"rtol": 1e-10, "atol": 1e-12}
SIZES = {
    "square": {},
    "E and H": {"embedding_size": 7, "hidden_size": 4},
    "AWD": {"embedding_size": 4, "hidden_size": 7, "last_hidden_size": 4, "num_hidden_layers": 3},
    "one layer": {"num_hidden_layers": 1},
}


def torch_logits(model, modules, ids, state):
    """Return the logits and the final state of stacked torch modules."""
    x, after = nn.functional.embedding(ids, model.embed.weight), []
    for module, before in zip(modules, state, strict=True):
        before = tuple(part[None] for part in before)
        x, found = module(x, before if len(before) > 1 else before[0])
        after.append(tuple(part[0] for part in (found if isinstance(found, tuple) else (found,))))
    return nn.functional.linear(x, model.head.weight, model.head.bias), tuple(after)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("cell", "bias"), KINDS)
def test_logits_states_and_gradients_match_torch_modules(cell, bias, sizes):
    model = tiny(cell=cell, lstm_bias=bias, **sizes)
    modules, ids, state = torch_modules(model), words(), detached(model(words(seed=1)).state)
    found = model(ids, state=state)
    wanted, after = torch_logits(model, modules, ids, state)
    torch.testing.assert_close((found.logits, found.state), (wanted, after), **EXACT)
    signal = torch.randn(wanted.shape, dtype=torch.double, generator=torch.Generator().manual_seed(5))
    names, table = ("weight_ih", "weight_hh", "bias_ih"), model.embed.weight
    mine = [table, *(getattr(layer, name) for layer in model.rnn.layers for name in names)]
    theirs = [table, *(getattr(module, f"{name}_l0") for module in modules for name in names)]
    pairs = ((found.logits, mine), (wanted, theirs))
    torch.testing.assert_close(*(torch.autograd.grad((out * signal).sum(), into) for out, into in pairs), **EXACT)


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def reference_cell(cell, x, state, weights, mask):
    """Compute a cell gate by gate from slices of the matrices, one position at a time."""
    matrix, recurrent, bias, recurrent_bias = weights
    width, (h, *_), rows = recurrent.shape[1], state, []

    def gate(k, t):
        part = slice(k * width, (k + 1) * width)
        given = x[:, t] if matrix is None else x[:, t] @ matrix[part].T
        return given + bias[part], (h * mask) @ recurrent[part].T + recurrent_bias[part]

    s = state[-1]
    for t in range(x.shape[1]):
        gates = [gate(k, t) for k in range(CELLS[cell].gates)]
        if cell in ("tanh", "relu"):
            total = sum(gates[0])
            up, down = total.exp(), (-total).exp()
            h = (up - down) / (up + down) if cell == "tanh" else total.clamp(min=0)
        elif cell == "gru":
            r, z = sigmoid(sum(gates[0])), sigmoid(sum(gates[1]))
            h = (1 - z) * (gates[2][0] + r * gates[2][1]).tanh() + z * h
        else:
            i, f, g, o = (sum(pair) for pair in gates)
            s = sigmoid(f) * s + sigmoid(i) * g.tanh()
            h = sigmoid(o) * s.tanh()
        rows.append(h)
    return torch.stack(rows, 1), (h, s) if cell == "lstm" else (h,)


def random_inputs(cell, bias="two", width_from=3, width=4, rows=2, length=5):
    source = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.double, generator=source).requires_grad_()

    size = CELLS[cell].gates * width
    second = draw(size) if bias == "two" else torch.zeros(size, dtype=torch.double)
    weights = [draw(size, width_from), draw(size, width), draw(size), second]
    x = draw(rows, length, width_from)
    state = tuple(draw(rows, width) for _ in range(CELLS[cell].states))
    mask = (torch.rand(rows, width, generator=source, dtype=torch.double) > 0.4).double() / 0.6
    return x, state, weights, mask


@pytest.mark.parametrize(("cell", "bias"), KINDS)
def test_run_stepped_with_mask_matches_reference_cell(cell, bias):
    x, state, weights, mask = random_inputs(cell, bias)
    assert 0 < mask.count_nonzero() < mask.numel()
    found, after = run_stepped(CELLS[cell], x, state, weights, mask)
    wanted, behind = reference_cell(cell, x, state, weights, mask)
    torch.testing.assert_close((found, after), (wanted, [behind]), **EXACT)
    leaves = [x, *state, *(each for each in weights if each.requires_grad)]
    signal = torch.randn(found.shape, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    gradients = [torch.autograd.grad((each * signal).sum(), leaves) for each in (found, wanted)]
    torch.testing.assert_close(*gradients, **EXACT)


def test_bfloat16_gradient_error_stays_near_that_of_reference_cell():
    x, state, weights, mask = random_inputs("lstm", rows=40, width=30, width_from=30)
    flat = [each.detach().float().requires_grad_() for each in weights]
    given = x.detach().float(), tuple(part.detach().float() for part in state), flat, mask.float()

    def gradients(hidden):
        return torch.autograd.grad(hidden.float().sum(), flat)

    exact = gradients(reference_cell("lstm", *given)[0])
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = run_stepped(CELLS["lstm"], *given)[0], reference_cell("lstm", *given)[0]
    for mine, theirs, wanted in zip(gradients(found), gradients(plain), exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - wanted).norm() <= 1.5 * (theirs - wanted).norm()


@pytest.mark.parametrize("cell", ["tanh", "relu"])
def test_cell_without_input_matrix_adds_embedding_directly(cell):
    x, state, (_, recurrent, bias, second), mask = random_inputs(cell, width_from=4)
    layer = tiny(cell=cell, input_matrix=False, hidden_size=4).rnn.layers[0]
    for name, value in (("weight_hh", recurrent), ("bias_ih", bias), ("bias_hh", second)):
        getattr(layer, name).data.copy_(value)
    weights, plain = layer.weights(0.0), (None, recurrent, bias, second)
    for kept in (mask, torch.ones_like(mask)):
        wanted, behind = reference_cell(cell, x, state, plain, kept)
        found = run_stepped(CELLS[cell], x, state, weights, kept)
        torch.testing.assert_close(found, (wanted, [behind]), **EXACT)
    torch.testing.assert_close(run_fused(CELLS[cell], x, [state], [weights], 0.0), (wanted, [behind]), **EXACT)
