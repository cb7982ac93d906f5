"""Start commands as one process or as several ranks, and return the exit code and output of each.

Each process is a fork of one that has imported torch.
"""

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from glob import glob

from tests.fork_server import ForkedCommand

PATIENCE = 900  # seconds; only a process that hangs takes so long, even on a busy machine


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(folder, count, *arguments):
    """Start `tiewise …` in `folder` as `count` processes of one run."""
    rendezvous = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)] if count > 1 else [{}]
    words, environment = list(map(str, arguments)), os.environ | {"OMP_NUM_THREADS": "1"}
    return [ForkedCommand(words, folder, environment | rank) for rank in ranks]


def wait_until(condition, *processes):
    """Wait until a condition is true while the processes run."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert all(process.poll() is None for process in processes), wait_for_exit(processes)
        assert time.monotonic() < end
        time.sleep(0.02)


def curves(folder):
    """Return the size of each run's curve file in bytes, by path, for all runs below a folder."""
    sizes = {}
    for path in sorted(glob("*/*/*/metrics.jsonl", root_dir=folder)):  # pathlib raises if a folder moves
        with suppress(FileNotFoundError):
            sizes[folder / path] = (folder / path).stat().st_size
    return sizes


def training_advances(folder):
    """Return a condition: since this call, a run below the folder has written a measurement."""
    before = sum(curves(folder).values())
    return lambda: sum(curves(folder).values()) > before


def wait_for_exit(processes):
    """Return (exit code, stdout, stderr) of each process.

    Those that do not end show their stacks and are killed.
    """
    try:
        outputs = [process.communicate(timeout=PATIENCE) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.send_signal(signal.SIGABRT)  # it prints the stack of each thread
        stacks = [process.communicate(timeout=PATIENCE)[1] for process in processes]
        raise AssertionError("\n".join(stacks)) from None
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]
