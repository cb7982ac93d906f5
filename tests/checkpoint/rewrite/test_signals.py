"""Ctrl-C, SIGTERM and SIGHUP at every moment of a rewrite: the result is there whole, or nothing is."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rewrite_models import listing, untimed
from tests.checkpoint.tiny_checkpoints import llama

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
INTERRUPTED = Path(__file__).with_name("interrupted_rewrite.py")

# A verb that stops once everything is written, and would go on for a minute.
SLOW = """
import sys, time
from tiewise.checkpoint.rewrite import engine
engine.verify = lambda *given: time.sleep(60)
from tiewise.__main__ import main
sys.argv = ["tiewise", "untie", "a", "--to", "b"]
main()
"""


@pytest.mark.parametrize("step", [17, pytest.param(4, marks=pytest.mark.slow)], ids=["some", "many"])
@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_a_signal_at_any_moment_leaves_all_or_nothing(tmp_path, number, step):
    llama(tmp_path / "folder/a")
    command = [sys.executable, INTERRUPTED, tmp_path / "folder", str(int(number)), str(step)]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    results = tmp_path / "folder-results"
    whole = untimed(results / "whole")
    assert report["lines"] > 150
    assert len(report["moments"]) == len(range(1, report["lines"], step))
    for moment, ended in report["moments"].items():
        assert set(ended["left"]) <= {f"b{moment}"}, moment
        if ended["left"]:
            assert untimed(results / f"b{moment}") == whole, moment
    codes = {ended["code"] for ended in report["moments"].values()}
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


# starts a program with these dispositions: nohup, or the background of a shell, may have started the suite with others
DISPOSED = """
import json, os, signal, sys
for number, handler in json.loads(sys.argv[1]).items():
    signal.signal(int(number), handler)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""


def begun(folder, ignored=None):
    """The command, once everything that it writes lies in its hidden folder."""

    handlers = {number: signal.SIG_IGN if number == ignored else signal.SIG_DFL for number in CODES}
    disposed = json.dumps({int(number): int(handler) for number, handler in handlers.items()})
    command = [sys.executable, "-c", DISPOSED, disposed, SLOW]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(Path(folder).glob(".b.tiewise-*/tiewise.json")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process
