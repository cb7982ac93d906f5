"""Compare the tests of two revisions by function name and parameters, whatever files they are in.

    python tools/test_inventory.py REV_A REV_B                   report removed, added and moved tests
    python tools/test_inventory.py REV_A REV_B --renames FILE    the same, after renaming tests of REV_A
    python tools/test_inventory.py REV_A REV_B --removed FILE    read the reasons here, not in REV_B's tests/removed.md

pytest collects each revision in a git worktree, with that revision's `src` first on the path. A test moves if it was
quick and is slow now, or the reverse. Tests of one name in several files are counted, so that a lost one is reported.

The file of renames has a row for each rename: old and new, with a tab, two spaces or an arrow between them.

    test_says_*              test_reports_*              one star each: the same text
    test_one                 test_other                  every set of parameters keeps its own
    test_sizes[*-wide]       test_sizes[*-512]           with a bracket: name and parameters
    /test_(\\w+)_ok\\[(.*)\\]/   test_\\1[\\2]                  a regular expression for name and parameters

A removed test needs a line in `tests/removed.md` of REV_B. Its pattern is one of the above, in backquotes:

    - `test_three_arms[*-tied]`: `test_arms` compares these parameters with the same oracle.

Exit codes: 0 every removal has a reason, 1 some has none, 2 a revision or file that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from revisions import RevisionError, worktree

COLLECTED = "TEST_INVENTORY"  # environment variable with the path of the file that the plugin writes
REASONS = Path("tests") / "removed.md"
COLUMNS = re.compile(r"\t+| {2,}| → | -> ")
REASON = re.compile(r"- `(?P<pattern>.+)`: (?P<reason>\S.*)")
ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
FAILED = 2  # exit code


class InventoryError(Exception):
    """Error of a revision or file that cannot be used."""


@dataclass
class Suites:
    """Tests of one revision as `name[parameters]`, each with the number of its functions."""

    quick: Counter[str] = field(default_factory=Counter)
    slow: Counter[str] = field(default_factory=Counter)

    @property
    def both(self) -> Counter[str]:
        """Return the tests of both suites."""
        return self.quick + self.slow


@dataclass(frozen=True)
class Pattern:
    """Pattern for tests: a name, a text with one star, or a regular expression in slashes."""

    text: str
    expression: re.Pattern[str]
    is_expression: bool = False
    takes_parameters: bool = False  # whether it is compared with name and parameters, or with the name alone

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read the written form."""
        if len(text) > 2 and text.startswith("/") and text.endswith("/"):
            return cls(text, compiled(text[1:-1]), is_expression=True, takes_parameters=True)
        if text.count("*") > 1:
            raise InventoryError(f"{text} has {text.count('*')} stars; write one, or a regular expression in slashes")
        expression = re.compile("(.*)".join(map(re.escape, text.split("*"))), re.DOTALL)
        return cls(text, expression, takes_parameters="[" in text)

    def match(self, test: str) -> re.Match[str] | None:
        """Return the match of a test's name, or None."""
        subject = test if self.takes_parameters else test.partition("[")[0]
        return self.expression.fullmatch(subject)


def compiled(text: str) -> re.Pattern[str]:
    """Compile a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise InventoryError(f"/{text}/: {error}; correct the regular expression") from None


def expand(match: re.Match[str], new: str) -> str:
    """Return `new` with the groups of a match."""
    try:
        return match.expand(new)
    except (re.error, IndexError) as error:
        raise InventoryError(f"{new}: {error}; name groups of the regular expression") from None


@dataclass(frozen=True)
class Rename:
    """One row of the file of renames."""

    old: Pattern
    new: str

    def apply(self, test: str) -> str | None:
        """Return the new name of a test, or None if the row does not fit."""
        match = self.old.match(test)
        if match is None:
            return None
        if self.old.is_expression:
            return expand(match, self.new)
        renamed = self.new.replace("*", match[1]) if "*" in self.old.text else self.new
        return renamed if self.old.takes_parameters else renamed + test[len(match[0]) :]


@dataclass(frozen=True)
class Reason:
    """One line of the file of reasons."""

    pattern: Pattern
    text: str


@dataclass
class Difference:
    """Tests that only one revision has, and tests that changed the suite."""

    removed: Counter[str] = field(default_factory=Counter)
    added: Counter[str] = field(default_factory=Counter)
    to_slow: Counter[str] = field(default_factory=Counter)
    to_quick: Counter[str] = field(default_factory=Counter)


# collecting: pytest loads this file as a plugin


def pytest_collection_finish(session: Any) -> None:
    """Write the collected tests to the file that the environment names."""
    if COLLECTED not in os.environ:
        return
    folder = Path.cwd()
    require_packages_of(folder)
    suites: dict[str, list[str]] = {"quick": [], "slow": []}
    for item in session.items:
        suite = "slow" if item.get_closest_marker("slow") else "quick"
        suites[suite].append(without_paths(item.name, folder))
    Path(os.environ[COLLECTED]).write_text(json.dumps(suites), encoding="utf-8")


def require_packages_of(folder: Path) -> None:
    """Raise if a package of `folder`/src was imported from another folder."""
    for package in sorted((folder / "src").glob("*/__init__.py")):
        module = sys.modules.get(package.parent.name)
        if module is not None and Path(module.__file__ or "").resolve() != package.resolve():
            raise InventoryError(f"{package.parent.name} was imported from {module.__file__}, not from the revision")


def without_paths(test: str, folder: Path) -> str:
    """Replace addresses and temporary paths, which differ between two collections."""
    for path in (str(folder), str(folder.resolve())):
        test = test.replace(path, "…")
    temporary = re.escape(tempfile.gettempdir())
    return ADDRESS.sub("0x…", re.sub(rf"{temporary}/[^\s\]]*", "…", test))


def collect(folder: Path) -> Suites:
    """Collect the quick and slow tests of a folder with its own package."""
    with tempfile.TemporaryDirectory(prefix="test-inventory-") as temporary:
        written = Path(temporary) / "collected.json"
        paths = [folder / "src", folder, Path(__file__).parent]
        settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), COLLECTED: str(written), "PYTEST_ADDOPTS": ""}
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
        command += ["-p", "no:cacheprovider", "-p", Path(__file__).stem]
        done = subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True)
        if done.returncode or not written.is_file():
            raise InventoryError(f"pytest cannot collect {folder}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        suites = json.loads(written.read_text(encoding="utf-8"))
    return Suites(Counter(suites["quick"]), Counter(suites["slow"]))


# renames and reasons


def read_renames(path: Path) -> list[Rename]:
    """Read the file of renames; empty lines and lines that start with # are no rows."""
    rows = []
    for line in read_lines(path):
        if not line or line.startswith("#"):
            continue
        columns = COLUMNS.split(line)
        if len(columns) != 2:
            raise InventoryError(f"{path}: {line!r} has {len(columns)} columns; write old and new with a tab between")
        row = Rename(Pattern.parse(columns[0]), columns[1])
        if "*" in row.new and "*" not in row.old.text:
            raise InventoryError(f"{path}: {row.new} has a star and {row.old.text} has none; write one in both")
        rows.append(row)
    return rows


def read_reasons(path: Path) -> list[Reason]:
    """Read the file of reasons; lines that do not start with - ` are prose."""
    reasons = []
    for line in read_lines(path):
        if not line.startswith("- `"):
            continue
        match = REASON.fullmatch(line)
        if match is None:
            raise InventoryError(f"{path}: {line!r} is no reason; write - `test_name`: why it is removed")
        reasons.append(Reason(Pattern.parse(match["pattern"]), match["reason"]))
    return reasons


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file without white space around them."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InventoryError(f"{path}: {error}") from None


def rename_tests(tests: Counter[str], rows: list[Rename]) -> tuple[Counter[str], Counter[Rename]]:
    """Rename tests by the first row that fits each; count the uses of each row."""
    renamed: Counter[str] = Counter()
    uses: Counter[Rename] = Counter()
    for test, count in tests.items():
        new, row = first_rename(test, rows)
        renamed[new] += count
        if row is not None:
            uses[row] += count
    return renamed, uses


def first_rename(test: str, rows: list[Rename]) -> tuple[str, Rename | None]:
    """Return a test's name after renaming, and the row that fits it, if any."""
    for row in rows:
        new = row.apply(test)
        if new is not None:
            return new, row
    return test, None


def first_reason(test: str, reasons: list[Reason]) -> Reason | None:
    """Return the first reason whose pattern fits a test, or None."""
    return next((reason for reason in reasons if reason.pattern.match(test)), None)


# comparing and reporting


def compare(before: Suites, after: Suites) -> Difference:
    """Compare two revisions; a test that moved to the other suite is neither removed nor added."""
    difference = Difference(before.both - after.both, after.both - before.both)
    left_quick, left_slow = before.quick - after.quick, before.slow - after.slow
    difference.to_slow = left_quick & (after.slow - before.slow)
    difference.to_quick = left_slow & (after.quick - before.quick)
    return difference


def listed(heading: str, tests: Counter[str]) -> Iterator[str]:
    """Yield a heading with the number of tests, and a line for each."""
    yield f"{heading}: {tests.total()}"
    for test, count in sorted(tests.items()):
        yield f"  {test}{times(count)}"


def times(count: int) -> str:
    """Return the text "(N times)", or an empty text for 1."""
    return f"  ({count} times)" if count > 1 else ""


def by_function(tests: Iterable[str]) -> Counter[str]:
    """Count tests by the name of their function."""
    return Counter(test.partition("[")[0] for test in tests)


def rename_table(rows: list[Rename], uses: Counter[Rename]) -> Iterator[str]:
    """Yield the table of renames, with the number of tests that each row renamed."""
    if rows:
        yield f"renamed: {uses.total()}"
    width = max((len(row.old.text) for row in rows), default=0)
    for row in rows:
        unused = "" if uses[row] else "  (fits no test)"
        yield f"  {uses[row]:5}  {row.old.text:{width}} → {row.new}{unused}"


def removal_table(removed: Counter[str], reasons: list[Reason]) -> Iterator[str]:
    """Yield every removed test with its reason."""
    yield f"removed: {removed.total()}"
    for test, count in sorted(removed.items()):
        reason = first_reason(test, reasons)
        yield f"  {test}{times(count)}: {'NO REASON' if reason is None else reason.text}"


def report(difference: Difference, reasons: list[Reason]) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from removal_table(difference.removed, reasons)
    yield from listed("moved from quick to slow", difference.to_slow)
    yield from listed("moved from slow to quick", difference.to_quick)
    yield f"added: {difference.added.total()}"
    for name, count in sorted(by_function(difference.added.elements()).items()):
        yield f"  {name}{times(count)}"


# command line


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", metavar="REV_A", help="revision to compare with")
    parser.add_argument("after", metavar="REV_B", help="revision whose tests are judged")
    parser.add_argument("--renames", type=Path, metavar="FILE", help="rows of old and new names")
    parser.add_argument("--removed", type=Path, metavar="FILE", help=f"reasons, instead of REV_B's {REASONS}")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    """Collect, compare and print; return the exit code."""
    rows = read_renames(arguments.renames) if arguments.renames else []
    with worktree(arguments.before) as folder:
        before = collect(folder)
    with worktree(arguments.after) as folder:
        after = collect(folder)
        path = arguments.removed or folder / REASONS
        reasons = read_reasons(path) if arguments.removed or path.is_file() else []
    quick, quick_uses = rename_tests(before.quick, rows)
    slow, slow_uses = rename_tests(before.slow, rows)
    difference = compare(Suites(quick, slow), after)
    for name, suites in ((arguments.before, before), (arguments.after, after)):
        print(f"{name}: {suites.quick.total():,} quick tests, {suites.slow.total():,} slow tests")
    print(*rename_table(rows, quick_uses + slow_uses), *report(difference, reasons), sep="\n")
    unexplained = [test for test in difference.removed if first_reason(test, reasons) is None]
    if unexplained:
        print(f"{len(unexplained)} removed tests have no reason; write a line in {REASONS}", file=sys.stderr)
    return int(bool(unexplained))


def main() -> int:
    """Run the tool; print an error as one message."""
    try:
        return run(read_arguments())
    except (InventoryError, RevisionError) as error:
        print(f"test_inventory: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
