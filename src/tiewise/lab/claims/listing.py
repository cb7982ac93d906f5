"""The published claims with their recorded verdicts, as rows and records."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from tiewise.core.measurement import NONE
from tiewise.lab.claims.expected import VERDICTS
from tiewise.lab.claims.recorded import recorded_results, recorded_verdict
from tiewise.lab.claims.registry import published_claims


def summary() -> str:
    """Return how many claims there are, and how many have each verdict."""
    claims, results = published_claims(), recorded_results()
    verdicts = Counter(recorded_verdict(name) for name in claims)
    counts = [f"{verdicts.pop(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts]
    counts += [f"{count} {verdict}" for verdict, count in verdicts.items()]
    return f"{len(claims)} published claims, {len(results)} run here: {', '.join(counts)}."


def claim_rows() -> list[list[str]]:
    """Return a row for each claim: name, source, price, verdict, measured and published figure."""
    results, rows = recorded_results(), []
    for name, claim in published_claims().items():
        measured = NONE
        if name in results:
            measured = results[name].outcome_text
        rows.append([name, claim.paper, claim.price, recorded_verdict(name), measured, claim.published])
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
