"""Every command of docs/errata.md and docs/plan.md that shows its output prints what stands under it."""

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from tiewise.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("errata.md", "plan.md"))


def commands():
    """(command, the lines under it) of every console block; a command may run over lines inside its quotes."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, flags=re.S | re.M):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            lines = part.splitlines()
            length = next(n for n in range(1, len(lines) + 1) if "\n".join(lines[:n]).count('"') % 2 == 0)
            found.append(("\n".join(lines[:length]), lines[length:]))
    return found


def output(command, monkeypatch):
    words = shlex.split(command)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if words[:2] == ["python", "-c"]:
            (code,) = words[2:]
            exec(code, {"__name__": "__main__"})
        else:
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == 0
    return said.getvalue()


def test_there_are_commands():
    assert len(commands()) >= 22
    assert {command.split()[0] for command, _ in commands()} == {"python", "tiewise"}


@pytest.mark.parametrize(("command", "expected"), commands(), ids=lambda value: str(value)[-60:])
def test_a_command_prints_what_stands_under_it(command, expected, monkeypatch):
    printed = output(command, monkeypatch)
    assert expected
    if command.startswith("python"):
        assert printed.splitlines() == expected
    else:  # of a table, the lines that matter
        flat = " ".join(printed.split())
        assert all(line in flat for line in expected)
