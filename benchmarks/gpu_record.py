"""Results of a phase of `benchmarks.gpu`: its file, and what is wrong or missing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]


@dataclass
class PhaseResult:
    """Counts of a phase."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    missing: int = 0  # results that the time did not suffice for

    def __str__(self) -> str:
        lines = [f"{self.right} right, {len(self.wrong)} wrong, {self.missing} not reached", *self.wrong]
        return "\n  wrong: ".join(lines)


def describe_card(device: str) -> Record:
    """Return the card and the versions that determine the results."""
    name = "cpu, a GPU's branch emulated" if device == "cpu" else torch.cuda.get_device_name()
    return {"device": name, "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}}


def read_record(path: Path, head: Record) -> Record:
    """Return the record of a file to continue; `head` if it is missing or of another card or version."""
    if path.exists():
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        if {name: record.get(name) for name in head} == head:
            return record
    return dict(head)


def write_record(path: Path, record: Record) -> None:
    """Write the file of a phase."""
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
