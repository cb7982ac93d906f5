"""Results of claims that were run.

`recorded.json` has one result of each claim that was run for this version. `tools/make_claims.py` adds results to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tiewise.core.files import read_packaged_json, write_atomically
from tiewise.core.measurement import signed
from tiewise.core.records import from_record, to_record
from tiewise.core.result import PrintedResult, Row
from tiewise.lab.claims.expected import NOT_RUN
from tiewise.lab.claims.registry import find_claim

RECORDED = "lab/claims/recorded.json"


@dataclass(frozen=True, repr=False)
class ClaimResult(PrintedResult):
    """Verdict on one published claim."""

    claim: str
    verdict: str  # one of `expected.VERDICTS`
    outcome: float  # in the unit of the claim
    low: float  # lower end of its 95 % interval
    high: float
    seeds: int
    rule: str  # hash of the rule that gave the verdict
    versions: dict[str, str]  # package → version
    command: str
    seconds: float  # of all runs together

    @property
    def has_other_rule(self) -> bool:
        """True if the rule is not the registered one."""
        return self.rule != find_claim(self.claim).rule_hash

    @property
    def outcome_text(self) -> str:
        """Figure and interval as text, "+0.0123 (+0.0040 to +0.0206)"."""
        return f"{signed(self.outcome)} ({signed(self.low)} to {signed(self.high)})"

    def answer_text(self) -> str:
        """Return the verdict, then the outcome and its source."""
        claim = find_claim(self.claim)
        verdict = f"{self.claim}: {self.verdict}."
        if self.has_other_rule:
            verdict += f" The rule ({self.rule}) is not the registered one ({claim.rule_hash})."
        measured = f"Measured {self.outcome_text} {claim.unit}, {self.seeds} seeds"
        return f"{verdict} {measured}; published: {claim.published} ({claim.paper})."

    def rows(self) -> list[Row]:
        """Return one row: verdict and outcome."""
        record = to_record(self)
        del record["versions"]
        return [record]

    def record(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        return to_record(self)


@cache
def recorded_results() -> Mapping[str, ClaimResult]:
    """Return the recorded results by claim."""
    records: dict[str, Any] = read_packaged_json(RECORDED)
    return {name: from_record(ClaimResult, record, RECORDED) for name, record in records.items()}


def recorded_verdict(name: str) -> str:
    """Return the recorded verdict on a claim; a result of another rule is named."""
    result = recorded_results().get(name)
    if result is None:
        return NOT_RUN
    if result.has_other_rule:
        return f"{result.verdict} (by another rule)"
    return result.verdict


def save_results(results: Mapping[str, ClaimResult], path: Path) -> None:
    """Write results as `recorded.json` has them, one a line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(results[name].record(), ensure_ascii=False)}" for name in sorted(results)
    ]
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
