"""Tests of the trials that choose learning rates: each arm has the same ones, and the tuning split decides."""

import math
import signal
from types import SimpleNamespace

import pytest

from tiewise.core.errors import RunError
from tiewise.training import compare, tuning
from tiewise.training.compare import finish, finish_element
from tiewise.training.folder import read_json
from tiewise.training.run import train


def replace_train(monkeypatch, trains):
    """Replace the function that trains runs and trials."""
    for module in (compare, tuning):
        monkeypatch.setattr(module, "train", trains)


@pytest.fixture
def two_trials(monkeypatch):
    """Use two trials for each arm instead of five."""
    monkeypatch.setattr(tuning, "FIRST_FACTORS", (1.0,))
    monkeypatch.setattr(tuning, "THEN_FACTORS", (4.0,))


def test_tuning_gives_every_arm_same_trials_and_selects_lowest_tune_loss(
    tiny_settings, tmp_path, lines, two_trials, monkeypatch
):
    asked = []
    out = lines.begin(tiny_settings(tune=True, steps=20), tmp_path / "out")
    replace_train(monkeypatch, lambda job: asked.append(job) or train(job))
    found = finish(out, lines.display)
    assert [job.split for job in asked] == ["tune"] * 4 + ["heldout"] * 2
    assert {(job.settings.steps, job.seed) for job in asked[:4]} == {(20, tuning.SEED)}
    for arm in ("tied", "untied"):
        trials = [t for t in found.tuning if t["arm"] == arm]
        best = min(trials, key=lambda t: t["nll"])
        assert [t["chosen"] for t in trials] == [t is best for t in trials]
        run = found.of(arm)[0]
        assert run.learning_rate == best["learning_rate"]
        assert [t["learning_rate"] for t in trials] == [0.004, 0.016]
    assert not any((out / "tuning").rglob("*.safetensors"))
    assert sum("→" in line for line in lines if line.startswith("tune ")) == 4
    assert any("is the largest of the trials; --set learning_rate=0.016 tries others" in line for line in lines)


def test_element_of_tuned_comparison_trains_as_tuned_or_refuses(tiny_settings, tmp_path, lines, two_trials):
    out = lines.begin(tiny_settings(tune=True, steps=20), tmp_path / "out")
    with pytest.raises(RunError, match=r"--element 2: the tuning trials of .* have not finished; finish them with"):
        finish_element(out, lines.display, 2)
    whole = finish(out, lines.display)
    result = out / "untied" / "seed-1" / "result.json"
    result.unlink()
    again, (first,) = finish_element(out, lines.display, 2).result, whole.of("untied")
    assert (again.arm, again.learning_rate) == ("untied", first.learning_rate)
    assert again.heldout_nll == first.heldout_nll


def test_tuning_resumes_after_interruption(tiny_settings, tmp_path, lines, two_trials, monkeypatch):
    undisturbed = finish(
        lines.begin(tiny_settings(tune=True, steps=20, arms=("tied",)), tmp_path / "whole"), lines.display
    )
    out = lines.begin(tiny_settings(tune=True, steps=20, arms=("tied",)), tmp_path / "cut")
    calls = []

    def interrupted(job):
        calls.append(job)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return train(job)

    replace_train(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(out, lines.display)
    assert len(read_json(out / "tuning.json")) == 1
    calls.clear()
    replace_train(monkeypatch, lambda job: calls.append(job) or train(job))
    resumed = finish(out, lines.display)
    assert [job.split for job in calls] == ["tune", "heldout"]
    assert resumed.tuning == undisturbed.tuning
    assert [r.heldout_nll for r in resumed.runs] == [r.heldout_nll for r in undisturbed.runs]


def test_tuning_rejects_diverged_trial(tiny_settings, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(tuning, "FIRST_FACTORS", (1e33, 1.0))
    monkeypatch.setattr(tuning, "THEN_FACTORS", ())
    out = lines.begin(tiny_settings(tune=True, steps=20, arms=("tied",)), tmp_path / "out")
    found = finish(out, lines.display)
    assert [(t["nll"] is None, t["chosen"]) for t in found.tuning] == [(False, True), (True, False)]
    assert any("diverged" in line for line in lines)


def test_trial_is_judged_at_its_best_step(tiny_settings, tmp_path, lines, two_trials, monkeypatch):
    """A text of few tokens is overfitted, so the last step is not the best one."""
    judged = []

    def noted(job):
        outcome = train(job)
        if job.split == "tune":
            judged.append(outcome.result)
        return outcome

    replace_train(monkeypatch, noted)
    settings = tiny_settings(tune=True, steps=300, width=32, arms=("tied",), train_tokens=600, select="best")
    found = finish(lines.begin(settings, tmp_path / "out"), lines.display)
    assert [trial["nll"] for trial in found.tuning] == [result.heldout_nll for result in judged]
    assert any(result.heldout_nll < result.last.heldout_nll for result in judged)


def losses_by_rate(optimum):
    """Return a function of a trial whose loss is least at a learning rate, and which trains nothing."""

    def train_nothing(trial):
        trial.folder.mkdir(parents=True)
        nll = 5 + abs(math.log2(trial.settings.learning_rate / optimum[trial.arm]))
        return SimpleNamespace(result=SimpleNamespace(heldout_nll=nll))

    return train_nothing


def test_later_trials_surround_best_first_trial_of_each_arm(tiny_settings, tmp_path, job, monkeypatch):
    """From 0.004 the first rates are 0.001, 0.004 and 0.016."""
    settings = tiny_settings(learning_rate=0.004, tune=True)
    jobs = [job(settings, tmp_path / arm, arm=arm) for arm in ("tied", "untied")]
    monkeypatch.setattr(tuning, "train", losses_by_rate({"tied": 0.03, "untied": 0.0022}))
    workers = SimpleNamespace(each=lambda work, trials, show, done: [done(one, tuning.train(one)) for one in trials])
    chosen, records = tuning.tune(jobs, tmp_path, workers, None, lambda job, line="": None)
    rates = {arm: [r["learning_rate"] for r in records if r["arm"] == arm] for arm in ("tied", "untied")}
    assert rates == {"tied": [0.001, 0.004, 0.008, 0.016, 0.032], "untied": [0.001, 0.002, 0.004, 0.008, 0.016]}
    assert [one.settings.learning_rate for one in chosen] == [0.032, 0.002]
    (note,) = tuning.rates_at_the_edge(records)
    assert note.startswith("tune tied: the best learning rate 0.032 is the largest of the trials")
    assert [one.settings.learning_rate for one in tuning.tuned_before(jobs, tmp_path, "--element 1")] == [0.032, 0.002]
