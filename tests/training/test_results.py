"""Tests of results.json, of paired differences against scipy, and of the finding."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tests.training.conftest import refusal

from tiewise.core.crossed_effects import crossed_interval
from tiewise.core.errors import RunError
from tiewise.core.estimates import detectable_difference
from tiewise.training import results
from tiewise.training.finding import complete, explanations
from tiewise.training.interval_sample import sample_note
from tiewise.training.results import (
    SCHEMA,
    BinNll,
    Comparison,
    Difference,
    DocumentLosses,
    LastStep,
    RunResult,
    correct_by_holm,
    gaps,
    paired,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 10**12)
word = st.text(max_size=8)
facts = st.dictionaries(word, st.one_of(word, whole, st.booleans(), st.none(), st.lists(whole, max_size=3)), max_size=3)
OF_TYPE = {"str": word, "int": whole, "float": finite, "bool": st.booleans(), "dict[str, Any]": facts}
OF_TYPE |= {"list[str]": st.lists(word, max_size=2), "list[int]": st.lists(whole, max_size=3)}
OF_TYPE |= {"float | None": st.none() | finite, "int | None": st.none() | whole, "list[list[float]]": st.just([[0.5]])}
OF_TYPE |= {
    "dict[str, int]": st.dictionaries(word, whole, max_size=3),
    "list[dict[str, Any]]": st.lists(facts, max_size=2),
}


def any_of(cls, **given):
    """Return a strategy for values of a dataclass."""
    chosen = {item.name: OF_TYPE[item.type] for item in fields(cls) if item.type in OF_TYPE}
    return st.builds(cls, **{**chosen, **given})


OF_TYPE["list[float]"] = st.lists(finite, max_size=3)
OF_TYPE["list[float] | None"] = st.none() | OF_TYPE["list[float]"]
OF_TYPE["DocumentLosses | None"] = st.none() | any_of(results.DocumentLosses)
OF_TYPE["LastStep | None"] = st.none() | any_of(results.LastStep)
OF_TYPE["dict[str, Share]"] = st.dictionaries(word, any_of(results.Share), max_size=2)
for name in ("BinNll", "CurvePoint", "ArmDirectPath", "Difference", "RunResult"):
    OF_TYPE[f"list[{name}]"] = st.lists(any_of(getattr(results, name)), max_size=3)


@given(any_of(Comparison, schema=st.just(SCHEMA)))
def test_comparison_round_trips_through_strict_json(comparison):
    text = json.dumps(comparison.record(), allow_nan=False)
    assert Comparison.from_dict(json.loads(text)) == comparison


def test_comparison_of_schema_1_is_read_without_its_expectation():
    record = comparison(runs_of("tied", [5.0]), arms=("tied",)).record()
    older = record | {"schema": 1, "expectation": {"verdict": "no expectation", "value": None}}
    assert Comparison.from_dict(older).record() == record


def make_run(arm, seed, nll, *, train=0.0, parameters=100, frequency=()):
    bins = [BinNll(label, 5, value) for label, value in frequency]
    sizes = {"parameters": {"body": parameters}, "total_parameters": parameters, "bytes": 4 * parameters}
    losses = {"train_nll": nll + train, "heldout_nll": nll, "perplexity": math.exp(nll), "bits_per_byte": nll / 2}
    others = ("tokens_per_second", "seconds", "init_std", "learning_rate", "predicted_initial_nll", "initial_nll")
    return RunResult(arm=arm, seed=seed, steps=1, frequency=bins, **sizes, **losses, **dict.fromkeys(others, 1.0))


def runs_of(arm, losses, **more):
    return [make_run(arm, seed, nll, **more) for seed, nll in enumerate(losses)]


def comparison(runs, arms=("tied", "untied"), **setting):
    plain = {"version": "0", "command": "", "demo": False, "data": {}, "env": {}, "reference": arms[0]}
    seeds = sorted({r.seed for r in runs})
    return complete(Comparison(**plain, arms=list(arms), seeds=seeds, setting=setting, runs=runs))


def test_comparison_reads_null_as_nan_and_integer_as_float():
    bad = replace(make_run("tied", 0, math.nan), perplexity=math.inf)
    record = json.loads(json.dumps(comparison([bad]).record(), allow_nan=False))
    record["runs"][0]["seconds"] = 5
    read = Comparison.from_dict(record).runs[0]
    assert str((read.heldout_nll, read.perplexity, read.seconds)) == "(nan, nan, 5.0)"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: r.update(schema=99), "schema 99"),
        (lambda r: r.pop("schema"), "schema None"),
        (lambda r: r.pop("runs"), "runs is missing"),
        (lambda r: r["runs"][0].pop("heldout_nll"), "runs[0]: heldout_nll is missing"),
        (lambda r: r["runs"][0].update(seed="one"), "runs[0]: seed must be a whole number"),
        (lambda r: r["runs"][0].update(seed=True), "seed must be a whole number"),
        (lambda r: r["runs"][0]["parameters"].update(body=None), "parameters['body'] must be a whole number"),
        (lambda r: r.update(arms="tied"), "arms must be a list"),
        (lambda r: r.update(demo="yes"), "demo must be true or false"),
        (lambda r: r.update(runs=[3]), "runs[0] must be an object"),
        (lambda r: r.clear(), "schema None"),
    ],
)
def test_from_dict_names_field_that_it_cannot_read(spoil, says):
    record = comparison([make_run("tied", 0, 5.0)]).record()
    spoil(record)
    with refusal(says, RunError):
        Comparison.from_dict(record or [])


numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12))
def test_paired_interval_matches_scipy_t_test(pairs):
    reference, other = map(list, zip(*pairs, strict=True))
    d = paired(reference, other)
    values = np.subtract(other, reference)
    error = values.std(ddof=1) / math.sqrt(len(pairs))
    half = stats.t.ppf(0.975, len(pairs) - 1) * error
    assert d.mean == pytest.approx(values.mean(), abs=1e-9)
    assert (d.low, d.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-9)
    assert d.n == len(pairs)
    p = stats.ttest_rel(other, reference).pvalue if error > 1e-6 else 0.05
    assert d.detected == (p < 0.05) or abs(p - 0.05) < 1e-9


def documented(runs, nats, tokens, unit="documents"):
    """Return runs whose losses by document are rows of `nats` [runs, J], so their loss is the mean over tokens."""
    each = zip(runs, nats, strict=True)
    return [
        replace(
            run,
            heldout_nll=sum(row) / sum(tokens),
            bits_per_byte=sum(row) / sum(tokens) / 2,
            documents=DocumentLosses(unit, list(tokens), [float(value) for value in row]),
        )
        for run, row in each
    ]


def crossed_sample():
    """Return a comparison of three seeds on four documents, whose difference depends on the document alone."""
    tokens, generator = [100, 150, 50, 200], np.random.default_rng(1)
    tied = 5.0 * np.array(tokens) + generator.normal(0, 3, (3, 4))
    by_document = np.array(tokens) * [0.30, 0.02, 0.10, -0.05]
    untied = tied + by_document + [[0.5], [0.0], [-0.5]]
    runs = documented(runs_of("tied", (0, 0, 0)), tied, tokens) + documented(
        runs_of("untied", (0, 0, 0)), untied, tokens
    )
    return comparison(runs), untied - tied, np.array(tokens)


def test_difference_of_held_out_loss_covers_seeds_and_documents():
    found, nats, tokens = crossed_sample()
    d, expected = found.difference("untied", "heldout_nll"), crossed_interval(nats, tokens)
    assert (d.low, d.high) == pytest.approx((expected.low, expected.high))
    assert (d.error, d.df, d.p) == pytest.approx((expected.standard_error, expected.degrees_of_freedom, expected.p))
    assert (d.documents, d.unit, d.n) == (4, "documents", 3)
    assert d.detectable == pytest.approx(detectable_difference(d.df) * d.error)
    over_seeds = paired([0.0] * 3, (nats.sum(1) / tokens.sum()).tolist())
    assert d.seed_error == pytest.approx(over_seeds.error)
    assert over_seeds.detected
    assert not d.detected
    assert "3 seeds and 4 documents)" in found.finding
    bits = found.difference("untied", "bits_per_byte")
    assert (bits.low, bits.high, bits.error) == pytest.approx((d.low / 2, d.high / 2, d.error / 2))
    assert found.difference("untied", "train_nll").documents == 0


def test_last_step_has_its_own_documents():
    found, nats, tokens = crossed_sample()
    runs = []
    for run in found.runs:
        moved = [2 * value for value in run.documents.nats] if run.arm == "untied" else None
        heldout = sum(moved or run.documents.nats) / tokens.sum()
        runs.append(replace(run, last=LastStep(None, 0.0, heldout, 0.0, moved)))
    untied = np.array([run.documents.nats for run in found.of("untied")])
    expected = crossed_interval(nats + untied, tokens)
    last = comparison(runs).difference("untied", "last:heldout_nll")
    assert (last.mean, last.low, last.documents) == pytest.approx((expected.estimate, expected.low, 4))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: replace(run, documents=None),  # of a version without losses by document
        lambda run: replace(run, documents=replace(run.documents, tokens=[100, 150, 51, 199])),  # another text
        lambda run: replace(run, documents=replace(run.documents, nats=[math.nan] * 4)),
    ],
)
def test_interval_covers_seeds_only_if_a_run_lacks_comparable_documents(spoil):
    found, nats, tokens = crossed_sample()
    first, *others = found.runs
    d = comparison([spoil(first), *others]).difference("untied", "heldout_nll")
    expected = paired([0.0] * 3, (nats.sum(1) / tokens.sum()).tolist())
    assert (d.documents, d.sample) == (0, "3 seeds")
    assert (d.low, d.high, d.df) == pytest.approx((expected.low, expected.high, 2))


def test_difference_of_an_older_version_has_the_error_of_its_interval():
    d = paired([0.0] * 4, [0.1, 0.2, 0.15, 0.12])
    older = replace(d, error=None, df=None, seed_error=None)
    assert older.estimated.standard_error == pytest.approx(d.error)
    assert older.estimated.degrees_of_freedom == 3
    assert replace(older, low=None, high=None).estimated is None


def test_detectable_difference_is_detected_in_four_of_five_repetitions():
    """In each repetition, a first study with three seeds estimates the standard deviation, which is 0.02."""
    generator, sigma, n, found = np.random.default_rng(0), 0.02, 3, []
    for _ in range(4000):
        true = paired([0.0] * n, generator.normal(0.0, sigma, n).tolist()).detectable
        found.append(paired([0.0] * n, generator.normal(true, sigma, n).tolist()).detected)
    assert np.mean(found) == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / 4000))


def test_correct_by_holm_adjusts_detected_and_detectable_differences():
    """Of p = 0.001, 0.02 and 0.5, Holm detects the first two.

    Holm compares the smallest p with 0.05/3, the second with 0.05/2 and the third with 0.05.
    """
    p = (0.001, 0.02, 0.5)
    half = stats.t.ppf(0.975, 2)  # for a standard error of 1
    family = [Difference("arm", "heldout_nll", 3, 1, 1 - half, 1 + half, 0.0, True, one) for one in (*p, None)]
    found = correct_by_holm(family)
    assert [d.p for d in found] == pytest.approx([0.003, 0.04, 0.5, None])
    assert [d.detected for d in found] == [True, True, False, True]
    assert [d.detectable for d in found] == pytest.approx(
        [*(detectable_difference(2, 0.05 / m) for m in (3, 2, 1)), 0.0]
    )


@pytest.mark.parametrize(
    ("reference", "other", "mean", "bound"),
    [
        ([5.0], [4.0], -1.0, None),  # one pair
        ([5.0, 5.1], [5.0, 5.1], 0.0, 0.0),  # equal arms
        ([5.0, 5.0], [5.1, math.inf], math.nan, None),  # a diverged run
    ],
)
def test_paired_detects_nothing_in_single_equal_or_diverged_pairs(reference, other, mean, bound):
    d = paired(reference, other)
    assert d.mean == pytest.approx(mean, nan_ok=True)
    assert (d.low, d.high, d.detectable, d.detected) == (bound, bound, bound, False)


@pytest.mark.parametrize("values", [([], []), ([1.0], [1.0, 2.0])])
def test_paired_refuses_missing_and_unequal_pairs(values):
    with pytest.raises(ValueError, match="pairs"):
        paired(*values)


def test_finding_states_difference_with_interval_and_parameters():
    found = comparison(runs_of("tied", (5.0, 5.1, 5.2)) + runs_of("untied", (5.1, 5.201, 5.302), parameters=150))
    assert found.finding == (
        "tied wins on this text: validation loss 0.101 nats/token lower than untied (95 % CI 0.099–0.103, 3 seeds), "
        "with 33 % fewer parameters."
    )
    turned = comparison(found.runs, ("untied", "tied"))
    assert turned.finding == found.finding


def test_finding_reports_missing_detection_and_detectable_difference():
    done = comparison(runs_of("tied", (5.0, 5.0, 5.0)) + runs_of("untied", (5.02, 4.98, 5.0), parameters=60))
    assert done.finding == (
        "Undecided: no difference detected, nor equivalence within 0.02 nats/token: validation loss untied − tied is "
        "0.000 nats/token (95 % CI −0.050 to +0.050, 3 seeds), with 40 % fewer parameters."
    )
    least = done.difference("untied", "heldout_nll").detectable
    said = f"untied: 3 seeds detect a true difference of {least:.3f} nats/token in 80 of 100 repetitions"
    assert any(line.startswith(said) for line in explanations(done))


def test_finding_reports_token_frequencies_that_gain_and_lose():
    bins = {"0": (9.0, 8.5), "1–9": (8.0, 7.8), "10–99": (7.0, 7.0), "≥10000": (3.0, 3.1)}
    runs = runs_of("tied", (5.0, 5.0, 5.0), frequency=[(label, tied) for label, (tied, _) in bins.items()])
    for seed, e in enumerate((-0.02, 0.0, 0.02)):
        own = [(label, untied + e) for label, (_, untied) in bins.items()]
        runs.append(make_run("untied", seed, 5.0 + e, frequency=own))
    assert explanations(comparison(runs))[-1] == (
        "untied predicts better tokens seen 0 or 1–9 times and worse tokens seen ≥10000 times in the training text "
        "(p < 0.05 over seeds, corrected for all bins)."
    )


@pytest.mark.parametrize(("match", "advised"), [("width", True), ("parameters", False), (None, False)])
def test_finding_suggests_match_parameters_only_after_matching_width(match, advised):
    found = comparison(runs_of("tied", [5.0] * 3) + runs_of("untied", [5.1] * 3, parameters=150), match=match)
    assert any("--match parameters compares equal sizes" in line for line in explanations(found)) is advised


@pytest.mark.parametrize(
    ("tune", "untied", "says"),
    [(False, (5.1, 5.101, 5.099), True), (True, (5.1, 5.101, 5.099), False), (False, (5.1, 4.9, 5.0), False)],
)
def test_detected_difference_at_one_learning_rate_suggests_tune(tune, untied, says):
    found = comparison(runs_of("tied", (5.0, 5.001, 4.999)) + runs_of("untied", untied), tune=tune)
    notes = [line for line in explanations(found) if "--tune compares the best rate of each" in line]
    assert len(notes) == says
    assert all(line.startswith("All arms have the learning rate 1;") for line in notes)


def test_note_about_tune_names_the_rate_of_tables():
    runs = runs_of("tied", (5.0, 5.001, 4.999)) + runs_of("untied", (5.1, 5.101, 5.099))
    found = comparison([replace(run, table_rate=8.0) for run in runs], tune=False)
    [note] = [line for line in explanations(found) if "--tune" in line]
    assert note.startswith("All arms have the learning rate 1, and 8 of their tables; --tune compares the best rate")


@pytest.mark.parametrize(
    ("setting", "untied", "says"),
    [
        ({"tune": True, "table_rate": None}, (5.1, 5.101, 5.099), True),
        ({"tune": True, "table_rate": 0.064}, (5.1, 5.101, 5.099), False),
        ({"tune": True}, (5.1, 5.101, 5.099), False),  # a kind of run whose tables cannot have their own
        ({"tune": False, "table_rate": None}, (5.1, 5.101, 5.099), False),
        ({"tune": True, "table_rate": None}, (5.1, 4.9, 5.0), False),
    ],
)
def test_detected_difference_after_tuning_suggests_rate_of_tables(setting, untied, says):
    found = comparison(runs_of("tied", (5.0, 5.001, 4.999)) + runs_of("untied", untied), **setting)
    notes = [line for line in explanations(found) if "table_rate" in line]
    assert len(notes) == says
    assert all(
        line == "Each arm has one learning rate; --set table_rate=8 lets --tune choose that of its tables, which can "
        "change a difference."
        for line in notes
    )


@pytest.mark.parametrize(
    ("tied", "untied", "arms", "says"),
    [
        (
            [5.0],
            [4.0],
            ("tied", "untied"),
            "One seed cannot show which is better: untied has a validation loss 1.000 nats/token lower than tied",
        ),
        ([5.0], [math.nan], ("tied", "untied"), "untied diverged, so untied cannot be compared with tied"),
        ([5.0], [], ("tied", "untied"), "no finished seed in common"),
        ([5.0], [], ("tied",), "nothing to compare"),
    ],
)
def test_finding_claims_no_improvement_without_valid_pairs(tied, untied, arms, says):
    found = comparison(runs_of("tied", tied) + runs_of("untied", untied), arms).finding
    assert says in found
    assert "wins" not in found
    assert "beats" not in found


def test_difference_pairs_only_seeds_that_both_arms_finished():
    done = comparison(
        [make_run("tied", 1, 9.0), make_run("tied", 0, 5.0), make_run("untied", 1, 9.5), make_run("untied", 2, 1.0)]
    )
    d = done.difference("untied", "heldout_nll")
    assert (d.n, d.mean) == (1, 0.5)
    assert [run.seed for run in done.of("tied")] == [0, 1]


def test_complete_compares_every_metric_and_filled_frequency_bin():
    runs = [
        make_run("tied", 0, 5.0, frequency=[("0", None), ("1–9", 9.0), ("≥10", 3.0)]),
        make_run("untied", 0, 5.5, train=-1.0, frequency=[("0", None), ("1–9", 9.5), ("≥10", 2.9)]),
    ]
    means = {d.metric: d.mean for d in comparison(runs).differences}
    assert means == pytest.approx(
        {"heldout_nll": 0.5, "train_nll": -0.5, "bits_per_byte": 0.25, "frequency:1–9": 0.5, "frequency:≥10": -0.1}
    )


@pytest.mark.parametrize("arms", [("tied", "untied"), ("untied", "tied")])
def test_gaps_are_tied_minus_untied_for_either_reference(arms):
    found = comparison(runs_of("tied", (5.0, 5.0)) + runs_of("untied", (5.5, 5.5), train=-1.0), arms)
    tying, generalisation = gaps(found)
    assert (tying.mean, generalisation.mean) == pytest.approx((0.5, -0.5))
    assert gaps(replace(found, arms=["tied"])) is None


def test_difference_among_several_arms_uses_holm_correction():
    """Compare the same arm alone and as one of three; its interval is uncorrected both times."""
    losses = {"tied": [4.0] * 4, "untied": [3.7, 3.8, 3.9, 3.85]}
    losses |= {"factored:8": [4.1, 3.8, 4.2, 3.9], "factored:4": [4.3, 3.8, 4.2, 3.7]}
    own = stats.ttest_rel(losses["untied"], losses["tied"]).pvalue
    assert 0.05 / 3 < own < 0.05

    def found(*arms):
        made = comparison([run for arm in arms for run in runs_of(arm, losses[arm])], arms)
        return made, made.difference("untied", "heldout_nll")

    alone, one = found("tied", "untied")
    assert (one.p, one.detected) == (pytest.approx(own), True)
    many, of_three = found(*losses)
    assert (of_three.p, of_three.detected) == (pytest.approx(3 * own), False)
    assert (of_three.low, of_three.high) == (one.low, one.high)
    assert of_three.high < 0
    assert alone.finding.startswith("untied wins on this text: validation loss ")
    assert many.finding.startswith("Undecided: no difference detected, nor equivalence within 0.02 nats/token: ")
    assert f"; p = {of_three.p:.3f} corrected for 3 arms)" in many.finding


def test_answer_names_every_arm_that_beats_the_reference_best_first():
    losses = {
        "tied": [5.0, 5.1, 5.2],
        "untied": [4.8, 4.901, 5.002],
        "spd": [4.7, 4.801, 4.902],
        "factored:4": [6.0] * 3,
    }
    done = comparison([run for arm, of_arm in losses.items() for run in runs_of(arm, of_arm)], tuple(losses))
    beginnings = [line.partition(" validation")[0] for line in done.finding.splitlines()]
    assert beginnings == ["spd beats tied on this text:", "untied beats tied on this text:", "factored:4:"]


def test_answer_names_the_reference_if_all_other_arms_are_worse():
    losses = {"tied": [5.0, 5.1, 5.2], "untied": [5.2, 5.301, 5.402], "spd": [5.3, 5.401, 5.502]}
    done = comparison([run for arm, of_arm in losses.items() for run in runs_of(arm, of_arm)], tuple(losses))
    answer, *others = done.finding.splitlines()
    assert answer == "tied wins on this text: untied and spd have a higher validation loss."
    assert [line.partition(":")[0] for line in others] == ["untied", "spd"]


def test_note_names_the_sample_of_the_intervals():
    found, _, _ = crossed_sample()
    d = found.difference("untied", "heldout_nll")
    assert sample_note(found) == (
        f"Standard error of untied − tied: {d.seed_error:.4f} over seeds alone and {d.error:.4f} with the documents; "
        "more held-out text narrows the interval further than more seeds."
    )
    assert sample_note(found) in explanations(found)
    plain = comparison([replace(run, documents=None) for run in found.runs])
    assert sample_note(plain) == "The intervals cover seeds only, for this held-out text."
    blocks = [replace(run, documents=replace(run.documents, unit="blocks")) for run in found.runs]
    assert sample_note(comparison(blocks)).startswith(
        "The held-out text has few documents, so the intervals cover blocks"
    )
    assert sample_note(comparison(found.runs[:2])) == ""
