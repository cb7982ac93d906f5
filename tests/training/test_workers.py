"""Tests of parallel workers against runs one at a time: results, their number, errors and Ctrl-C."""

import heapq
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from io import StringIO
from multiprocessing import Pipe

import psutil
import pytest
import torch
from tests.training.conftest import differing_fields
from tqdm import tqdm

import tiewise
from tiewise.core import ranks
from tiewise.core.errors import DataError, RunError
from tiewise.training import short_trials, tuning, workers
from tiewise.training.compare import RunsBar, finish
from tiewise.training.folder import ENVIRONMENT, METRICS, RESULT, SPEED, newest_checkpoint, read_json
from tiewise.training.run import train
from tiewise.training.short_trials import Demand, Pace, settle_count, steps_within
from tiewise.training.worker_process import Worker, _PressInCall
from tiewise.training.workers import Workers

PATIENCE = 120  # seconds; only a hanging worker takes this long
GIGABYTE = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def two_workers():
    """Start two workers once for the module, because starting is slow."""
    with Workers(2) as made:
        yield made


def ignore(*said):
    """Ignore the messages of runs."""


def test_two_workers_give_same_results_as_one(two_workers, tiny_settings, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(tuning, "FACTORS", (1.0, 4.0))
    monkeypatch.setattr(tuning, "MOST_FACTOR", 4.0)
    settings = tiny_settings(arms=("tied", "untied"), steps=6, seeds=2, tune=True)
    one, two = (
        finish(lines.begin(settings, tmp_path / f"{w.count}"), lines.display, w) for w in (Workers(1), two_workers)
    )
    for alone, beside in zip(one.runs, two.runs, strict=True):
        assert differing_fields(alone, beside) == set()
    assert (one.tuning, one.direct_path) == (two.tuning, two.direct_path)
    assert [name for name, value in one.env.items() if value != two.env[name]] == ["jobs"]
    assert len([line for line in lines if "of the trials" not in line]) == 2 * (1 + 4 + 4)
    assert finish(tmp_path / "2", lines.display, two_workers).runs == two.runs


def threads_of(job):
    return torch.get_num_threads()


def test_last_run_uses_all_threads(two_workers, job, tiny_settings, tmp_path, monkeypatch):
    jobs = [job(tiny_settings(), tmp_path) for _ in range(3)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert two_workers.each(threads_of, jobs, ignore, ignore) == [1, 1, 2]


def fails(job):
    """Raise an error in run 1 after another run has started; train every other run."""
    if job.seed == 1:
        while not (job.folder.parent / "2" / METRICS).exists():  # until the other run trains
            time.sleep(0.01)
        raise DataError("no such text", "name another")
    return train(job)


def fails_unpicklably(job):
    class Local(Exception):
        pass

    raise Local(job.title)


def test_worker_error_stops_other_runs_with_checkpoint_and_keeps_its_type(two_workers, job, tiny_settings, tmp_path):
    first, second = (replace(job(tiny_settings(steps=100_000), tmp_path / f"{n}"), seed=n) for n in (1, 2))
    waits = replace(first, seed=3, folder=tmp_path / "3")
    with pytest.raises(DataError, match="no such text; name another") as caught:
        two_workers.each(fails, [second, first, waits], ignore, ignore)
    assert "in fails" in str(caught.value.__cause__)
    assert newest_checkpoint(tmp_path / "2")[1] > 0
    assert not waits.folder.exists()
    with pytest.raises(RuntimeError, match="Local: a title"):
        two_workers.each(fails_unpicklably, [replace(first, title="a title")], ignore, ignore)
    assert two_workers.each(os.path.basename, [], ignore, ignore) == []


def train_or_die(job):
    if job.seed == 2:
        while not (job.folder.parent / "1" / METRICS).exists():  # until the other run trains
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return train(job)


@pytest.mark.slow
def test_killed_worker_is_named_and_other_runs_resume(job, tiny_settings, tmp_path):
    before = psutil.Process().children()
    jobs = [replace(job(tiny_settings(steps=1000), tmp_path / f"{n}"), seed=n, title=f"run {n}") for n in (1, 2)]
    undisturbed = train(replace(jobs[0], folder=tmp_path / "whole"))
    shown = []
    ended = "run 2: its process was ended by SIGKILL; resume from its last checkpoint with --resume"
    with Workers(2) as two_workers, pytest.raises(RunError, match=ended):
        two_workers.each(train_or_die, jobs, lambda job, what, done, total: shown.append((job.title, total)), ignore)
    assert psutil.Process().children() == before
    assert set(shown) == {("run 1", 1000)}
    assert 0 < newest_checkpoint(tmp_path / "1")[1] < 1000
    # the interrupted window has fewer steps
    assert differing_fields(train(jobs[0]).result, undisturbed.result) <= {"curve"}


@pytest.mark.slow
def test_ctrl_c_ends_workers_that_are_starting(job, tiny_settings, tmp_path):
    before, sessions = psutil.Process().children(), []
    jobs = [replace(job(tiny_settings(), tmp_path / f"{n}"), seed=n) for n in (1, 2)]

    class InterruptedWorkers(Workers):
        presses = iter([signal.SIGINT])

        def wait_for_messages(self, busy):
            for number in self.presses:  # once, while both workers still import
                started = [child for child in psutil.Process().children() if child not in before]
                sessions.extend(os.getsid(child.pid) for child in started)
                signal.raise_signal(number)
            return super().wait_for_messages(busy)

    with InterruptedWorkers(2) as two_workers, pytest.raises(KeyboardInterrupt):
        two_workers.each(train, jobs, ignore, ignore)
    # a terminal sends Ctrl-C to its session, and only the parent may pass it on
    assert len({*sessions, os.getsid(0)}) == 3
    assert psutil.Process().children() == before
    assert list(tmp_path.iterdir()) == []


def test_settle_count_considers_threads_runs_memory_kind_and_trial_speed(job, tiny_settings, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(short_trials, "free_memory", lambda: 100 * GIGABYTE)
    slower = 1.0  # time of a parallel run relative to its share of the threads
    alone_steps, cores = [1.0], [1.0, 1.0]  # seconds of the trials alone in turn; shares with a core alone, in parallel

    class TrialWorkers(Workers):
        def each(self, work, jobs, show, done):
            assert len({job.folder for job in jobs}) == len(jobs) == self.count
            return [Pace(slower * self.count, 0.0, 0.0, cores[1])] * len(jobs)

    def pace(job, steps):
        assert steps in range(*short_trials.COUNT_TRIAL_STEPS)
        assert not job.folder.exists()  # an interrupted trial leaves this folder
        alone_steps.append(alone_steps.pop(0))
        return Pace(alone_steps[-1], 0.0, 0.0, cores[0])

    monkeypatch.setattr(short_trials, "measure_pace", pace)

    def chosen(runs, asked="auto", one=None, before=None):
        made, one = TrialWorkers(asked), one or job(tiny_settings())
        (tmp_path / "trial" / "alone").mkdir(parents=True, exist_ok=True)
        found = settle_count(made, one, runs, tmp_path / "trial", ignore, before)
        assert bool(found) == (asked == "auto" and runs > 1)
        assert settle_count(made, one, runs, tmp_path / "trial", ignore) == ""
        return made.count, made.threads, found.partition("; ")[2]

    assert Workers("auto").count == 1
    assert chosen(9) == (1, 8, "they are too short for several at a time")
    assert chosen(9, before=4) == (4, 2, "as before the interruption")
    assert chosen(1, before=4)[:2] == (1, 8)
    assert (chosen(3, 6), chosen(9, "1")) == ((3, 2, ""), (1, 8, ""))
    monkeypatch.setattr(short_trials, "estimate_demand", lambda job: Demand(10 * GIGABYTE, 0, 30.0))
    slower = 0.7
    assert chosen(2)[:2] == (1, 8)
    assert chosen(9) == (8, 1, "they took 30 % less time than one at a time in a short trial")
    for seconds in ([1.0, 20.0], [20.0, 1.0]):  # another program starts or ends during the trial
        alone_steps = seconds
        assert chosen(9)[2] == "they took 30 % less time than one at a time in a short trial"
    others = ", during which other programs used the cores"
    alone_steps = [20.0, 20.0]
    for shares in ([0.3, 0.9], [0.9, 0.3]):
        cores = shares
        assert chosen(9) == (8, 1, f"they were faster than one at a time in a short trial{others}")
    alone_steps, slower = [1.0], 1.2
    assert chosen(9) == (1, 8, f"8 at a time were not clearly faster in a short trial{others}")
    cores, slower = [1.0, 1.0], 0.7
    assert [chosen(3)[:2], chosen(1)[:2]] == [(3, 2), (1, 8)]
    slower = 1.2
    assert chosen(9) == (1, 8, "8 at a time were not clearly faster in a short trial")
    slower, need = 0.7, 10 * GIGABYTE
    for room, count in ((need - 1, 1), (2 * need, 2), (3 * need - 1, 2)):
        monkeypatch.setattr(short_trials, "free_memory", lambda room=room: room)
        assert chosen(9)[0] == count
        assert chosen(9, 6)[0] == 6
    alone = (1, 8, "each run uses the whole machine")
    assert chosen(9, one=job(tiny_settings(backend="flax"))) == alone
    monkeypatch.setattr(ranks, "size", lambda: 2)
    assert [chosen(9)[:2], chosen(9, 1)[:2]] == [(1, 8), (1, 8)]
    with pytest.raises(RunError, match="jobs = 4 where 2 processes train a run; leave jobs out"):
        chosen(9, 4)


@pytest.mark.slow
def test_worker_count_trial_decides_once_and_removes_its_files(tiny_settings, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(short_trials, "LEAST_SECONDS_FOR_TRIAL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    settings = tiny_settings(seeds=1, steps=20)
    for share, count in ((100.0, 2), (0.0, 1)):
        monkeypatch.setattr(short_trials, "LARGEST_TIME_RATIO", share)
        out = lines.begin(settings, tmp_path / f"{count}")
        with Workers() as two_workers:
            found = finish(out, lines.display, two_workers)
            assert (len(two_workers._open), found.env["jobs"], found.env["threads"]) == (
                2 * (count == 2),
                count,
                3 - count,
            )
        assert not (out / SPEED).exists()
        assert read_json(out / ENVIRONMENT)["jobs"] == count
        assert finish(out, lines.display, Workers()).env["jobs"] == count  # a finished run reports its recorded jobs
        (out / "untied" / "seed-1" / RESULT).unlink()
        (out / "tied" / "seed-1" / RESULT).unlink()
        finish(out, lines.display, again := Workers(1))
        assert again.count == 1
    assert [" at a time; " in line for line in lines].count(True) == 2


def test_estimate_demand_overestimates_memory_and_matches_operations(job, tiny_settings):
    """The reference counts weights, gradients and moments by hand."""
    settings = tiny_settings(width=256)
    demand = short_trials.estimate_demand(job(settings))
    parameters = 300 * 256 + 256 * 256 * 4 + 3 * 256 * 680
    assert 16 * parameters < demand.memory - 800 * (1 << 20) < 60 * parameters
    assert demand.device_memory == 0
    tokens = settings.steps * settings.batch * settings.accumulate * settings.length
    assert demand.seconds == pytest.approx(6 * (parameters + 300 * 256) * tokens / short_trials.OPERATIONS, rel=0.05)
    assert short_trials.estimate_demand(job(tiny_settings(minutes=2.0))).seconds == 120


def test_estimate_demand_counts_the_memory_of_a_gpu(job, tiny_settings, emulated_gpu):
    settings = tiny_settings(width=256)
    demand = short_trials.estimate_demand(job(settings))
    parameters = 300 * 256 + 256 * 256 * 4 + 3 * 256 * 680
    logits = 4 * settings.batch * settings.length * 300
    assert 16 * parameters + logits < demand.device_memory - GIGABYTE < 60 * parameters + logits
    assert demand.memory > 3 * GIGABYTE
    assert demand.seconds >= settings.steps * 0.01


@pytest.fixture
def emulated_gpu(monkeypatch):
    """A GPU of which torch knows only that it exists, with 80 GB of free memory."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (80 * GIGABYTE, 80 * GIGABYTE))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_trial_decides_how_many_runs_share_a_gpu(job, tiny_settings, tmp_path, monkeypatch, emulated_gpu):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(short_trials, "free_memory", lambda: 500 * GIGABYTE)
    monkeypatch.setattr(short_trials, "estimate_demand", lambda job: Demand(GIGABYTE, 10 * GIGABYTE, 30.0))
    monkeypatch.setattr(short_trials, "measure_pace", lambda job, steps: Pace(1.0, 0.0, 0.0))
    time_ratio, error = 0.7, None  # time of several at a time, relative to one at a time

    class TrialWorkers(Workers):
        def each(self, work, jobs, show, done):
            if error is not None:
                raise error
            return [Pace(time_ratio * self.count, 0.0, 0.0)] * len(jobs)

    def choose(runs):
        workers = TrialWorkers("auto")
        line = settle_count(workers, job(tiny_settings()), runs, tmp_path / "trial", ignore)
        return workers.count, line.partition("; ")[2]

    assert choose(9) == (4, "they took 30 % less time than one at a time in a short trial")
    assert choose(3)[0] == 3
    for free, count in ((35, 3), (23, 2), (22, 1)):  # GB of which a tenth is reserved
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index, free=free: (free * GIGABYTE, 80 * GIGABYTE))
        assert choose(9)[0] == count
    assert choose(9)[1] == "memory is too small for two"
    free_bytes = [23 * GIGABYTE, 80 * GIGABYTE]  # of two GPUs, which get as many runs
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes[index], 80 * GIGABYTE))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose(9)[0] == 4
    free_bytes[0] = 80 * GIGABYTE
    assert choose(9)[0] == 8
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(short_trials, "free_memory", lambda: 2 * GIGABYTE)  # of the machine
    assert choose(9)[0] == 2
    time_ratio = 1.0
    assert choose(9) == (1, "2 at a time were not clearly faster in a short trial")
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert choose(9) == (1, "the GPU's memory did not suffice for 2 at a time")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as with an accelerator of another vendor
    assert choose(9) == (1, "the free memory of this accelerator is not known")


@pytest.mark.parametrize(
    ("count", "visible", "seen"),
    [
        (0, None, [None] * 5),
        (1, None, [None] * 5),
        (3, None, ["0", "1", "2", "0", "1"]),
        (2, "5, GPU-8f", ["5", "GPU-8f", "5", "GPU-8f", "5"]),
        (1, "3", [None] * 5),  # the worker inherits the variable
        (2, "1,2,-1,4", ["1", "2", "1", "2", "1"]),  # CUDA ignores what follows an invalid name
    ],
)
def test_workers_see_one_of_several_gpus_in_turn(count, visible, seen, monkeypatch):
    started = []

    class StartedWorker:
        def __init__(self, env):
            started.append(env.get("CUDA_VISIBLE_DEVICES"))

        def end(self):
            pass

    class CountingRound:
        def __init__(self, pool, workers, work, jobs, *rest):
            self.jobs = jobs

        def run(self):
            return dict.fromkeys(self.jobs)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(workers, "Worker", StartedWorker)
    monkeypatch.setattr(workers, "_Round", CountingRound)
    with Workers(5) as pool:
        pool.each(abs, range(9), ignore, ignore)
    assert started == seen


@pytest.mark.slow
def test_process_of_a_worker_has_its_gpu_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    with Workers(2) as pool:
        found = pool.each(os.getenv, ["CUDA_VISIBLE_DEVICES"], ignore, ignore)
        pool._open.append(pool.start_worker())
        pool._open[0].end()
        del pool._open[0]
        found += pool.each(os.getenv, ["CUDA_VISIBLE_DEVICES"], ignore, ignore)
    assert found == ["6", "7"]


def test_free_memory_respects_container_limit(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(short_trials, "_MEMORY", tmp_path)
    assert short_trials.free_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert short_trials.free_memory() > GIGABYTE // 8


@pytest.mark.parametrize("asked", [0, -1, "two", "0", "", 1.5, True, None])
def test_compare_refuses_invalid_jobs(asked, tmp_path):
    with pytest.raises(RunError, match="give how many runs are trained at a time, 1 or more, or auto"):
        tiewise.compare(out=tmp_path / "out", jobs=asked)
    assert list(tmp_path.iterdir()) == []


def test_runs_bar_shows_all_current_runs(job, tiny_settings):
    lines, jobs = [], [job(tiny_settings(steps=steps)) for steps in (10, 20, 30)]
    bar = RunsBar(tqdm(total=60, file=StringIO()), lines.append)
    bar.show(jobs[0], "1/3", 4, 10)  # steps from a checkpoint
    bar.show(jobs[1], "2/3", 0, 20)
    bar.show(jobs[1], "2/3", 7, 20)
    assert (bar.bar.n, bar.bar.initial, bar.bar.desc) == (11, 4, "1/3 · 2/3")
    bar.ended(jobs[1], "second")
    assert (bar.bar.n, bar.bar.initial, bar.bar.desc) == (24, 4, "1/3")
    bar.ended(jobs[2], "third, long ago")
    bar.ended(jobs[0])
    assert (bar.bar.n, bar.bar.initial, lines) == (60, 34, ["second", "third, long ago"])


@pytest.mark.parametrize(("many", "tune"), [(2, False), (3, True), (8, False)])
def test_steps_within_minutes_account_for_parallel_workers(job, tiny_settings, tmp_path, monkeypatch, many, tune):
    """Simulated runs in order of arrival take 99 to 100 % of the requested time."""
    paces = {"tied": Pace(0.5, 0.001, 4.0), "untied": Pace(0.9, 0.001, 4.0), "factored:4": Pace(0.4, 0.001, 9.0)}

    class PacedWorkers(Workers):
        def each(self, work, jobs, show, done):
            assert len(jobs) in (many, 3 * many)
            assert len({job.folder for job in jobs}) == len(jobs)
            return [paces[job.arm] for job in jobs]

    crowd = PacedWorkers(many)
    settings = tiny_settings(arms=tuple(paces), minutes=60.0, seeds=3, tune=tune)
    arms = [job(settings, tmp_path, arm=arm) for arm in paces]
    settle_count(crowd, arms[0], 9, tmp_path, ignore)
    (tmp_path / "trials").mkdir()
    steps = steps_within(arms, tmp_path / "trials", lambda: 600.0, crowd, ignore)
    whole = [replace(one, settings=replace(settings, steps=steps)) for one in arms]
    trials = [tuning.make_trial(one, tmp_path) for one in whole for _ in range(5)] if tune else []
    taken = 600.0
    for runs in (trials, 3 * whole):
        free = [0.0] * many
        for run in runs:
            heapq.heapreplace(free, free[0] + paces[run.arm].seconds(run))
        taken += max(free)
    assert 0.99 * 3600 < taken <= 3600


def test_pickled_prepared_text_refers_to_folder_without_copying(text):
    assert len(pickle.dumps(text)) < 300
    assert pickle.loads(pickle.dumps(text)) == text


def test_worker_ends_without_traceback_when_parent_stops_reading():
    """The worker notices that the parent was killed when its write fails."""
    ours, theirs = Pipe()
    command = f"from tiewise.training.worker_process import serve; serve({theirs.fileno()})"
    process = subprocess.Popen([sys.executable, "-c", command], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
    theirs.close()
    assert ours.recv() == ("ready",)
    with socket.socket(fileno=os.dup(ours.fileno())) as end:
        end.shutdown(socket.SHUT_RD)
    ours.send_bytes(pickle.dumps(partial(str, 1)))
    assert process.communicate(timeout=900)[1] == b""
    assert process.returncode == 1


UNGUARDED = """
from tiewise.training.workers import Workers

print("begun", flush=True)
with Workers(2) as pair:
    print(pair.each(abs, [-1, -2], print, lambda job, value: None))
"""


@pytest.mark.slow
def test_workers_run_script_without_main_guard_once(tmp_path):
    """A script may call `tiewise.compare(…, jobs=2)` without a guard; `multiprocessing` would run the script again."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n[1, 2]\n", "")


def test_ctrl_c_between_calls_raises_at_start_of_next_call():
    press = _PressInCall(signal.default_int_handler)  # `raise_at_ctrl_c` would record the press for this process
    press(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        press.start_call()
    press.start_call()
    with pytest.raises(KeyboardInterrupt):
        press(signal.SIGINT, None)
    press(signal.SIGINT, None)  # comes while the interrupted call ends
    with pytest.raises(KeyboardInterrupt):
        press.start_call()


def test_worker_can_be_stopped_if_its_parent_ignores_ctrl_c():
    """Shells start jobs with & so, and nohup too; without a stop, one failed run waits for the end of all others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = Worker()
    finally:
        signal.signal(signal.SIGINT, before)
    assert worker.next_message() == ("ready",)
    worker.send(pickle.dumps(partial(time.sleep, PATIENCE)))
    begin = time.monotonic()
    worker.stop()
    name, error = worker.next_message()
    worker.end()
    assert name == "error"
    assert isinstance(pickle.loads(error), KeyboardInterrupt)
    assert time.monotonic() - begin < PATIENCE / 2


@pytest.mark.slow
def test_ctrl_c_after_run_ends_keeps_its_value_and_interrupts_next_run(capfd):
    worker = Worker()
    try:
        worker.start_job("a run", pickle.dumps(partial(abs, -1)))
        assert worker.next_message() == ("ready",)
        assert worker.connection.poll(PATIENCE)  # the answer has arrived and is unread
        worker.stop()
        what, value = worker.next_message()
        assert (what, pickle.loads(value)) == ("found", 1)
        worker.start_job("another run", pickle.dumps(partial(abs, -2)))  # Ctrl-C interrupts the next run
        what, error = worker.next_message()
        assert what == "error"
        assert isinstance(pickle.loads(error), KeyboardInterrupt)
        worker.start_job("a third run", pickle.dumps(partial(abs, -3)))  # and no later run
        what, value = worker.next_message()
        assert (what, pickle.loads(value)) == ("found", 3)
        assert worker.process.poll() is None
    finally:
        worker.end()
    assert capfd.readouterr().err == ""
