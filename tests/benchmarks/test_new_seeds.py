"""Tests of rows of the atlas with new seeds: the drawn rows exist, seeds follow those of the study, and the rule."""

import json
from dataclasses import replace

import pytest
from benchmarks.new_seeds import DRAWN, compare_row, new_difference, old_row, settings_of

from benchmarks import new_seeds
from tiewise.core.estimates import critical_t
from tiewise.training.results import paired


@pytest.mark.parametrize("key", DRAWN, ids=lambda key: f"{key.study} {key.arm}")
def test_drawn_row_is_in_atlas_and_in_grid(key):
    assert old_row(key)["contrast"] == f"{key.arm} − {key.reference}"
    assert settings_of(key).arms == (key.reference, key.arm)


def test_drawn_rows_differ():
    assert len(set(DRAWN)) == 8


def test_new_runs_have_seeds_after_those_of_study(tmp_path, monkeypatch):
    short = {"seeds": 2, "steps": 2, "width": 16, "measured": 2048, "tune": False, "tokenizer": "bpe:300"}
    short |= {"text": ("synthetic:words=20000",), "train_tokens": 20_000}  # the seeds depend on no text
    monkeypatch.setattr(new_seeds, "settings_of", lambda key: replace(settings_of(key), **short))
    new = new_difference(DRAWN[1], tmp_path)
    (results,) = tmp_path.glob("*/results.json")
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"]
    assert sorted((run["arm"], run["seed"]) for run in runs) == [
        ("tied", 3), ("tied", 4), ("untied", 3), ("untied", 4),
    ]  # fmt: skip
    assert new.n == 2


@pytest.mark.parametrize(("old", "agrees"), [("0.05", "yes"), ("0.5", "no")])
def test_row_agrees_within_combined_interval(old, agrees):
    new = paired([0.0, 0.0, 0.0], [0.0, 0.1, 0.2])
    half = critical_t(2) * 0.1 / 3**0.5
    ends = {"heldout_low": str(float(old) - 0.03), "heldout_high": str(float(old) + 0.03)}
    row = compare_row(DRAWN[0], {"heldout": old} | ends, new)
    assert row["agrees"] == agrees
    assert float(row["bound"]) == pytest.approx((half**2 + 0.03**2) ** 0.5, abs=1e-5)
    assert float(row["seed_bound"]) == pytest.approx(critical_t(4) * 2**0.5 * 0.1 / 3**0.5, abs=1e-5)
    assert float(row["moved"]) == pytest.approx(0.1 - float(old), abs=1e-5)
