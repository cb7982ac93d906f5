"""Test `--report-to`: names of trackers, refusals before any training, TensorBoard's events, and runs in trackio."""

import json
import os
import signal
import subprocess
import sys
from importlib import util

import pytest
import yaml
from cli_tiny import TINY, assert_refused, write_text
from launched import launch, training_advances, wait_for_exit, wait_until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.integrations import integration_utils

from tiewise.core.errors import RunError
from tiewise.training.settings import Settings
from tiewise.training.tracker_names import PACKAGES, read_tracker_names, require_packages

# Prints every run of trackio's project as JSON, read with trackio's own functions. trackio reads TRACKIO_DIR at import.
READER = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = trackio.Api().runs("tiewise")
logs = {run.name: SQLiteStorage.get_logs("tiewise", run.name, run_id=run.id) for run in runs}
print(json.dumps([{"name": run.name, "config": run.config, "logs": logs[run.name]} for run in runs]))
"""
FIGURES = ("path_a", "path_b", "cosine", "learning_rate")
needs_trackio = pytest.mark.skipif(util.find_spec("trackio") is None, reason="trackio is not installed")


def points(run):
    """Return the points of a run's curve."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trackio_runs(folder):
    """Return the runs in trackio's store of a folder by arm and seed; the same twice fails."""
    environment = os.environ | {"TRACKIO_DIR": str(folder)}
    read = subprocess.run([sys.executable, "-c", READER], env=environment, capture_output=True, text=True, check=True)
    runs = json.loads(read.stdout.splitlines()[-1])
    by_arm = {(run["config"]["arm"], run["config"]["seed"]): run for run in runs}
    assert len(by_arm) == len(runs)
    return by_arm


def check_figures(run, folder):
    """Check that a tracker's run has the figures of a run's curve, once each."""
    logged = [log for log in run["logs"] if "train/loss" in log]
    curve = points(folder)
    assert [log["train/global_step"] for log in logged] == [point["step"] for point in curve]
    for log, point in zip(logged, curve, strict=True):
        assert log["eval/tune_nll"] == pytest.approx(point["tune_nll"])
        assert log["train/loss"] == pytest.approx(point["train_nll"])
        for name in FIGURES:
            assert log.get(f"train/{name}") == pytest.approx(point.get(name)), name


def test_table_of_packages_has_every_tracker_of_transformers():
    assert set(PACKAGES) == set(integration_utils.INTEGRATION_TO_CALLBACK)


@pytest.mark.parametrize(
    ("texts", "names"),
    [([], ()), (["none"], ()), (["tensorboard, trackio", "trackio"], ("tensorboard", "trackio")), (["all"], ("all",))],
)
def test_tracker_names_are_separated_by_commas_and_none_means_no_tracker(texts, names):
    assert read_tracker_names(texts) == names
    assert Settings(report_to=tuple(texts)).checked().report_to == names


@pytest.mark.parametrize(("name", "command"), [("azure_ml", "azureml-core"), ("dagshub", "dagshub mlflow")])
def test_tracker_that_is_not_installed_is_refused_with_pip_command(name, command):
    with pytest.raises(RunError, match=f"the tracker {name} is not installed; pip install {command}$"):
        require_packages([name])


def test_compare_refuses_unknown_and_missing_trackers_before_it_writes(tiewise, text, tree, monkeypatch):
    before = tree()
    near = assert_refused(tiewise("compare", "-t", text, *TINY, "--report-to=tensorbord"))
    assert "no tracker 'tensorbord'; did you mean tensorboard?" in near
    monkeypatch.setattr("tiewise.training.tracker_names.find_spec", lambda module: None)
    missing = assert_refused(tiewise("compare", "-t", text, *TINY, "--report-to=wandb"))
    assert missing == "tiewise: the tracker wandb is not installed; pip install wandb\n"
    assert tree() == before


def test_tracker_that_cannot_start_is_refused_before_training(tiewise, text, tree, monkeypatch):
    def without_account():
        raise RuntimeError("no API key")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "kubeflow", without_account)
    before = tree()
    line = assert_refused(tiewise("compare", "-t", text, *TINY, "--report-to=kubeflow"), "no API key")
    assert "leave it out of --report-to" in line
    assert tree() == before


def test_resume_without_the_tracker_is_refused_and_keeps_the_run(tiewise, text, tmp_path, monkeypatch):
    done = tiewise("train", "-t", text, *TINY, "--report-to=tensorboard", "--out=run")
    assert done.code == 0, done.err
    assert yaml.safe_load((tmp_path / "run/run.yaml").read_text())["report_to"] == ["tensorboard"]
    (tmp_path / "run/tied/seed-1/result.json").unlink()
    monkeypatch.setattr("tiewise.training.tracker_names.find_spec", lambda module: None)
    assert_refused(tiewise("train", "--out=run", "--resume"), "pip install tensorboard")
    monkeypatch.undo()
    assert (tmp_path / "run/tied/seed-1/final/model.safetensors").is_file()


def test_run_without_trackers_needs_no_tensorboard(tiewise, text, tmp_path, monkeypatch):
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # an import raises ImportError
    done = tiewise("train", "-t", text, *TINY, "--out=run")
    assert done.code == 0, done.err
    assert not list((tmp_path / "run").rglob("*events.out*"))


def test_flax_refuses_trackers_with_one_line(tiewise, text):
    result = tiewise("compare", "-t", text, *TINY, "--backend=flax", "--report-to=tensorboard")
    assert_refused(result, "tiewise: --report-to tensorboard with the flax backend; leave it out")
    with pytest.raises(RunError, match=r"^report_to='tensorboard' with the flax backend; leave it out"):
        Settings(backend="flax", arms=("tied", "untied"), report_to=("tensorboard",)).checked()
    assert Settings(backend="flax", arms=("tied", "untied"), report_to=("none",)).checked().report_to == ()


def test_tensorboard_has_curve_arm_and_seed_of_each_run(tiewise, text, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    options = ["--arms=tied,untied", "--seeds=1", "--jobs=1", "--out=run", "--report-to=tensorboard"]
    result = tiewise("compare", "-t", text, *TINY, *options)
    assert result.code == 0, result.err
    [comparison] = (tmp_path / "events").iterdir()
    assert comparison.name.startswith("run-2")
    for arm in ("tied", "untied"):
        events = EventAccumulator(str(comparison / arm / "seed-1"))
        events.Reload()
        curve = points(tmp_path / "run" / arm / "seed-1")
        losses = events.Scalars("eval/tune_nll")
        assert [event.step for event in losses] == [point["step"] for point in curve]
        assert [event.value for event in losses] == pytest.approx([point["tune_nll"] for point in curve])
        norms = [event.value for event in events.Scalars("train/path_b")]
        assert norms == pytest.approx([point["path_b"] for point in curve])
        [shown] = events.Tensors("args/text_summary")
        config = json.loads(shown.tensor_proto.string_val[0])
        assert (config["arm"], config["seed"]) == (arm, 1)
        assert not (tmp_path / "run" / arm / "seed-1/tensorboard").exists()


@needs_trackio
def test_trackio_has_a_run_with_figures_and_config_and_stdout_has_the_result_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    text = write_text(tmp_path)
    process = launch(tmp_path, 1, "train", "-t", text, *TINY, "--out=run", "--report-to=trackio", "--json")
    [(code, out, err)] = wait_for_exit(process)
    assert code == 0, err
    assert json.loads(out)["arm"] == "tied"
    runs = trackio_runs(tmp_path / "trackio")
    assert list(runs) == [("tied", 1)]
    run = runs["tied", 1]
    assert run["name"].startswith("run-2")
    assert run["name"].endswith("/tied/seed-1")
    check_figures(run, tmp_path / "run/tied/seed-1")


@pytest.mark.slow
@needs_trackio
def test_runs_of_worker_processes_and_a_resume_are_the_same_runs_in_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    options = ["--arms=tied,untied", "--seeds=2", "--jobs=2", "--steps=400", "--out=run", "--report-to=trackio"]
    [process] = launch(tmp_path, 1, "compare", "-t", write_text(tmp_path), *TINY, *options)
    wait_until(training_advances(tmp_path), process)
    process.send_signal(signal.SIGINT)
    [(code, _, err)] = wait_for_exit([process])
    assert code == 130, err
    [(code, _, err)] = wait_for_exit(launch(tmp_path, 1, "compare", "--out=run", "--resume", "--jobs=2"))
    assert code == 0, err
    runs = trackio_runs(tmp_path / "trackio")
    assert sorted(runs) == [(arm, seed) for arm in ("tied", "untied") for seed in (1, 2)]
    for (arm, seed), run in runs.items():
        check_figures(run, tmp_path / "run" / arm / f"seed-{seed}")


def test_sweep_gives_every_cell_the_trackers_of_the_option(tiewise, text, tmp_path, monkeypatch):
    fixed = {"width": 16, "heads": 2, "length": 16, "batch": 4, "steps": 4, "text": [text], "tokenizer": "bytes"}
    grid = {"asks": "Why?", "settings": {**fixed, "arms": ["tied", "untied"]}, "axes": {"layers": [1]}}
    (tmp_path / "g.yaml").write_text(yaml.safe_dump(grid))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    result = tiewise("sweep", "g.yaml", "--quick", "--out=s", "--jobs=1", "--report-to=tensorboard")
    assert result.code == 0, result.err
    assert "--set" in (tmp_path / "s/sweep.csv").read_text()
    assert len(list((tmp_path / "events").glob("layers=1-*/*/seed-*"))) == 4
    assert_refused(tiewise("sweep", "--out=s", "--resume", "--report-to=trackio"), "--resume takes its grid")
    assert "did you mean trackio?" in assert_refused(tiewise("sweep", "g.yaml", "--out=t", "--report-to=trakio"))
