"""What sections say of what was measured: the answer, the numbers of the table, curves, what is listed and noted."""

import math
from dataclasses import replace

import pytest
from tests.inspection.path_samples import bigrams as text_and_path
from tests.inspection.path_samples import mlp

from tiewise.analysis.estimates import Estimate
from tiewise.analysis.path_matrix import SampledAsymmetry
from tiewise.inspection.section import SECTIONS, sections
from tiewise.inspection.sections.applications import found_of as applications
from tiewise.inspection.sections.bigrams import found_of as bigrams
from tiewise.inspection.sections.first_mlp import found_of as first_mlp
from tiewise.inspection.sections.lens import found_of as lens
from tiewise.inspection.sections.refinement import found_of as refinement
from tiewise.internals.application_sweep import Applied, Sweep
from tiewise.internals.lens import Lenses, LensLayer, LensRead
from tiewise.internals.refinement import Application, Refinement, Rest, Trajectory


def about(value, half=0.02, rows=4):
    return Estimate(value, value - half, value + half, rows)


def numbers(quantity):
    return quantity.value, quantity.low, quantity.high


def curves(found, name):
    return {curve.which: curve for curve in found.curves if curve.name == name}


# --- applications


def sweep(nlls=(4.0, 3.0, 2.0, 2.5), trained=3, unigram=3.5, half=0.25, rows=4, **changed):
    own = nlls[trained - 1]
    course = tuple(
        Applied(
            n,
            None if nll is None else about(nll, 0.25),
            None if nll is None else about(nll - own, half, rows),
            None if nll is None else about(0.5**n, 0.01),
        )
        for n, nll in enumerate(nlls, 1)
    )
    facts = {"objective": "hidden", "predicted": 1200, "windows": 4, "layers": 1, "parameters": 1000, "separate": 3000}
    return Sweep(**(facts | changed), trained=trained, unigram=about(unigram, 0.25), applied=course)


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (sweep(), "no: the layer is applied 3 times, and no other number up to 4 is better"),
        (sweep((2.0, 2.0, 2.0)), "no: the layer is applied 3 times, and no other number up to 3 is better"),
        (sweep(layers=2), "no: the block of 2 layers is applied 3 times, and no other number up to 4 is better"),
        (sweep(trained=2), "yes: the loss is lower after 3 applications of the layer than after 2, as trained"),
        (
            sweep(trained=2, half=1.5),
            "not told apart: 3 applications of the layer from the 2 of training",
        ),
        (sweep(trained=2, rows=1), "not told apart: 3 applications of the layer from the 2 of training"),
    ],
)
def test_another_number_of_applications_is_better_only_where_its_interval_says_so(found, answer):
    assert applications(found).answer == answer


def test_applications_give_loss_beside_the_frequencies_alone_and_what_sharing_saves():
    found = applications(sweep(trained=2, objective="next token"))
    assert numbers(found["nll as trained"]) == (3.0, 2.75, 3.25)
    assert found["nll as trained"].chance == 3.5
    assert found["best number"].value == 3
    assert numbers(found["there − as trained"]) == (-1.0, -1.25, -0.75)
    assert found["parameters"].value == 1000
    assert found["parameters"].why.startswith("16 kB of weights")
    assert "48 kB if none were shared" in found["parameters"].why
    assert found.notes == ("nll of 1,200 next tokens in 4 windows",)


def test_applications_draw_every_number_that_was_measured():
    by_name = {curve.name: curve for curve in applications(sweep((4.0, None, 2.0, 2.5), trained=1)).curves}
    loss = by_name["Loss by how often the block is applied"]
    assert (loss.x, loss.y, loss.low, loss.mark) == ((1, 3, 4), (4.0, 2.0, 2.5), (3.75, 1.75, 2.25), 1)
    assert (loss.level, loss.level_name) == (3.5, "token frequencies")
    assert by_name["Loss less that of the model as trained"].y == (0.0, -2.0, -1.5)
    assert by_name["Change by one more application"].log


# --- lens


def read(kl, agreement=0.4):
    return LensRead(about(kl), about(kl + 3), about(agreement))


def layer(depth, logit, tuned, improvement=0.005, fitted=None):
    curve = (logit, 2 * tuned, tuned / (1 - improvement), tuned)
    reads = read(logit, 0.1), read(tuned, 0.3 + 0.3 * depth)
    return LensLayer(depth, "h.<0>" if depth else "input", *reads, curve, fitted or tuned, improvement)


def lenses(*layers, **changed):
    last = LensLayer(len(layers), "h.1", LensRead(about(0.0), about(3.0), about(1.0)), None, (), None, None)
    values = {"nll": about(3.0), "uniform": about(2.5), "unigram": about(1.6), "constant": about(1.5), "tied": True}
    values |= {"steps": 100, "marks": (0, 50, 90, 100), "batch": 4, "rate": 0.01, "windows": 50, "held_out": 8}
    return Lenses(**(values | changed), layers=(*layers, last), length=64, seed=0)


def test_the_lens_answers_where_half_of_the_positions_are_named():
    assert lens(lenses(layer(0, 7.0, 0.5), layer(1, 0.8, 0.2))).answer == (
        "the first choice at most positions, after layer 1 of 2"
    )
    assert lens(lenses(layer(0, 7.0, 0.5))).answer.startswith("not the first choice")


def test_the_lens_gives_both_distances_beside_a_distribution_that_is_the_same_everywhere():
    found = lens(lenses(layer(0, 7.0, 0.5), layer(1, 0.8, 0.2)))
    tuned, logit = found["tuned lens, before any layer"], found["logit lens there"]
    assert numbers(tuned) == (0.5, 0.48, 0.52)
    assert (tuned.chance, logit.value) == (1.5, 7.0)
    assert tuned.why.startswith(f"{0.5 / math.log(2):.2f} bits")
    assert found["uniform distribution"].value == 2.5
    assert "at 1 of 2 places the logit lens is clearly further off" in found.notes[0]
    distance = curves(found, "How far is each layer from the final distribution?")
    assert (distance["tuned lens"].x, distance["tuned lens"].y) == ((0, 1), (0.5, 0.2))
    assert distance["logit lens"].y == (7.0, 0.8)
    assert curves(found, "Does a layer already name the model's first choice?")["tuned lens"].y == (0.3, 0.6)
    assert curves(found, "Were the tuned lenses trained long enough?")["depth 0"].x == (0, 50, 90, 100)
    (places,) = found.listings
    assert [row[0] for row in places.rows] == ["input", "1 · h.<0>", "2 · h.1"]


@pytest.mark.parametrize(
    ("one", "note"),
    [
        (layer(0, 7.0, 0.5, improvement=0.04), "1 of 2 tuned lenses still moved in the last tenth of 100 steps"),
        (layer(0, 7.0, 0.5, fitted=0.3), "at 1 place the tuned lens fits the windows better"),
    ],
)
def test_a_lens_that_was_trained_too_little_or_too_much_says_so(one, note):
    assert any(note in said for said in lens(lenses(one, layer(1, 0.8, 0.2))).notes)
    assert not any(note in said for said in lens(lenses(layer(0, 7.0, 0.5), layer(1, 0.8, 0.2))).notes)


# --- refinement


def application(change, same_as=None, shared=0.0, turn=None):
    turned = None if turn is None else about(turn)
    values = [about(change), about(3.0), about(0.9), turned, about(5.0), about(change / 2), about(0.95)]
    return Application("layers.<0>", *values, shared, same_as)


def rest(**changed):
    settings = {"first": 0, "period": 1, "times": 3, "two_steps": (about(0.1),), "ratio": about(0.5)}
    settings |= {"residual": (about(0.5), None, about(0.125)), "growth": about(0.6), "windows": 4, "converged": 4}
    return Rest(**(settings | {"alternating": 0, "from_end": about(0.2)} | changed))


def alike(states):
    return tuple(tuple(0.9 ** abs(i - j) for j in range(states)) for i in range(states))


def shared(**changed):
    applied = (application(0.5), application(0.25, 0, 1.0, -0.5), application(0.125, 0, 1.0, -0.25))
    control = Trajectory(applied, (rest(converged=0, from_end=None, growth=about(1.2)),), alike(4))
    return Refinement(64, 4, 2, Trajectory(applied, (rest(**changed),), alike(4)), control)


def unshared(fraction=0.0):
    course = Trajectory((application(0.5), application(0.25, None, fraction, 0.3)), (), alike(3))
    return Refinement(64, 4, 2, course, None)


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (shared(), "a layer is applied 3 times and comes to rest in 4 of 4 windows if it is applied 2 times more"),
        (
            shared(converged=0, alternating=3, from_end=None),
            "a layer is applied 3 times and alternates between two states in 3 of 4 windows",
        ),
        (shared(converged=0, from_end=None), "a layer is applied 3 times and does not come to rest within 2 more"),
        (
            shared(period=2, converged=0),
            "a block of 2 layers is applied 3 times and does not come to rest within 2 more",
        ),
        (unshared(), "each layer is applied once: there is no fixed point to look for"),
        (unshared(0.4), "layers share up to 40% of their parameters, and none is repeated whole"),
    ],
)
def test_refinement_answers_whether_a_repeated_layer_comes_to_rest(found, answer):
    assert refinement(found).answer.startswith(answer)


def test_refinement_gives_every_layer_beside_fresh_weights():
    found = refinement(shared())
    assert numbers(found["first layer's change"]) == (0.5, 0.48, 0.52)
    assert found["last layer's change"].value == 0.125
    growth = found["small differences grow by"]
    assert (growth.value, growth.chance, growth.high < 1) == (0.6, 1.0, True)
    assert found["small differences grow by, fresh weights"].value == 1.2
    change = curves(found, "Change per application")
    assert [change[which].y for which in ("", "fresh weights")] == [(0.5, 0.25, 0.125)] * 2
    assert curves(found, "Does a layer go on or turn back?")[""].y == (-0.5, -0.25)
    assert curves(found, "Does the repeated block come to rest?")[""].x == (1, 3)
    assert [grid.values[1] for grid in found.grids] == [alike(4)[1]] * 2
    (listed,) = found.listings
    assert [row[-2] for row in listed.rows] == ["no", "all, as 1", "all, as 1"]
    assert len(refinement(unshared()).grids) == 1


def test_one_window_gives_a_number_without_an_interval():
    found = refinement(shared(from_end=Estimate(0.25, -math.inf, math.inf, 1)))
    assert str(found["distance from rest"]) == "0.250"


# --- first MLP and bigrams


def test_the_first_mlp_gives_order_back_only_where_the_change_is_clear():
    assert first_mlp(mlp()).answer == "some"
    unclear = SampledAsymmetry(about(0.01), about(0.01))
    assert first_mlp(replace(mlp(), change=unclear)).answer == "no clear amount"
    less = SampledAsymmetry(about(-0.5), about(-0.5))
    assert first_mlp(replace(mlp(), change=less)).answer == "it takes some away"


def test_the_first_mlp_gives_both_paths_their_cost_and_the_text():
    found = first_mlp(mlp())
    assert numbers(found["asymmetry, direct"]) == pytest.approx((0.16, 0.15, 0.18))
    assert numbers(found["change"]) == pytest.approx((0.86, 0.85, 0.88))
    assert found["asymmetry, direct, centred"].value == pytest.approx(0.16)
    assert found["parameters of that MLP"].why == "25% of one table, 14% of the model"
    assert numbers(found["loss on the text's pairs, direct"]) == (9.5, 9.4, 9.6)
    assert found["with the first MLP follows the text"].value == 0.5
    logits = {q.name: q.value for q in found.quantities if q.figure == "Requested pairs: logits"}
    assert logits["New → <York>, direct"] == 1.25
    assert logits["<York> → New, with the first MLP"] == 1.02
    (pairs,) = found.listings
    assert pairs.rows[0] == ("New → <York>", "1.250", "0.02", "5", "1.250", "0.02", "5", "0.02")
    assert pairs.rows[1][-1] == "0"


def test_heat_maps_share_the_colours_of_the_text_and_keep_pairs_that_it_never_has_empty():
    grids = first_mlp(mlp()).grids
    assert [grid.name for grid in grids] == ["Bigrams", "Direct path", "With the first MLP"]
    assert len({grid.top for grid in grids}) == 1
    assert sum(math.isnan(value) for row in grids[0].values for value in row) == 3
    assert sum(math.isnan(value) for row in grids[1].values for value in row) == 0


def test_without_text_and_pairs_the_first_mlp_has_no_more_than_its_asymmetry():
    found = first_mlp(mlp(text=False, asked=False))
    assert (found.grids, found.listings) == ((), ())
    assert [q.name for q in found.quantities if q.main] == [
        "asymmetry, direct",
        "asymmetry, with the first MLP",
        "change",
    ]


def test_bigrams_say_what_symmetry_costs_and_split_what_paths_pay():
    found = bigrams(text_and_path())
    assert found.answer == "a symmetric one, as a tied model's, pays for it at any width"
    assert numbers(found["irreversibility"]) == (0.364, 0.348, 0.38)
    assert (found["… as counted"].value, found["… as counted"].chance) == (0.583, 0.13)
    assert numbers(found["own direct path pays"]) == (12.78, 12.67, 12.9)
    assert found["a bias alone pays"].value == 6.57
    stacks = {stack.bar: dict(stack.parts) for stack in found.stacks}
    assert sum(stacks["best tied, width 128"].values()) == pytest.approx(3.24)
    assert sum(stacks[""].values()) == pytest.approx(8.18)
    assert min(value for parts in stacks.values() for value in parts.values()) >= 0
    (pairs,) = found.listings
    assert pairs.rows[1] == (". → ⏎", "12,110", "22", "0.5", "0.0004", "0.013")


# --- all of them


def test_every_file_of_the_folder_is_one_section_with_a_question_and_a_place():
    found = sections()
    assert (
        {one.name for one in found}
        == set(SECTIONS)
        >= {"lens", "refinement", "applications", "gradients_over_training"}
    )
    assert all(one.asks.endswith("?") for one in found)
    assert len({one.place for one in found}) == len(found)
    assert [replace(one, measure=None).name for one in found] == [
        one.name for one in sorted(found, key=lambda s: s.place)
    ]
