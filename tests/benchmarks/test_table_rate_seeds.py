"""Test of new seeds for the change of the cost of tying: they follow the earlier ones and have the chosen rates."""

import json

import pytest
import yaml

from benchmarks import table_rate_seeds

RATE = 0.01
SIZES = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 8, "layers": 1, "tokenizer": "bpe:300"}
BEST = {"untied": 0.02, "tied": 0.005}


@pytest.fixture
def study(tmp_path):
    """Return the folder of a study whose trials have finished; another rate is best for each arm."""
    folder = tmp_path / "mine"
    (folder / "train_tokens=1000").mkdir(parents=True)
    settings = SIZES | {"arms": list(BEST), "text": ["synthetic:words=4000"], "learning_rate": RATE, "tune": True}
    grid = {"asks": "Which?", "settings": settings, "axes": {"train_tokens": [1000, 2000]}}
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid))
    trials = [
        {"arm": arm, "learning_rate": factor * RATE, "nll": 5 + abs(factor * RATE - best)}
        for arm, best in BEST.items()
        for factor in (0.25, 0.5, 1, 2, 4)
    ]
    (folder / "train_tokens=1000" / "tuning.json").write_text(json.dumps(trials))
    return folder


def test_runs_have_later_seeds_and_rates_of_earlier_trials(study, tmp_path, monkeypatch):
    monkeypatch.setattr(table_rate_seeds, "CELLS", ("train_tokens=1000",))
    monkeypatch.setattr(table_rate_seeds, "SEEDS", 2)
    found = table_rate_seeds.train_study(study, tmp_path / "out")["train_tokens=1000"]
    runs = sorted((run.arm, run.seed, run.learning_rate) for run in found.runs)
    assert runs == [("tied", 6, 0.005), ("tied", 7, 0.005), ("untied", 6, 0.02), ("untied", 7, 0.02)]
    assert len(found.tuning) == 10  # no trial was added, and none repeated
    assert not (tmp_path / "out" / "mine" / "train_tokens=1000" / "tuning").exists()
