"""Test that Ray tasks and recipes for schedulers give the figures of the local launcher, also after failures."""

import contextlib
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml
from cli_tiny import TINY, assert_refused, write_text
from launched import PATIENCE, curves, free_port, launch, training_advances, wait_for_exit, wait_until

from tiewise.cli.train_command import _TrainingCommand
from tiewise.core.errors import RunError
from tiewise.core.progress import report_progress
from tiewise.training import launchers, remote_worker
from tiewise.training.folder import locked
from tiewise.training.launchers import OnRay

ARMS = ["--arms=tied,untied", "--seeds=2"]
FIGURES = ("heldout_nll", "train_nll", "initial_nll", "bits_per_byte", "frequency", "parameters")


def figures(printed):
    return [{name: run[name] for name in ("arm", "seed", *FIGURES)} for run in json.loads(printed)["runs"]]


@pytest.fixture(scope="module")
def long_runs(tmp_path_factory):
    """Return the options of four runs of some seconds, and their figures by the local launcher."""
    folder = tmp_path_factory.mktemp("local")
    options = ["-t", folder / write_text(folder), *TINY, *ARMS, "--steps=1000"]
    [(code, out, err)] = wait_for_exit(launch(folder, 1, "compare", *options, "--jobs=2", "--json"))
    assert code == 0, err
    return options, figures(out)


def descendants(process, called="", recursive=True):
    """Return the child processes whose command line contains `called`."""
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive):
            with contextlib.suppress(psutil.Error):
                children += [child] if called in " ".join(child.cmdline()) else []
    return children


def training_processes(ray):
    """Return the processes that train a run now, without idle ones that wait for the next task."""
    return [
        child for task in descendants(ray, "stream_messages") for child in descendants(task, "serve(", recursive=False)
    ]


def all_gone(processes):
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


@pytest.mark.slow
def test_ray_restarts_killed_worker_and_killed_run_and_counts_each_run_once(tmp_path, long_runs, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    options, undisturbed = long_runs
    [ray] = launch(tmp_path, 1, "compare", *options, "--out=run", "--launcher=ray", "--jobs=2", "--json")
    wait_until(lambda: len(training_processes(ray)) == 2, ray)
    wait_until(training_advances(tmp_path), ray)
    before, (task, *_) = descendants(ray), descendants(ray, "stream_messages")
    task.kill()
    assert all_gone([task])
    wait_until(training_advances(tmp_path), ray)
    during = descendants(ray)
    training_processes(ray)[0].kill()
    [(code, out, err)] = wait_for_exit([ray])
    assert code == 0, err
    assert figures(out) == undisturbed
    output = [line for line in err.splitlines() if "restarted" in line]
    assert len(output) == 2, err
    assert all("restarted, " in line and " of 3" in line for line in output)
    for run in ("1/4 ", "2/4 ", "3/4 ", "4/4 "):
        assert sum(run in line and "validation" in line for line in err.splitlines()) == 1, err
    assert "Traceback" not in err
    assert all_gone(before + during)
    assert json.loads(out)["env"]["launcher"] == "ray"
    assert list((tmp_path / "home").iterdir()) == []
    assert not list(tmp_path.glob("run/.*"))


@pytest.mark.slow
def test_ray_tasks_end_at_ctrl_c_and_on_full_disk_with_checkpoints_that_local_launcher_resumes(
    tmp_path, long_runs, disk
):
    options, undisturbed = long_runs
    place = disk(60_000)
    out = place / "run"
    [ray] = launch(tmp_path, 1, "compare", *options, f"--out={out}", "--launcher=ray", "--jobs=2")
    started_runs = lambda: [path.parent for path, size in curves(tmp_path / "disk").items() if size]  # noqa: E731
    unfinished = lambda runs: [run for run in runs if not (run / "result.json").exists()]  # noqa: E731
    # on a busy machine one run may end before the other starts
    wait_until(lambda: len(unfinished(started_runs())) == 2, ray)
    processes = descendants(ray)
    ray.send_signal(signal.SIGINT)
    [(code, printed, err)] = wait_for_exit([ray])
    again = f"tiewise compare --out {out} --resume --launcher ray"
    line = f"tiewise: interrupted, a checkpoint is written; resume with: {again}"
    assert (code, printed, err.splitlines()[-1], "Traceback" in err) == (130, "", line, False)
    stopped = unfinished(started_runs())
    assert stopped
    assert all(list(run.glob("checkpoint-*/trainer_state.json")) for run in stopped)
    assert all_gone(processes)

    disk(used_kilobytes(place) + 200)  # too little for the remaining models: a worker finds the disk full
    words = shlex.split(again)[1:]
    [(code, printed, err)] = wait_for_exit(launch(tmp_path, 1, *words, "--jobs=2"))
    assert (code, printed, "Traceback" in err) == (2, "", False), err
    assert "No space left on device" in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith(f"make room there, then {again}")
    assert not list(out.glob(".token"))

    disk(60_000)
    local = ["compare", f"--out={out}", "--resume", "--jobs=2", "--json"]
    [(code, printed, err)] = wait_for_exit(launch(tmp_path, 1, *local))
    assert (code, figures(printed)) == (0, undisturbed), err


def used_kilobytes(place):
    """Return how full a file system is."""
    system = os.statvfs(place)
    return (system.f_blocks - system.f_bfree) * system.f_frsize // 1000


@pytest.mark.slow
def test_compare_refuses_ray_cluster_that_does_not_see_run_folder(tmp_path, monkeypatch):
    """The only machine of the cluster has another file system mounted on the folder of the run."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with tempfile.TemporaryDirectory() as short:  # Ray puts sockets there, whose paths must be short
        ray = f"{Path(sys.executable).parent}/ray start --head --block --num-cpus=1 --include-dashboard=false"
        ray += f" --disable-usage-stats --port={port} --temp-dir={short}"
        mounted = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs tmpfs {tmp_path} && exec {ray}"]
        head = subprocess.Popen(mounted, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in head.stdout:
            if "--block" in line:  # the head node has started
                break
        else:
            pytest.skip("only root can mount")
        try:
            options = ["-t", tmp_path / write_text(tmp_path), *TINY, *ARMS, "--out=run", "--launcher=ray"]
            [(code, out, err)] = wait_for_exit(launch(tmp_path, 1, "compare", *options))
        finally:
            head.terminate()
            head.communicate(timeout=PATIENCE)
    way = "give an --out on a file system that all machines share"
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith(f"does not see {tmp_path}/run as it is here; {way}"), err
    assert not list(tmp_path.glob("run/*/seed-1"))


def script_of_docs(begins):
    """Return the only script of docs/compare.md that begins with `begins`."""
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    [script] = re.findall(rf"^```\w+\n({begins}.*?)^```", page, re.MULTILINE | re.DOTALL)
    return script


def write_stand_in(folder, name, line):
    """Write a program of one line."""
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


@pytest.mark.slow
def test_array_script_of_docs_trains_each_run_once_and_resume_collects_results(compare, tiewise, tmp_path):
    """A stand-in for Slurm runs one element. Another process holds the lock of the third run when it starts."""
    output = compare(*ARMS, "--out=run", "--element=0")
    out = tmp_path / "run"
    prepared = "4 runs are prepared in run\ntrain each: tiewise compare --out run --resume --element N\n"
    assert (output.code, output.out) == (0, prepared)
    assert not list(out.glob("*/seed-*"))
    before = (out / "run.yaml").read_text()
    script = script_of_docs("#!/bin/bash").replace("/shared/run", str(out))
    assert "#SBATCH --array=" in script
    write_stand_in(tmp_path, "srun", 'shift\nexec "$@"')
    write_stand_in(tmp_path, "tiewise", f'exec {sys.executable} -m tiewise "$@"')
    slurm = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1", "SLURM_ARRAY_TASK_ID": "1"}
    env = os.environ | slurm | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(["bash", "-c", script], env=env, cwd="/", capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tied seed 1: validation loss ")
    assert tiewise("compare", "--out=run", "--resume", "--element=2").out.startswith("untied seed 1: ")
    assert (out / "run.yaml").read_text() == before
    assert not (out / "results.json").exists()
    with locked(out / "tied" / "seed-2"):
        output = tiewise("compare", "--out=run", "--resume", "--element=3")
        assert (output.code, "another run is at work in run/tied/seed-2" in output.err) == (2, True)
        output = compare(*ARMS, "--out=run", "--element=0", "--overwrite")
        assert (output.code, "run/tied/seed-2; wait for it" in output.err) == (2, True)
        assert (out / "run.yaml").read_text() == before
    for number in (3, 4):
        assert tiewise("compare", "--out=run", "--resume", f"--element={number}").code == 0
    assert tiewise("compare", "--out=run", "--resume", "--element=1").out == done.stdout  # already finished
    output = tiewise("compare", "--out=run", "--resume", "--json")
    reference = compare(*ARMS, "--out=whole", "--jobs=1", "--json")
    assert figures(output.out) == figures(reference.out)


def test_sky_task_of_docs_trains_each_run_on_exactly_one_node(tmp_path):
    task = yaml.safe_load(script_of_docs("name: tiewise"))
    assert (task["num_nodes"], *task["file_mounts"]) == (4, "~/run")
    write_stand_in(tmp_path, "tiewise", 'last() { shift $(($# - 1)); echo "$1"; }; last "$@"; [ "$7" != 2 ]')
    trained = []
    for rank in range(4):
        sky = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "4"}
        done = subprocess.run(["bash", "-c", task["run"]], env=os.environ | sky, capture_output=True, text=True)
        trained.append([int(number) for number in done.stdout.split()])
        assert (done.returncode != 0) == (rank == 1), done.stderr  # one run failed, the next trained
    assert trained == [list(range(first, 21, 4)) for first in (1, 2, 3, 4)]


def test_compare_refuses_missing_or_unreachable_ray(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert "a client outside the cluster shares no folder" in assert_refused(compare("--launcher=ray", "--out=run"))
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    assert "--launcher ray needs ray; pip install 'tiewise[ray]'" in assert_refused(
        compare("--launcher=ray", "--out=run")
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("cores", "gpus", "runs", "asked", "expected"),
    [
        ([2], [0], 12, "auto", (2, 1)),
        ([8, 8, 8], [0, 0, 0], 3, "auto", (3, 8)),
        ([8, 8, 8], [0, 0, 0], 4, "auto", (4, 4)),
        ([8, 3], [0, 0], 12, 5, (5, 2)),
        ([2, 2], [0, 0], 1, 4, (1, 2)),
        ([16, 16], [4, 2], 12, "auto", (6, 4)),
        ([2, 2], [0, 0], 12, 5, "jobs = 5 where the cluster has 4 cores; give 4 or fewer, or auto"),
        ([], [], 12, "auto", "no machine of the cluster has room for a run: it has 0 cores"),
        ([16], [2], 12, 3, "jobs = 3 where the cluster has 2 GPUs and 16 cores; give 2 or fewer, or auto"),
    ],
)
def test_ray_launcher_chooses_jobs_and_threads_from_cluster_resources(tmp_path, cores, gpus, runs, asked, expected):
    launcher = OnRay(asked, tmp_path, print)
    launcher.ray = "begun"
    launcher.nodes = [{"Resources": {"CPU": float(c), "GPU": g}} for c, g in zip(cores, gpus, strict=True)]
    if isinstance(expected, str):
        with pytest.raises(RunError, match=re.escape(expected)):
            launcher.settle_count(runs)
        return
    threads = f"{expected[1]} thread{'s' * (expected[1] > 1)} each"
    machines = f"{len(cores)} machine{'s' * (len(cores) > 1)}"
    assert launcher.settle_count(runs) == f"Ray: {expected[0]} at a time on {machines}, {threads}"
    assert (launcher.count, launcher.threads, launcher.settle_count(runs)) == (*expected, "")


def test_remote_worker_reports_other_folder_or_package_versions(tmp_path, monkeypatch):
    (tmp_path / remote_worker.TOKEN).write_text("mine")
    assert remote_worker.find_mismatch(str(tmp_path), "mine", remote_worker.installed_versions()) is None
    monkeypatch.setattr(remote_worker, "_PATIENCE", 0.1)
    for folder, token in ((tmp_path, "other"), (tmp_path / "elsewhere", "mine")):
        what, fix = remote_worker.find_mismatch(str(folder), token, remote_worker.installed_versions())
        assert what == f"does not see {folder} as it is here"
        assert fix.startswith("give an --out on a file system")
    what, fix = remote_worker.find_mismatch(str(tmp_path), "mine", "tiewise 0.0.1, torch 1.0, Python 3.9")
    assert what.endswith("and the run began with tiewise 0.0.1, torch 1.0, Python 3.9")
    [(output, error)] = remote_worker.stream_messages(
        b"", {}, str(tmp_path), "other", remote_worker.installed_versions()
    )
    assert (output, "does not see" in str(pickle.loads(error))) == ("error", True)


def wait_for_ctrl_c(folder):
    """Wait for Ctrl-C in a worker, then write a file."""
    with contextlib.suppress(KeyboardInterrupt):
        report_progress("waiting", 0, 1)
        time.sleep(PATIENCE)
    (Path(folder) / "stopped").touch()


@pytest.mark.slow
def test_cancelled_task_stops_its_worker_and_killed_worker_is_reported_lost(tmp_path):
    (tmp_path / remote_worker.TOKEN).write_text("mine")
    call = pickle.dumps(partial(wait_for_ctrl_c, str(tmp_path)))
    task = remote_worker.stream_messages(call, {}, str(tmp_path), "mine", remote_worker.installed_versions())
    assert next(task) == ("at", "waiting", 0, 1)
    task.close()
    assert (tmp_path / "stopped").exists()
    killed = remote_worker.Worker()
    remote_worker._idle[os.environ.get("CUDA_VISIBLE_DEVICES")] = killed
    task = remote_worker.stream_messages(call, {}, str(tmp_path), "mine", remote_worker.installed_versions())
    assert next(task)[0] == "at"
    os.kill(killed.process.pid, signal.SIGKILL)
    assert list(task) == [("lost", "was ended by SIGKILL")]
    assert remote_worker._idle == {}


def test_resume_command_includes_element_or_launcher(tmp_path):
    parameters = {"out": tmp_path / "a run", "resume": True}
    without_options = _TrainingCommand("compare", parameters)
    one = _TrainingCommand("compare", {**parameters, "element": 3})
    by_ray = _TrainingCommand("compare", {**parameters, "launcher": "ray"})
    resumed = f"tiewise compare --out '{tmp_path}/a run' --resume"
    assert without_options._resume_command() == resumed
    assert one._resume_command() == f"{resumed} --element 3"
    assert by_ray._resume_command() == f"{resumed} --launcher ray"
