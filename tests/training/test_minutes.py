"""`--minutes` with a clock that the test drives: what a run costs is what this file says, and nothing sleeps."""

from dataclasses import replace

import pytest

from tiewise.core.errors import RunError
from tiewise.training import kind, minutes, tuning
from tiewise.training.compare import finish
from tiewise.training.evaluate import Measured
from tiewise.training.folder import saved_run
from tiewise.training.run import train

STEP = {"tied": 0.5, "untied": 0.8}  # seconds
TOKEN, BUILDING, STARTING, FIRST = 0.001, 4.0, 7.0, 30.0  # an evaluated token, a run, a process, its first run


class Machine:
    """A machine whose seconds are counted: as a clock, and as what trains and measures on it."""

    def __init__(self, text, counts, settings, folder):
        job = minutes.Job("tied", settings.specs()["tied"], 1, replace(settings, steps=2), folder / "real")
        self.real = train(job, text, counts, [])
        self.now, self.trained, self.text = STARTING, [], text

    def gone(self):
        return self.now

    def measure(self, installed, tokens, length, counts, blocks):
        measured = min(len(tokens), blocks * length)
        self.now += measured * TOKEN
        return Measured(5.0, measured, [])

    def train(self, job, text, counts, probe):
        """What run.py does, in its order: build, first loss, steps with a point at every window, last losses, save."""
        steps, split, training = job.settings.steps, len(text.split(job.split)), len(text.split("train"))
        first = FIRST if not self.trained else 0.0
        points = [step for step in range(1, steps + 1) if step % max(1, steps // 20) == 0]
        course = min(split, 32 * job.settings.length)
        evaluated = course + min(split, job.settings.measured)
        if not job.trial:
            evaluated += len(points) * course + min(split, training, job.settings.measured)
        self.now += first + BUILDING + steps * STEP[job.arm] + evaluated * TOKEN
        self.trained.append(job)
        job.folder.mkdir(parents=True, exist_ok=True)
        result = replace(self.real.result, arm=job.arm, seed=job.seed, steps=steps, seconds=(steps - 1) * STEP[job.arm])
        return replace(self.real, result=result)


@pytest.fixture
def machine(text, counts, tiny, tmp_path, monkeypatch):
    machine = Machine(text, counts, tiny(), tmp_path)
    monkeypatch.setattr(minutes, "train", machine.train)
    monkeypatch.setattr(kind, "measure", machine.measure)
    return machine


def whole(machine, lines, settings, out):
    """Begin and finish a comparison on the machine; return the seconds that it took."""
    lines.begin(settings, out, gone=machine.gone)
    machine.trained.clear()
    machine.trained.append(None)  # the first run of the process is behind
    finish(out, lines.display, machine.train)
    return machine.now


@pytest.mark.parametrize("asked", [12.0, 60.0, 600.0])
@pytest.mark.parametrize("tune", [False, True])
def test_minutes_hold_tuning_evaluation_and_start(machine, tiny, tmp_path, lines, asked, tune):
    settings = tiny(minutes=asked, seeds=2, tune=tune)
    taken = whole(machine, lines, settings, tmp_path / "out")
    steps = saved_run(tmp_path / "out").steps
    assert 0.97 * 60 * asked - 2 * (2 * 1.3 + 9 * 1.3) < taken <= 60 * asked  # one step more of each would be too many
    runs = machine.trained[1:]
    assert {job.settings.steps for job in runs if not job.trial} == {steps}
    assert {job.settings.steps for job in runs if job.trial} == ({steps // 4} if tune else set())
    assert len(runs) == 4 + (18 if tune else 0)
    assert not (tmp_path / "out" / "calibration").exists()
    assert f"{asked:g} minutes: {steps} steps for each run" in lines


def test_evaluation_is_counted(machine, tiny, tmp_path, lines, monkeypatch):
    """Where it takes most of the time."""
    monkeypatch.setitem(globals(), "TOKEN", 0.05)
    assert 0.97 * 6000 < whole(machine, lines, tiny(minutes=100.0, seeds=2, tune=True), tmp_path / "out") <= 6000


@pytest.mark.parametrize(("tune", "runs"), [(False, "4 runs"), (True, "18 tuning runs and 4 runs")])
def test_what_cannot_fit_is_refused_with_the_minutes_that_do(machine, tiny, tmp_path, lines, tune, runs):
    with pytest.raises(RunError, match=f"--minutes 2 does not hold {runs} of 20 steps") as refused:
        lines.begin(tiny(minutes=2.0, seeds=2, tune=tune), tmp_path / "out", gone=machine.gone)
    assert not (tmp_path / "out").exists()
    assert ("without tuning" in refused.value.fix) is tune
    asked = float(refused.value.fix.split()[2])
    machine.now = STARTING
    machine.trained.clear()
    taken = whole(machine, lines, tiny(minutes=asked, seeds=2, tune=tune), tmp_path / "out")
    assert 0.8 * 60 * asked < taken <= 60 * asked
    assert saved_run(tmp_path / "out").steps >= 20


def test_a_resumed_comparison_keeps_its_steps(machine, tiny, tmp_path, lines):
    out = tmp_path / "out"
    lines.begin(tiny(minutes=12.0, seeds=2), out, gone=machine.gone)
    steps = saved_run(out).steps
    machine.now = 1e6  # days later
    finish(out, lines.display, machine.train)
    assert {job.settings.steps for job in machine.trained[-4:]} == {steps}


def test_trials_evaluate_nothing_that_does_not_choose(text, counts, tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "tiewise.training.kind.measure",
        lambda installed, tokens, *rest: asked.append((len(tokens), rest[-1])) or Measured(5.0, 1, []),
    )
    settings = tiny(steps=80)
    job = minutes.Job("tied", settings.specs()["tied"], 1, settings, tmp_path)
    train(tuning.short(job, tmp_path / "trial"), text, counts, [])
    tune = len(text.split("tune"))
    assert asked == [(tune, 32), (tune, tune // 16)]
