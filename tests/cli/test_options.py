"""Test the progress bar of commands and the message about missing packages."""

import io
import math
import sys

import pytest

from tiewise.cli import options
from tiewise.core.errors import RunError
from tiewise.core.progress import report_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_need_names_missing_package_and_its_extra():
    options.need("json")
    for named, extra in (({}, "torch"), ({"extra": "plots"}, "plots")):
        with pytest.raises(RunError, match=rf"needs no_such_package; pip install 'tiewise\[{extra}\]'"):
            options.need("json", "no_such_package", **named)


@pytest.mark.parametrize("reads", [False, True])
def test_progress_bar_shows_one_bar_for_all_tasks(reads, monkeypatch):
    """Several bars would move the cursor up; a bar that stops at the first task would keep its name on the screen."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for name in ("NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with options.progress_bar(False, reads, soon=0):
        for what, done in (("[first]", 0), ("second", 3), ("third", 5)):
            report_progress(what, done, 9)
    assert "third" in terminal.getvalue()
    assert "\x1b[1A" not in terminal.getvalue().rpartition("third")[0]


@pytest.mark.parametrize(
    ("quiet", "reads", "after", "lines"),
    [
        (False, False, 0, ["first (0 %)", "second (33 %)"]),  # one line per stage
        (False, False, math.inf, []),  # short work
        (True, False, 0, []),
        (False, True, 0, []),  # files
    ],
)
def test_progress_bar_prints_a_line_per_stage_without_terminal(capsys, monkeypatch, quiet, reads, after, lines):
    monkeypatch.setattr(options, "LINES_AFTER", after)
    with options.progress_bar(quiet, reads=reads, soon=0):
        for stage, done in (("first", 0), ("first", 1), ("second", 3), ("first", 4), ("second", 5)):
            report_progress(stage, done, 9)
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("is_terminal", [True, False])
def test_stage_without_measure_is_one_line(capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(options, "LINES_AFTER", 0)
    with options.progress_bar(False, reads=False, soon=0):
        for _ in range(3):
            report_progress("building X without weights", 0, 0)
    assert capsys.readouterr().err.count("building X without weights") == 1
