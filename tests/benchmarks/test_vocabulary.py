"""Tests of the study of vocabularies: steps against counts by hand, and a small study to its end."""

import csv
from dataclasses import replace

import pytest

from benchmarks import study_curves, tuned_rates, vocabulary
from tiewise.training.settings import Settings


def test_steps_take_equally_many_operations_by_counts_by_hand():
    """Width 64, 2 layers: four attention matrices and three of 168 columns in each layer, and a head."""
    body = 2 * (4 * 64 * 64 + 3 * 64 * 168)
    assert vocabulary.weights_per_token(vocabulary.SETTINGS, 512) == body + 512 * 64
    by_name = vocabulary.cells(vocabulary.SETTINGS, vocabulary.VOCABULARIES)
    assert [settings.tokenizer for settings in by_name.values()] == [
        f"bpe:{vocab}" for vocab in (512, 1024, 2048, 4096, 8192, 16384)
    ]
    budget = 2400 * (body + 512 * 64)
    for vocab, settings in zip(vocabulary.VOCABULARIES, by_name.values(), strict=True):
        assert settings.steps * (body + vocab * 64) == pytest.approx(budget, rel=0.002)
        assert settings.checked().select == "best"


@pytest.mark.slow
def test_small_study_writes_bits_per_byte_and_curves(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "CSV_FILE", tmp_path / "vocabulary.csv")
    monkeypatch.setattr(study_curves, "CURVES", tmp_path / "curves")
    monkeypatch.setattr(tuned_rates, "CSV_FILE", tmp_path / "tuned_rates.csv")
    sizes = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 8, "layers": 1}
    small = replace(Settings(arms=("untied", "tied"), seeds=2, text=("synthetic:words=4000",)), **sizes)
    vocabulary.main(tmp_path / "runs", small, (300, 400))
    rows = list(csv.DictReader((tmp_path / "vocabulary.csv").open(encoding="utf-8")))
    assert [row["vocabulary"] for row in rows] == ["300", "400"]
    for row in rows:
        assert float(row["tied"]) - float(row["untied"]) == pytest.approx(float(row["tied − untied"]), abs=2e-5)
        assert float(row["low"]) <= float(row["tied − untied"]) <= float(row["high"])
        assert row["seeds"] == "2"
        assert float(row["detectable"]) > 0
    assert int(rows[1]["steps"]) < int(rows[0]["steps"]) == 8
    assert len(study_curves.read(tmp_path / "curves" / "vocabulary.jsonl")) == 8
