"""Process that runs tests on mutants: `python serve.py COPY MODULE …`.

Each line of its input is a job as JSON. The process imports the modules once and forks a child for each job, so that
children need not import them. It never imports the package or the tests, so that each child imports the mutant. COPY
is a copy of the project that this process alone uses. Limits count the CPU seconds of the child and its descendants,
since other programs may slow the machine.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import pytest

POLL_SECONDS = 0.05
MEASURE_SECONDS = 1.0  # reading the CPU time of all processes takes several milliseconds
LOG = "mutate.log"
REPORT = "mutate-report.json"


@dataclass
class Job:
    """Tests to run, with or without a mutant: `line` of `file` becomes `mutated`."""

    tests: list[str]
    cpu_seconds: float
    wall_seconds: float
    file: str = ""
    line: int = 0
    mutated: str = ""
    stop_at_first: bool = True


@dataclass
class Report:
    """Outcome of a job: passed, failed, import, crashed, timeout or none (no test was selected)."""

    outcome: str
    failed: list[str] = field(default_factory=list)
    ran: int = 0
    cpu: float = 0.0
    wall: float = 0.0


class ChosenTests:
    """Pytest plugin that runs chosen tests only, file by file, and records which ones fail."""

    def __init__(self, job: Job, report: Path):
        self.rank = {test: position for position, test in enumerate(job.tests)}
        self.files: dict[str, int] = {}
        for test in job.tests:
            self.files.setdefault(test.partition("::")[0], len(self.files))
        self.path = report
        self.report = Report("passed")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the chosen tests; files follow their best test, so that module fixtures are made once."""
        others = [item for item in items if item.nodeid not in self.rank]
        items[:] = [item for item in items if item.nodeid in self.rank]
        items.sort(key=lambda item: self.files[item.nodeid.partition("::")[0]])
        if others:
            config.hook.pytest_deselected(items=others)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a test file that cannot be imported."""
        if report.failed:
            self.report.outcome = "import"
            self.report.failed.append(report.nodeid)
            self.save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test and record a failure at once, in case the process does not survive."""
        self.report.ran += report.when == "call"
        if report.failed:
            self.report.outcome = "failed"
            if report.nodeid not in self.report.failed:
                self.report.failed.append(report.nodeid)
            self.save()

    def save(self) -> None:
        """Write the report where the parent reads it."""
        self.path.write_text(json.dumps(asdict(self.report)), encoding="utf-8")


class Server:
    """Runner of jobs in a copy of the project, one after another."""

    def __init__(self, copy: Path):
        self.copy = copy
        self.scratch = copy.parent
        self.parent = os.getppid()
        paths = [path for path in copy.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        self.original = {path: path.read_bytes() for path in paths}
        self.stamps = {path: _stamp(path) for path in paths}

    def run(self, job: Job) -> Report:
        """Run the tests of a job in a child process; leave the copy as it was."""
        (self.scratch / REPORT).unlink(missing_ok=True)
        self.change(job)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self.in_child(job)
        tree = ProcessTree(pid)
        try:
            report = self.wait(tree, job)
        finally:
            tree.kill()
            self.restore()
        report.wall = round(time.monotonic() - started, 2)
        return report

    def change(self, job: Job) -> None:
        """Write the mutated line."""
        if job.file:
            path = self.copy / job.file
            lines = self.original[path].decode().split("\n")
            lines[job.line - 1] = job.mutated
            path.write_text("\n".join(lines), encoding="utf-8")

    def restore(self) -> None:
        """Write back every file that the mutant or its tests changed."""
        for path, data in self.original.items():
            if _stamp(path) != self.stamps[path]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                self.stamps[path] = _stamp(path)

    def in_child(self, job: Job) -> None:
        """Run pytest in this process, then end it."""
        status = 70
        try:
            os.setsid()
            os.chdir(self.copy)
            output = os.open(self.scratch / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            status = self.pytest(job)
        finally:
            os._exit(status)

    def pytest(self, job: Job) -> int:
        """Run the chosen tests; return pytest's exit code."""
        chosen = ChosenTests(job, self.scratch / REPORT)
        files = [file for file in chosen.files if (self.copy / file).is_file()]
        options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={self.scratch / 'pytest'}"]
        options += ["-x"] if job.stop_at_first else []
        code = int(pytest.main([*options, *files], plugins=[chosen])) if files else 5
        if code in (2, 3, 4) and chosen.report.outcome == "passed":
            chosen.report.outcome = "import" if code == 4 else "crashed"
        if code == 5:
            chosen.report.outcome = "none"
        chosen.save()
        return code

    def wait(self, tree: ProcessTree, job: Job) -> Report:
        """Wait for the child and return its report.

        The child is killed if it exceeds a limit or if this process lost its parent.
        """
        pid = tree.root.pid
        started = measured = time.monotonic()
        is_late = False
        while (ended := os.wait4(pid, os.WNOHANG))[0] == 0:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - measured < MEASURE_SECONDS:
                continue
            measured = time.monotonic()
            is_late = tree.cpu_seconds() > job.cpu_seconds or measured - started > job.wall_seconds
            if is_late or os.getppid() != self.parent:
                tree.kill()
                ended = os.wait4(pid, 0)
                break
        _, status, usage = ended
        report = self.read_report(is_late, status)
        report.cpu = round(max(tree.used, usage.ru_utime + usage.ru_stime), 2)
        return report

    def read_report(self, is_late: bool, status: int) -> Report:
        """Return what the child wrote, or that it ended before it could."""
        path = self.scratch / REPORT
        report = Report(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Report("crashed")
        if is_late and report.outcome not in ("failed", "import"):
            report.outcome = "timeout"
        elif os.WIFSIGNALED(status) and report.outcome == "passed":
            report.outcome = "crashed"
        return report


class ProcessTree:
    """Process and all its descendants that one poll has seen."""

    def __init__(self, pid: int):
        self.root = psutil.Process(pid)
        self.seen = {self.root}
        self.used = 0.0

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the tree has used, those of ended children included."""
        try:
            self.seen.update(self.root.children(recursive=True))
        except psutil.Error:
            return self.used
        total = 0.0
        for process in self.seen:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        self.used = max(self.used, total)
        return self.used

    def kill(self) -> None:
        """End all processes of the tree."""
        self.cpu_seconds()
        for process in self.seen:
            try:
                process.kill()
            except psutil.Error:
                continue


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the time and size of a file, or None if it is missing."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def main() -> None:
    """Read jobs from the input until it ends; print a report for each."""
    copy = Path(sys.argv[1])
    sys.path.remove(str(Path(__file__).parent))  # its modules must not hide those that tests import
    jobs, reports = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    server = Server(copy)
    for line in jobs:
        report = server.run(Job(**json.loads(line)))
        print(json.dumps(asdict(report)), file=reports, flush=True)


if __name__ == "__main__":
    main()
