"""Run command lines in this process, each in a separate folder and with separate state."""

import contextlib
import gc
import io
import logging
import math
import os
import random
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass
from unittest import mock

import numpy as np

WIDTH = 100
# the same for every case: no colour, one width, no network, the portable products, and no child process
ENVIRONMENT = {
    "COLUMNS": str(WIDTH),
    "LINES": "50",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TIEWISE_PRODUCTS": "default",
    "TIEWISE_KERNELS": "off",
    "TIEWISE_NO_VERIFY_LOAD": "1",
    "TIEWISE_NO_BUILD": "1",
    "DISPLAY": "",
    "WAYLAND_DISPLAY": "",
}
DROPPED = ("TIEWISE_LOSS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "FORCE_COLOR", "RAY_ADDRESS")


@dataclass
class Ended:
    """Exit code and output of one command line."""

    code: int | str
    out: str
    err: str


def run(arguments, folder, environment=()):
    """Run one command line in `folder`."""
    import_first()
    from tiewise.__main__ import main
    from tiewise.cli import options

    out, err = io.StringIO(), io.StringIO()
    with (
        _isolated(folder, dict(environment)),
        mock.patch.object(sys, "argv", ["tiewise", *arguments]),
        mock.patch.object(options, "LINES_AFTER", math.inf),  # stages would be printed on a slow machine alone
        mock.patch.object(sys.modules["__main__"], "__package__", None),  # else help takes it for the program
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = _exit_code(main)
    return Ended(code, out.getvalue(), err.getvalue())


def _exit_code(main):
    """Return how the command line ends: an exit code, or the error where a person would see a traceback."""
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    except Exception as error:
        return f"traceback: {type(error).__name__}: {error}"
    return "the command did not exit"


def import_first():
    """Import the libraries that commands import, so that no case depends on imports of an earlier one."""
    import datasets
    import torch
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(torch.get_num_threads())


@contextlib.contextmanager
def _isolated(folder, environment):
    """Give a block a separate folder, environment, temporary folder and random state, and restore everything."""
    import torch
    import transformers

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    verbosity, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    hooks = sys.unraisablehook, sys.excepthook
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, ENVIRONMENT | environment),
        mock.patch.object(tempfile, "tempdir", str(temporary)),
        mock.patch.object(logging.getLogger(), "handlers", []),  # pytest's, which keep warnings from stderr
        warnings.catch_warnings(),
    ):
        for name in DROPPED:
            os.environ.pop(name, None)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.random.set_rng_state(states[2])
            torch.set_num_threads(threads)
            transformers.logging.set_verbosity(verbosity)
            sys.unraisablehook, sys.excepthook = hooks
            for number, handler in handlers.items():
                signal.signal(number, handler)
            gc.collect(0)
