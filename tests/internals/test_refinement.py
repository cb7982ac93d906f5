"""Refinement against planted maps whose fixed point, rate and distance are known, and against transformers' states."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers as tr
from scipy.stats import t
from tests.boundary.tiny_models import _BERT, _LLAMA, FAMILIES, V, build
from torch import nn

from tiewise.boundary.locate import locate
from tiewise.core.errors import DataError
from tiewise.internals.loaded import Opened
from tiewise.internals.refinement import refinement
from tiewise.internals.repeats import Repeat, applied, iterate, keys, repeats, shared_fractions
from tiewise.internals.stack import find_stack


class Affine(nn.Module):
    """h → h Aᵀ + b, in a layer's clothes."""

    def __init__(self, matrix, bias):
        super().__init__()
        self.linear = nn.Linear(len(matrix), len(matrix))
        with torch.no_grad():
            self.linear.weight.copy_(torch.as_tensor(matrix))
            self.linear.bias.copy_(torch.as_tensor(bias))

    def forward(self, hidden_states, **_):
        return self.linear(hidden_states)


class Alone(nn.Module):
    """h → h, without parameters."""

    def forward(self, hidden_states, **_):
        return hidden_states


def with_layers(layers):
    """A Llama whose stack is `layers`."""
    model = build("llama").eval()
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    return Opened(None, model, locate(model))


def opened(model):
    return Opened(None, model.eval(), locate(model))


def albert(seed=0, **settings):
    torch.manual_seed(seed)
    config = tr.AlbertConfig(**(_BERT | {"embedding_size": 8, "num_hidden_layers": 6} | settings))
    return opened(tr.AlbertForMaskedLM(config))


def windows(count=4, length=8, seed=3):
    return np.random.default_rng(seed).integers(3, V, (count, length))


def rotation_like(norms, seed=0):
    """Symmetric matrix [D, D] with these eigenvalues."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(norms),) * 2))
    return basis @ np.diag(norms) @ basis.T


def test_a_planted_contraction_is_found_with_its_rate_and_distance():
    d, times, further = 16, 3, 40
    values = np.linspace(-0.3, 0.6, d)
    matrix, bias = rotation_like(values), np.random.default_rng(1).normal(size=d)
    model = with_layers([Affine(matrix, bias)] * times)
    found = refinement(model, windows(), further=further)
    (rest,) = found.trained.repeats
    assert (rest.first, rest.period, rest.times) == (0, 1, times)
    assert (rest.windows, rest.converged, rest.alternating) == (4, 4, 0)

    table = model.model.get_input_embeddings().weight.detach().double().numpy()
    fixed = np.linalg.solve(np.eye(d) - matrix, bias)
    states = [table[windows()]]
    for _ in range(times + 4):
        states.append(states[-1] @ matrix.T + bias)
    norm = np.linalg.norm
    away = (norm(states[times] - fixed, axis=-1) / norm(fixed)).mean()
    assert rest.from_end.value == pytest.approx(away, rel=1e-4)
    for k in range(times + 4):
        step = (norm(states[k + 1] - states[k], axis=-1) / norm(states[k], axis=-1)).mean()
        assert rest.residual[k].value == pytest.approx(step, rel=1e-4, abs=1e-6)
    units = np.stack([state / norm(state, axis=-1, keepdims=True) for state in states[: times + 1]])
    cosines = np.einsum("iwtd,jwtd->ijwt", units, units).mean((2, 3))
    np.testing.assert_allclose(found.trained.alike, cosines, atol=1e-6)
    assert len(rest.residual) == times + further
    assert rest.growth.value == pytest.approx(0.6, rel=0.02)  # a random difference turns into the leading direction


def test_a_difference_grows_at_the_spectral_radius_and_a_ratio_is_that_of_changes():
    values = np.array([1.3, 0.2, -0.1, 0.05])
    matrix = torch.tensor(rotation_like(values, 2))
    start = torch.tensor(np.random.default_rng(5).normal(size=(3, 2, 4)))
    walked = iterate(lambda state: state @ matrix, start, 30, seed=0)
    assert walked.growth[-1].numpy() == pytest.approx(1.3, rel=1e-6)
    assert walked.ratio[-1].numpy() == pytest.approx(1.3, rel=1e-6)
    assert walked.residual[-1].numpy() == pytest.approx(0.3, rel=1e-6)


def test_a_reflection_alternates_and_never_rests():
    model = with_layers([Affine(-np.eye(16), np.zeros(16))] * 2)
    (rest,) = refinement(model, windows(), further=6).trained.repeats
    assert (rest.converged, rest.alternating) == (0, 4)
    assert rest.from_end is None
    assert rest.residual[-1].value == pytest.approx(2, rel=1e-6)
    assert rest.growth.value == pytest.approx(1, rel=1e-4)


def test_a_stack_that_does_nothing_changes_nothing():
    layer = Alone()
    found = refinement(with_layers([layer, layer, layer]), windows(), further=4)
    for one in found.trained.applications:
        assert (one.change.value, one.again.value) == (0, 0)
        assert one.cosine.value == pytest.approx(1, abs=1e-6)
    (rest,) = found.trained.repeats
    assert (rest.times, rest.converged, rest.from_end.value) == (3, 4, 0)
    assert found.untrained is None  # its class makes other layers from the config


def test_steps_are_those_between_the_states_that_transformers_gives_out():
    model = albert(num_hidden_groups=2)
    ids = windows()
    found = refinement(model, ids, further=3).trained
    with torch.no_grad():
        states = model.model(torch.tensor(ids), output_hidden_states=True).hidden_states
    states = [state.double().numpy() for state in states]
    steps = [new - old for old, new in pairwise(states)]
    norm = np.linalg.norm
    assert len(found.applications) == 6
    for i, (one, old, new) in enumerate(zip(found.applications, states, states[1:], strict=False)):
        each = norm(steps[i], axis=-1) / norm(old, axis=-1)
        assert one.change.value == pytest.approx(each.mean(), rel=1e-5)
        assert one.change.high - one.change.value == pytest.approx(
            t.ppf(0.975, 3) * each.mean(1).std(ddof=1) / 2, rel=1e-3
        )
        cosine = (old * new).sum(-1) / norm(old, axis=-1) / norm(new, axis=-1)
        assert one.cosine.value == pytest.approx(cosine.mean(), abs=1e-6)
        assert one.norm.value == pytest.approx(norm(new, axis=-1).mean(), rel=1e-5)
        assert one.distance.value == pytest.approx(norm(steps[i], axis=-1).mean(), rel=1e-5)
        if i:
            turn = (steps[i] * steps[i - 1]).sum(-1) / norm(steps[i], axis=-1) / norm(steps[i - 1], axis=-1)
            assert one.turn.value == pytest.approx(turn.mean(), abs=1e-5)


def test_a_repeated_layer_applied_twice_is_its_next_application():
    parts = refinement(albert(), windows(), further=3).trained.applications
    for one, following in pairwise(parts):
        assert one.again.value == pytest.approx(following.change.value, rel=1e-5)
        assert one.again_cosine.value == pytest.approx(following.cosine.value, rel=1e-5)


def test_further_applications_are_those_of_a_deeper_model():
    shallow, deep = albert(), albert(num_hidden_layers=11)
    (rest,) = refinement(shallow, windows(), further=5).trained.repeats
    steps = refinement(deep, windows(), further=2).trained.applications
    assert [e.value for e in rest.residual] == pytest.approx([one.change.value for one in steps], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [Repeat(0, 1, 6)]),
        ({"num_hidden_groups": 2}, [Repeat(0, 1, 3), Repeat(3, 1, 3)]),
        ({"num_hidden_groups": 6}, []),
        ({"inner_group_num": 2}, [Repeat(0, 1, 6)]),
    ],
)
def test_alberts_repeats_follow_its_groups(settings, expected):
    found = refinement(albert(**settings), windows(2), further=2).trained
    assert [Repeat(r.first, r.period, r.times) for r in found.repeats] == expected


def test_layers_are_the_same_by_parameter_whatever_modules_hold_them():
    settings = _LLAMA | {"num_hidden_layers": 4}
    kind, config, _ = FAMILIES["llama"]
    model = kind(config(**settings))
    layers = model.model.layers
    for name, value in list(layers[0].named_parameters()):  # layers 0 and 2 are one; 3 has its own ffn
        for index in (2, 3):
            if index == 2 or not name.startswith("mlp"):
                owner, _, leaf = name.rpartition(".")
                setattr(layers[index].get_submodule(owner), leaf, value)
    assert layers[0] is not layers[2]
    stack = find_stack(opened(model))
    calls = applied(stack, torch.tensor(windows(2)))[1]
    found = keys(calls)
    assert found[0] == found[2]
    assert len(set(found)) == 3
    whole = sum(p.numel() for p in layers[0].parameters())
    ffn = sum(p.numel() for p in layers[0].mlp.parameters())
    assert shared_fractions(calls) == pytest.approx([0, 0, 1, 1 - ffn / whole])

    one = layers[1]
    model.model.layers = nn.ModuleList([one, one, one, one])
    calls = applied(find_stack(opened(model)), torch.tensor(windows(2)))[1]
    assert repeats(keys(calls)) == [Repeat(0, 1, 4)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcd", []),
        ("abbbc", [Repeat(1, 1, 3)]),
        ("ababab", [Repeat(0, 2, 3)]),
        ("abbabbc", [Repeat(0, 3, 2)]),
        ("aabbb", [Repeat(0, 1, 2), Repeat(2, 1, 3)]),
        ("abab" + "cc", [Repeat(0, 2, 2), Repeat(4, 1, 2)]),
        ("", []),
    ],
)
def test_repeats_are_runs_of_a_block(text, expected):
    assert repeats([(letter,) for letter in text]) == expected


def test_the_untrained_control_has_fresh_weights_and_the_models_sharing():
    kind, config, _ = FAMILIES["llama"]
    model = kind(config(**_LLAMA | {"num_hidden_layers": 3}))
    model.model.layers = nn.ModuleList([model.model.layers[0]] * 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = refinement(opened(model), windows(), seed=1, further=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert [one.same_as for one in found.untrained.applications] == [None, 0, 0]
    assert len(found.untrained.repeats) == 1
    assert found.untrained.applications[0].change.value != found.trained.applications[0].change.value
    assert refinement(opened(model), windows(), seed=1, further=2) == found
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2", "opt"])
def test_unshared_stacks_of_any_family_have_no_repeat(name):
    found = refinement(opened(build(name)), windows(2), further=2)
    assert not found.trained.repeats
    assert not found.trained.shared
    assert len(found.untrained.applications) == len(found.trained.applications) == 2
    assert all(one.again is not None for one in found.trained.applications)


def test_batches_do_not_change_the_numbers(monkeypatch):
    together = refinement(albert(), windows(), further=3).trained
    monkeypatch.setattr("tiewise.internals.refinement.TOKENS_AT_ONCE", 8)
    apart = refinement(albert(), windows(), further=3).trained
    for a, b in zip(together.applications, apart.applications, strict=True):
        assert a.change.value == pytest.approx(b.change.value, rel=1e-5)
    assert together.repeats[0].residual[-1].value == pytest.approx(apart.repeats[0].residual[-1].value, rel=1e-4)


def test_one_window_has_no_interval_and_overflow_no_number():
    found = refinement(with_layers([Affine(1e9 * np.eye(16), np.zeros(16))] * 2), windows(1), further=6)
    (rest,) = found.trained.repeats
    assert rest.residual[-1] is None
    assert rest.converged == 0
    assert math.isnan(found.trained.applications[0].cosine.low)


def test_windows_must_be_there_and_fit():
    with pytest.raises(DataError, match="no windows"):
        refinement(albert(), np.zeros((0, 8), int))
    with pytest.raises(DataError, match="40 positions"):
        refinement(albert(), windows(1, 41))
