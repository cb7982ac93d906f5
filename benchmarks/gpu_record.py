"""Results of a phase of `benchmarks.gpu`: its file, and what is wrong or missing.

A file starts with the card, the versions of the packages, and a hash of the sources. Results of another card, version
or source are not continued.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tiewise
from benchmarks import gpu_packages
from tiewise.boundary.ops.kernel_version import hash_sources

Record = dict[str, Any]
BENCHMARKS = Path(__file__).parent


@dataclass
class PhaseResult:
    """Counts of a phase."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)  # each with the reason
    missing: int = 0  # results that the time did not suffice for

    def __str__(self) -> str:
        counts = f"{self.right} right, {len(self.wrong)} wrong, {len(self.not_run)} not run, {self.missing} not reached"
        lines = [f"  wrong: {name}" for name in self.wrong] + [f"  not run: {name}" for name in self.not_run]
        return "\n".join([counts, *lines])

    def add(self, name: str, state: str, why: str) -> None:
        """Count a result by its state: right, wrong or not run."""
        self.right += state == "right"
        self.wrong += [name] * (state == "wrong")
        self.not_run += [f"{name}: {why}"] * (state == "not run")

    def merge(self, other: PhaseResult) -> None:
        """Add the counts of a part of the phase."""
        self.right, self.missing = self.right + other.right, self.missing + other.missing
        self.wrong += other.wrong
        self.not_run += other.not_run


def describe_card(device: str) -> Record:
    """Return the card, the versions and the sources that determine the results."""
    name = "cpu, a GPU's branch emulated" if device == "cpu" else torch.cuda.get_device_name()
    return {"device": name, "versions": list_versions(), "sources": hash_sources(list_sources())}


def list_versions() -> dict[str, str | None]:
    """Return the versions of the packages by name; an empty one is missing."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "tiewise": tiewise.__version__}
    transformers = gpu_packages.Package("transformers")
    others = [gpu_packages.ON_A_GPU, transformers, *gpu_packages.read_optional()]
    return versions | {package.name: gpu_packages.find_version(package) for package in others}


def list_sources() -> list[Path]:
    """Return the files of tiewise and of `benchmarks.gpu` that compute results."""
    package = Path(tiewise.__file__).parent
    phases = [path for path in BENCHMARKS.glob("gpu*.py") if path.name != "gpu_page.py"]  # which only renders
    return [*package.rglob("*.py"), *package.rglob("*.cpp"), *phases, BENCHMARKS / "measure.py"]


def read_record(path: Path, head: Record) -> Record:
    """Return the record of a file to continue; `head` if it is missing or of another card, version or source."""
    if not path.exists():
        return dict(head)
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    changes = describe_changes(record, head)
    if changes:
        print(f"{path.stem}: runs again from the start, because of another {', '.join(changes)}", flush=True)
        return dict(head)
    return record


def describe_changes(record: Record, head: Record) -> list[str]:
    """Return which values of `head` a record has differently."""
    found, expected = record.get("versions", {}), head["versions"]
    changed = [name for name in ("device", "sources") if record.get(name) != head[name]]
    return changed + [
        f"{name} ({found.get(name)} then, {expected[name]} now)"
        for name in expected
        if found.get(name) != expected[name]
    ]


def write_record(path: Path, record: Record) -> None:
    """Write the file of a phase."""
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
