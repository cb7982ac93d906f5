"""Tests of tuning, and of `--minutes` on a simulated machine.

Every arm gets the same small tuning budget. The simulated machine has a clock and fixed costs, so no test sleeps.
"""

import signal
from dataclasses import replace

import pytest

from tiewise.core.errors import RunError
from tiewise.training import compare, short_trials
from tiewise.training.compare import finish, finish_element
from tiewise.training.folder import read_json, saved_run
from tiewise.training.kinds import decoder
from tiewise.training.measures import MeasuredSplit
from tiewise.training.run import train

STEP = {"tied": 0.5, "untied": 0.8}  # seconds
TOKEN, BUILDING, STARTING, FIRST = 0.001, 4.0, 7.0, 30.0  # an evaluated token, a run, a process, its first run


def replace_train(monkeypatch, trains):
    """Replace the function that trains runs and trials."""
    for module in (compare, short_trials):
        monkeypatch.setattr(module, "train", trains)


@pytest.fixture
def four_trials(monkeypatch):
    """Use four trials for each arm instead of nine."""
    monkeypatch.setattr(short_trials, "INIT_FACTORS", (0.5, 1.0))
    monkeypatch.setattr(short_trials, "RATE_FACTORS", (1.0, 2.0))


def test_tuning_gives_every_arm_same_trials_and_selects_lowest_tune_loss(
    tiny_settings, tmp_path, lines, four_trials, monkeypatch
):
    asked = []
    out = lines.begin(tiny_settings(tune=True, steps=20), tmp_path / "out")
    replace_train(monkeypatch, lambda job: asked.append(job) or train(job))
    found = finish(out, lines.display)
    assert [job.split for job in asked] == ["tune"] * 8 + ["heldout"] * 2
    assert {(job.settings.steps, job.seed) for job in asked[:8]} == {(5, short_trials.SEED)}
    for arm in ("tied", "untied"):
        trials = [t for t in found.tuning if t["arm"] == arm]
        best = min(trials, key=lambda t: t["nll"])
        assert [t["chosen"] for t in trials] == [t is best for t in trials]
        run = found.of(arm)[0]
        assert (run.init_std, run.learning_rate) == (best["init"], best["learning_rate"])
    tied, untied = (
        {(t["init"], t["learning_rate"]) for t in found.tuning if t["arm"] == job.arm} for job in asked[-2:]
    )
    assert (len(tied), tied) == (4, untied)
    assert not any((out / "tuning").rglob("*.safetensors"))
    assert sum(line.startswith("tune ") for line in lines) == 8


def test_element_of_tuned_comparison_trains_as_tuned_or_refuses(tiny_settings, tmp_path, lines, four_trials):
    out = lines.begin(tiny_settings(tune=True, steps=20), tmp_path / "out")
    with pytest.raises(RunError, match=r"--element 2: 8 of 8 tuning trials of .* have not finished; finish them with"):
        finish_element(out, lines.display, 2)
    whole = finish(out, lines.display)
    result = out / "untied" / "seed-1" / "result.json"
    result.unlink()
    again, (first,) = finish_element(out, lines.display, 2).result, whole.of("untied")
    assert (again.arm, again.init_std, again.learning_rate) == ("untied", first.init_std, first.learning_rate)
    assert again.heldout_nll == first.heldout_nll


def test_tuning_resumes_after_interruption(tiny_settings, tmp_path, lines, four_trials, monkeypatch):
    undisturbed = finish(
        lines.begin(tiny_settings(tune=True, steps=20, arms=("tied",)), tmp_path / "whole"), lines.display
    )
    out = lines.begin(tiny_settings(tune=True, steps=20, arms=("tied",)), tmp_path / "cut")
    calls = []

    def interrupted(job):
        calls.append(job)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return train(job)

    replace_train(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(out, lines.display)
    assert len(read_json(out / "tuning.json")) == 2
    calls.clear()
    replace_train(monkeypatch, lambda job: calls.append(job) or train(job))
    resumed = finish(out, lines.display)
    assert [job.split for job in calls] == ["tune", "tune", "heldout"]
    assert resumed.tuning == undisturbed.tuning
    assert [r.heldout_nll for r in resumed.runs] == [r.heldout_nll for r in undisturbed.runs]


def test_tuning_rejects_diverged_trial(tiny_settings, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(short_trials, "INIT_FACTORS", (1.0,))
    monkeypatch.setattr(short_trials, "RATE_FACTORS", (1e33, 1.0))
    out = lines.begin(tiny_settings(tune=True, steps=20, arms=("tied",)), tmp_path / "out")
    found = finish(out, lines.display)
    assert [(t["nll"] is None, t["chosen"]) for t in found.tuning] == [(True, False), (False, True)]
    assert any("diverged" in line for line in lines)


class FakeMachine:
    """Simulated machine that trains and measures at fixed costs and counts the seconds."""

    def __init__(self, real):
        self.real, self.now, self.trained = real, STARTING, []

    def elapsed(self):
        return self.now

    def measure(self, installed, tokens, length, counts, blocks, units):
        measured = min(len(tokens), blocks * length)
        self.now += measured * TOKEN
        return MeasuredSplit(5.0, measured, [])

    def train(self, job):
        """Add the cost of building, first loss, steps, the curve, and losses of the best and the last step."""
        steps, split, training = job.settings.steps, len(job.text.split(job.split)), len(job.text.split("train"))
        first = FIRST if not self.trained else 0.0
        points = [step for step in range(1, steps + 1) if step % max(1, steps // 20) == 0]
        few, tuning = 32 * job.settings.length, len(job.text.split("tune"))
        evaluated = min(split, few) + min(split, job.settings.measured)
        if not job.trial:
            evaluated += len(points) * min(tuning, few) + min(split, training, job.settings.measured)
            assert job.settings.select == "best"
            evaluated += min(tuning, few) + min(split, job.settings.measured)
            evaluated += min(split, training, job.settings.measured)
        self.now += first + BUILDING + steps * STEP[job.arm] + evaluated * TOKEN
        self.trained.append(job)
        job.folder.mkdir(parents=True, exist_ok=True)
        result = replace(self.real.result, arm=job.arm, seed=job.seed, steps=steps, seconds=(steps - 1) * STEP[job.arm])
        return replace(self.real, result=result)


@pytest.fixture
def machine(trained, tiny_settings, tmp_path, monkeypatch):
    machine = FakeMachine(trained(tiny_settings(steps=2), tmp_path / "real"))
    replace_train(monkeypatch, machine.train)
    monkeypatch.setattr(decoder, "measure", machine.measure)
    monkeypatch.setattr(short_trials, "monotonic", machine.elapsed)
    return machine


def run_comparison(machine, lines, settings, out):
    """Start and finish a comparison on the machine; return the seconds that it took."""
    lines.begin(settings, out, elapsed=machine.elapsed)
    machine.trained[:] = [None]  # the process has already paid for its first run
    finish(out, lines.display)
    return machine.now


@pytest.mark.parametrize(
    ("asked", "tune", "token"),
    [(asked, tune, TOKEN) for asked in (12.0, 60.0, 600.0) for tune in (False, True)] + [(100.0, True, 0.05)],
)
def test_minutes_cover_tuning_evaluation_and_start(
    machine, tiny_settings, tmp_path, lines, monkeypatch, asked, tune, token
):
    """The last case spends most of its time on evaluation."""
    monkeypatch.setitem(globals(), "TOKEN", token)
    taken = run_comparison(machine, lines, tiny_settings(minutes=asked, seeds=2, tune=tune), tmp_path / "out")
    steps = saved_run(tmp_path / "out").steps
    # one more step in each run would exceed the time
    assert 0.97 * 60 * asked - 2 * (2 * 1.3 + 9 * 1.3) < taken <= 60 * asked
    runs = machine.trained[1:]
    assert {job.settings.steps for job in runs if not job.trial} == {steps}
    assert {job.settings.steps for job in runs if job.trial} == ({steps // 4} if tune else set())
    assert len(runs) == 4 + (18 if tune else 0)
    assert not (tmp_path / "out" / "calibration").exists()
    assert f"{asked:g} minutes allow {steps} steps for each run" in lines


@pytest.mark.parametrize(("tune", "runs"), [(False, "4 runs"), (True, "18 tuning runs and 4 runs")])
def test_start_refuses_too_few_minutes_and_reports_sufficient_ones(machine, tiny_settings, tmp_path, lines, tune, runs):
    with pytest.raises(RunError, match=f"--minutes 2 does not hold {runs} of 20 steps") as refused:
        lines.begin(tiny_settings(minutes=2.0, seeds=2, tune=tune), tmp_path / "out", elapsed=machine.elapsed)
    assert not (tmp_path / "out").exists()
    assert ("without tuning" in refused.value.remedy) is tune
    asked = float(refused.value.remedy.split()[2])
    machine.now, machine.trained = STARTING, []
    taken = run_comparison(machine, lines, tiny_settings(minutes=asked, seeds=2, tune=tune), tmp_path / "out")
    assert 0.8 * 60 * asked < taken <= 60 * asked
    assert saved_run(tmp_path / "out").steps >= 20
