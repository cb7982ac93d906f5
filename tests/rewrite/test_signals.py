"""Ctrl-C, SIGTERM and SIGHUP at every moment of a rewrite: the result is there whole, or nothing is."""

import itertools
import linecache
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rewrite_models import listing, untimed
from tests.checkpoint.tiny_checkpoints import llama

from tiewise.rewrite import engine, file_plan, new_folder, untie

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SHOWN = (new_folder.__file__, engine.__file__, file_plan.__file__, sys.modules["tiewise.core.errors"].__file__)

# A verb that stops once everything is written, and would go on for a minute.
SLOW = """
import sys, time
from tiewise.rewrite import engine
engine.verify = lambda *given: time.sleep(60)
from tiewise.__main__ import main
sys.argv = ["tiewise", "untie", "a", "--to", "b"]
main()
"""


def traced(source, to, heard):
    """Rewrite, and call `heard` at every line of the engine, each time the same ones."""

    def line(frame, event, argument):
        if frame.f_code.co_filename not in SHOWN:
            return None
        # Python looks for signals at calls and loops, and never at a bare `try:`
        if event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() != "try:":
            heard()
        return line

    sys.settrace(line)
    try:
        untie(source, to)
    finally:
        sys.settrace(None)


def ended_at(moment, number, source, to):
    """Rewrite in a process of its own, which gets a signal at one of these lines; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = itertools.count(moment, -1)
    next(left)
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code = 0
    try:
        traced(source, to, lambda: next(left) or os.kill(os.getpid(), number))
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = error.code
    finally:
        os._exit(code)


@pytest.mark.parametrize("step", [17, pytest.param(4, marks=pytest.mark.slow)], ids=["some", "many"])
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_at_any_moment_leaves_all_or_nothing(tmp_path, number, step):
    source = llama(tmp_path / "a")
    lines, codes = [], set()
    traced(source, tmp_path / "whole", lambda: lines.append(1))
    whole = untimed(tmp_path / "whole")
    assert len(lines) > 150
    for moment in range(1, len(lines), step):
        to = tmp_path / f"b{moment}"
        codes.add(ended_at(moment, number, source, to))
        left = {path.name for path in tmp_path.iterdir()} - {"a", "whole"}
        assert left <= {to.name}, (moment, left)
        if left:
            assert untimed(to) == whole, moment
            to.rename(tmp_path.parent / f"{tmp_path.name}-{to.name}")
    # before there is anything to clean up, and after, SIGTERM and SIGHUP end the process as they always do
    assert CODES[number] in codes
    assert codes <= {CODES[number], -number}


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_the_command_says_so_and_exits_as_shells_expect(tmp_path, number):
    llama(tmp_path / "a")
    before = listing(tmp_path)
    for twice in (False, True):
        process = begun(tmp_path)
        for _ in range(1 + twice):
            process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == CODES[number]
        assert said == "tiewise: interrupted; a is as it was and b was not made\n"
        assert listing(tmp_path) == before


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_that_is_ignored_goes_on_being_ignored(tmp_path, number):
    """As SIGHUP is under nohup, and SIGINT in the background of a shell."""
    llama(tmp_path / "a")
    process = begun(tmp_path, ignored=number)
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM if number != signal.SIGTERM else signal.SIGINT)
    process.communicate(timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def begun(folder, ignored=None):
    """The command, once everything that it writes lies in its hidden folder."""

    def dispose():  # whatever this suite was begun under: nohup ignores one of them, the background of a shell another
        for number in CODES:
            signal.signal(number, signal.SIG_IGN if number == ignored else signal.SIG_DFL)

    command, options = [sys.executable, "-c", SLOW], {"cwd": folder, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, preexec_fn=dispose, **options)
    end = time.monotonic() + 60
    while not list(Path(folder).glob(".b.tiewise-*/tiewise.json")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process
