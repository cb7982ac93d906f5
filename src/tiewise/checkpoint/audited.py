"""What an audit says of one checkpoint, for a program and, by `record`, for JSON."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiewise import __version__
from tiewise.checkpoint.claims import Claims
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.likeness import Likeness
from tiewise.checkpoint.loaders import Outcome
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.rule import SEVERITIES, Finding
from tiewise.core.errors import CheckpointError

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
