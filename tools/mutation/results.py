"""Results of a mutation run: a JSON line for the run and one for each mutant."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutation.choice import Mutant
from tiewise.core import estimates

PRINTED_FIELDS = ("seed", "commit", "recheck of", "limit")  # keys of the header that the summary prints


@dataclass(frozen=True)
class Result:
    """Outcome of one mutant.

    `outcome` is killed, survived or gone (the source line no longer exists). `how` is the reason: test, import, crashed
    or timeout for a killed mutant, passed or undecided for a survivor. `seconds` is CPU time, `tests` counts those that
    ran.
    """

    mutant: Mutant
    outcome: str
    how: str
    test: str = ""
    tests: int = 0
    seconds: float = 0.0

    def to_json(self) -> str:
        """Return the line of a file of results."""
        fields = asdict(self.mutant) | asdict(self)
        del fields["mutant"]
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        """Read a line of a file of results."""
        names = ("file", "line", "operator", "original", "mutated")
        mutant = Mutant(**{name: fields[name] for name in names})
        return cls(mutant, **{name: value for name, value in fields.items() if name not in names})


class ResultFile:
    """File of results that a later run continues.

    If a mutant has two results, the later one counts.
    """

    def __init__(self, path: Path):
        self.path = path
        self.header: dict[str, Any] = {}
        self.notes: dict[str, Any] = {}
        self.results: dict[tuple[str, int, str, str], Result] = {}
        if path.exists():
            text = path.read_text(encoding="utf-8")
            if text and not text.endswith("\n"):  # a run was killed in the middle of a line
                text = text[: text.rfind("\n") + 1]
                path.write_text(text, encoding="utf-8")
            for line in text.splitlines():
                self._add(line)

    def _add(self, line: str) -> None:
        """Add one line of the file to the results, notes or header."""
        fields = json.loads(line)
        if "outcome" in fields:
            result = Result.from_json(fields)
            self.results[result.mutant.key] = result
        elif "note" in fields:
            self.notes[fields["note"]] = fields["value"]
        else:
            self.header = fields

    def begin(self, header: dict[str, Any]) -> None:
        """Write the first line, or check that it describes the same run."""
        if not self.header:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.header = header
            self._append(json.dumps(header))
        differing = [name for name in header if self.header.get(name) != header[name]]
        if differing:
            differences = ", ".join(f"{name} {self.header.get(name)}, now {header[name]}" for name in differing)
            raise SystemExit(f"{self.path} belongs to another run ({differences}); give another --results")

    def note(self, name: str, value: object) -> None:
        """Record a fact about the run, such as the outcome of a check."""
        self.notes[name] = value
        self._append(json.dumps({"note": name, "value": value}))

    def add(self, result: Result) -> None:
        """Record the outcome of a mutant at once."""
        self.results[result.mutant.key] = result
        self._append(result.to_json())

    def _append(self, line: str) -> None:
        """Write one line to the disk at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share.

    It is 0 to 1 without a trial.
    """
    if trials == 0:
        return 0.0, 1.0
    return estimates.wilson_interval(successes / trials, trials)


def summary(file: ResultFile) -> str:
    """Return the score, the outcomes, the operators and the survivors as Markdown."""
    results = [result for result in file.results.values() if result.outcome != "gone"]
    killed = sum(result.outcome == "killed" for result in results)
    low, high = wilson(killed, len(results))
    share = killed / max(len(results), 1)
    lines = ["# Mutation score", "", "Printed by `python tools/mutate.py --summary` from a file of results.", ""]
    lines += ["| measure | value |", "|---|---|"]
    lines += [f"| {name} | {file.header[name]} |" for name in PRINTED_FIELDS if name in file.header]
    lines += [f"| mutants | {len(results)} |", f"| killed | {killed} |", f"| survived | {len(results) - killed} |"]
    lines += [f"| score | {share:.3f} |", f"| 95 % Wilson interval | {low:.3f} to {high:.3f} |"]
    lines += [f"| source line gone | {len(file.results) - len(results)} |"]
    lines += [f"| {name} | {value} |" for name, value in file.header.get("lines", {}).items()]
    lines += [f"| {name} | {json.dumps(value)} |" for name, value in file.notes.items()]
    lines += ["", "## Outcomes", "", "| outcome | mutants |", "|---|---|"]
    outcomes = Counter(f"{result.outcome}: {result.how}" for result in results)
    lines += [f"| {outcome} | {count} |" for outcome, count in sorted(outcomes.items())]
    lines += ["", "## Operators", "", "| operator | mutants | killed |", "|---|---|---|", *_operators(results)]
    lines += ["", "## Survivors", "", "| line | change | how |", "|---|---|---|", *_survivors(results)]
    return "\n".join(lines) + "\n"


def _operators(results: Iterable[Result]) -> list[str]:
    """Return the rows of the table of operators."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.mutant.operator, Counter())[result.outcome] += 1
    rows = sorted(counts.items(), key=lambda row: row[0])
    return [f"| {name} | {outcomes.total()} | {outcomes['killed']} |" for name, outcomes in rows]


def _survivors(results: Iterable[Result]) -> list[str]:
    """Return the rows of the table of survivors."""
    rows = sorted((r.mutant.file, r.mutant.line, r.mutant.change, r.how) for r in results if r.outcome == "survived")
    return [f"| {file}:{line} | {change.replace('|', chr(92) + '|')} | {how} |" for file, line, change, how in rows]
