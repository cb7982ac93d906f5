"""The published claims with their recorded verdicts, as rows and records."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from tiewise.lab.claims.expected import VERDICTS
from tiewise.lab.claims.recorded import recorded_results, recorded_verdict
from tiewise.lab.claims.registry import published_claims

AT_THIS_SIZE = " at this size"  # the list leaves this end of a verdict out; its first sentence has it


def summary() -> str:
    """Return how many claims there are, and how many have each verdict."""
    claims, results = published_claims(), recorded_results()
    verdicts = Counter(recorded_verdict(name) for name in claims)
    counts = [f"{verdicts.pop(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    counts += [f"{count} {verdict}" for verdict, count in verdicts.items()]
    return f"{len(claims)} published claims, {len(results)} run here: {', '.join(counts)}."


def claim_rows() -> list[list[str]]:
    """Return a row for each claim: name, verdict, measured figure or else price, source, published figure."""
    results, rows = recorded_results(), []
    for name, claim in published_claims().items():
        measured = claim.price
        if name in results:
            measured = results[name].outcome_text
        verdict = recorded_verdict(name).removesuffix(AT_THIS_SIZE)
        rows.append([name, verdict, measured, claim.paper, claim.published])
    return rows


def claim_records() -> list[dict[str, Any]]:
    """Return each claim with its rule and recorded result, as JSON types."""
    results, records = recorded_results(), []
    for name, claim in published_claims().items():
        record = asdict(claim)
        record |= {"rule": claim.rule_text, "rule_hash": claim.rule_hash, "verdict": recorded_verdict(name)}
        record["result"] = results[name].record() if name in results else None
        records.append(record)
    return records
