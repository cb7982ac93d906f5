"""Test that `tools/set_up.py` reports the stages of an installation and its failure."""

import sys
import time
from importlib.util import cache_from_source
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import set_up

PIP_LINES = {  # lines as pip 24 prints them, with the stage that each starts
    "Collecting torch==2.13.0 (from -r x)": "finding torch",
    "Collecting numpy>=1.26 (from tiewise==0.2.0)": "finding numpy",
    "  Downloading torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (190.1 MB)": "downloading torch (190.1 MB)",
    "  Using cached ml_dtypes-0.5.4-cp311-cp311-manylinux_2_28_x86_64.whl (5.0 MB)": "downloading ml_dtypes (5.0 MB)",
    "Installing collected packages: torch, numpy": "unpacking all packages",
    "Requirement already satisfied: pip in ./.venv": None,
    "": None,
}


@pytest.mark.parametrize("line", PIP_LINES)
def test_stage_of_reads_lines_of_pip(line):
    assert set_up.stage_of(line) == PIP_LINES[line]


def test_remaining_adds_the_training_and_never_drops_below_it():
    status = set_up.Status(expected=80, afterwards=180, start=0, shows=False)
    assert status.remaining(0) == "about 4 min"  # 260 s
    assert status.remaining(20) == "about 4 min"  # 240 s
    assert status.remaining(1000) == "about 3 min"  # the training, and 10 s
    assert set_up.Status(80, 0, 0, False).remaining(30) == "about 50 s"


def test_failed_command_exits_with_its_last_lines():
    command = [sys.executable, "-c", "print('ERROR: no such package'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match="ERROR: no such package"):
        list(set_up.lines_of(command))


def test_lines_of_yields_both_streams():
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr, flush=True)"
    assert list(set_up.lines_of([sys.executable, "-c", code])) == ["one\n", "two\n"]


def test_background_compiler_compiles_modules_as_they_grow_and_skips_others(tmp_path, monkeypatch):
    monkeypatch.setattr(set_up, "IMPORTED", ("one",))
    module, faulty = tmp_path / "one" / "grows.py", tmp_path / "one" / "faulty.py"
    skipped = [tmp_path / "one" / "tests" / "test.py", tmp_path / "other" / "unused.py"]
    for path in (module, faulty, *skipped):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("value = 1\n")
    faulty.write_text("value = (\n")
    compiled = Path(cache_from_source(module))
    with set_up.BackgroundCompiler(tmp_path):
        wait_until(compiled.exists)
        module.write_text("value = 1\nother = 'added'\n")  # pip writes the rest of the module
        wait_until(lambda: b"added" in compiled.read_bytes())
    assert not any(Path(cache_from_source(path)).exists() for path in (faulty, *skipped))


def wait_until(condition):
    """Return as soon as a condition holds; fail after ten seconds."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
