"""Choice of mutants and of the tests for each.

Lines are drawn uniformly from those that a quick test executes and that an operator can change. Each drawn line gets
one mutant: an operator is drawn first, then one of its changes.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from mutation.coverage_data import PACKAGE, Coverage, mask_of
from mutation.operators import ExecutableLine, Source, edits_of

SECONDS_PER_MUTANT = 45.0  # CPU time of the chosen tests
FIRST_SECONDS = 6.0  # CPU time of the first stage
FILES_PER_MUTANT = 12
TESTS_PER_MUTANT = 200
ALWAYS = 10  # number of most specific tests, which are chosen at any cost


@dataclass(frozen=True)
class Mutant:
    """Change of one line, named by file, number and the texts before and after."""

    file: str
    line: int
    operator: str
    original: str
    mutated: str

    @property
    def key(self) -> tuple[str, int, str, str]:
        """Return the identity of a mutant in a file of results."""
        return self.file, self.line, self.original, self.mutated

    @property
    def change(self) -> str:
        """Return the two texts without their indentation."""
        return f"`{self.original.strip()}` → `{self.mutated.strip()}`"


@dataclass(frozen=True)
class Candidate:
    """Line that can be drawn, with its rank and its source of random choices."""

    order: float
    file: str
    source: Source
    line: ExecutableLine
    chance: random.Random


@dataclass
class Draw:
    """The mutants of a seed, the tests of each, and counts of lines."""

    mutants: list[Mutant]
    tests: dict[Mutant, list[str]]
    counts: dict[str, int]


def draw(root: Path, coverage: Coverage, seed: int, count: int) -> Draw:
    """Draw `count` mutants; a larger count continues the same draw.

    Each line gets a random number from the seed, its file and its text, and the lowest numbers are drawn. Lines that
    are added elsewhere, or executed by new tests, therefore leave most of the draw as it was.
    """
    counts: Counter[str] = Counter()
    candidates: list[Candidate] = []
    for file in package_files(root):
        source = Source((root / file).read_text(encoding="utf-8"))
        repeated: Counter[bytes] = Counter()
        for line in edits_of(source):
            text = source.lines[line.line - 1]
            repeated[text] += 1
            is_executed = has_tests(line, file, coverage)
            counts["executable lines"] += 1
            counts["lines that run at import"] += line.at_import
            counts["lines that no quick test executes"] += not is_executed
            if is_executed and line.edits:
                chance = random.Random(f"{seed} {file} {text.decode()} {repeated[text]}")
                candidates.append(Candidate(chance.random(), file, source, line, chance))
    counts["lines drawn from"] = len(candidates)
    result = Draw([], {}, dict(counts))
    for candidate in sorted(candidates, key=lambda one: one.order):
        if len(result.mutants) == count:
            break
        mutant = _mutant(candidate)
        if mutant is not None:
            result.mutants.append(mutant)
            result.tests[mutant] = choose(tests_of(candidate.line, candidate.file, coverage), coverage)
    return result


def package_files(root: Path) -> list[str]:
    """Return the paths of the package's modules, relative to the root."""
    return sorted(path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("*.py"))


def _mutant(candidate: Candidate) -> Mutant | None:
    """Draw an operator that can change the line, then one of its changes."""
    by_operator = defaultdict(list)
    for edit in candidate.line.edits:
        by_operator[edit.operator].append(edit)
    names = sorted(by_operator)
    candidate.chance.shuffle(names)
    for name in names:
        edits = by_operator[name]
        candidate.chance.shuffle(edits)
        for edit in edits:
            if candidate.source.is_change(edit):
                return Mutant(candidate.file, edit.line, name, *candidate.source.apply(edit))
    return None


def has_tests(line: ExecutableLine, file: str, coverage: Coverage) -> bool:
    """Return True if `tests_of` has a test for the line."""
    if line.at_import:
        return coverage.executed[file] != 0
    return coverage.executed[file] & mask_of(range(line.line, line.last + 1)) != 0


def tests_of(line: ExecutableLine, file: str, coverage: Coverage) -> dict[str, int]:
    """Return the tests that can notice a change of a line, each with its tier.

    Lower tiers run first. Tier 0 has the tests that execute the line. If a fixture or a function with a cache executes
    it, the coverage names only the first test that used it. The other tests of that test file then follow in tier 1. A
    line that runs at import belongs to the tests that execute the lines which use its name. All tests that execute the
    file follow in tier 1.
    """
    mask = mask_of(range(line.line, line.last + 1))
    if line.at_import:
        users = mask_of(line.used_on)
        direct = coverage.callers(file, users) | coverage.preparers(file, users)
        others = set(coverage.called.get(file, {})) | set(coverage.prepared.get(file, {}))
    else:
        prepared = coverage.preparers(file, mask)
        direct = coverage.callers(file, mask) | prepared
        shared = direct if line.is_cached else prepared
        files = {test.partition("::")[0] for test in shared}
        others = {test for test in coverage.seconds if test.partition("::")[0] in files}
    tiers = dict.fromkeys(others, 1)
    tiers.update(dict.fromkeys(direct, 0))
    return tiers


def choose(tests: dict[str, int], coverage: Coverage) -> list[str]:
    """Return at most 45 CPU seconds of tests, the most specific first.

    A test is specific if it executes few lines of the package. The first ones are always chosen; the others are spread
    over test functions and files.
    """

    def rank(test: str) -> tuple[int, int, float, str]:
        """Return the sort key of a test: tier, lines executed, seconds, name."""
        return tests[test], coverage.breadth.get(test, 0), coverage.seconds.get(test, 0.0), test

    ranked = sorted(tests, key=rank)
    chosen = ranked[:ALWAYS]
    seconds = sum(coverage.seconds.get(test, 0.0) for test in chosen)
    while len(chosen) > 1 and seconds > SECONDS_PER_MUTANT:
        seconds -= coverage.seconds.get(chosen.pop(), 0.0)
    files = {test.partition("::")[0] for test in chosen}
    for test in _in_turn(ranked):
        if len(chosen) >= TESTS_PER_MUTANT:
            break
        file = test.partition("::")[0]
        cost = coverage.seconds.get(test, 0.0)
        is_affordable = seconds + cost <= SECONDS_PER_MUTANT and (file in files or len(files) < FILES_PER_MUTANT)
        if test not in chosen and is_affordable:
            chosen.append(test)
            files.add(file)
            seconds += cost
    return chosen


def _in_turn(ranked: list[str]) -> list[str]:
    """Return the tests with the first case of each function before any second case."""
    seen: Counter[str] = Counter()
    turns = []
    for position, test in enumerate(ranked):
        function = test.partition("[")[0]
        turns.append((seen[function], position, test))
        seen[function] += 1
    return [test for _, _, test in sorted(turns)]


def stages(tests: list[str], coverage: Coverage) -> list[list[str]]:
    """Divide chosen tests into a first stage of a few seconds and the rest."""
    first: list[str] = []
    seconds = 0.0
    for test in tests:
        seconds += coverage.seconds.get(test, 0.0)
        if first and seconds > FIRST_SECONDS:
            break
        first.append(test)
    return [stage for stage in (first[:ALWAYS], tests[len(first[:ALWAYS]) :]) if stage]
