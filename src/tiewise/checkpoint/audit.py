"""Audit a checkpoint: run the rules, and say beside them what was read."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tiewise.checkpoint.adapter import AdapterFacts, open_adapter
from tiewise.checkpoint.claims import Claims
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.gguf import GgufFacts, open_gguf
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.loaders import Outcome, predict
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.rule import ADAPTER, ANY, FOLDER, GGUF, SEVERITIES, Finding, Rule
from tiewise.checkpoint.rules import RULES, matching
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import IDENTICAL, Likeness
from tiewise.core.errors import CheckpointError
from tiewise.core.version import __version__

SCHEMA = 1


@dataclass(frozen=True)
class Part:
    """A stored tensor and the part that it plays: "input", "output", "bias", "position", "map"."""

    role: str
    tensor: Stored


@dataclass(frozen=True)
class Audit:
    """What is true of one checkpoint.

    Args:
        path: what was given.
        kind: "folder", "file" (one `.safetensors`), "adapter" or "gguf".
        claims: what the config says of tying, level by level; without levels where there is no config.
        roles: the parts of the boundary that are stored; None for an adapter or a GGUF file.
        parts: the stored tensors of the boundary, the two ends first.
        ends: how alike the two tables are; None where they are not both stored, not comparable, or were not read.
        spare: bytes that a second, equal copy of the table takes.
        tensors: number of tensors, and
        nbytes: their bytes.
        outcomes: what each loader will make of it; empty for an adapter or a GGUF file.
        findings: the most severe first, then by id.
        ran: ids of the rules that ran.
        skipped: id → why a rule did not run.
        scan: the tables were read, not only headers.
        deep: every row was read.
    """

    path: Path
    kind: str
    claims: Claims = field(default_factory=lambda: Claims(()))
    roles: Roles | None = None
    parts: tuple[Part, ...] = ()
    ends: Likeness | None = None
    spare: int = 0
    tensors: int = 0
    nbytes: int = 0
    outcomes: tuple[Outcome, ...] = ()
    findings: tuple[Finding, ...] = ()
    ran: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    scan: bool = True
    deep: bool = False

    @property
    def worst(self) -> str | None:
        """The severity of the most severe finding; None without findings."""
        return self.findings[0].severity if self.findings else None

    def at_least(self, severity: str) -> tuple[Finding, ...]:
        """Findings of this severity ("info", "warning", "error", "fatal") or a worse one.

        Raises:
            CheckpointError: no such severity.
        """
        if severity not in SEVERITIES:
            raise CheckpointError(f"there is no severity {severity!r}", f"choose one of {', '.join(SEVERITIES)}")
        least = SEVERITIES.index(severity)
        return tuple(finding for finding in self.findings if SEVERITIES.index(finding.severity) >= least)

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it; the fields are described in docs/check-schema.md."""
        roles = self.roles
        return {
            "schema": SCHEMA,
            "versions": {"tiewise": __version__, "python": platform.python_version()},
            "path": str(self.path),
            "kind": self.kind,
            "scan": self.scan,
            "deep": self.deep,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "spare_bytes": self.spare,
            "claims": _claims_record(self.claims),
            "found_by": None if roles is None else roles.source,
            "headless": None if roles is None else roles.headless,
            "names": None if roles is None else {"input": roles.input_name, "output": roles.output_name},
            "scalars": {} if roles is None else {key: _finite(value) for key, value in roles.scalars.items()},
            "parts": [_part_record(part) for part in self.parts],
            "ends": None if self.ends is None else _ends_record(self.ends),
            "loaders": [asdict(outcome) for outcome in self.outcomes],
            "worst": self.worst,
            "findings": [asdict(finding) for finding in self.findings],
            "rules": {"ran": list(self.ran), "skipped": dict(self.skipped)},
        }


def _claims_record(claims: Claims) -> dict[str, Any]:
    levels = [asdict(claim) | {"effective": claim.effective} for claim in claims.levels]
    return {
        "tied": claims.tied,
        "known": claims.known,
        "t5_like": claims.t5_like,
        "fixed": claims.fixed,
        "levels": levels,
    }


def _part_record(part: Part) -> dict[str, Any]:
    tensor = part.tensor
    return {
        "role": part.role,
        "name": tensor.name,
        "file": tensor.path.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
    }


def _ends_record(ends: Likeness) -> dict[str, Any]:
    numbers = {"relative": _finite(ends.relative), "largest": _finite(ends.largest)}
    return asdict(ends) | {"first": list(ends.first)} | numbers


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


FILE = "file"
MOST_OF_A_KIND = 10  # findings that are told one by one


def check(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    scan: bool = True,
    base: str | os.PathLike[str] | None = None,
    beside: str | os.PathLike[str] | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Audit:
    """Audit a checkpoint. Nothing is executed, nothing written, no pickle opened.

    Args:
        path: a Hugging Face folder, one `.safetensors`, a PEFT adapter's folder, or a GGUF file.
        deep: read every row of the tables and compare all large tensors.
        scan: False reads headers only, so that equal tables are not told from different ones.
        base: of an adapter: the checkpoint that it changes.
        beside: of a GGUF file: the Hugging Face checkpoint that it was made from.
        select: ids or prefixes of the rules to run; none given: all.
        ignore: ids or prefixes of rules to leave out.

    Raises:
        CheckpointError: nothing at `path` can be read, an id is unknown, or the arguments contradict each other.
    """
    path = Path(path)
    if deep and not scan:
        raise CheckpointError("a deep check reads every row", "leave out one of the two: headers only, or deep")
    rules = _Choice(tuple(select), tuple(ignore), scan, deep)
    if path.suffix == ".gguf":
        _refuse(base, "base", "an adapter's folder")
        return _gguf(path, beside, rules)
    _refuse(beside, "beside", "a GGUF file")
    folder = open_folder(path)
    if folder.is_adapter:
        return _adapter(path, folder, base, rules)
    _refuse(base, "base", "an adapter's folder")
    return _checkpoint(path, folder, rules)


class _Choice:
    """Which rules run, and why the others do not."""

    def __init__(self, select: Sequence[str], ignore: Sequence[str], scan: bool, deep: bool) -> None:
        self.selected = matching(select) if select else frozenset(rule.id for rule in RULES)
        self.ignored = matching(ignore)
        self.scan = scan
        self.deep = deep

    def obstacle(self, rule: Rule, kind: str) -> str | None:
        """Return why a rule does not run on this kind of checkpoint; None where it runs."""
        if rule.id in self.ignored:
            return "ignored"
        if rule.id not in self.selected:
            return "not selected"
        if rule.kind not in (kind, ANY):
            return {FOLDER: "for whole checkpoints", ADAPTER: "for adapters", GGUF: "for GGUF files"}[rule.kind]
        if rule.scans and not self.scan:
            return "compares the two tables, and only headers were read"
        return "reads every row, and was not asked to" if rule.deep and not self.deep else None

    def run(self, kind: str, facts: Any, audit: Audit) -> Audit:
        """Return the audit with the findings of the rules for `kind`."""
        found: list[Finding] = []
        ran, skipped = [], {}
        for rule in RULES:
            why = self.obstacle(rule, kind)
            if why is None:
                ran.append(rule.id)
                found += _counted(rule.check(facts))
            else:
                skipped[rule.id] = why
        found.sort(key=lambda finding: (-SEVERITIES.index(finding.severity), finding.rule))
        return replace(audit, findings=tuple(found), ran=tuple(ran), skipped=skipped, scan=self.scan, deep=self.deep)


def _counted(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield ten findings of each kind, and one that stands for all others of it."""
    seen: Counter[tuple[str, str, bool]] = Counter()
    last: dict[tuple[str, str, bool], Finding] = {}
    for finding in findings:
        kind = finding.rule, finding.severity, finding.safe
        seen[kind] += 1
        if seen[kind] <= MOST_OF_A_KIND:
            yield finding
        last[kind] = finding
    for kind, finding in last.items():
        left = seen[kind] - MOST_OF_A_KIND
        if left == 1:
            yield finding
        elif left > 1:
            what = f"{left:,} more of {seen[kind]:,} findings of this kind, the last at {finding.where}"
            yield replace(finding, evidence=what, count=left)


def _checkpoint(path: Path, folder: Folder, rules: _Choice) -> Audit:
    if not folder.tensors and not folder.faults and not folder.pickles:
        fix = "give a checkpoint folder, or one .safetensors or .gguf file"
        raise CheckpointError(f"{path}: no file of tensors in it", fix)
    facts = Facts(folder, rules.scan)
    head = facts.roles.output
    audit = Audit(
        path,
        FILE if folder.single else FOLDER,
        facts.claims,
        facts.roles,
        _parts(facts.roles),
        facts.ends,
        head.nbytes if head is not None and facts.ends is not None and facts.ends.kind == IDENTICAL else 0,
        len(folder.tensors),
        sum(tensor.nbytes for tensor in folder.tensors.values()),
        predict(facts),
    )
    return rules.run(FOLDER, facts, audit)


def _parts(roles: Roles) -> tuple[Part, ...]:
    groups = {
        "input": roles.inputs,
        "output": () if roles.output is None else (roles.output,),
        "bias": roles.biases,
        "position": roles.positions,
        "map": roles.maps,
    }
    return tuple(Part(role, tensor) for role, tensors in groups.items() for tensor in tensors)


def _adapter(path: Path, folder: Folder, base: str | os.PathLike[str] | None, rules: _Choice) -> Audit:
    adapter = open_adapter(folder)
    facts = AdapterFacts(adapter, _facts(base, rules), rules.scan)
    nbytes = sum(tensor.nbytes for tensor in adapter.tensors.values())
    return rules.run(ADAPTER, facts, Audit(path, ADAPTER, tensors=len(adapter.tensors), nbytes=nbytes))


def _gguf(path: Path, beside: str | os.PathLike[str] | None, rules: _Choice) -> Audit:
    gguf = open_gguf(path)
    facts = GgufFacts(gguf, _facts(beside, rules), rules.scan)
    ends = {"input": gguf.table, "output": gguf.head}
    parts = tuple(Part(role, tensor) for role, tensor in ends.items() if tensor is not None)
    spare = gguf.head.nbytes if gguf.head is not None and facts.equal else 0
    nbytes = sum(tensor.nbytes for tensor in gguf.tensors.values())
    audit = Audit(path, GGUF, parts=parts, spare=spare, tensors=len(gguf.tensors), nbytes=nbytes)
    return rules.run(GGUF, facts, audit)


def _facts(path: str | os.PathLike[str] | None, rules: _Choice) -> Facts | None:
    return None if path is None else Facts(open_folder(path), rules.scan)


def _refuse(given: object, name: str, what: str) -> None:
    if given is not None:
        raise CheckpointError(f"{name} is given, and this is not {what}", f"leave {name} out")
