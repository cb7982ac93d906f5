"""Tuning: the same small budget for every arm, chosen on the tune split, taken up where it stopped."""

import signal

import pytest

from tiewise.training import tuning
from tiewise.training.compare import finish
from tiewise.training.folder import read_json
from tiewise.training.run import train
from tiewise.training.settings import Job


@pytest.fixture
def few(monkeypatch):
    """Four trials for each arm instead of nine."""
    monkeypatch.setattr(tuning, "INIT_FACTORS", (0.5, 1.0))
    monkeypatch.setattr(tuning, "RATE_FACTORS", (1.0, 2.0))


def test_every_arm_gets_the_same_trials_and_the_best_on_the_tune_split(tiny, tmp_path, lines, few):
    asked: list[Job] = []
    out = lines.begin(tiny(tune=True, steps=20), tmp_path / "out")
    found = finish(out, lines.display, lambda job, *rest: asked.append(job) or train(job, *rest))
    assert [job.split for job in asked] == ["tune"] * 8 + ["heldout"] * 2
    for arm in ("tied", "untied"):
        jobs = [job for job in asked[:8] if job.arm == arm]
        assert len(jobs) == 4
        assert {(job.split, job.settings.steps, job.seed) for job in jobs} == {("tune", 5, tuning.SEED)}
        trials = [t for t in found.tuning if t["arm"] == arm]
        best = min(trials, key=lambda t: t["nll"])
        assert [t["chosen"] for t in trials] == [t is best for t in trials]
        run = found.of(arm)[0]
        assert (run.init_std, run.learning_rate) == (best["init"], best["learning_rate"])
    rates = [{(t["init"], t["learning_rate"]) for t in found.tuning if t["arm"] == arm} for arm in ("tied", "untied")]
    assert rates[0] == rates[1]
    assert not any((out / "tuning").rglob("*.safetensors"))
    assert sum(line.startswith("tune ") for line in lines) == 8


def test_tuning_is_taken_up_after_an_interruption(tiny, tmp_path, lines, few):
    undisturbed = finish(lines.begin(tiny(tune=True, steps=20, arms=("tied",)), tmp_path / "whole"), lines.display)
    out = lines.begin(tiny(tune=True, steps=20, arms=("tied",)), tmp_path / "cut")
    calls = []

    def interrupted(job, *rest):
        calls.append(job)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return train(job, *rest)

    with pytest.raises(KeyboardInterrupt):
        finish(out, lines.display, interrupted)
    assert len(read_json(out / "tuning.json")) == 2
    calls.clear()
    resumed = finish(out, lines.display, lambda job, *rest: calls.append(job) or train(job, *rest))
    assert [job.split for job in calls] == ["tune", "tune", "heldout"]
    assert resumed.tuning == undisturbed.tuning
    assert [r.heldout_nll for r in resumed.runs] == [r.heldout_nll for r in undisturbed.runs]


def test_a_trial_that_diverges_is_not_chosen(tiny, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(tuning, "INIT_FACTORS", (1.0,))
    monkeypatch.setattr(tuning, "RATE_FACTORS", (1e33, 1.0))
    out = lines.begin(tiny(tune=True, steps=20, arms=("tied",)), tmp_path / "out")
    found = finish(out, lines.display)
    assert [t["nll"] is None for t in found.tuning] == [True, False]
    assert [t["chosen"] for t in found.tuning] == [False, True]
    assert any("diverged" in line for line in lines)
