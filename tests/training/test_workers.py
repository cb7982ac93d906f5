"""Several runs at a time: the figures of one at a time, how many there are, and how they end."""

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
from tests.training.conftest import differing
from tqdm import tqdm

import tiewise
from tiewise.core import ranks
from tiewise.core.errors import DataError, RunError
from tiewise.training import short_trials
from tiewise.training.compare import RunsBar, finish
from tiewise.training.folder import ENVIRONMENT, METRICS, RESULT, SPEED, newest_checkpoint, read_json
from tiewise.training.run import train
from tiewise.training.short_trials import Pace, settle_count, steps_within
from tiewise.training.worker_process import Worker, _PressInCall
from tiewise.training.workers import Workers

PATIENCE = 120  # seconds, which only what hangs takes
GIGABYTE = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair():
    """Two workers, which take a while to start."""
    with Workers(2) as made:
        yield made


def unheard(*said):
    """Where nobody listens to what runs say."""


def test_two_at_a_time_end_with_the_figures_of_one_at_a_time(pair, tiny, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(short_trials, "INIT_FACTORS", (1.0,))
    settings = tiny(arms=("tied", "untied"), steps=20, seeds=2, tune=True)
    one, two = (finish(lines.begin(settings, tmp_path / f"{w.count}"), lines.display, w) for w in (Workers(1), pair))
    for alone, beside in zip(one.runs, two.runs, strict=True):
        assert differing(alone, beside) == set()
    assert (one.tuning, one.direct_path) == (two.tuning, two.direct_path)
    assert [name for name, value in one.env.items() if value != two.env[name]] == ["jobs"]
    assert len(lines) == 2 * (1 + 6 + 4)
    assert finish(tmp_path / "2", lines.display, pair).runs == two.runs


def threads_of(job):
    return torch.get_num_threads()


def test_the_last_runs_share_all_threads(pair, job, tiny, tmp_path, monkeypatch):
    jobs = [job(tiny(), tmp_path) for _ in range(3)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert pair.each(threads_of, jobs, unheard, unheard) == [1, 1, 2]


def fails(job):
    """What a worker is asked to do here."""
    if job.seed == 1:
        while not (job.folder.parent / "2" / METRICS).exists():  # until the other trains
            time.sleep(0.01)
        raise DataError("no such text", "name another")
    return train(job)


def fails_unpicklably(job):
    class Local(Exception):
        pass

    raise Local(job.title)


def test_an_error_in_one_stops_the_others_with_a_checkpoint_and_comes_as_it_was(pair, job, tiny, tmp_path):
    first, second = (replace(job(tiny(steps=100_000), tmp_path / f"{n}"), seed=n) for n in (1, 2))
    waits = replace(first, seed=3, folder=tmp_path / "3")
    with pytest.raises(DataError, match="no such text; name another") as caught:
        pair.each(fails, [second, first, waits], unheard, unheard)
    assert "in fails" in str(caught.value.__cause__)
    assert newest_checkpoint(tmp_path / "2")[1] > 0
    assert not waits.folder.exists()
    with pytest.raises(RuntimeError, match="Local: a title"):
        pair.each(fails_unpicklably, [replace(first, title="a title")], unheard, unheard)
    assert pair.each(os.path.basename, [], unheard, unheard) == []


def killed(job):
    if job.seed == 2:
        while not (job.folder.parent / "1" / METRICS).exists():  # until the other trains
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return train(job)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_and_the_others_can_be_resumed(job, tiny, tmp_path):
    before = psutil.Process().children()
    jobs = [replace(job(tiny(steps=1000), tmp_path / f"{n}"), seed=n, title=f"run {n}") for n in (1, 2)]
    undisturbed = train(replace(jobs[0], folder=tmp_path / "whole"))
    shown = []
    with Workers(2) as pair, pytest.raises(RunError, match="run 2: its process was ended by SIGKILL; --resume"):
        pair.each(killed, jobs, lambda job, what, done, total: shown.append((job.title, total)), unheard)
    assert psutil.Process().children() == before
    assert set(shown) == {("run 1", 1000)}
    assert 0 < newest_checkpoint(tmp_path / "1")[1] < 1000
    # a window that it was stopped in has fewer steps
    assert differing(train(jobs[0]).result, undisturbed.result) <= {"curve"}


@pytest.mark.slow
def test_ctrl_c_while_a_worker_is_started_ends_it(job, tiny, tmp_path):
    before, sessions = psutil.Process().children(), []
    jobs = [replace(job(tiny(), tmp_path / f"{n}"), seed=n) for n in (1, 2)]

    class Pressed(Workers):
        presses = iter([signal.SIGINT])

        def wait_for_messages(self, busy):
            for number in self.presses:  # once, while both still import
                started = [child for child in psutil.Process().children() if child not in before]
                sessions.extend(os.getsid(child.pid) for child in started)
                signal.raise_signal(number)
            return super().wait_for_messages(busy)

    with Pressed(2) as pair, pytest.raises(KeyboardInterrupt):
        pair.each(train, jobs, unheard, unheard)
    # a terminal sends Ctrl-C to its whole session, and only the parent may pass it on
    assert len({*sessions, os.getsid(0)}) == 3
    assert psutil.Process().children() == before
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_threads_runs_memory_what_kind_of_run_it_is_and_what_was_faster(job, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(short_trials, "free_memory", lambda: 100 * GIGABYTE)
    slower = 1.0  # a run beside others, by what its share of the threads makes of it

    class Tried(Workers):
        def each(self, work, jobs, show, done):
            assert len({job.folder for job in jobs}) == len(jobs) == self.count
            return [Pace(slower * self.count, 0.0, 0.0)] * len(jobs)

    def pace(job, steps):
        assert steps in range(*short_trials.COUNT_TRIAL_STEPS)
        assert not job.folder.exists()  # what a trial left that was interrupted
        return Pace(1.0, 0.0, 0.0)

    monkeypatch.setattr(short_trials, "measure_pace", pace)

    def chosen(runs, asked="auto", one=None, before=None):
        made, one = Tried(asked), one or job(tiny())
        (tmp_path / "trial" / "alone").mkdir(parents=True, exist_ok=True)
        found = settle_count(made, one, runs, tmp_path / "trial", unheard, before)
        assert bool(found) == (asked == "auto" and runs > 1)
        assert settle_count(made, one, runs, tmp_path / "trial", unheard) == ""
        return made.count, made.threads, found.partition(": ")[2]

    assert Workers("auto").count == 1
    assert chosen(9) == (1, 8, "there is too little to do for several")
    assert chosen(9, before=4) == (4, 2, "as when they began")
    assert chosen(1, before=4)[:2] == (1, 8)
    assert (chosen(3, 6), chosen(9, "1")) == ((3, 2, ""), (1, 8, ""))
    monkeypatch.setattr(short_trials, "estimate_demand", lambda job: (10 * GIGABYTE, 30.0))
    slower = 0.7
    assert chosen(2)[:2] == (1, 8)
    assert chosen(9) == (8, 1, "in a trial they took 0.70 of the time of one at a time")
    assert [chosen(3)[:2], chosen(1)[:2]] == [(3, 2), (1, 8)]
    slower = 1.2
    assert chosen(9) == (1, 8, "in a trial 8 at a time took 1.20 of its time")
    slower, need = 0.7, 10 * GIGABYTE
    for room, count in ((need - 1, 1), (2 * need, 2), (3 * need - 1, 2)):
        monkeypatch.setattr(short_trials, "free_memory", lambda room=room: room)
        assert chosen(9)[0] == count
        assert chosen(9, 6)[0] == 6
    alone = (1, 8, "each takes the whole machine")
    assert chosen(9, one=job(tiny(backend="flax"))) == alone
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert chosen(9) == alone
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(ranks, "size", lambda: 2)
    assert [chosen(9)[:2], chosen(9, 1)[:2]] == [(1, 8), (1, 8)]
    with pytest.raises(RunError, match="jobs = 4 where 2 processes train a run; leave jobs out"):
        chosen(9, 4)


@pytest.mark.slow
def test_a_trial_of_both_ways_decides_once_and_leaves_nothing(tiny, tmp_path, lines, monkeypatch):
    monkeypatch.setattr(short_trials, "LEAST_SECONDS_FOR_TRIAL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    settings = tiny(seeds=1, steps=20)
    for share, count in ((100.0, 2), (0.0, 1)):
        monkeypatch.setattr(short_trials, "LARGEST_TIME_RATIO", share)
        out = lines.begin(settings, tmp_path / f"{count}")
        with Workers() as pair:
            found = finish(out, lines.display, pair)
            assert (len(pair._open), found.env["jobs"], found.env["threads"]) == (2 * (count == 2), count, 3 - count)
        assert not (out / SPEED).exists()
        assert read_json(out / ENVIRONMENT)["jobs"] == count
        assert finish(out, lines.display, Workers()).env["jobs"] == count  # of what is done it says how it was
        (out / "untied" / "seed-1" / RESULT).unlink()
        (out / "tied" / "seed-1" / RESULT).unlink()
        finish(out, lines.display, again := Workers(1))
        assert again.count == 1
    assert [" at a time, " in line for line in lines].count(True) == 2


def test_memory_is_rather_more_than_less(job, tiny):
    """Of what can be counted by hand: weights, gradients, moments."""
    settings = tiny(width=256)
    held, work = short_trials.estimate_demand(job(settings))
    parameters = 300 * 256 + 256 * 256 * 4 + 3 * 256 * 680
    assert 16 * parameters < held - 800 * (1 << 20) < 60 * parameters
    tokens = settings.steps * settings.batch * settings.accumulate * settings.length
    assert work == pytest.approx(6 * (parameters + 300 * 256) * tokens / short_trials.OPERATIONS, rel=0.05)
    assert short_trials.estimate_demand(job(tiny(minutes=2.0)))[1] == 120


def test_what_a_container_may_take_is_all_there_is(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(short_trials, "_MEMORY", tmp_path)
    assert short_trials.free_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert short_trials.free_memory() > GIGABYTE // 8


@pytest.mark.parametrize("asked", [0, -1, "two", "0", "", 1.5, True, None])
def test_what_is_no_number_of_runs_is_refused(asked, tmp_path):
    with pytest.raises(RunError, match="give how many runs are trained at a time, 1 or more, or auto"):
        tiewise.compare(tmp_path / "out", jobs=asked)
    assert list(tmp_path.iterdir()) == []


def test_the_bar_holds_all_that_are_at_hand(job, tiny):
    lines, jobs = [], [job(tiny(steps=steps)) for steps in (10, 20, 30)]
    bar = RunsBar(tqdm(total=60, file=StringIO()), lines.append)
    bar.show(jobs[0], "1/3", 4, 10)  # a checkpoint's
    bar.show(jobs[1], "2/3", 0, 20)
    bar.show(jobs[1], "2/3", 7, 20)
    assert (bar.bar.n, bar.bar.initial, bar.bar.desc) == (11, 4, "1/3 · 2/3")
    bar.ended(jobs[1], "second")
    assert (bar.bar.n, bar.bar.initial, bar.bar.desc) == (24, 4, "1/3")
    bar.ended(jobs[2], "third, long ago")
    bar.ended(jobs[0])
    assert (bar.bar.n, bar.bar.initial, lines) == (60, 34, ["second", "third, long ago"])


@pytest.mark.parametrize(("many", "tune"), [(2, False), (3, True), (8, False)])
def test_minutes_count_with_the_workers(job, tiny, tmp_path, monkeypatch, many, tune):
    """As first come, first served would have it, the time asked for holds all runs, and hardly more of them."""
    paces = {"tied": Pace(0.5, 0.001, 4.0), "untied": Pace(0.9, 0.001, 4.0), "factored:4": Pace(0.4, 0.001, 9.0)}

    class Crowd(Workers):
        def each(self, work, jobs, show, done):
            assert len(jobs) in (many, 3 * many)
            assert len({job.folder for job in jobs}) == len(jobs)
            return [paces[job.arm] for job in jobs]

    crowd = Crowd(many)
    settings = tiny(arms=tuple(paces), minutes=60.0, seeds=3, tune=tune)
    arms = [job(settings, tmp_path, arm=arm) for arm in paces]
    settle_count(crowd, arms[0], 9, tmp_path, unheard)
    (tmp_path / "trials").mkdir()
    steps = steps_within(arms, tmp_path / "trials", lambda: 600.0, crowd, unheard)
    whole = [replace(one, settings=replace(settings, steps=steps)) for one in arms]
    trials = [short_trials.make_trial(one, tmp_path) for one in whole for _ in range(9)] if tune else []
    taken = 600.0
    for runs in (trials, 3 * whole):
        free = [0.0] * many
        for run in runs:
            heapq.heapreplace(free, free[0] + paces[run.arm].seconds(run))
        taken += max(free)
    assert 0.99 * 3600 < taken <= 3600


def test_what_was_prepared_is_opened_by_a_worker_and_not_copied(text):
    assert len(pickle.dumps(text)) < 300
    assert pickle.loads(pickle.dumps(text)) == text


def test_a_worker_that_nobody_reads_ends_without_a_traceback():
    """The process that started it was killed, and its end is not noticed yet: a write fails before a read does."""
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
def test_a_script_without_a_guard_runs_once(tmp_path):
    """As `tiewise.compare(…, jobs=2)` in a script may be written; `multiprocessing` would run the script again."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "begun\n[1, 2]\n", "")


def test_ctrl_c_waits_while_a_worker_sends():
    press = _PressInCall(signal.default_int_handler)  # the other one is remembered by this process
    press(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        press.start_call()
    press.start_call()
    with pytest.raises(KeyboardInterrupt):
        press(signal.SIGINT, None)
    press(signal.SIGINT, None)  # the call ends already
    with pytest.raises(KeyboardInterrupt):
        press.start_call()


@pytest.mark.slow
def test_ctrl_c_just_after_a_run_has_ended_keeps_its_value_and_says_nothing(capfd):
    worker = Worker()
    try:
        worker.start_job("a run", pickle.dumps(partial(abs, -1)))
        assert worker.next_message() == ("ready",)
        assert worker.connection.poll(PATIENCE)  # its answer, not yet read
        worker.stop()
        what, value = worker.next_message()
        assert (what, pickle.loads(value)) == ("found", 1)
        worker.start_job("another run", pickle.dumps(partial(abs, -2)))  # Ctrl-C ends what follows it
        what, error = worker.next_message()
        assert what == "error"
        assert isinstance(pickle.loads(error), KeyboardInterrupt)
        worker.start_job("a third run", pickle.dumps(partial(abs, -3)))  # and is no answer to anything else
        what, value = worker.next_message()
        assert (what, pickle.loads(value)) == ("found", 3)
        assert worker.process.poll() is None
    finally:
        worker.end()
    assert capfd.readouterr().err == ""
