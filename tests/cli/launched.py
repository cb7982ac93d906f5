"""The command as one process or as several, as a launcher starts them, so that each one's end can be seen."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from glob import glob

PATIENCE = 900  # seconds, which only what hangs takes, however busy the machine is


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(folder, count, *arguments):
    """Start `python -m tiewise …` as `count` processes of one run in `folder`."""
    met = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [met | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)] if count > 1 else [{}]
    command = [sys.executable, "-m", "tiewise", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return [subprocess.Popen(command, cwd=folder, env=environment | rank, **pipes) for rank in ranks]


def until(condition, *processes):
    """Wait for what these processes do."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert all(process.poll() is None for process in processes), ended(processes)
        assert time.monotonic() < end
        time.sleep(0.02)


def curves(folder):
    """Bytes of each run's curve, by its path below a folder that runs lie in."""
    found = {}
    for path in sorted(glob("*/*/*/metrics.jsonl", root_dir=folder)):  # pathlib's raises where a folder moves just then
        with suppress(FileNotFoundError):
            found[folder / path] = (folder / path).stat().st_size
    return found


def trains(folder):
    """A condition: something was measured since now."""
    before = sum(curves(folder).values())
    return lambda: sum(curves(folder).values()) > before


def ended(processes):
    """(exit code, stdout, stderr) of each; all are gone afterwards."""
    try:
        said = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]
