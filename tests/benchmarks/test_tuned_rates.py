"""Tests of the learning rates that trials chose, and of the tables made from them, on a study made by hand."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import tuned_rates

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import atlas_tuning

RATES = {"untied": 0.004, "tied": 0.016}


def comparison(tune):
    """Return a finished comparison whose arms chose other learning rates, the tied one at the edge."""
    tuning = []
    for arm, chosen in RATES.items():
        for rate in (0.002, 0.004, 0.016):
            tuning.append({"arm": arm, "learning_rate": rate, "chosen": rate == chosen})
    return SimpleNamespace(setting={"tune": tune}, arms=list(RATES), tuning=tuning)


@pytest.fixture
def studies(tmp_path, monkeypatch):
    """Return the folders of two studies with a finished cell each; only the first one was tuned."""
    monkeypatch.setattr(tuned_rates, "CSV_FILE", tmp_path / "tuned_rates.csv")
    monkeypatch.setattr(tuned_rates, "Comparison", SimpleNamespace(from_dict=comparison))
    folders = [tmp_path / "rank", tmp_path / "plain"]
    for folder in folders:
        (folder / "tokenizer=bpe-1024").mkdir(parents=True)
        (folder / "tokenizer=bpe-1024" / "results.json").write_text(json.dumps(folder.name == "rank"))
    return folders


def test_chosen_rates_of_tuned_studies_are_written_once(studies):
    for _ in range(2):
        tuned_rates.replace_rows(studies)
    rows = [("rank", "tokenizer=bpe-1024", arm, f"{rate:g}", "0.002", "0.016") for arm, rate in RATES.items()]
    assert [tuple(row.values()) for row in tuned_rates.read()] == rows


def test_rate_of_tables_is_written_and_shown_with_its_edge(studies, monkeypatch, tmp_path):
    def with_table_rates(tune):
        plain = comparison(tune)
        for trial in plain.tuning:
            trial["table_rate"] = 0.064
        plain.tuning += [{"arm": arm, "learning_rate": 0.002, "table_rate": 0.128, "chosen": False} for arm in RATES]
        return plain

    monkeypatch.setattr(tuned_rates, "Comparison", SimpleNamespace(from_dict=with_table_rates))
    tuned_rates.replace_rows(studies)
    untied = tuned_rates.read()[0]
    assert (untied["table_rate"], untied["table_smallest"], untied["table_largest"]) == ("0.064", "0.064", "0.128")
    monkeypatch.setattr(atlas_tuning, "RESULTS", tmp_path)
    row = atlas_tuning.chosen_rates("rank").splitlines()[-1]
    assert row == "| V 1,024 | 0.004, tables 0.064* | 0.016*, tables 0.064* |"


def test_table_has_cell_for_each_arm(studies, monkeypatch, tmp_path):
    tuned_rates.replace_rows(studies)
    monkeypatch.setattr(atlas_tuning, "RESULTS", tmp_path)
    assert atlas_tuning.chosen_rates("rank").splitlines() == [
        "| cell | untied | tied |", "| --- | ---: | ---: |", "| V 1,024 | 0.004 | 0.016* |",
    ]  # fmt: skip


def test_worth_of_best_step_is_mean_over_seeds(monkeypatch, tmp_path):
    monkeypatch.setattr(atlas_tuning, "RESULTS", tmp_path)
    (tmp_path / "curves").mkdir()
    runs = [(1, 10, [5.0, 6.0]), (2, 20, [5.5, 5.25])]
    lines = [json.dumps({"steps": [10, 20]})]
    for seed, selected, losses in runs:
        run = {"cell": "train_tokens=12500", "arm": "tied", "seed": seed, "selected": selected, "tune_nll": losses}
        lines.append(json.dumps(run))
    (tmp_path / "curves" / "mine.jsonl").write_text("\n".join(lines))
    assert atlas_tuning.best_steps("mine").splitlines()[-1] == "| 12,500 | 10 to 20 | 0.50 |"
