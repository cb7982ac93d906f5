"""Test both sides of a Ray task that is cancelled: it ends at any moment, and no side waits for a lost message."""

import os
import pickle
import signal
from types import SimpleNamespace

import pytest

from tiewise.training import remote_worker
from tiewise.training.launchers import OnRay

FOUND = ("found", b"value")
AT = ("at", "step", 1, 9)


class ScriptedWorker:
    """Worker with given messages; Ctrl-C, by which Ray cancels a task, comes at a given point."""

    def __init__(self, messages, cancel_before=None, cancel_after=None):
        self.messages = list(messages)
        self.cancel_before, self.cancel_after = cancel_before, cancel_after
        self.calls = []
        self.connection = self

    def send(self, call):
        self.calls.append("send")

    def stop(self):
        self.calls.append("stop")

    def end(self):
        self.calls.append("end")

    def poll(self, seconds):
        if self.messages[0] == self.cancel_before:
            self.cancel_before = None
            signal.raise_signal(signal.SIGINT)
            return False
        return True

    def next_message(self):
        assert self.messages, "a real worker would never answer"
        message = self.messages.pop(0)
        if message == self.cancel_after:
            signal.raise_signal(signal.SIGINT)
        return message


@pytest.fixture
def start_task(tmp_path, monkeypatch):
    """Return a function that starts a task with a worker, and require that Ctrl-C is handled as before in the end."""
    (tmp_path / remote_worker.TOKEN).write_text("mine")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(remote_worker, "_idle", {})
    before = signal.getsignal(signal.SIGINT)

    def start(worker):
        remote_worker._idle[gpus] = worker
        return remote_worker.stream_messages(b"", {}, str(tmp_path), "mine", remote_worker.installed_versions())

    yield start
    assert signal.getsignal(signal.SIGINT) is before


def test_task_cancelled_as_last_message_arrives_yields_it_and_keeps_worker(start_task):
    worker = ScriptedWorker([AT, FOUND], cancel_after=FOUND)
    assert list(start_task(worker)) == [AT, FOUND]
    assert worker.calls == ["send"]
    assert list(remote_worker._idle.values()) == [worker]


@pytest.mark.parametrize("position", [AT, FOUND])
def test_task_cancelled_before_message_stops_worker_and_ends(start_task, position):
    worker = ScriptedWorker([AT, FOUND], cancel_before=position)
    with pytest.raises(KeyboardInterrupt):
        list(start_task(worker))
    assert worker.calls == ["send", "stop", "end"]
    assert worker.messages == []
    assert remote_worker._idle == {}


def test_task_cancelled_while_it_is_suspended_stops_worker_at_next_step(start_task):
    worker = ScriptedWorker([AT, FOUND])
    task = start_task(worker)
    assert next(task) == AT
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(task)
    assert worker.calls == ["send", "stop", "end"]


class LostStream:
    """Stream of a cancelled task whose next message never comes."""

    def __next__(self):
        raise AssertionError("a real stream would never answer")

    def completed(self):
        return "completed"


class CancelledError(Exception):
    """TaskCancelledError of a Ray that is not there."""


def fake_ray(stream):
    """Return a module ray with one task, which was cancelled and has ended."""

    def wait(refs, num_returns=1, timeout=None):
        ready = [ref for ref in refs if ref == "completed"]
        return ready, [ref for ref in refs if ref not in ready]

    def get(ref):
        assert ref == "completed"
        raise CancelledError("cancelled")

    errors = SimpleNamespace(TaskCancelledError=CancelledError, RayTaskError=OSError, RayError=OSError)
    remote = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: stream))
    return SimpleNamespace(
        wait=wait, get=get, exceptions=errors, remote=lambda function: remote, cancel=lambda stream: None
    )


def test_launcher_notes_end_of_cancelled_task_whose_messages_are_lost(tmp_path):
    launcher = OnRay(1, tmp_path, print)
    launcher.ray = fake_ray(LostStream())
    task = launcher.start_worker()
    task.start_job(SimpleNamespace(title="run", folder=tmp_path), b"")
    task.stop()
    assert launcher.wait_for_messages([task]) == [task]
    kind, error = task.next_message()
    assert (kind, type(pickle.loads(error))) == ("error", KeyboardInterrupt)
