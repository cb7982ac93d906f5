"""Start commands in forks of one process that has imported torch and transformers, which take seconds to import.

A fork server is Python's own: it imports modules once, trains nothing, and forks a child for each command. Tests of
imports, of Ctrl-C during imports and of terminals start Python themselves.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from unittest import mock

PRELOADED = ("tests.preloaded",)
ROOT = Path(__file__).parents[1]
# torch reads these when it is imported; the commands set them before that
AT_IMPORT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": "3"}


def fork_context():
    """Return the context of `multiprocessing` whose processes are forks of this test process's server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    found_from = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, AT_IMPORT | {"PYTHONPATH": found_from}):
        multiprocessing.forkserver.ensure_running()
    return context


class ForkedCommand:
    """A running `tiewise` command, with the methods of `subprocess.Popen` that tests use.

    Its output goes to files, so that a command that nobody reads from never waits, or to the paths of other streams.
    """

    def __init__(self, arguments, folder, environment, stdin=os.devnull, stdout=None, stderr=None):
        self.args = ["tiewise", *arguments]
        self._output = tempfile.TemporaryDirectory(prefix="command-")
        self._paths = [Path(self._output.name) / name for name in ("stdout", "stderr")]
        outputs = [given or str(path) for given, path in zip((stdout, stderr), self._paths, strict=True)]
        self._process = fork_context().Process(
            target=run_command, args=(self.args, str(folder), environment, stdin, *outputs)
        )
        self._process.start()

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for the end; return stdout and stderr, "" for one that went elsewhere."""
        self.wait(timeout)
        return tuple(path.read_text() if path.exists() else "" for path in self._paths)

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def run_command(arguments, folder, environment, *streams):
    """Become the process of a command: take its folder, environment and streams, run it and exit as Python does."""
    for number, path in enumerate(streams):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.__stdout__ = sys.stdout  # the command line watches the stdout of a process, and no replacement
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    sys.argv = arguments
    code = exit_code_of_command()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120  # as Python exits if it cannot write the last output
    os._exit(code)


def exit_code_of_command():
    try:
        runpy.run_module("tiewise", run_name="__main__", alter_sys=False)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
