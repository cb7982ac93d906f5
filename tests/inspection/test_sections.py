"""What sections say of what was measured: the answer, the numbers of the table, curves, what is listed and noted."""

import math
from dataclasses import replace

import pytest
from tests.inspection.path_samples import bigrams as text_and_path
from tests.inspection.path_samples import mlp

from tiewise.analysis.estimates import Estimate
from tiewise.analysis.path_matrix import SampledAsymmetry
from tiewise.inspection.section import SECTIONS, sections
from tiewise.inspection.sections.bigrams import found_of as bigrams
from tiewise.inspection.sections.first_mlp import found_of as first_mlp


def about(value, half=0.02):
    return Estimate(value, value - half, value + half, 4)


def numbers(quantity):
    return quantity.value, quantity.low, quantity.high


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
