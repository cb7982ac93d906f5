"""Run a test file in a process that interprets triton's kernels on a CPU.

`make setup` installs triton and the packages of other kernels into a separate folder, because torch imports triton
wherever it finds it. Those processes alone see the folder.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FOLDER = Path(sys.prefix) / "interpreted"


def is_available(module):
    """Return whether a module is in this environment or in the folder."""
    return find_spec(module) is not None or (FOLDER / module).is_dir()


def run_interpreted(file, *options, module="triton"):
    """Run a test file in a process that interprets triton, and return what it prints; or skip."""
    if INTERPRETED:
        pytest.skip("this is that process")
    if not (is_available("triton") and is_available(module)):
        pytest.skip(f"{module}: NOT RUN by triton's interpreter, not installed; make setup")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options, file]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(FOLDER)]))
    of_interpreter = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    run = subprocess.run(command, env=os.environ | of_interpreter, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    return run.stdout


def passed(printed):
    """Return the number of tests that passed."""
    return int(re.search(r"(\d+) passed", printed)[1])
