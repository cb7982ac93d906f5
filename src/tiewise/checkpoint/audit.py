"""Audit a checkpoint: run the rules, and say beside them what was read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiewise.checkpoint.adapter import is_adapter, open_adapter
from tiewise.checkpoint.audited import SCHEMA as SCHEMA
from tiewise.checkpoint.audited import Audit as Audit
from tiewise.checkpoint.audited import Part as Part
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.folder import Folder, open_folder
from tiewise.checkpoint.format_facts import AdapterFacts, GgufFacts
from tiewise.checkpoint.gguf import open_gguf
from tiewise.checkpoint.likeness import IDENTICAL
from tiewise.checkpoint.loaders import predict
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.rule import ADAPTER, ANY, FOLDER, GGUF, SEVERITIES, Finding, Rule
from tiewise.checkpoint.rules import RULES, matching
from tiewise.core.errors import CheckpointError

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
    if is_adapter(folder):
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
