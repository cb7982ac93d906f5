"""Promises of `training.workers` that a pool of `concurrent.futures` breaks.

A failure here is good news: Python now keeps the promise. Then look again whether its pool can replace our workers.
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

METHODS = ("spawn", "forkserver")
# how long a pool is waited for that may never return
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


def started(*arguments):
    """Start Python in a separate session, so that whatever it starts can be ended with it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen([sys.executable, *arguments], start_new_session=True, **pipes)


def ended(process):
    """End a process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_one_killed_process_fails_all_calls_and_no_error_names_its_work():
    """Or the pool hangs: it may not notice the end of a process that it has just started."""
    process = started("-c", ONE_KILLED)
    try:
        errors = process.communicate(timeout=PATIENCE)[0].splitlines()
    except subprocess.TimeoutExpired:
        return
    finally:
        ended(process)
    assert len(errors) == 2
    assert len(set(errors)) == 1
    assert errors[0].startswith("BrokenProcessPool")
    assert "SIGKILL" not in errors[0]


def test_a_process_is_in_the_session_of_its_parent():
    """So Ctrl-C on a terminal reaches it directly, also while it starts."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(os.getsid, 0).result() == os.getsid(0)


UNGUARDED = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

print("begun", flush=True)
ProcessPoolExecutor(1, get_context("{method}")).submit(abs, -1)
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_script_without_a_guard_runs_again(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(method=method))
    process = started(str(script))
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    finally:
        ended(process)
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
def test_a_process_outlives_its_killed_parent(method):
    parent = started("-c", KILLED.format(method=method))
    orphan = psutil.Process(int(parent.stdout.readline()))
    try:
        assert parent.wait() == -signal.SIGKILL
        with pytest.raises(psutil.TimeoutExpired):
            orphan.wait(timeout=1)
    finally:
        orphan.kill()
