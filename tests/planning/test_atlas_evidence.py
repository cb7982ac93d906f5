"""What the atlas says of other sizes: planted surfaces are found and held, beyond its hull nothing is said."""

import itertools
import json
import math
import shlex

import numpy as np
import pytest
from typer.main import get_command

from tiewise.cli.main import command_line
from tiewise.cli.train_settings import choose_settings
from tiewise.core.estimates import mean_interval
from tiewise.planning import evidence, plan_rows
from tiewise.planning.evidence import (
    EXPECTED,
    SIZES,
    SURPRISE,
    UNKNOWN,
    assess_difference,
    factors_beyond,
    nearest_settings,
    score,
)
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes

GRID = [*itertools.product((32, 64, 128), (1, 2, 4), (512, 4096), (25_000, 100_000, 400_000))]
SEEDS, NOISE = 3, 0.004
NUMBERS = ("difference", "low", "high", "error", "sign")
INSIDE = {"width": 80, "layers": 3, "vocab": 2000, "tokens": 60_000, "seen": 307_200}


def gain(width, layers, vocab, tokens):
    """Tied − untied as it is planted."""
    return 0.02 * math.log(tokens / 60_000) + 0.01 * math.log(width / 64) - 0.015 * math.log(vocab / 1000)


def planted(seed=0, noise=NOISE):
    """The rows of a made-up atlas."""
    draw = np.random.default_rng(seed)
    for at in GRID:
        each = gain(*at) + draw.normal(0, noise, SEEDS)
        e = mean_interval(each.tolist())
        numbers = (e.value, e.low, e.high, float(each.std(ddof=1)) / SEEDS**0.5, int(e.low > 0) - int(e.high < 0))
        facts = {"seeds": SEEDS, "study": "planted", "text": "builtin", "command": "tiewise compare"}
        yield dict(zip((*SIZES, *NUMBERS), (*at, 307_200, *numbers), strict=True)) | facts


@pytest.fixture
def atlas(monkeypatch):
    """Put other rows in the place of the atlas."""
    return lambda rows: monkeypatch.setattr(evidence, "rows", lambda made=tuple(rows): made)


def test_a_planted_surface_is_found_and_a_new_run_is_held_against_it(atlas):
    atlas(planted())
    true = gain(80, 3, 2000, 60_000)
    found = assess_difference(INSIDE, true, seeds=SEEDS)
    assert (found.verdict, found.why, found.settings) == (EXPECTED, "", len(GRID))
    assert found.low < true < found.high
    assert found.value == pytest.approx(true, abs=0.003)
    one = assess_difference(INSIDE, true, seeds=1)
    assert found.high - found.low < min(6 * NOISE, one.high - one.low)  # it says something, of three seeds more
    for away in (found.low - 1e-4, found.high + 1e-4):
        assert assess_difference(INSIDE, away, seeds=SEEDS).verdict == SURPRISE


def test_a_prediction_that_would_hold_anything_confirms_nothing(atlas):
    """Settings that differ by half a nat for no reason of their sizes are predicted to ± 1; outside is a surprise."""
    draw = np.random.default_rng(0)
    atlas(row | {"difference": row["difference"] + 0.5 * draw.standard_normal()} for row in planted())
    inside = assess_difference(INSIDE, 0.0, seeds=SEEDS)
    assert (inside.verdict, math.isnan(inside.low)) == (UNKNOWN, True)
    assert "only one narrower than ± 0.12 could agree" in inside.why
    assert assess_difference(INSIDE, 3.0, seeds=SEEDS).verdict == SURPRISE


def test_the_atlas_as_it_is_confirms_nothing():
    """Left out one by one, its settings are predicted to ± 0.18 at best."""
    for row in evidence.rows():
        found = assess_difference({name: row[name] for name in SIZES}, row["difference"], row["seeds"])
        assert found.verdict != EXPECTED


def test_beyond_the_hull_there_is_no_evidence(atlas):
    atlas(planted())
    for name, size, factor in (("width", 256, 2), ("layers", 8, 2), ("tokens", 5000, 0.2), ("seen", 30_720, 0.1)):
        there = INSIDE | {name: size}
        assert factors_beyond(there) == {name: pytest.approx(factor)}
        found = assess_difference(there, 0.0, seeds=3)
        assert (found.verdict, math.isnan(found.value), f"{factor} times" in found.why) == (UNKNOWN, True, True)
    assert nearest_settings({"width": 80, "layers": 3, "vocab": 2000})["within"]
    assert nearest_settings({"width": 32, "layers": 1, "vocab": 512})["within"]  # a corner
    assert nearest_settings({"width": 33, "layers": 1, "vocab": 520})["within"]
    assert not nearest_settings({"width": 768, "layers": 12, "vocab": 50_257})["within"]
    hollow = [row for row in planted() if (row["width"], row["layers"]) not in ((128, 4), (64, 4), (128, 2))]
    atlas(hollow)
    corner = INSIDE | {"width": 120, "layers": 4}
    assert not factors_beyond(corner)
    assert "enclose" in assess_difference(corner, 0.0, seeds=3).why
    assert not nearest_settings({"width": 120, "layers": 4, "vocab": 2000})["within"]


def test_the_nearest_is_the_smallest_distance_in_logarithms(atlas):
    atlas(planted())
    found = nearest_settings({"width": 768, "layers": 12, "vocab": 50_257})
    assert {(row["width"], row["layers"], row["vocab"]) for row in found["rows"]} == {(128, 4, 4096)}
    assert [row["tokens"] for row in found["rows"]] == [25_000, 100_000, 400_000]
    assert found["distance"] == pytest.approx(math.hypot(*map(math.log, (6, 3, 50_257 / 4096))))
    assert found["beyond"] == {"width": 6, "layers": 3, "vocab": 50_257 / 4096}


def test_the_score_counts_what_was_predicted_by_the_others(atlas):
    atlas(planted(3))
    found = score()
    assert (found.settings, found.never > found.chosen, found.always > found.chosen) == (len(GRID), True, True)
    assert 0.88 * len(GRID) <= found.covered <= len(GRID)
    atlas([*planted(3), *(row | {"text": "other"} for row in planted(3))])
    twice = score()  # each is left out with its like, so no row changes what it is predicted to be
    assert twice.chosen == pytest.approx(found.chosen, rel=1e-9)
    atlas([*planted()][:4])
    assert score() is None
    assert "enclose" in assess_difference({name: next(planted())[name] for name in SIZES}, 0.0, 3).why


def test_other_settings_than_sizes_have_no_expectation(atlas):
    atlas(planted())
    found = assess_difference(INSIDE, 0.0, 3, other="learning_rate=0.1")
    assert (found.verdict, found.why) == (UNKNOWN, "nothing in the atlas was trained with learning_rate=0.1")


def test_every_row_of_the_atlas_is_repeated_by_its_command():
    parser = get_command(command_line(["compare"])).commands["compare"]
    assert evidence.rows()
    for row in evidence.rows():
        program, command, *words = shlex.split(row["command"])
        assert (program, command) == ("tiewise", "compare")
        settings = choose_settings(None, parser.make_context("compare", words).params, single=False)
        assert {"tied", "untied"} <= set(settings.arms)
        assert (settings.width, settings.layers, settings.seeds) == (row["width"], row["layers"], row["seeds"])
        assert settings.steps * settings.batch * settings.accumulate * settings.length == row["seen"]
        assert settings.tokenizer == f"bpe:{row['vocab']}"
        assert (row["sign"], row["low"] <= row["difference"] <= row["high"]) in (((-1, True), (0, True), (1, True)))


def test_a_plan_says_what_the_nearest_found(atlas):
    atlas(planted(noise=1e-4))
    record = json.loads(json.dumps(plan("gpt2").record()))
    assert set(record["atlas"]) == {"kind", "within", "beyond", "distance", "rows"}
    assert set(record["atlas"]["rows"][0]) == set(next(planted())) == set(evidence.rows()[0])
    said = plan_rows.atlas_sentences(record)
    assert said.startswith("No evidence of what tying does to the loss: this model has a width 6 times the largest,")
    assert "width 128, 4 layers and V 4,096, tying gained 0.03" in said
    assert "nats per token with 25,000 and lost 0.02" in said
    assert said.endswith("tokens of text, by the loss of the last step.")
    *_, nearest = plan_rows.lookup_tables(record)
    assert [row[:2] + row[3:] for row in nearest.rows] == [
        ["25,000", "12", "better", "3"],
        ["100,000", "3.1", "better", "3"],
        ["400,000", "0.77", "worse", "3"],
    ]
    assert said in repr(plan("gpt2"))
    inside = plan_rows.atlas_sentences(plan(Sizes(2000, 64, 2)).record())
    assert inside.startswith("The atlas trained decoders around this size. At the nearest, width 64, 2 layers")
    within = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 2000, "num_attention_heads": 2}
    for config, kind in (
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "an encoder"),
        ({"model_type": "camembert", "architectures": ["CamembertForMaskedLM"]}, "an encoder"),  # sizes alone are known
        ({"model_type": "t5", "d_model": 64, "num_layers": 1}, "an encoder–decoder"),
        ({"model_type": "mamba"}, "a recurrent model"),
    ):
        other = plan(within | config).record()
        assert not other["atlas"]["within"]
        said = f"this model is {kind}, and the atlas varied the size of decoders only. At the nearest decoder, width"
        assert said in plan_rows.atlas_sentences(other)
    headless = plan({"model_type": "bert", "architectures": ["BertModel"]})
    assert headless.record()["atlas"] is None
    assert plan_rows.atlas_sentences(headless.record()) == ""
    assert len(plan_rows.lookup_tables(headless.record())) == 2
