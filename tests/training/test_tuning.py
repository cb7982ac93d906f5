"""Tests of the trials that choose learning rates: each arm has the same ones, and the tuning split decides."""

import json
import math
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.training.conftest import DisplayedLines

from tiewise.core.errors import RunError
from tiewise.report.comparison_page import render
from tiewise.training import compare, tuning
from tiewise.training.compare import finish, finish_element
from tiewise.training.folder import read_json
from tiewise.training.run import train


def replace_train(monkeypatch, trains):
    """Replace the function that trains runs and trials."""
    for module in (compare, tuning):
        monkeypatch.setattr(module, "train", trains)


def use_two_trials(patch):
    """Use two trials for each arm instead of five or more."""
    patch.setattr(tuning, "FACTORS", (1.0, 4.0))
    patch.setattr(tuning, "LEAST_FACTOR", 1.0)
    patch.setattr(tuning, "MOST_FACTOR", 4.0)


@pytest.fixture
def two_trials(monkeypatch):
    use_two_trials(monkeypatch)


@pytest.fixture(scope="module")
def tuned(tiny_settings, tmp_path_factory):
    """Return the folder of a finished tuned comparison, its result, its trained jobs and its lines."""
    asked, lines = [], DisplayedLines()
    with pytest.MonkeyPatch.context() as patch:
        use_two_trials(patch)
        replace_train(patch, lambda job: asked.append(job) or train(job))
        out = lines.begin(tiny_settings(tune=True, steps=20), tmp_path_factory.mktemp("tuned") / "out")
        found = finish(out, lines.display)
    return SimpleNamespace(folder=out, found=found, asked=asked, lines=lines)


def test_tuning_gives_every_arm_same_trials_and_selects_lowest_tune_loss(tuned):
    out, found, asked, lines = tuned.folder, tuned.found, tuned.asked, tuned.lines
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


def test_element_of_tuned_comparison_trains_as_tuned_or_refuses(tuned, tiny_settings, tmp_path, lines, two_trials):
    unfinished = lines.begin(tiny_settings(tune=True, steps=20), tmp_path / "unfinished")
    with pytest.raises(RunError, match=r"--element 2: the tuning trials of .* have not finished; finish them with"):
        finish_element(unfinished, lines.display, 2)
    out = shutil.copytree(tuned.folder, tmp_path / "out")
    (out / "untied" / "seed-1" / "result.json").unlink()
    again, (first,) = finish_element(out, lines.display, 2).result, tuned.found.of("untied")
    assert (again.arm, again.learning_rate) == ("untied", first.learning_rate)
    assert again.heldout_nll == first.heldout_nll


def test_tuning_resumes_after_interruption(tuned, tiny_settings, tmp_path, lines, two_trials, monkeypatch):
    """The undisturbed comparison also has an untied arm, on which the trials of the tied one do not depend."""
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
    assert resumed.tuning == [trial for trial in tuned.found.tuning if trial["arm"] == "tied"]
    assert [r.heldout_nll for r in resumed.runs] == [r.heldout_nll for r in tuned.found.of("tied")]


def test_tuning_rejects_diverged_trial(tiny_settings, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(tuning, "FACTORS", (1e33, 1.0))
    monkeypatch.setattr(tuning, "LEAST_FACTOR", 1.0)
    out = lines.begin(tiny_settings(tune=True, steps=5, arms=("tied",)), tmp_path / "out")
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
    small = {"steps": 100, "width": 32, "arms": ("tied",), "train_tokens": 320, "learning_rate": 0.02}
    settings = tiny_settings(tune=True, select="best", **small)
    found = finish(lines.begin(settings, tmp_path / "out"), lines.display)
    assert [trial["nll"] for trial in found.tuning] == [result.heldout_nll for result in judged]
    assert any(result.heldout_nll < result.last.heldout_nll for result in judged)


def losses_by_rate(optimum, table_optimum):
    """Return a function of a trial whose loss is least at given learning rates, and which trains nothing."""

    def train_nothing(trial):
        trial.folder.mkdir(parents=True)
        nll = 5 + abs(math.log2(trial.settings.learning_rate / optimum[trial.arm]))
        if table_optimum:
            nll += abs(math.log2(trial.settings.table_rate / table_optimum[trial.arm]))
        return SimpleNamespace(result=SimpleNamespace(heldout_nll=nll))

    return train_nothing


@pytest.fixture
def chosen_by(tiny_settings, tmp_path, job, monkeypatch):
    """Return a function that tunes tied and untied with given optima.

    The given rate is 0.004; that of tables is 0.064 if they have an optimum of their own.
    """

    def chosen(optimum, table_optimum=None, may_add=True):
        settings = tiny_settings(learning_rate=0.004, table_rate=0.064 if table_optimum else None, tune=True)
        jobs = [job(settings, tmp_path, arm=arm) for arm in optimum]
        monkeypatch.setattr(tuning, "train", losses_by_rate(optimum, table_optimum))
        workers = SimpleNamespace(each=lambda work, trials, show, done: [done(one, work(one)) for one in trials])
        ended, added = [], []
        bar = SimpleNamespace(show=None, ended=lambda job, line="": ended.append(job), add=added.extend)
        tuned, records = tuning.tune(jobs, tmp_path, workers, bar, may_add=may_add)
        assert len(ended) == len(records) == tuning.least_trials_per_arm(settings) * len(jobs) + len(added)
        before = tuning.tuned_before(jobs, tmp_path, "--element 1", may_add=may_add)
        assert [one.settings for one in before] == [one.settings for one in tuned]
        if table_optimum:
            return [(one.settings.learning_rate, one.settings.table_rate) for one in tuned], records
        return [one.settings.learning_rate for one in tuned], records

    return chosen


def test_all_arms_get_rates_beyond_end_where_one_arm_is_best(chosen_by):
    rates, records = chosen_by({"tied": 0.03, "untied": 0.0042})
    tried = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064]
    assert [(r["arm"], r["learning_rate"]) for r in records] == [(arm, r) for arm in ("tied", "untied") for r in tried]
    assert rates == [0.032, 0.004]
    assert list(tuning.rates_at_the_edge(records)) == []


def test_rates_end_at_factor_of_32(chosen_by):
    rates, records = chosen_by({"tied": 1.0, "untied": 1e-6})
    assert rates == [0.128, 0.000125]
    assert {r["learning_rate"] for r in records if r["arm"] == "tied"} == {0.004 * 2**k for k in range(-5, 6)}
    notes = list(tuning.rates_at_the_edge(records))
    assert notes[0].startswith("tune tied: the best learning rate 0.128 is the largest of the trials")
    assert notes[1].startswith("tune untied: the best learning rate 0.000125 is the smallest of the trials")


def test_no_rates_are_added_if_their_time_was_not_counted(chosen_by):
    rates, records = chosen_by({"tied": 0.03}, may_add=False)
    assert rates == [0.016]
    assert len(records) == 5


def test_rate_of_tables_is_chosen_with_the_best_learning_rate_of_each_arm(chosen_by):
    rates, records = chosen_by({"tied": 0.002, "untied": 0.008}, {"tied": 0.032, "untied": 0.25})
    assert rates == [(0.002, 0.032), (0.008, 0.256)]
    tied = [(r["learning_rate"], r["table_rate"]) for r in records if r["arm"] == "tied"]
    first = [(rate, 0.064) for rate in (0.001, 0.002, 0.004, 0.008, 0.016)]
    second = [(0.002, rate) for rate in (0.016, 0.032, 0.128, 0.256, 0.512)]  # 0.512: untied is best at 0.256
    assert tied == sorted(first + second)
    assert list(tuning.rates_at_the_edge(records)) == []


def test_note_names_rate_of_tables_at_the_edge(chosen_by):
    _, records = chosen_by({"tied": 0.002}, {"tied": 10.0}, may_add=False)
    assert len(records) == 9
    [note] = tuning.rates_at_the_edge(records)
    assert note == (
        "tune tied: the best table rate 0.256 is the largest of the trials; --set table_rate=0.256 tries others"
    )


def test_runs_have_the_chosen_rate_of_tables(tiny_settings, tmp_path, lines, two_trials, monkeypatch):
    rates = {}

    def noted(job):
        if job.split == "heldout":
            rates[job.arm] = (job.settings.learning_rate, job.settings.table_rate)
        return train(job)

    replace_train(monkeypatch, noted)
    out = lines.begin(tiny_settings(tune=True, table_rate=0.016, steps=5), tmp_path / "out")
    found = finish(out, lines.display)
    for arm in ("tied", "untied"):
        [chosen] = [trial for trial in found.tuning if trial["arm"] == arm and trial["chosen"]]
        assert rates[arm] == (chosen["learning_rate"], chosen["table_rate"])
        assert {(run.learning_rate, run.table_rate) for run in found.of(arm)} == {rates[arm]}
        assert len([trial for trial in found.tuning if trial["arm"] == arm]) == 3
    assert "learning rate of tables" in render(found)
    older = [replace(found.runs[0], table_rate=None), *found.runs[1:]]  # a version that did not record it
    assert "learning rate of tables" in render(replace(found, runs=older))


def test_smaller_rates_are_tried_if_all_diverge(chosen_by):
    rates, records = chosen_by({"tied": math.nan})
    assert rates == [0.004 / 32]
    assert [record["nll"] for record in records] == [None] * 8
    [note] = tuning.rates_at_the_edge(records)
    assert note == "tune tied: all trials diverged; try lower rates with --set learning_rate"


def test_records_that_are_no_trials_are_ignored(tmp_path):
    trial = {"arm": "tied", "learning_rate": 0.004, "nll": 5.0}
    lacking = [{name: value for name, value in trial.items() if name != missing} for missing in trial]
    (tmp_path / "tuning.json").write_text(json.dumps([1, None, *lacking, trial]))
    notes = tuning.TrialNotes(tmp_path / "tuning.json", print)
    assert notes.records == {tuning.TrialKey("tied", 0.004): trial}
