"""results.json, a round trip through strict JSON; paired differences against scipy's, and what the finding says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tiewise.core.errors import RunError
from tiewise.training.results import (
    SCHEMA,
    ArmDirectPath,
    BinNll,
    Comparison,
    CurvePoint,
    Difference,
    RunResult,
    complete,
    gaps,
    paired,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 10**12)
word = st.text(max_size=8)
facts = st.dictionaries(word, st.one_of(word, whole, st.booleans(), st.none(), st.lists(whole, max_size=3)), max_size=3)
points = st.builds(CurvePoint, whole, whole, *[st.none() | finite] * 5)
runs = st.builds(
    RunResult,
    frequency=st.lists(st.builds(BinNll, word, whole, st.none() | finite), max_size=3),
    parameters=st.dictionaries(word, whole, max_size=3),
    curve=st.lists(points, max_size=3),
    **dict.fromkeys(("arm",), word),
    **dict.fromkeys(("seed", "steps", "total_parameters", "bytes"), whole),
    **dict.fromkeys(
        ("train_nll", "heldout_nll", "perplexity", "bits_per_byte", "tokens_per_second", "seconds"), finite
    ),
    **dict.fromkeys(("init_std", "learning_rate", "predicted_initial_nll", "initial_nll"), finite),
)
comparisons = st.builds(
    Comparison,
    runs=st.lists(runs, max_size=3),
    tuning=st.lists(facts, max_size=2),
    direct_path=st.lists(st.builds(ArmDirectPath, word, st.lists(word, max_size=2), st.just([[0.5]])), max_size=2),
    bigrams=st.lists(facts, max_size=2),
    differences=st.lists(st.builds(Difference, word, word, whole, finite, *[st.none() | finite] * 3, st.booleans())),
    finding=word,
    schema=st.just(SCHEMA),
    **dict.fromkeys(("version", "command", "reference"), word),
    **dict.fromkeys(("setting", "data", "env"), facts),
    demo=st.booleans(),
    arms=st.lists(word),
    seeds=st.lists(whole),
)


@given(comparisons)
def test_round_trip_through_strict_json(comparison):
    text = json.dumps(comparison.record(), allow_nan=False)
    assert Comparison.from_dict(json.loads(text)) == comparison


def example(**changes):
    common = {"version": "0", "command": "c", "demo": False, "arms": ["tied"], "seeds": [0], "reference": "tied"}
    run = RunResult(
        "tied", 0, 1, 1.0, 1.0, 2.7, 1.0, [], {"body": 3}, 3, 12, 1.0, 1.0, 0.02, 1e-3, 8.3, 8.3, [CurvePoint(0, 0)]
    )
    return replace(Comparison(**common, setting={}, data={}, env={}, runs=[run]), **changes)


def test_a_diverged_run_is_written_as_null_and_read_as_nan():
    bad = replace(example().runs[0], heldout_nll=math.nan, perplexity=math.inf)
    text = json.dumps(example(runs=[bad]).record(), allow_nan=False)
    read = Comparison.from_dict(json.loads(text)).runs[0]
    assert math.isnan(read.heldout_nll)
    assert math.isnan(read.perplexity)


def test_an_integer_is_read_as_a_float_where_a_float_is_meant():
    record = example().record()
    record["runs"][0]["heldout_nll"] = 5
    value = Comparison.from_dict(record).runs[0].heldout_nll
    assert isinstance(value, float)


def _without(record, name):
    del record["runs"][0][name]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda r: r.update(schema=99), "schema 99"),
        (lambda r: r.pop("schema"), "schema None"),
        (lambda r: r.pop("runs"), "runs is missing"),
        (lambda r: _without(r, "heldout_nll"), "runs[0]: heldout_nll is missing"),
        (lambda r: r["runs"][0].update(seed="one"), "runs[0]: seed must be a whole number"),
        (lambda r: r["runs"][0].update(seed=True), "seed must be a whole number"),
        (lambda r: r["runs"][0]["parameters"].update(body=None), "parameters['body'] must be a whole number"),
        (lambda r: r.update(arms="tied"), "arms must be a list"),
        (lambda r: r.update(demo="yes"), "demo must be true or false"),
        (lambda r: r.update(runs=[3]), "runs[0] must be an object"),
    ],
)
def test_what_cannot_be_read_is_named(spoil, says):
    record = example().record()
    spoil(record)
    with pytest.raises(RunError) as caught:
        Comparison.from_dict(record)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_something_else_than_an_object_is_refused():
    with pytest.raises(RunError, match="schema"):
        Comparison.from_dict([])


def test_runs_of_an_arm_come_by_seed():
    first = example().runs[0]
    both = example(runs=[replace(first, seed=2), replace(first, seed=1), replace(first, arm="untied")])
    assert [run.seed for run in both.of("tied")] == [1, 2]


numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


def a_run(arm, seed, nll, *, train=0.0, parameters=100, frequency=()):
    return RunResult(
        arm=arm,
        seed=seed,
        steps=1,
        train_nll=nll + train,
        heldout_nll=nll,
        perplexity=math.exp(nll),
        bits_per_byte=nll / 2,
        frequency=[BinNll(label, 5, value) for label, value in frequency],
        parameters={"body": parameters},
        total_parameters=parameters,
        bytes=4 * parameters,
        tokens_per_second=1.0,
        seconds=1.0,
        init_std=0.02,
        learning_rate=1e-3,
        predicted_initial_nll=8.3,
        initial_nll=8.3,
    )


def comparison(runs, arms=("tied", "untied")):
    seeds = sorted({r.seed for r in runs})
    facts = {"setting": {}, "data": {}, "env": {}}
    return complete(
        Comparison(
            version="0", command="", demo=False, arms=list(arms), seeds=seeds, reference=arms[0], runs=runs, **facts
        )
    )


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=12))
def test_interval_is_that_of_the_paired_t_test(pairs):
    reference, other = map(list, zip(*pairs, strict=True))
    d = paired(reference, other)
    values = np.subtract(other, reference)
    error = values.std(ddof=1) / math.sqrt(len(pairs))
    half = stats.t.ppf(0.975, len(pairs) - 1) * error
    assert d.mean == pytest.approx(values.mean(), abs=1e-9)
    assert (d.low, d.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-9)
    assert d.n == len(pairs)
    if error > 1e-6:
        p = stats.ttest_rel(other, reference).pvalue
        if abs(p - 0.05) > 1e-9:
            assert d.detected == (p < 0.05)


def test_sign_is_other_minus_reference_and_swaps():
    a, b = [5.0, 5.2, 5.1], [5.3, 5.4, 5.45]
    forth, back = paired(a, b), paired(b, a)
    assert forth.mean > 0
    assert (back.mean, back.low, back.high) == pytest.approx((-forth.mean, -forth.high, -forth.low))
    assert back.detectable == pytest.approx(forth.detectable)


def test_pairing_removes_what_seeds_share():
    seed_effect = [0.0, 3.0, -2.0]
    d = paired(seed_effect, [x + 0.1 + e for x, e in zip(seed_effect, (0.001, -0.001, 0.0), strict=True)])
    assert d.detected


def test_detectable_difference_is_found_in_four_of_five_repetitions():
    generator, sigma, n = np.random.default_rng(0), 0.02, 3
    true = paired([0.0, 0.0, 0.0], [sigma, 0.0, -sigma]).detectable  # three values whose deviation is sigma
    found = [paired([0.0] * n, generator.normal(true, sigma, n).tolist()).detected for _ in range(4000)]
    assert np.mean(found) == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / 4000))


def test_one_pair_has_no_interval_and_detects_nothing():
    d = paired([5.0], [4.0])
    assert (d.mean, d.low, d.high, d.detectable, d.detected) == (-1.0, None, None, None, False)


def test_equal_arms_are_not_different():
    d = paired([5.0, 5.1], [5.0, 5.1])
    assert (d.mean, d.low, d.high, d.detected) == (0.0, 0.0, 0.0, False)


def test_a_diverged_run_leaves_no_interval():
    d = paired([5.0, 5.0], [5.1, math.inf])
    assert math.isnan(d.mean)
    assert d.low is None
    assert not d.detected


@pytest.mark.parametrize("values", [([], []), ([1.0], [1.0, 2.0])])
def test_no_pairs_is_an_error(values):
    with pytest.raises(ValueError, match="pairs"):
        paired(*values)


def test_finding_states_a_real_difference_with_its_interval_and_parameters():
    runs = [a_run("tied", s, 5.0 + s / 10) for s in range(3)]
    runs += [a_run("untied", s, 5.1 + s / 10 + s / 1000, parameters=150) for s in range(3)]
    text = comparison(runs).finding
    assert text == (
        "untied against tied: validation loss is higher (worse) by 0.1010 nats/token (95 % interval +0.0985 to "
        "+0.1035, 3 seeds), with 50 more parameters (+50.0 %)."
    )


def test_finding_says_when_nothing_was_detected_and_what_could_have_been():
    runs = [a_run("tied", s, 5.0) for s in range(3)]
    runs += [a_run("untied", s, 5.0 + e, parameters=60) for s, e in enumerate((0.02, -0.02, 0.0))]
    done = comparison(runs)
    assert "no difference detected at this budget" in done.finding
    assert f"smallest detectable difference {done.difference('untied', 'heldout_nll').detectable:.4f}" in done.finding
    assert "40 fewer parameters (−40.0 %)" in done.finding
    assert "better" not in done.finding


def test_finding_says_which_tokens_gain_and_lose():
    def bins(*nll):
        return list(zip(("0", "1–9", "10–99", "≥10000"), nll, strict=True))

    runs = [a_run("tied", s, 5.0, frequency=bins(9.0, 8.0, 7.0, 3.0)) for s in range(3)]
    runs += [
        a_run("untied", s, 5.0 + e, frequency=bins(8.5 + e, 7.8 + e, 7.0 + e, 3.1 + e))
        for s, e in enumerate((-0.02, 0.0, 0.02))
    ]
    assert comparison(runs).finding.endswith(
        " It predicts better the tokens that the training text has 0 or 1–9 times, and worse the tokens that the "
        "training text has ≥10000 times (p < 0.05 over all bins, Holm)."
    )


def test_finding_names_the_way_to_equal_sizes_where_there_is_one():
    runs = [a_run("tied", s, 5.0) for s in range(3)] + [a_run("untied", s, 5.1, parameters=150) for s in range(3)]
    for match, advised in (("width", True), ("parameters", False), (None, False)):
        found = replace(comparison(runs), setting={"match": match}, finding="")
        assert ("(+50.0 %; --match parameters compares equal sizes)" in complete(found).finding) is advised


def test_finding_of_one_seed_claims_nothing():
    text = comparison([a_run("tied", 0, 5.0), a_run("untied", 0, 4.0)]).finding
    assert "one seed, which cannot tell a difference from chance" in text
    assert "better" not in text


def test_finding_of_one_arm_and_of_a_diverged_arm():
    assert "nothing to compare" in comparison([a_run("tied", 0, 5.0)], arms=("tied",)).finding
    assert "diverged" in comparison([a_run("tied", 0, 5.0), a_run("untied", 0, math.nan)]).finding


def test_only_seeds_that_both_arms_finished_are_paired():
    done = comparison([a_run("tied", 0, 5.0), a_run("tied", 1, 9.0), a_run("untied", 1, 9.5), a_run("untied", 2, 1.0)])
    d = done.difference("untied", "heldout_nll")
    assert (d.n, d.mean) == (1, 0.5)
    assert "nothing is known" in comparison([a_run("tied", 0, 5.0)]).finding


def test_every_metric_and_every_filled_bin_is_compared():
    runs = [
        a_run("tied", 0, 5.0, frequency=[("0", None), ("1–9", 9.0), ("≥10", 3.0)]),
        a_run("untied", 0, 5.5, train=-1.0, frequency=[("0", None), ("1–9", 9.5), ("≥10", 2.9)]),
    ]
    done = comparison(runs)
    means = {d.metric: d.mean for d in done.differences}
    assert means == pytest.approx(
        {"heldout_nll": 0.5, "train_nll": -0.5, "bits_per_byte": 0.25, "frequency:1–9": 0.5, "frequency:≥10": -0.1}
    )


@pytest.mark.parametrize("arms", [("tied", "untied"), ("untied", "tied")])
def test_gaps_are_tied_minus_untied_whichever_is_the_reference(arms):
    runs = [a_run("tied", s, 5.0) for s in range(2)] + [a_run("untied", s, 5.5, train=-1.0) for s in range(2)]
    tying, generalisation = gaps(comparison(runs, arms))
    assert (tying.mean, generalisation.mean) == pytest.approx((0.5, -0.5))
    assert gaps(replace(comparison(runs, arms), arms=["tied"])) is None


def test_of_several_arms_a_difference_counts_only_with_holms_correction():
    """The same arm, alone and as one of three; its interval is the plain one both times."""
    losses = {"tied": dict.fromkeys((1, 2, 3, 4), 4.0)}
    losses["untied"] = {1: 3.7, 2: 3.8, 3: 3.9, 4: 3.85}
    losses |= {"factored:8": {1: 4.1, 2: 3.8, 3: 4.2, 4: 3.9}, "factored:4": {1: 4.3, 2: 3.8, 3: 4.2, 4: 3.7}}
    own = stats.ttest_rel(list(losses["untied"].values()), list(losses["tied"].values())).pvalue
    assert 0.05 / 3 < own < 0.05

    def found(*arms):
        made = comparison([a_run(a, s, x) for a in arms for s, x in losses[a].items()], arms)
        return made, made.difference("untied", "heldout_nll")

    alone, one = found("tied", "untied")
    assert (one.p, one.detected) == (pytest.approx(own), True)
    many, of_three = found(*losses)
    assert (of_three.p, of_three.detected) == (pytest.approx(3 * own), False)
    assert (of_three.low, of_three.high) == (one.low, one.high)
    assert of_three.high < 0
    assert "untied against tied: validation loss is lower (better)" in alone.finding
    assert "untied against tied: no difference detected at this budget" in many.finding
    assert "with 3 arms (Holm)" in many.finding
