"""Runs as Ray tasks and as jobs of other schedulers give the local launcher's figures, whatever is killed or full."""

import contextlib
import json
import os
import pickle
import re
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
from cli_tiny import TINY, refused, write_text
from launched import PATIENCE, curves, ended, free_port, launch, trains, until

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
def long(tmp_path_factory):
    """Options of four runs of some seconds, and what the local launcher finds in them, undisturbed."""
    folder = tmp_path_factory.mktemp("local")
    options = ["-t", folder / write_text(folder), *TINY, *ARMS, "--steps=1000"]
    [(code, out, err)] = ended(launch(folder, 1, "compare", *options, "--jobs=2", "--json"))
    assert code == 0, err
    return options, figures(out)


def below(process, called="", recursive=True):
    """Processes that one has started, those that are called so."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive):
            with contextlib.suppress(psutil.Error):
                found += [child] if called in " ".join(child.cmdline()) else []
    return found


def serving(ray):
    """Processes in which runs are being trained: those of tasks, not those that are kept for the next one."""
    return [child for task in below(ray, "streamed") for child in below(task, "serve(", recursive=False)]


def all_gone(processes):
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


@pytest.mark.slow
def test_ray_restarts_killed_worker_and_killed_run_and_counts_each_run_once(tmp_path, long, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    options, undisturbed = long
    [ray] = launch(tmp_path, 1, "compare", *options, "--out=run", "--launcher=ray", "--jobs=2", "--json")
    until(lambda: len(serving(ray)) == 2, ray)
    until(trains(tmp_path), ray)
    before, (task, *_) = below(ray), below(ray, "streamed")
    task.kill()
    assert all_gone([task])
    until(trains(tmp_path), ray)
    during = below(ray)
    serving(ray)[0].kill()
    [(code, out, err)] = ended([ray])
    assert code == 0, err
    assert figures(out) == undisturbed
    said = [line for line in err.splitlines() if "taken up again" in line]
    assert len(said) == 2, err
    assert all("taken up again, " in line and " of 3" in line for line in said)
    for run in ("1/4 ", "2/4 ", "3/4 ", "4/4 "):
        assert sum(run in line and "validation" in line for line in err.splitlines()) == 1, err
    assert "Traceback" not in err
    assert all_gone(before + during)
    assert json.loads(out)["env"]["launcher"] == "ray"
    assert list((tmp_path / "home").iterdir()) == []
    assert not list(tmp_path.glob("run/.*"))


@pytest.mark.slow
def test_ctrl_c_ends_ray_tasks_with_checkpoints_that_local_launcher_resumes(tmp_path, long):
    options, undisturbed = long
    [ray] = launch(tmp_path, 1, "compare", *options, "--out=run", "--launcher=ray", "--jobs=2")
    begun = lambda: [path.parent for path, size in curves(tmp_path).items() if size]  # noqa: E731
    left = lambda runs: [run for run in runs if not (run / "result.json").exists()]  # noqa: E731
    until(lambda: len(left(begun())) == 2, ray)  # on a busy machine one may end before the other begins
    processes = below(ray)
    ray.send_signal(signal.SIGINT)
    [(code, out, err)] = ended([ray])
    line = "tiewise: interrupted, a checkpoint is written; tiewise compare --out run --resume --launcher ray goes on"
    assert (code, out, err.splitlines()[-1], "Traceback" in err) == (130, "", line, False)
    stopped = left(begun())
    assert stopped
    assert all(list(run.glob("checkpoint-*/trainer_state.json")) for run in stopped)
    assert all_gone(processes)
    [(code, out, err)] = ended(launch(tmp_path, 1, "compare", "--out=run", "--resume", "--jobs=2", "--json"))
    assert (code, figures(out)) == (0, undisturbed), err


# Too little for four models and their checkpoints: a run finds the disk full on its machine, then the head does.
@pytest.mark.slow
def test_ray_run_on_full_disk_exits_2_and_resumes_with_same_figures(tmp_path, long, disk):
    options, undisturbed = long
    out = disk(900) / "run"
    [(code, said, err)] = ended(launch(tmp_path, 1, "compare", *options, f"--out={out}", "--launcher=ray", "--jobs=2"))
    fix = f"make room there, then tiewise compare --out {out} --resume --launcher ray"
    assert (code, said, "Traceback" in err) == (2, "", False), err
    assert "No space left on device" in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith(fix)
    assert not list(out.glob(".token"))
    disk(60_000)
    again = ["--resume", f"--out={out}", "--launcher=ray", "--jobs=2", "--json"]
    [(code, said, err)] = ended(launch(tmp_path, 1, "compare", *again))
    assert (code, figures(said)) == (0, undisturbed), err


@pytest.mark.slow
def test_compare_refuses_ray_cluster_that_does_not_see_run_folder(tmp_path, monkeypatch):
    """Its one machine has another file system where the command has the run's folder."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    port = free_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with tempfile.TemporaryDirectory() as short:  # sockets lie there, whose names may not be long
        ray = f"{Path(sys.executable).parent}/ray start --head --block --num-cpus=1 --include-dashboard=false"
        ray += f" --disable-usage-stats --port={port} --temp-dir={short}"
        mounted = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs tmpfs {tmp_path} && exec {ray}"]
        head = subprocess.Popen(mounted, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in head.stdout:
            if "--block" in line:  # it stands
                break
        else:
            pytest.skip("only root can mount")
        try:
            options = ["-t", tmp_path / write_text(tmp_path), *TINY, *ARMS, "--out=run", "--launcher=ray"]
            [(code, out, err)] = ended(launch(tmp_path, 1, "compare", *options))
        finally:
            head.terminate()
            head.communicate(timeout=PATIENCE)
    way = "give an --out on a file system that all machines share"
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].endswith(f"does not see {tmp_path}/run as it is here; {way}"), err
    assert not list(tmp_path.glob("run/*/seed-1"))


def recipe(begins):
    """Return the one script of docs/many-machines.md that begins so."""
    page = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text(encoding="utf-8")
    [script] = re.findall(rf"^```\w+\n({begins}.*?)^```", page, re.MULTILINE | re.DOTALL)
    return script


def stand_in(folder, name, line):
    """Write a program of one line."""
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


@pytest.mark.slow
def test_array_script_of_docs_trains_each_run_once_and_resume_collects_results(compare, tiewise, tmp_path):
    """A stand-in for Slurm runs one element. Another process has the third run when it is started."""
    said = compare(*ARMS, "--out=run", "--element=0")
    out = tmp_path / "run"
    prepared = "4 runs are prepared in run\ntrain each: tiewise compare --out run --resume --element N\n"
    assert (said.code, said.out) == (0, prepared)
    assert not list(out.glob("*/seed-*"))
    before = (out / "run.yaml").read_text()
    script = recipe("#!/bin/bash").replace("/shared/run", str(out))
    assert "#SBATCH --array=" in script
    stand_in(tmp_path, "srun", 'shift\nexec "$@"')
    stand_in(tmp_path, "tiewise", f'exec {sys.executable} -m tiewise "$@"')
    slurm = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1", "SLURM_ARRAY_TASK_ID": "1"}
    env = os.environ | slurm | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(["bash", "-c", script], env=env, cwd="/", capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tied seed 1: validation nll ")
    assert tiewise("compare", "--out=run", "--resume", "--element=2").out.startswith("untied seed 1: ")
    assert (out / "run.yaml").read_text() == before
    assert not (out / "results.json").exists()
    with locked(out / "tied" / "seed-2"):
        said = tiewise("compare", "--out=run", "--resume", "--element=3")
        assert (said.code, "another run is at work in run/tied/seed-2" in said.err) == (2, True)
        said = compare(*ARMS, "--out=run", "--element=0", "--overwrite")
        assert (said.code, "run/tied/seed-2; wait for it" in said.err) == (2, True)
        assert (out / "run.yaml").read_text() == before
    for number in (3, 4):
        assert tiewise("compare", "--out=run", "--resume", f"--element={number}").code == 0
    assert tiewise("compare", "--out=run", "--resume", "--element=1").out == done.stdout  # at once: it is finished
    said = tiewise("compare", "--out=run", "--resume", "--json")
    whole = compare(*ARMS, "--out=whole", "--jobs=1", "--json")
    assert figures(said.out) == figures(whole.out)


def test_sky_task_of_docs_trains_each_run_on_exactly_one_node(tmp_path):
    task = yaml.safe_load(recipe("name: tiewise"))
    assert (task["num_nodes"], *task["file_mounts"]) == (4, "~/run")
    stand_in(tmp_path, "tiewise", 'last() { shift $(($# - 1)); echo "$1"; }; last "$@"; [ "$7" != 2 ]')
    trained = []
    for rank in range(4):
        sky = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": "4"}
        done = subprocess.run(["bash", "-c", task["run"]], env=os.environ | sky, capture_output=True, text=True)
        trained.append([int(number) for number in done.stdout.split()])
        assert (done.returncode != 0) == (rank == 1), done.stderr  # one of its runs failed, and the next was trained
    assert trained == [list(range(first, 21, 4)) for first in (1, 2, 3, 4)]


def test_compare_refuses_missing_or_unreachable_ray(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert "a client outside the cluster shares no folder" in refused(compare("--launcher=ray", "--out=run"))
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)
    assert "--launcher ray needs ray; pip install 'tiewise[ray]'" in refused(compare("--launcher=ray", "--out=run"))
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
    made = OnRay(asked, tmp_path, print)
    made.ray = "begun"
    made.nodes = [{"Resources": {"CPU": float(c), "GPU": g}} for c, g in zip(cores, gpus, strict=True)]
    if isinstance(expected, str):
        with pytest.raises(RunError, match=re.escape(expected)):
            made.settle_count(runs)
        return
    threads = f"{expected[1]} thread{'s' * (expected[1] > 1)} each"
    machines = f"{len(cores)} machine{'s' * (len(cores) > 1)}"
    assert made.settle_count(runs) == f"Ray: {expected[0]} at a time on {machines}, {threads}"
    assert (made.count, made.threads, made.settle_count(runs)) == (*expected, "")


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
    [(said, error)] = remote_worker.stream_messages(b"", {}, str(tmp_path), "other", remote_worker.installed_versions())
    assert (said, "does not see" in str(pickle.loads(error))) == ("error", True)


def waits(folder):
    """What a worker is asked to do here: to wait for Ctrl-C, and then to note it."""
    with contextlib.suppress(KeyboardInterrupt):
        report_progress("waiting", 0, 1)
        time.sleep(PATIENCE)
    (Path(folder) / "stopped").touch()


@pytest.mark.slow
def test_cancelled_task_stops_its_worker_and_killed_worker_is_reported_lost(tmp_path):
    (tmp_path / remote_worker.TOKEN).write_text("mine")
    call = pickle.dumps(partial(waits, str(tmp_path)))
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
    whole = _TrainingCommand("compare", parameters)
    one = _TrainingCommand("compare", {**parameters, "element": 3})
    by_ray = _TrainingCommand("compare", {**parameters, "launcher": "ray"})
    resumed = f"tiewise compare --out '{tmp_path}/a run' --resume"
    assert whole._resume_command() == resumed
    assert one._resume_command() == f"{resumed} --element 3"
    assert by_ray._resume_command() == f"{resumed} --launcher ray"
