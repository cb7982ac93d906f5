"""Refinement over layers against linear maps with known fixed points, and against transformers' hidden states."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers as tr
from scipy.stats import t
from tests.boundary.tiny_models import _BERT, _LLAMA, FAMILIES, build
from tests.inspection.running.test_repeats import (
    Affine,
    IdentityLayer,
    open_for_evaluation,
    rotation_like,
    windows,
    with_layers,
)
from torch import nn

from tiewise.core.errors import DataError
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.running.stack import Repeat
from tiewise.inspection.sections.refinement import Trajectory, iterate, measurement_of, refinement_of


def albert(seed=0, **settings):
    torch.manual_seed(seed)
    config = tr.AlbertConfig(**(_BERT | {"embedding_size": 8, "num_hidden_layers": 6} | settings))
    return open_for_evaluation(tr.AlbertForMaskedLM(config))


def find_curve(found, name, which=""):
    """Return the curve whose title contains `name`, or None."""
    return next((one for one in found.curves if name in one.name and one.which == which), None)


def curve_values(found, name, which=""):
    """Return the values of a curve, one for each application."""
    return find_curve(found, name, which).y


def test_iterate_measures_growth_and_ratio_as_the_spectral_radius():
    values = np.array([1.3, 0.2, -0.1, 0.05])
    matrix = torch.tensor(rotation_like(values, 2))
    start = torch.tensor(np.random.default_rng(5).normal(size=(3, 2, 4)))
    _, walked = iterate(lambda state: state @ matrix, start, 30, seed=0)
    assert walked["growth"][-1].numpy() == pytest.approx(1.3, rel=1e-6)
    assert walked["ratio"][-1].numpy() == pytest.approx(1.3, rel=1e-6)
    assert walked["residual"][-1].numpy() == pytest.approx(0.3, rel=1e-6)


def test_refinement_of_finds_rate_and_distance_of_a_planted_contraction():
    d, times, further = 16, 3, 40
    values = np.linspace(-0.3, 0.6, d)
    matrix, bias = rotation_like(values), np.random.default_rng(1).normal(size=d)
    model = with_layers([Affine(matrix, bias)] * times)
    found = refinement_of(model, windows(), further=further)
    rest = find_curve(found, "come to rest")
    assert rest.mark == times
    assert found.answer == "a layer is applied 3 times and reaches a fixed state in 4 of 4 windows within 40 more"
    assert found["windows that alternate"].value == 0

    table = model.model.get_input_embeddings().weight.detach().double().numpy()
    fixed = np.linalg.solve(np.eye(d) - matrix, bias)
    states = [table[windows()]]
    for _ in range(times + 4):
        states.append(states[-1] @ matrix.T + bias)
    norm = np.linalg.norm
    away = (norm(states[times] - fixed, axis=-1) / norm(fixed)).mean()
    assert found["distance from rest"].value == pytest.approx(away, rel=1e-4)
    for k in range(times + 4):
        step = (norm(states[k + 1] - states[k], axis=-1) / norm(states[k], axis=-1)).mean()
        assert rest.y[k] == pytest.approx(step, rel=1e-4, abs=1e-6)
    units = np.stack([state / norm(state, axis=-1, keepdims=True) for state in states[: times + 1]])
    cosines = np.einsum("iwtd,jwtd->ijwt", units, units).mean((2, 3))
    np.testing.assert_allclose(found.grids[0].values, cosines, atol=1e-6)
    assert len(rest.y) == times + further
    # a random difference converges to the leading direction
    assert found["small differences grow by"].value == pytest.approx(0.6, rel=0.02)


def test_refinement_of_reports_that_a_reflection_alternates():
    model = with_layers([Affine(-np.eye(16), np.zeros(16))] * 2)
    found = refinement_of(model, windows(), further=6)
    assert found.answer == "a layer is applied 2 times and alternates between two states in 4 of 4 windows"
    assert (found["windows at rest"].value, found["windows that alternate"].value) == (0, 4)
    assert math.isnan(found["distance from rest"].value)
    assert curve_values(found, "come to rest")[-1] == pytest.approx(2, rel=1e-6)
    assert found["small differences grow by"].value == pytest.approx(1, rel=1e-4)


def test_refinement_of_reports_no_change_for_identity_layers():
    layer = IdentityLayer()
    found = refinement_of(with_layers([layer, layer, layer]), windows(), further=4)
    assert curve_values(found, "Change per") == curve_values(found, "applied again") == (0, 0, 0)
    assert curve_values(found, "Cosine of output") == pytest.approx([1] * 3, abs=1e-6)
    assert found.answer.startswith("a layer is applied 3 times and reaches a fixed state in 4 of 4 windows")
    assert found["distance from rest"].value == 0
    assert len(found.grids) == 1  # no control: the class builds other layers from the config


def test_refinement_of_matches_hidden_states_of_transformers():
    model, ids = albert(num_hidden_groups=2), windows()
    found = refinement_of(model, ids, further=3)
    with torch.no_grad():
        states = model.model(torch.tensor(ids), output_hidden_states=True).hidden_states
    states = [state.double().numpy() for state in states]
    steps = [new - old for old, new in pairwise(states)]
    norm, (listed, distances) = np.linalg.norm, found.listings
    assert len(listed.rows) == 6
    change = find_curve(found, "Change per")
    for i, (old, new) in enumerate(pairwise(states)):
        of_step = norm(steps[i], axis=-1) / norm(old, axis=-1)
        assert change.y[i] == pytest.approx(of_step.mean(), rel=1e-5)
        half = t.ppf(0.975, 3) * of_step.mean(1).std(ddof=1) / 2
        assert change.high[i] - change.y[i] == pytest.approx(half, rel=1e-3)
        cosine = (old * new).sum(-1) / norm(old, axis=-1) / norm(new, axis=-1)
        assert curve_values(found, "Cosine of output")[i] == pytest.approx(cosine.mean(), abs=1e-6)
        assert float(listed.rows[i][4].split()[0]) == pytest.approx(norm(new, axis=-1).mean(), abs=6e-4)
        assert float(distances.rows[i][1].split()[0]) == pytest.approx(norm(steps[i], axis=-1).mean(), abs=6e-4)
        if i:
            turn = (steps[i] * steps[i - 1]).sum(-1) / norm(steps[i], axis=-1) / norm(steps[i - 1], axis=-1)
            assert curve_values(found, "turn back")[i - 1] == pytest.approx(turn.mean(), abs=1e-5)


def test_further_and_repeated_applications_match_a_deeper_model():
    found = refinement_of(albert(), windows(), further=5)
    deep = refinement_of(albert(num_hidden_layers=11), windows(), further=2)
    assert curve_values(found, "come to rest") == pytest.approx(curve_values(deep, "Change per"), rel=1e-5)
    assert curve_values(found, "applied again")[:-1] == pytest.approx(curve_values(found, "Change per")[1:], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["1 to 6"]),
        ({"num_hidden_groups": 2}, ["1 to 3", "4 to 6"]),
        ({"num_hidden_groups": 6}, []),
        ({"inner_group_num": 2}, ["1 to 6"]),
    ],
)
def test_repeats_of_albert_follow_its_groups(settings, expected):
    found = refinement_of(albert(**settings), windows(2), further=2)
    where = [q.why.partition(", applications ")[2] for q in found.quantities if q.name == "small differences grow by"]
    assert where == expected


def test_control_has_fresh_weights_and_the_sharing_of_the_model():
    kind, config, _ = FAMILIES["llama"]
    model = kind(config(**_LLAMA | {"num_hidden_layers": 3}))
    model.model.layers = nn.ModuleList([model.model.layers[0]] * 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = refinement_of(open_for_evaluation(model), windows(), seed=1, further=2)
    assert torch.equal(torch.get_rng_state(), state)
    fresh = found["small differences grow by, fresh weights"]
    assert fresh.why.endswith("applications 1 to 3")
    assert curve_values(found, "Change per", "fresh weights")[0] != curve_values(found, "Change per")[0]
    again = refinement_of(open_for_evaluation(model), windows(), seed=1, further=2)
    assert (again.curves, again.grids) == (found.curves, found.grids)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma2", "opt"])
def test_refinement_of_unshared_models_reports_no_repeat(name):
    found = refinement_of(open_for_evaluation(build(name)), windows(2), further=2)
    assert found.answer == "no layer is repeated: each is applied once"
    assert [len(curve_values(found, "Change per", which)) for which in ("", "fresh weights")] == [2, 2]
    assert len(curve_values(found, "applied again")) == 2


def test_refinement_of_is_independent_of_batch_size(monkeypatch):
    together = refinement_of(albert(), windows(), further=3)
    monkeypatch.setattr("tiewise.inspection.running.loaded.TOKENS_AT_ONCE", 8)
    apart = refinement_of(albert(), windows(), further=3)
    assert curve_values(together, "Change per") == pytest.approx(curve_values(apart, "Change per"), rel=1e-5)
    assert curve_values(together, "come to rest")[-1] == pytest.approx(
        curve_values(apart, "come to rest")[-1], rel=1e-4
    )


def test_refinement_of_leaves_out_overflow_and_the_interval_of_one_window():
    found = refinement_of(with_layers([Affine(1e9 * np.eye(16), np.zeros(16))] * 2), windows(1), further=6)
    assert max(find_curve(found, "come to rest").x) < 8
    assert found["windows at rest"].value == 0
    assert math.isnan(found["first layer's change"].low)
    assert "[" not in str(found["first layer's change"])


def test_progress_counts_the_windows_of_model_and_control():
    messages = []
    with listen_to_progress(lambda *message: messages.append(message)):
        refinement_of(albert(), windows(2), further=2)
    assert messages[-1] == ("refinement", 4, 4)
    assert {total for _, _, total in messages} == {4}


def test_refinement_of_refuses_windows_longer_than_the_model():
    with pytest.raises(DataError, match="40 positions"):
        refinement_of(albert(), windows(1, 41))


def trajectory(blocks=None, shared=0.0, layers=3):
    """Return a trajectory whose layers change the state by a half, a quarter, an eighth."""
    near = np.linspace(-0.01, 0.01, 4)
    made = [dict.fromkeys(("change", "distance", "norm"), 0.5**k + near) for k in range(1, layers + 1)]
    for k, values in enumerate(made):
        values |= {"cosine": 0.9 + near, "again": 0.5 * values["change"]} | ({"turn": near - 0.5**k} if k else {})
    alike = np.array([[0.9 ** abs(i - j) for j in range(layers + 1)] for i in range(layers + 1)])
    same = (None, *[0 if shared == 1 else None] * (layers - 1))
    return Trajectory(("layers.<0>",) * layers, tuple(made), (0.0, *[shared] * (layers - 1)), same, blocks or {}, alike)


def repeated_block(residual=(0.0,) * 4, two_steps=(0.1,) * 4, period=1):
    """Return a trajectory with a repeated block, given the final residuals of four windows."""
    near = np.linspace(-0.01, 0.01, 4)
    course = np.array([[0.5] * 4, [math.nan] * 4, residual])
    values = {"residual": course, "two_steps": np.array([two_steps]), "ratio": 0.5 + near, "growth": 0.6 + near}
    return trajectory({Repeat(0, period, 3): {**values, "from_end": 0.2 + near}}, shared=1.0)


FAR, BACK = (0.125,) * 4, (0.0, 0.0, 0.0, 0.1)  # residuals after one application, and after two


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (repeated_block(), "a layer is applied 3 times and reaches a fixed state in 4 of 4 windows within 2 more"),
        (repeated_block(FAR, BACK), "a layer is applied 3 times and alternates between two states in 3 of 4 windows"),
        (repeated_block(FAR), "a layer is applied 3 times and reaches no fixed state within 2 more"),
        (
            repeated_block(FAR, period=2),
            "a block of 2 layers is applied 3 times and reaches no fixed state within 2 more",
        ),
        (trajectory(), "no layer is repeated: each is applied once"),
        (trajectory(shared=0.4), "no layer is repeated whole; layers share up to 40% of their parameters"),
    ],
)
def test_answer_states_whether_a_repeated_layer_comes_to_rest(found, answer):
    assert measurement_of(found, None, 2).answer == answer


def test_measurement_of_reports_every_layer_next_to_fresh_weights():
    found = measurement_of(repeated_block(), repeated_block(FAR), 2)
    assert found["last layer's change"].value == pytest.approx(0.125)
    growth = found["small differences grow by"]
    assert (growth.value, growth.chance, growth.high < 1) == (pytest.approx(0.6), 1.0, True)
    assert found["windows at rest, fresh weights"].value == 0
    for which in ("", "fresh weights"):
        assert curve_values(found, "Change per", which) == pytest.approx((0.5, 0.25, 0.125))
    assert find_curve(found, "turn back").x == (2, 3)
    assert find_curve(found, "come to rest").x == (1, 3)  # NaN is not drawn
    assert [row[-2] for row in found.listings[0].rows] == ["no", "all, as 1", "all, as 1"]
    assert found.listings[1].rows[0] == ("1 · layers.<0>", "0.500 [0.486, 0.514]", "0.500 [0.486, 0.514]")
