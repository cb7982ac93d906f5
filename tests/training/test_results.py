"""results.json: a round trip through strict JSON, and one clear line for whatever cannot be read."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiewise.core.errors import RunError
from tiewise.training.results import SCHEMA, ArmDirectPath, BinNll, Comparison, CurvePoint, Difference, RunResult

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
