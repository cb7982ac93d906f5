"""Conclusion of an inspection: which quantities count as evidence for one table or for two."""

import json
import math
from dataclasses import replace

import pytest
from scipy import stats
from tests.inspection.test_tables_over_seeds import planted, write_run
from tests.inspection.tiny_folders import write_model

from tiewise.core.estimates import Estimate, p_value
from tiewise.core.measurement import NEITHER, ONE, TWO, Measurement, Quantity
from tiewise.inspection.inspection import NO_INTERVAL, NO_PAIR, SectionMeasurement, measure, open_models, tie_or_not


@pytest.fixture
def conclude(tmp_path):
    """Return a function from {section: measurement} of one model to the conclusion."""
    subjects = open_models([write_model(tmp_path / "model")])

    def make(found=(), **of_model):
        return tie_or_not(subjects, [*found, *(SectionMeasurement(n, {"model": x}, {}) for n, x in of_model.items())])

    return make


def sides_by_measure(found):
    return {measure(q): q.speaks for _, q in found.rows}


def make_estimate(value, half):
    return Estimate(value, value - half, value + half, 100)


def gradients_measurement(*estimates):
    """Return the gradients section's measurement of the cosine of the two paths."""
    said = {"question": "Do the two uses of the table pull the same way?", "above": ONE}
    every = (Quantity.of_estimate("cosine of the two paths per batch", e, **said) for e in estimates)
    return Measurement("neither", tuple(every))


def alignment_measurement(value, half, permuted):
    """Return the alignment section's measurement of the cosine of two stored tables."""
    said = {"question": "Are input and output table alike?", "below": TWO, "above": ONE, "unit": "cosine"}
    return Measurement(
        "alike", (Quantity.of_estimate("as they stand", make_estimate(value, half), null=permuted, **said),)
    )


@pytest.mark.parametrize(
    ("value", "half", "permuted", "side"),
    [
        (0.2, 0.01, (0.001, 0.003), ONE),
        (-0.2, 0.01, (0.001, 0.003), TWO),
        (0.0, 0.002, (0.0025, 0.003), NEITHER),  # below every permutation, but at the chance level
        (0.0, 0.002, (-0.003, -0.0025), NEITHER),
        (0.01, 0.002, (0.001, 0.02), NEITHER),  # a permutation reaches it
    ],
)
def test_alignment_counts_only_beyond_chance_and_all_permutations(conclude, value, half, permuted, side):
    said = sides_by_measure(conclude(alignment=alignment_measurement(value, half, permuted)))
    assert said == {"as they stand, cosine": side}


@pytest.mark.parametrize(("cosine", "side"), [(0.3, ONE), (-0.3, NEITHER)])
def test_opposed_gradient_paths_do_not_favour_two_tables(conclude, cosine, side):
    """At a stationary point A + B = 0, so a tied model's cosine is −1."""
    assert sides_by_measure(conclude(gradients=gradients_measurement(make_estimate(cosine, 0.1)))) == {
        "cosine of the two paths per batch": side
    }


def test_tie_or_not_leaves_out_quantities_that_favour_neither_side(conclude):
    asked = Quantity("share", 0.7, 0.6, 0.8, 100, chance=0.5, question="Which end moves the table?")
    assert conclude(any=Measurement("half", (asked, replace(asked, question="", above=ONE)))).rows == ()


def test_tie_or_not_records_one_batch_without_interval_and_drops_nan(conclude):
    nan = math.nan
    found = conclude(gradients=gradients_measurement(Estimate(0.7, nan, nan, 1), Estimate(nan, nan, nan, 1)))
    record = SectionMeasurement("evidence", {"": found}, {}).record()["found"][""]
    (row,) = record["rows"]
    assert [row[key] for key in ("value", "low", "high", "p", "speaks")] == [0.7, None, None, None, NEITHER]
    json.dumps(record, allow_nan=False)


def test_tie_or_not_applies_holms_correction_over_models(conclude):
    """0.021 [0.004, 0.038] is significant alone, but not as the best of eleven."""
    weak = Estimate(0.021, 0.004, 0.038, 16)
    t = 0.021 / 0.017 * stats.t.ppf(0.975, 15)
    own = 2 * stats.t.sf(t, 15)
    assert 0.01 < own < 0.025

    def rows(*batches):
        made = {f"m{i}": gradients_measurement(one) for i, one in enumerate(batches)}
        return [row for _, row in conclude([SectionMeasurement("gradients", made, {})]).rows]

    (alone,) = rows(weak)
    assert (alone.p, alone.speaks) == (pytest.approx(own), ONE)
    nothing = [Estimate(0.001 * i, 0.001 * i - 0.1, 0.001 * i + 0.1, 16) for i in range(1, 11)]
    first, *others = rows(weak, *nothing)  # eleven intervals
    assert (first.p, first.speaks) == (pytest.approx(11 * own), NEITHER)
    assert (first.low, first.high) == (0.004, 0.038)  # the interval is not corrected
    assert {row.speaks for row in others} == {NEITHER}
    strong = [make_estimate(0.5 + 0.01 * i, 0.01) for i in range(10)]
    first, *others = rows(weak, *strong)
    assert (first.p, first.speaks) == (pytest.approx(own), ONE)


def test_p_value_compares_the_estimate_with_its_permutations(conclude):
    e = Estimate(0.03, 0.01, 0.05, 30)
    ((_, row),) = conclude(alignment=alignment_measurement(0.03, 0.02, (0.005,))).rows
    t = (0.03 - 0.005) / 0.02 * stats.t.ppf(0.975, 99)
    assert row.p == pytest.approx(2 * stats.t.sf(t, 99))
    assert p_value(e, [0.02, 0.04]) == 1.0
    assert math.isnan(p_value(Estimate(0.1, math.nan, math.nan, 1), [0.0]))


def verdict_of_losses(tmp_path, losses, reference="tied"):
    models = planted(range(1, len(losses["tied"]) + 1))
    by_seed = {(arm, seed): nll for arm, every in losses.items() for seed, nll in enumerate(every, 1)}
    # the first arm is the reference
    run = write_run(tmp_path / "run", {reference: models[reference]} | models, by_seed)
    return tie_or_not(open_models([run]), ())


@pytest.mark.parametrize("reference", ["tied", "untied"])
@pytest.mark.parametrize(
    ("losses", "side", "value"),
    [
        ({"tied": (5.0, 5.1, 5.2), "untied": (4.5, 4.61, 4.7)}, TWO, -0.4966667),
        ({"tied": (4.5, 4.61, 4.7), "untied": (5.0, 5.1, 5.2)}, ONE, 0.4966667),
        ({"tied": (5.0, 5.1, 5.2), "untied": (5.5, 4.6, 5.2)}, NEITHER, 0.0),
    ],
)
def test_verdict_follows_the_loss_for_either_reference_arm(tmp_path, losses, side, value, reference):
    found = verdict_of_losses(tmp_path, losses, reference)
    ((_, row),) = found.rows
    assert row.speaks == side
    assert row.value == pytest.approx(value, abs=1e-6)
    assert found.verdict.startswith("no difference" if side == NEITHER else side)
    assert "over 3 seeds" in row.why


def test_verdict_has_more_digits_for_a_small_difference(tmp_path):
    found = verdict_of_losses(tmp_path, {"tied": (5.0, 5.1, 5.2), "untied": (4.9995, 5.0996, 5.1994)})
    assert "their validation loss is 0.00050 nats/token lower (95 % CI 0.00025–0.00075, 3 seeds)" in found.verdict


def test_verdict_of_a_comparison_without_a_pair_says_which_arms_to_train(tmp_path):
    run = write_run(tmp_path / "run", {"tied": planted([1])["tied"]}, {("tied", 1): 5.0})
    found = tie_or_not(open_models([run]), ())
    assert found.rows == ()
    assert found.verdict == NO_PAIR


def test_one_seed_gives_no_verdict(tmp_path):
    found = verdict_of_losses(tmp_path, {"tied": (5.0,), "untied": (4.0,)})
    assert found.verdict == NO_INTERVAL
    ((_, row),) = found.rows
    assert (row.value, math.isnan(row.low), row.p, row.speaks) == (-1.0, True, None, NEITHER)
