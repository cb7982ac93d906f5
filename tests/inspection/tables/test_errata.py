"""Commands of docs/dev/errata.md and docs/plan.md print the output that the pages show below them."""

import contextlib
import io
import runpy
import shlex
from pathlib import Path

import pytest

from tiewise.cli.main import main

ROOT = Path(__file__).parents[3]
RUN = runpy.run_path(str(ROOT / "tools" / "run_docs.py"))
PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("dev/errata.md", "plan.md")]
CONSOLES = [one for page in PAGES for one in RUN["examples"](page) if one.kind == "console"]
COMMANDS = [(command, lines) for console in CONSOLES for command, lines in RUN["commands"](console)]


def test_errata_and_plan_pages_contain_commands():
    assert len(COMMANDS) >= 22
    assert {command.split()[0] for command, _ in COMMANDS} == {"python", "tiewise"}


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=lambda value: str(value)[-60:])
def test_documented_command_prints_the_output_below_it(command, expected, type_command):
    words, said = shlex.split(command), io.StringIO()
    assert expected
    with contextlib.redirect_stdout(said):
        if words[:2] == ["python", "-c"]:
            exec(*words[2:], {"__name__": "__main__"})
        else:
            type_command(*words)
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == 0
    if words[0] == "python":
        assert said.getvalue().splitlines() == expected
    else:  # the page shows only some lines of a table
        flat = " ".join(said.getvalue().split())
        assert all(line in flat for line in expected)
