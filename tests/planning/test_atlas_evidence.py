"""Test which rows of the atlas are nearest to given sizes, and whether the trained sizes enclose them."""

import csv
import io
import itertools
import json
import math
import shlex

import numpy as np
import pytest
from scipy.spatial import Delaunay
from typer.main import get_command

from tiewise.cli.main import command_line
from tiewise.cli.train_settings import choose_settings
from tiewise.core.estimates import mean_interval
from tiewise.planning import evidence, plan_rows
from tiewise.planning.evidence import SIZES, encloses, factors_beyond, nearest_settings
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes

GRID = [*itertools.product((32, 64, 128), (1, 2, 4), (512, 4096), (25_000, 100_000, 400_000))]
SEEDS, NOISE = 3, 0.004
NUMBERS = ("difference", "low", "high", "error", "sign")
INSIDE = {"width": 80, "layers": 3, "vocab": 2000}


def planted_gain(width, layers, vocab, tokens):
    """Return the planted loss difference, tied − untied, in nats per token."""
    return 0.02 * math.log(tokens / 60_000) + 0.01 * math.log(width / 64) - 0.015 * math.log(vocab / 1000)


def planted_records(seed=0, noise=NOISE):
    """Yield the rows of a synthetic atlas with the planted differences."""
    draw = np.random.default_rng(seed)
    for at in GRID:
        each = planted_gain(*at) + draw.normal(0, noise, SEEDS)
        e = mean_interval(each.tolist())
        numbers = (e.value, e.low, e.high, float(each.std(ddof=1)) / SEEDS**0.5, int(e.low > 0) - int(e.high < 0))
        facts = {"seeds": SEEDS, "study": "planted", "text": "builtin", "command": "tiewise compare", "step": "last"}
        yield dict(zip((*SIZES, *NUMBERS), (*at, 307_200, *numbers), strict=True)) | facts


@pytest.fixture
def set_atlas(monkeypatch):
    """Return a function that replaces the records of the atlas."""
    return lambda rows: monkeypatch.setattr(evidence, "atlas_records", lambda made=tuple(rows): made)


def test_sizes_beyond_the_trained_range_have_no_evidence(set_atlas):
    set_atlas(planted_records())
    for name, size, factor in (("width", 256, 2), ("layers", 8, 2), ("vocab", 256, 0.5), ("width", 16, 0.5)):
        there = INSIDE | {name: size}
        assert factors_beyond(there) == {name: pytest.approx(factor)}
        assert not nearest_settings(there)["within"]
    assert nearest_settings(INSIDE)["within"]
    assert nearest_settings({"width": 32, "layers": 1, "vocab": 512})["within"]  # a corner of the hull
    assert nearest_settings({"width": 33, "layers": 1, "vocab": 520})["within"]
    assert not nearest_settings({"width": 768, "layers": 12, "vocab": 50_257})["within"]
    hollow = [row for row in planted_records() if (row["width"], row["layers"]) not in ((128, 4), (64, 4), (128, 2))]
    set_atlas(hollow)
    corner = INSIDE | {"width": 120, "layers": 4}
    assert not factors_beyond(corner)
    assert not nearest_settings(corner)["within"]


def test_size_that_never_varies_must_be_the_trained_one(set_atlas):
    set_atlas([row for row in planted_records() if row["layers"] == 2])
    assert encloses(INSIDE | {"layers": 2})
    assert not encloses(INSIDE | {"layers": 3})


def test_enclosed_sizes_are_in_the_delaunay_triangulation_of_the_trained_ones(set_atlas):
    draw, (record, *_) = np.random.default_rng(0), planted_records()
    trained = draw.uniform(3, 6, (12, 2))  # logarithms of width and vocabulary
    set_atlas([record | dict(zip(("width", "vocab"), np.exp(point), strict=True)) for point in trained])
    within = draw.uniform(trained.min(0), trained.max(0), (60, 2))
    found = [encloses(dict(zip(("width", "vocab"), np.exp(point), strict=True))) for point in within]
    assert found == (Delaunay(trained).find_simplex(within) >= 0).tolist()
    assert 10 < sum(found) < 50


def test_nearest_settings_minimise_the_logarithmic_distance(set_atlas):
    set_atlas(planted_records())
    nearest = nearest_settings({"width": 768, "layers": 12, "vocab": 50_257})
    assert {(row["width"], row["layers"], row["vocab"]) for row in nearest["rows"]} == {(128, 4, 4096)}
    assert [row["tokens"] for row in nearest["rows"]] == [25_000, 100_000, 400_000]
    assert nearest["distance"] == pytest.approx(math.hypot(*map(math.log, (6, 3, 50_257 / 4096))))
    assert nearest["beyond"] == {"width": 6, "layers": 3, "vocab": 50_257 / 4096}


def test_command_of_every_atlas_row_repeats_its_settings():
    parser = get_command(command_line(["compare"])).commands["compare"]
    assert evidence.atlas_records()
    for row in evidence.atlas_records():
        program, command, *words = shlex.split(row["command"])
        assert (program, command) == ("tiewise", "compare")
        settings = choose_settings(None, parser.make_context("compare", words).params, single=False)
        assert {"tied", "untied"} <= set(settings.arms)
        assert (settings.width, settings.layers, settings.seeds) == (row["width"], row["layers"], row["seeds"])
        assert settings.steps * settings.batch * settings.accumulate * settings.length == row["seen"]
        assert settings.tokenizer == f"bpe:{row['vocab']}"
        assert (row["sign"], row["low"] <= row["difference"] <= row["high"]) in (((-1, True), (0, True), (1, True)))


def test_plan_describes_the_nearest_atlas_settings(set_atlas):
    set_atlas(planted_records(noise=1e-4))
    record = json.loads(json.dumps(plan("gpt2").record()))
    assert set(record["atlas"]) == {"kind", "within", "beyond", "distance", "rows"}
    assert set(record["atlas"]["rows"][0]) == set(next(planted_records())) == set(evidence.atlas_records()[0])
    sentence = plan_rows.atlas_sentences(record)
    assert sentence.startswith("No measurement near this size: this model has a width 6 times the largest,")
    nearest = "The nearest decoder that was trained both ways has width 128, 4 layers, V 4,096."
    assert sentence.endswith(
        f"{nearest} Its losses are those of the last step at the best learning rate of each, one for all parameters, "
        "on the demo corpus."
    )
    *_, nearest = plan_rows.lookup_tables(record)
    assert [row[:2] + row[3:] for row in nearest.rows] == [
        ["25,000", "12", "lowers the loss", "3"],
        ["100,000", "3.1", "lowers the loss", "3"],
        ["400,000", "0.77", "raises the loss", "3"],
    ]
    inside = plan_rows.atlas_sentences(plan(Sizes(2000, 64, 2)).record())
    assert inside.startswith("The nearest decoder that was trained both ways has width 64, 2 layers")
    within = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 2000, "num_attention_heads": 2}
    for config, kind in (
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "an encoder"),
        # estimated from its sizes
        (
            {"model_type": "camembert", "architectures": ["CamembertForMaskedLM"]},
            "an encoder",
        ),
        ({"model_type": "t5", "d_model": 64, "num_layers": 1}, "an encoder–decoder"),
        ({"model_type": "mamba"}, "a recurrent model"),
    ):
        other = plan(within | config).record()
        assert not other["atlas"]["within"]
        sentence = f"this model is {kind}, and only decoders were trained at several sizes. The nearest decoder that"
        assert sentence in plan_rows.atlas_sentences(other)
    headless = plan({"model_type": "bert", "architectures": ["BertModel"]})
    assert headless.record()["atlas"] is None
    assert plan_rows.atlas_sentences(headless.record()) == ""
    assert len(plan_rows.lookup_tables(headless.record())) == 2


def atlas_line(last="0.4", seeds=3, heldout=0.1, tokens=25_000, command="tiewise compare --set tune=true"):
    """Return a line of the atlas for a tied and an untied decoder of default settings, tuned."""
    numbers = {"heldout": heldout, "heldout_low": heldout - 0.05, "heldout_high": heldout + 0.05, "sign": 1}
    sizes = {"width": 64, "layers": 2, "vocab": 2048, "tokens": tokens, "seen": 307_200, "seeds": seeds}
    facts = {"arm": "tied", "reference": "untied", "text": "builtin", "study": "s", "command": command}
    return {name: str(value) for name, value in (numbers | sizes | facts | {"error": 0.02, "last": last}).items()}


@pytest.fixture
def written_atlas(monkeypatch):
    """Return a function that replaces the file of the atlas."""

    def replace_lines(*lines):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
        monkeypatch.setattr(evidence.pkgutil, "get_data", lambda package, name: text.getvalue().encode())
        evidence.atlas_records.cache_clear()

    yield replace_lines
    evidence.atlas_records.cache_clear()


def test_rows_of_last_step_are_no_evidence_and_most_seeds_decide(written_atlas):
    written_atlas(
        atlas_line("", seeds=9), atlas_line(heldout=0.2), atlas_line(seeds=8, heldout=0.3), atlas_line(seeds=5)
    )
    assert [(row["step"], row["difference"]) for row in evidence.atlas_records()] == [("best", 0.3)]


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        ("tiewise compare --set tune=true --set learning_rate=0.008 --set width=64", True),
        ("tiewise compare --tune --set width=64", True),
        ("tiewise compare --set width=64", False),
        ("tiewise compare --set learning_rate=0.008 --set width=64", False),
        ("tiewise compare --set tune=true --set match=parameters", False),
    ],
)
def test_only_tuned_arms_that_differ_in_sizes_are_evidence(written_atlas, command, counts):
    written_atlas(atlas_line(command=command))
    assert len(evidence.atlas_records()) == counts


def test_nearest_rows_are_ordered_by_amount_of_text(written_atlas):
    written_atlas(atlas_line(tokens=400_000), atlas_line("", tokens=50_000), atlas_line())
    rows = nearest_settings({"width": 64, "layers": 2, "vocab": 2048})["rows"]
    assert [row["tokens"] for row in rows] == [25_000, 400_000]
