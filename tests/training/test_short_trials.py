"""Tests of `--minutes` on a simulated machine with a clock and fixed costs, so no test sleeps."""

from dataclasses import replace

import pytest

from tiewise.core.errors import RunError
from tiewise.training import compare, short_trials, tuning
from tiewise.training.compare import finish
from tiewise.training.folder import saved_run
from tiewise.training.kinds import decoder
from tiewise.training.measures import MeasuredSplit

STEP = {"tied": 0.5, "untied": 0.8}  # seconds
TOKEN, BUILDING, STARTING, FIRST = 0.001, 4.0, 7.0, 30.0  # an evaluated token, a run, a process, its first run


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


@pytest.fixture(scope="module")
def real_outcome(trained, tiny_settings, tmp_path_factory):
    return trained(tiny_settings(steps=2), tmp_path_factory.mktemp("real") / "run")


@pytest.fixture
def machine(real_outcome, monkeypatch):
    machine = FakeMachine(real_outcome)
    for module in (compare, short_trials, tuning):
        monkeypatch.setattr(module, "train", machine.train)
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
    [(asked, tune, TOKEN) for asked in (12.0, 60.0, 600.0) for tune in (False, True)] + [(300.0, True, 0.05)],
)
def test_minutes_cover_tuning_evaluation_and_start(
    machine, tiny_settings, tmp_path, lines, monkeypatch, asked, tune, token
):
    """The last case spends most of its time on evaluation."""
    monkeypatch.setitem(globals(), "TOKEN", token)
    taken = run_comparison(machine, lines, tiny_settings(minutes=asked, seeds=2, tune=tune), tmp_path / "out")
    steps = saved_run(tmp_path / "out").steps
    # one more step in each run would exceed the time
    assert 0.97 * 60 * asked - 2 * (2 * 1.3 + 5 * 1.3) < taken <= 60 * asked
    runs = machine.trained[1:]
    assert {job.settings.steps for job in runs} == {steps}
    assert [job.split for job in runs] == (["tune"] * 10 if tune else []) + ["heldout"] * 4
    assert not (tmp_path / "out" / "calibration").exists()
    assert f"{asked:g} minutes allow {steps} steps for each run" in lines


@pytest.mark.parametrize(("tune", "runs"), [(False, "4 runs"), (True, "10 tuning runs and 4 runs")])
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
