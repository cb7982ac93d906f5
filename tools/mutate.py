"""Change one line of the package at a time and see whether the quick tests notice.

    python tools/mutate.py --collect                    run the quick suite with coverage by test (needed once)
    python tools/mutate.py --seed 34 --count 200        draw mutants and run them; the same command continues a run
    python tools/mutate.py --recheck FILE               run each killed mutant of FILE against today's tests
    python tools/mutate.py --summary FILE               print the score, the outcomes and the survivors

Each mutant runs with the quick tests that execute its line, the most specific first, until one fails. The tool chooses
at most 200 of these tests, and at most 45 CPU seconds. A mutant is killed if a test fails, if a module no longer
imports or if the process crashes. A mutant that exceeds 60 CPU seconds is killed if its tests need less than 20
without it. Otherwise it counts as survived, not decided.

Data and results are in .cache/mutate, which git ignores. Results name a mutant by its file, its line and both texts, so
that `--recheck` finds a line that has moved within its file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from mutation.choice import Mutant, choose, draw, stages, tests_of  # noqa: E402
from mutation.coverage_data import DATA, QUIET, Coverage, collect  # noqa: E402
from mutation.operators import OPERATORS, Source, edits_of  # noqa: E402
from mutation.results import Result, ResultFile, summary  # noqa: E402
from mutation.serve import Job, Report  # noqa: E402

CPU_SECONDS = 60.0  # limit for one mutant
WALL_SECONDS = 600.0  # limit for one mutant; a busy machine gives a process a fraction of a core
PRELOADED = (  # modules that a test server imports once
    "numpy",
    "scipy.stats",
    "hypothesis",
    "rich.console",
    "typer",
    "safetensors.torch",
    "torch",
    "transformers",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "plotly.graph_objects",
)
SANITY_MUTANTS = 4  # their tests first run without a mutant
SANITY_SECONDS = 300.0  # CPU seconds of such a run
Task = TypeVar("Task")


class Server:
    """Process of `mutation/serve.py`, with a separate copy of the project."""

    def __init__(self, root: Path, scratch: Path, preloaded: Sequence[str] = PRELOADED):
        copy = scratch / "project"
        copy_project(root, copy)
        for name in ("tmp", "cache"):
            (scratch / name).mkdir()
        kernels = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tiewise"
        if kernels.is_dir():
            shutil.copytree(kernels, scratch / "cache" / "tiewise")
        settings = os.environ | QUIET | {"PYTHONPATH": str(copy / "src")}
        settings |= {"TMPDIR": str(scratch / "tmp"), "XDG_CACHE_HOME": str(scratch / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "mutation" / "serve.py"), str(copy), *preloaded],
            cwd=copy,
            env=settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, job: Job) -> Report:
        """Run a job; return its report."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the test server ended; its output is above")
        return Report(**json.loads(line))

    def close(self) -> None:
        """End the process and the tests that it runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def copy_project(root: Path, copy: Path) -> None:
    """Copy the files that git would commit, and compile the package by content.

    Python compares a usual `.pyc` by time and size, which a mutant can share with the original. It compares one of the
    kind `checked-hash` by content.
    """
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    compiling = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", str(copy / "src")]
    subprocess.run(compiling, check=True)


@contextlib.contextmanager
def servers(root: Path, count: int, preloaded: Sequence[str] = PRELOADED) -> Iterator[list[Server]]:
    """Start test servers on temporary copies of the project; end them and remove the copies."""
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        started: list[Server] = []
        try:
            for number in range(count):
                scratch = Path(folder) / str(number)
                scratch.mkdir()
                started.append(Server(root, scratch, preloaded))
            yield started
        finally:
            for server in started:
                server.close()


def in_parallel(started: list[Server], tasks: list[Task], work: Callable[[Server, Task], None]) -> None:
    """Give the tasks to the servers; each takes the next one when it is free."""
    waiting = deque(tasks)
    errors: list[BaseException] = []

    def serve(server: Server) -> None:
        """Run waiting tasks until none is left or one raises."""
        while waiting and not errors:
            try:
                work(server, waiting.popleft())
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=serve, args=(server,), daemon=True) for server in started]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)  # unlike join, this lets Ctrl-C through
    if errors:
        raise errors[0]


@dataclass
class Judge:
    """Runner of mutants that names their outcomes; `excluded` tests fail without a mutant."""

    coverage: Coverage
    excluded: set[str]
    cpu_seconds: float = CPU_SECONDS
    wall_seconds: float = WALL_SECONDS

    def judge(self, server: Server, mutant: Mutant, tests: list[str]) -> Result:
        """Run the tests in stages until one kills the mutant."""
        allowed = [test for test in tests if test not in self.excluded]
        ran, used, wall, expected = 0, 0.0, 0.0, 0.0
        for stage in stages(allowed, self.coverage):
            expected += sum(self.coverage.seconds.get(test, 0.0) for test in stage)
            job = Job(
                stage, self.cpu_seconds - used, self.wall_seconds - wall, mutant.file, mutant.line, mutant.mutated
            )
            report = server.run(job)
            ran, used, wall = ran + report.ran, used + report.cpu, wall + report.wall
            outcome, how = self.verdict(report.outcome, expected)
            if how != "passed":
                test = report.failed[0] if report.failed else ""
                return Result(mutant, outcome, how, test, ran, round(used, 1))
        return Result(mutant, "survived", "passed", "", ran, round(used, 1))

    def verdict(self, outcome: str, expected_seconds: float) -> tuple[str, str]:
        """Return outcome and `how` of a mutant from the outcome that a server reported.

        A timeout kills only if the tests need less than a third of the limit without a mutant: then the mutant loops.
        """
        if outcome == "failed":
            return "killed", "test"
        if outcome in ("import", "crashed"):
            return "killed", outcome
        if outcome == "timeout":
            is_loop = expected_seconds < self.cpu_seconds / 3
            return ("killed", "timeout") if is_loop else ("survived", "undecided")
        return "survived", "passed"


def run(arguments: argparse.Namespace) -> ResultFile:
    """Draw mutants, run those without a result, and confirm the tests that killed."""
    root, data = arguments.root, arguments.data
    coverage = read_coverage(data)
    selected = draw(root, coverage, arguments.seed, arguments.count)
    file = ResultFile(arguments.results or data / f"results-{arguments.seed}.jsonl")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    header = {"seed": arguments.seed, "count": arguments.count, "commit": commit, "lines": selected.counts}
    header |= {"limit": arguments.limit, "operators": sorted(OPERATORS)}
    file.begin(header)
    with servers(root, arguments.workers, arguments.preload) as started:
        excluded = check_sanity(started, file, selected.tests, selected.mutants[:SANITY_MUTANTS])
        judge = Judge(coverage, excluded, arguments.limit)
        while waiting := [mutant for mutant in selected.mutants if mutant.key not in file.results]:
            judge_all(started, judge, [(mutant, selected.tests[mutant]) for mutant in waiting], file)
            unreliable = confirm_killers(started, file)
            judge.excluded |= unreliable
            for key in [key for key, result in file.results.items() if result.test in unreliable and result.test]:
                del file.results[key]
    return file


def read_coverage(data: Path) -> Coverage:
    """Read the data of `--collect`."""
    if not (data / DATA).is_file():
        raise SystemExit(f"{data / DATA} does not exist; run `python tools/mutate.py --collect` first")
    return Coverage.read(data)


def judge_all(started: list[Server], judge: Judge, waiting: list[tuple[Mutant, list[str]]], file: ResultFile) -> None:
    """Run mutants on all servers; record and print each outcome."""
    total = len(file.results) + len(waiting)

    def work(server: Server, task: tuple[Mutant, list[str]]) -> None:
        """Judge one mutant and record the result."""
        result = judge.judge(server, *task)
        file.add(result)
        print_result(result, len(file.results), total)

    in_parallel(started, waiting, work)


def print_result(result: Result, done: int, total: int) -> None:
    """Print one line for a mutant."""
    mutant = result.mutant
    by = f" by {result.test}" if result.test else ""
    where = f"{mutant.file}:{mutant.line}"
    text = f"{result.outcome} ({result.how}, {result.seconds:.1f} s, {result.tests} tests){by}"
    print(f"[{done}/{total}] {where} {mutant.change}: {text}", flush=True)


def check_sanity(
    started: list[Server], file: ResultFile, tests: dict[Mutant, list[str]], sample: list[Mutant]
) -> set[str]:
    """Run the tests of some mutants without them; return the tests to exclude."""
    if "sanity" not in file.notes:
        failed, ran = run_unchanged(started, [tests[mutant] for mutant in sample])
        file.note("sanity", {"tests": ran, "failed": sorted(failed)})
    return set(file.notes["sanity"]["failed"]) | set(file.notes.get("unreliable", []))


def confirm_killers(started: list[Server], file: ResultFile) -> set[str]:
    """Run every test that killed a mutant without one; return those that fail."""
    killers = sorted({result.test for result in file.results.values() if result.how == "test"})
    share = -(-len(killers) // len(started))
    parts = [killers[start : start + share] for start in range(0, len(killers), share or 1)]
    failed, ran = run_unchanged(started, parts)
    file.note("confirmed killers", {"tests": ran, "failed": sorted(failed)})
    file.note("unreliable", sorted(failed | set(file.notes.get("unreliable", []))))
    return failed


def run_unchanged(started: list[Server], groups: list[list[str]]) -> tuple[set[str], int]:
    """Run groups of tests without a mutant; return the failures and the number of tests."""
    reports: list[Report] = []

    def work(server: Server, tests: list[str]) -> None:
        """Run one group of tests."""
        reports.append(server.run(Job(tests, SANITY_SECONDS, 2 * SANITY_SECONDS, stop_at_first=False)))

    in_parallel(started, groups, work)
    unfinished = [report.outcome for report in reports if report.outcome not in ("passed", "failed")]
    if unfinished:
        raise SystemExit(f"tests without a mutant ended as {', '.join(unfinished)}; the tree must pass its tests first")
    return {test for report in reports for test in report.failed}, sum(report.ran for report in reports)


def recheck(arguments: argparse.Namespace) -> ResultFile:
    """Run each killed mutant of a file of results on this tree.

    The test that killed it runs first. If that passes or is gone, the tests that are chosen today run.
    """
    root, before = arguments.root, ResultFile(arguments.recheck)
    coverage = read_coverage(arguments.data)
    file = ResultFile(arguments.results or arguments.data / f"recheck-{arguments.recheck.stem}.jsonl")
    file.begin({"recheck of": arguments.recheck.name, **before.header})
    killed = [result for result in before.results.values() if result.outcome == "killed"]
    waiting = [result for result in killed if result.mutant.key not in file.results]
    judge = Judge(coverage, set(), arguments.limit)

    def work(server: Server, result: Result) -> None:
        """Judge one mutant again and record the result."""
        again = judge_again(server, judge, root, result)
        file.add(again)
        print_result(again, len(file.results), len(killed))

    with servers(root, arguments.workers, arguments.preload) as started:
        in_parallel(started, waiting, work)
    return file


def judge_again(server: Server, judge: Judge, root: Path, result: Result) -> Result:
    """Return the outcome on this tree, under the mutant's earlier file and line."""
    line = locate(root, result.mutant)
    if line is None:
        return Result(result.mutant, "gone", "the source line changed")
    mutant = replace(result.mutant, line=line)
    again = Result(mutant, "survived", "passed")
    if result.how == "test":
        again = judge.judge(server, mutant, [result.test])
    if again.outcome == "survived":
        again = judge.judge(server, mutant, selection(root, mutant, judge.coverage))
    return replace(again, mutant=result.mutant)


def locate(root: Path, mutant: Mutant) -> int | None:
    """Return the nearest line of the file that has the mutant's original text."""
    path = root / mutant.file
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    numbers = [number for number, line in enumerate(lines, 1) if line == mutant.original]
    return min(numbers, key=lambda number: abs(number - mutant.line), default=None)


def selection(root: Path, mutant: Mutant, coverage: Coverage) -> list[str]:
    """Choose the tests of a mutant on this tree."""
    lines = edits_of(Source((root / mutant.file).read_text(encoding="utf-8")))
    around = [line for line in lines if line.line <= mutant.line <= line.last]
    return choose(tests_of(around[-1], mutant.file, coverage), coverage) if around else []


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--collect", action="store_true", help="run the quick suite with coverage by test")
    task.add_argument("--seed", type=int, help="draw mutants with this seed and run them")
    task.add_argument("--recheck", type=Path, metavar="FILE", help="run the killed mutants of a file of results")
    task.add_argument("--summary", type=Path, metavar="FILE", help="print a file of results as Markdown")
    parser.add_argument("--count", type=int, default=200, help="mutants to draw (default: 200)")
    parser.add_argument("--workers", type=int, default=2, help="test servers, one for a core (default: 2)")
    parser.add_argument("--limit", type=float, default=CPU_SECONDS, help="CPU seconds of a mutant (default: 60)")
    parser.add_argument("--root", type=Path, default=ROOT, help="project to mutate (default: this one)")
    parser.add_argument("--data", type=Path, help="folder of coverage and results (default: ROOT/.cache/mutate)")
    parser.add_argument("--results", type=Path, help="file of results (default: in the data folder)")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help="modules that a test server imports once")
    arguments = parser.parse_args(words)
    arguments.root = arguments.root.resolve()
    arguments.data = (arguments.data or arguments.root / ".cache" / "mutate").resolve()
    return arguments


def main(words: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = parse(words)
    if arguments.collect:
        return collect(arguments.root, arguments.data, arguments.workers)
    if arguments.summary:
        print(summary(ResultFile(arguments.summary)), end="")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background processes ignore it
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        file: ResultFile = recheck(arguments) if arguments.recheck else run(arguments)
    except KeyboardInterrupt:
        print("Interrupted. The results so far are saved; the same command continues.", file=sys.stderr)
        return 130
    print(summary(file), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
