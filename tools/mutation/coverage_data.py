"""Coverage of the quick suite by test: lines and CPU time.

`collect` runs the quick suite once with pytest-cov, and `Coverage.read` reads the data. This module is also the pytest
plugin (`-p mutation.coverage_data`) that records the CPU seconds of each test.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

DATA = "coverage"  # file of coverage, in the data folder
SECONDS = "seconds"  # start of the names of the files of CPU times
SECONDS_VARIABLE = "TIEWISE_MUTATE_SECONDS"
PACKAGE = "src/tiewise/"
# These tests change the user of the process, and that user may not write the file of coverage.
NOT_COLLECTED = ("tests/training/data/test_sources.py::test_open_sources_reports_missing_read_permission",)
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "true"}
LINES_BY_TEST = """
    SELECT file.path, context.context, line_bits.numbits FROM line_bits
    JOIN file ON file.id = line_bits.file_id JOIN context ON context.id = line_bits.context_id
"""  # the schema is public: https://coverage.readthedocs.io/en/latest/dbschema.html

Masks = dict[str, dict[str, int]]


class Coverage:
    """Lines that each test executes, as bit masks: bit n of `called[file][test]` is line n.

    `called` has the lines that a test's body executes, `prepared` those of its fixtures. `breadth` counts the lines of
    the package that a test executes, `seconds` is its CPU time, and `executed[file]` has the lines of all tests.
    """

    def __init__(self, called: Masks, prepared: Masks, seconds: dict[str, float]):
        self.called = called
        self.prepared = prepared
        self.seconds = seconds
        self.breadth: dict[str, int] = defaultdict(int)
        self.executed: dict[str, int] = defaultdict(int)
        for file, masks in (*called.items(), *prepared.items()):
            for test, mask in masks.items():
                self.breadth[test] += mask.bit_count()
                self.executed[file] |= mask

    @classmethod
    def read(cls, folder: Path) -> Coverage:
        """Read the data that `collect` wrote into a folder."""
        called: Masks = defaultdict(dict)
        prepared: Masks = defaultdict(dict)
        with sqlite3.connect(f"file:{folder / DATA}?mode=ro", uri=True) as database:
            for path, context, numbits in database.execute(LINES_BY_TEST):
                test, _, phase = context.rpartition("|")
                name = path.replace("\\", "/").rpartition(f"/{PACKAGE}")[2]
                if test:
                    masks = (called if phase == "run" else prepared)[PACKAGE + name]
                    masks[test] = masks.get(test, 0) | int.from_bytes(numbits, "little")
        return cls(called, prepared, dict(_seconds(folder)))

    def callers(self, file: str, lines: int) -> set[str]:
        """Return the tests whose bodies execute any of these lines, given as a mask."""
        return {test for test, mask in self.called.get(file, {}).items() if mask & lines}

    def preparers(self, file: str, lines: int) -> set[str]:
        """Return the tests whose fixtures execute any of these lines, given as a mask."""
        return {test for test, mask in self.prepared.get(file, {}).items() if mask & lines}


def mask_of(lines: range | list[int]) -> int:
    """Return the mask that has the bits of these lines."""
    mask = 0
    for line in lines:
        mask |= 1 << line
    return mask


def _seconds(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield each test with its CPU seconds."""
    for path in sorted(folder.glob(f"{SECONDS}.*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            test, seconds, *_ = json.loads(line)
            yield test, seconds


def collect(root: Path, folder: Path, workers: int) -> int:
    """Run the quick suite once with coverage by test; return pytest's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob(f"{SECONDS}.*"), *folder.glob(f"{DATA}*")]:
        path.unlink()
    paths = [str(root / "src"), str(Path(__file__).parents[1])]
    settings = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(paths), "COVERAGE_CORE": "ctrace"}
    settings |= {"COVERAGE_FILE": str(folder / DATA), SECONDS_VARIABLE: str(folder / SECONDS)}
    command = [sys.executable, "-m", "pytest", "-p", "mutation.coverage_data"]
    command += ["-n", str(workers), "--dist", "worksteal"] if workers else []
    command += ["--cov=tiewise", "--cov-context=test", "--cov-report="]
    command += [f"--deselect={test}" for test in NOT_COLLECTED]
    return subprocess.run(command, cwd=root, env=settings).returncode


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the CPU seconds of a test and of the child processes that it waited for.

    A test that sets a trace function ends coverage for all later tests, so coverage's trace function is set again.
    """
    before, tracer = _cpu_seconds(), sys.gettrace()
    result = yield
    if sys.gettrace() is not tracer:
        sys.settrace(tracer)
    if SECONDS_VARIABLE in os.environ:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        with open(f"{os.environ[SECONDS_VARIABLE]}.{worker}", "a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, round(_cpu_seconds() - before, 3)]) + "\n")
    return result
