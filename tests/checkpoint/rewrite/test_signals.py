"""Test that SIGINT, SIGTERM and SIGHUP at any moment of a rewrite leave a complete result or none."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rewrite_models import hash_files, hash_without_times
from tests.checkpoint.tiny_checkpoints import llama

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
INTERRUPTED = Path(__file__).with_name("interrupted_rewrite.py")

# A verb that pauses for a minute after it has written all files.
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
def test_signal_during_rewrite_leaves_complete_result_or_none(tmp_path, number, step):
    llama(tmp_path / "folder/a")
    command = [sys.executable, INTERRUPTED, tmp_path / "folder", str(int(number)), str(step)]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    results = tmp_path / "folder-results"
    whole = hash_without_times(results / "whole")
    assert report["lines"] > 150
    assert len(report["moments"]) == len(range(1, report["lines"], step))
    for moment, ended in report["moments"].items():
        assert set(ended["left"]) <= {f"b{moment}"}, moment
        if ended["left"]:
            assert hash_without_times(results / f"b{moment}") == whole, moment
    codes = {ended["code"] for ended in report["moments"].values()}
    # before and after the engine's clean-up is active, SIGTERM and SIGHUP end the process directly
    assert CODES[number] in codes
    assert codes <= {CODES[number], -number}


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_command_reports_interruption_and_exits_with_signal_code(tmp_path, number):
    llama(tmp_path / "a")
    before = hash_files(tmp_path)
    for twice in (False, True):
        process = start_command(tmp_path)
        for _ in range(1 + twice):
            process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == CODES[number]
        assert said == "tiewise: interrupted; a is as it was and b was not made\n"
        assert hash_files(tmp_path) == before


@pytest.mark.parametrize("number", CODES, ids=lambda number: number.name)
def test_command_keeps_ignoring_ignored_signals(tmp_path, number):
    """nohup ignores SIGHUP, and a shell ignores SIGINT for background jobs."""
    llama(tmp_path / "a")
    process = start_command(tmp_path, ignored=number)
    process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM if number != signal.SIGTERM else signal.SIGINT)
    process.communicate(timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# starts a program with these signal dispositions, because nohup or a shell may have changed those of the suite
DISPOSED = """
import json, os, signal, sys
for number, handler in json.loads(sys.argv[1]).items():
    signal.signal(int(number), handler)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""


def start_command(folder, ignored=None):
    """Start the command and return its process when its hidden folder is complete."""

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
