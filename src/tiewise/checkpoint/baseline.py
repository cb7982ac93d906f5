"""Baseline of `check`: the findings of an earlier check, which are not reported again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiewise.checkpoint.audit import Audit
from tiewise.checkpoint.rules.rule import Finding
from tiewise.checkpoint.untrusted import object_of, read_json
from tiewise.core.errors import CheckpointError

HOW_TO_MAKE = "write one with: tiewise check PATH --format json > FILE"


@dataclass(frozen=True)
class FindingKey:
    """Identity of a finding over several checks of one checkpoint.

    The evidence is no part of it, because its numbers change while the fault stays.
    """

    path: str  # absolute path of the checkpoint
    rule: str
    severity: str
    where: str  # "" for a finding that counts several: the place that it names is any one of them


@dataclass(frozen=True)
class Baseline:
    """Findings of an earlier check."""

    counts: Mapping[FindingKey, int]  # {finding: number of findings that it represents}

    def new_of(self, audit: Audit) -> Audit:
        """Return an audit whose findings are those that the baseline lacks; the others are in `in_baseline`."""
        new, old = list[Finding](), list[Finding]()
        for finding in audit.findings:
            key = _key(str(audit.path), finding.rule, finding.severity, finding.where, finding.count)
            if finding.count <= self.counts.get(key, 0):
                old.append(finding)
            else:
                new.append(finding)
        return replace(audit, findings=tuple(new), in_baseline=tuple(old))


def read_baseline(path: Path) -> Baseline:
    """Read a baseline: the JSON of an earlier check, of one path or of several.

    Raises:
        CheckpointError: the file cannot be read, or is no such JSON.
    """
    content = object_of(read_json(str(path)))
    audits = content.get("audits", [content])
    counts = dict[FindingKey, int]()
    if not isinstance(audits, list):
        raise _not_a_baseline(path)
    for record in map(object_of, audits):
        for finding in _findings(record, path):
            counts[_key_of_record(record, finding, path)] = _count(finding, path)
    return Baseline(counts)


def _findings(record: Mapping[str, Any], path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the findings of one audit's JSON, including those of its baseline."""
    for name in ("findings", "known_findings"):
        findings = record.get(name, [])
        if not isinstance(findings, list) or "path" not in record:
            raise _not_a_baseline(path)
        yield from map(object_of, findings)


def _key_of_record(record: Mapping[str, Any], finding: Mapping[str, Any], path: Path) -> FindingKey:
    """Return the identity of a finding in JSON."""
    texts = [record["path"], finding.get("rule"), finding.get("severity"), finding.get("where")]
    if not all(isinstance(text, str) for text in texts):
        raise _not_a_baseline(path)
    checkpoint, rule, severity, where = texts
    return _key(checkpoint, rule, severity, where, _count(finding, path))


def _count(finding: Mapping[str, Any], path: Path) -> int:
    """Return the number of findings that one in JSON represents."""
    count = finding.get("count", 1)
    if type(count) is not int:
        raise _not_a_baseline(path)
    return count


def _key(path: str, rule: str, severity: str, where: str, count: int) -> FindingKey:
    """Return the identity of a finding that represents `count` findings."""
    if count > 1:
        where = ""
    return FindingKey(os.path.abspath(path), rule, severity, where)


def _not_a_baseline(path: Path) -> CheckpointError:
    """Return the error of a file that is no JSON of `check`."""
    return CheckpointError(f"{path}: not the JSON of tiewise check", HOW_TO_MAKE)
