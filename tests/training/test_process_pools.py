"""Tests of limits of `concurrent.futures` pools that `training.workers` exists to avoid.

If a test fails, Python has lifted the limit. Then check again whether its pool can replace our workers.
"""

import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context

import psutil
import pytest

pytestmark = pytest.mark.slow  # these tests are about Python, and wait for pools that may never return
METHODS = ("spawn", "forkserver")
# seconds to wait for a pool that may never return
PATIENCE = 20

ONE_KILLED = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context

pool = ProcessPoolExecutor(2, get_context("spawn"))
futures = [pool.submit(time.sleep, 600) for _ in range(2)]
killed, other = active_children()
killed.kill()
for future in futures:
    print(repr(future.exception()), flush=True)
os._exit(0)
"""


def start_python(*arguments):
    """Start Python in a separate session, so its child processes can be ended with it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([sys.executable, *arguments], start_new_session=True, **pipes)


def end_session(process):
    """End a process and all its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_pool_fails_all_calls_after_one_kill_without_naming_signal():
    """The pool may also hang, because it can miss the end of a new process."""
    process = start_python("-c", ONE_KILLED)
    try:
        errors = process.communicate(timeout=PATIENCE)[0].splitlines()
    except subprocess.TimeoutExpired:
        pytest.skip("the pool missed the end of its process and hangs, as the interpreter allows")
    finally:
        end_session(process)
    assert len(errors) == 2
    assert len(set(errors)) == 1
    assert errors[0].startswith("BrokenProcessPool")
    assert "SIGKILL" not in errors[0]


def test_pool_process_shares_session_of_parent():
    """Therefore Ctrl-C on a terminal reaches the process directly, even while it starts."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(os.getsid, 0).result() == os.getsid(0)


UNGUARDED = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

print("begun", flush=True)
ProcessPoolExecutor(1, get_context("{method}")).submit(abs, -1)
"""


@pytest.mark.parametrize("method", METHODS)
def test_pool_runs_script_without_main_guard_again(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(method=method))
    process = start_python(str(script))
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    finally:
        end_session(process)
        process.communicate()


KILLED = """
import os, signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

pool = ProcessPoolExecutor(1, get_context("{method}"))
print(pool.submit(os.getpid).result(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", METHODS)
def test_pool_process_outlives_killed_parent(method):
    parent = start_python("-c", KILLED.format(method=method))
    orphan = psutil.Process(int(parent.stdout.readline()))
    try:
        assert parent.wait() == -signal.SIGKILL
        with pytest.raises(psutil.TimeoutExpired):
            orphan.wait(timeout=1)
    finally:
        orphan.kill()
