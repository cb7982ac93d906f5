"""Format `sarif`: one log of the Static Analysis Results Interchange Format, which code-scanning services read.

Standard: SARIF 2.1.0, https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. Its section numbers are named
below.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tiewise.checkpoint.audit import Audit
from tiewise.checkpoint.formats.answer import CheckedPath, audits_of, file_of, uri_of
from tiewise.checkpoint.rules.rule import Finding, Rule, rules
from tiewise.core import __version__

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {"fatal": "error", "error": "error", "warning": "warning", "info": "note"}  # severity → level (§3.27.10)
FINGERPRINT = "tiewiseFinding/v1"  # key of the fingerprint, with the version of its computation (§3.27.17)
Record = dict[str, Any]


def sarif_text(answers: Sequence[CheckedPath]) -> str:
    """Return one log with one run (§3.13)."""
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [_run(answers)]}, allow_nan=False)


def _run(answers: Sequence[CheckedPath]) -> Record:
    """Return the run (§3.14): the rules that reported something, and the results."""
    audits = audits_of(answers)
    reported = _reported_rules(audits)
    index_of = {rule.id: index for index, rule in enumerate(reported)}
    results = list[Record]()
    for audit in audits:
        for finding in audit.findings:
            results.append(_result(audit, finding, index_of[finding.rule]))
    driver = {"name": "tiewise", "version": __version__, "rules": [_descriptor(rule) for rule in reported]}
    return {"tool": {"driver": driver}, "invocations": [_invocation(answers)], "results": results}


def _reported_rules(audits: Iterable[Audit]) -> list[Rule]:
    """Return the rules of all findings, by id."""
    ids = {finding.rule for audit in audits for finding in audit.findings}
    return [rule for rule in rules().values() if rule.id in ids]


def _descriptor(rule: Rule) -> Record:
    """Return the description of a rule (§3.49)."""
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": " ".join(rule.explain.split())},
        "help": {"text": f"tiewise check --explain {rule.id}"},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def _result(audit: Audit, finding: Finding, rule_index: int) -> Record:
    """Return a finding as a result (§3.27)."""
    result: Record = {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": LEVELS[finding.severity],
        "message": {"text": _message(finding)},
        "locations": [_location(audit, finding)],
        "partialFingerprints": {FINGERPRINT: _fingerprint(audit, finding)},
        "occurrenceCount": finding.count,
        "properties": {"severity": finding.severity, "fixes": list(finding.fixes), "safe": finding.safe},
    }
    if audit.in_baseline is not None:
        result["baselineState"] = "new"
    return result


def _message(finding: Finding) -> str:
    """Return the evidence and the fixes as one text."""
    return f"{finding.evidence.rstrip('.')}. Fix: {finding.repair}"


def _location(audit: Audit, finding: Finding) -> Record:
    """Return the file of a finding, and the tensor or config key in it (§3.28)."""
    return {
        "physicalLocation": {"artifactLocation": {"uri": uri_of(file_of(audit, finding))}},
        "logicalLocations": [{"fullyQualifiedName": finding.where}],
    }


def _fingerprint(audit: Audit, finding: Finding) -> str:
    """Return a digest of path, rule and place, which stays while a fault stays."""
    identity = "\0".join([audit.path.as_posix(), finding.rule, finding.where])
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()


def _invocation(answers: Sequence[CheckedPath]) -> Record:
    """Return whether every path could be read, and a notification for each that could not (§3.20)."""
    notifications = list[Record]()
    for answer in answers:
        if answer.audit is None:
            location = {"physicalLocation": {"artifactLocation": {"uri": uri_of(answer.path)}}}
            notification = {"level": "error", "message": {"text": answer.error}, "locations": [location]}
            notifications.append(notification)
    return {"executionSuccessful": not notifications, "toolExecutionNotifications": notifications}
