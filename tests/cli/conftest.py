"""Fixtures that run commands in this process, in an empty folder."""

import math
import os
import subprocess
from dataclasses import dataclass
from importlib import import_module

import pytest
import transformers
from cli_tiny import TINY, write_text

from tiewise.cli import options
from tiewise.cli.main import main

import_module("tiewise.training.compare")


@dataclass
class Observation:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def tiewise(tmp_path, monkeypatch, capfd, type_command, pipe_in):
    """Run a command line in this process, in an empty folder, without a terminal."""
    monkeypatch.chdir(tmp_path)
    # the command sets these; monkeypatch restores them
    for name in ("TOKENIZERS_PARALLELISM", "TF_CPP_MIN_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "false"))
    verbosity = transformers.logging.get_verbosity()
    monkeypatch.setattr(options, "LINES_AFTER", math.inf)  # on a slow machine, commands would print their stages

    def run(*arguments, stdin=b""):
        type_command("tiewise", *arguments)
        pipe_in(stdin)
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        return Observation(end.value.code, *capfd.readouterr())

    yield run
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def text(tmp_path):
    """A text file of 8,000 characters in the folder where commands run."""
    return write_text(tmp_path)


@pytest.fixture
def compare(tiewise, text):
    """Return a function that runs a comparison of a second with further arguments."""
    return lambda *arguments, **named: tiewise("compare", "-t", text, *TINY, *arguments, **named)


@pytest.fixture
def tree(tmp_path):
    """Return a function that reads all files of the folder."""
    return lambda: {str(p): p.read_bytes() if p.is_file() else None for p in sorted(tmp_path.rglob("*"))}


@pytest.fixture
def disk(tmp_path):
    """Return a function that mounts or resizes a file system of so many kB; only root can."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mounted = []

    def resize(size):
        options = f"{'remount,' if mounted else ''}size={size}k"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", mount_point], capture_output=True)
        if done.returncode:
            pytest.skip("only root can mount")
        mounted.append(size)
        return mount_point

    yield resize
    if mounted:
        subprocess.run(["umount", "-l", mount_point], check=True)
