"""A worker on another machine: the code of a Ray task.

The task passes messages of a separate worker process, so this module does not import torch.
"""

from __future__ import annotations

import os
import pickle
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from tiewise.core import __version__
from tiewise.core.errors import RunError
from tiewise.core.interrupts import set_ctrl_c_handler
from tiewise.training.worker_process import Message, Worker

TOKEN = ".token"  # file in the folder of a run that other machines train
_PAUSE = 0.5  # seconds between two progress messages to another machine
_PATIENCE = 5.0  # seconds that a slow shared file system may take to show a file of another machine
_LAST = ("found", "error", "lost")  # messages that end a call
_idle: dict[
    str | None, Worker
] = {}  # visible GPUs → idle worker, kept so that the next task here need not import everything


def stream_messages(call: bytes, env: Mapping[str, str], folder: str, token: str, needed: str) -> Iterator[Message]:
    """Yield the messages of a worker for a pickled call: the work of a Ray task.

    Some progress messages are left out. If the task is cancelled, the worker writes its checkpoint and ends. A machine
    that cannot train the run in `folder` yields an error, see `find_mismatch`.
    """
    problem = find_mismatch(folder, token, needed)
    if problem is not None:
        problem_text, fix = problem
        yield "error", pickle.dumps(RunError(f"{platform.node()} {problem_text}", fix))
        return
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    worker = _idle.pop(gpus, None) or Worker(env)
    worker.send(call)
    has_ended, due = False, 0.0
    cancellation = _NotedCancellation()
    before = set_ctrl_c_handler(cancellation)
    try:
        while not has_ended:
            message = _next_message(worker, cancellation)
            has_ended = message[0] in _LAST
            if message[0] in ("found", "error"):
                _idle[gpus] = worker
            if has_ended:
                yield message
            elif message[0] == "at" and time.monotonic() >= due:
                due = time.monotonic() + _PAUSE
                yield message
    finally:
        if not has_ended:
            worker.stop()
            while worker.next_message()[0] not in _LAST:
                pass
            worker.end()
        set_ctrl_c_handler(before)


class _NotedCancellation:
    """Handler of the interrupt with which Ray cancels a task: it only takes note.

    An exception could come between the arrival of a worker's last message and the statement that reads it. The task
    would then wait forever for another message.
    """

    def __init__(self) -> None:
        self.is_cancelled = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.is_cancelled = True


def _next_message(worker: Worker, cancellation: _NotedCancellation) -> Message:
    """Wait for a worker's next message.

    KeyboardInterrupt: Ray has cancelled the task, and no message was taken.
    """
    while not cancellation.is_cancelled:
        if worker.connection.poll(_PAUSE):
            return worker.next_message()
    raise KeyboardInterrupt


def find_mismatch(folder: str, token: str, needed: str) -> tuple[str, str] | None:
    """Return why this machine cannot train a run, and the remedy; None if it can.

    The run's main machine wrote `token` into its folder, and has the versions `needed`.
    """
    present = installed_versions()
    if present != needed:
        return f"has {present}, and the run began with {needed}", "install the same on every machine"
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with suppress(OSError):
            if (Path(folder) / TOKEN).read_text(encoding="utf-8") == token:
                return None
        time.sleep(0.2)
    return f"does not see {folder} as it is here", "give an --out on a file system that all machines share"


def installed_versions() -> str:
    """Return the versions that must be equal on all machines, whose figures are compared."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"tiewise {__version__}, torch {version('torch')}, Python {python}"
