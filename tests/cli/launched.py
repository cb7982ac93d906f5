"""The command as several processes, as a launcher starts them, so that each one's end can be seen."""

import os
import socket
import subprocess
import sys


def launch(folder, count, *arguments):
    """Start `python -m tiewise …` as `count` processes of one run in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    met = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tiewise", *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | met | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def ended(processes, timeout=400):
    """(exit code, stdout, stderr) of each; all are gone afterwards."""
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]
