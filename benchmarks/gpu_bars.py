"""Bars of the loss on a GPU, each next to the measured value: met, missed or never run.

The phases `times` and `memory` of `benchmarks.gpu` print them, and `gpu_page` renders them. A missed bar is no error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]
WIDE, WIDE_LIMIT, NARROW_LIMIT = 2048, 1.15, 1.5  # width; most of three products from it on, and below it
AUTO_LIMIT = 1.05  # most of the fastest row
TYPES = {"bfloat16": "bf16", "float32": "fp32"}
ONE_BUFFER = "one gradient buffer"  # check of the phase `memory`


@dataclass(frozen=True)
class Bar:
    """A measured value, None if it was never measured, and the most that it may be."""

    name: str
    value: float | None
    limit: float

    @property
    def verdict(self) -> str:
        """Return "met", "missed" or "never run"."""
        if self.value is None:
            return "never run"
        return "met" if self.value <= self.limit else "missed"

    @property
    def shown(self) -> str:
        """Return the value as text."""
        if self.value is None:
            return ""
        if self.value == int(self.value) and not self.limit:
            return f"{self.value:g}"  # a count
        return f"{self.value:.2f}" if self.value >= 0.01 else f"{self.value:.0e}"

    def __str__(self) -> str:
        measured = f"{self.shown}, at most {self.limit:g}: " if self.shown else ""
        return f"{self.name}: {measured}{self.verdict}"


def list_time_bars(measurement: Record) -> list[Bar]:
    """Return the bars of one shape and type: the default next to three products, and `auto` next to the fastest."""
    rows = {row["name"]: row for row in measurement["rows"]}
    sizes = " × ".join(map(str, measurement["shape"]))
    case = f"{TYPES[measurement['dtype']]}, {sizes}"
    limit = WIDE_LIMIT if measurement["shape"][2] >= WIDE else NARROW_LIMIT
    default = find_default_row(rows)
    bars = [Bar(f"{case}: default / three products", default["ratio"] if default else None, limit)]
    if "tiewise, auto" in rows:
        fastest = min(row["milliseconds"] for row in rows.values())
        bars.append(Bar(f"{case}: `auto` / the fastest", rows["tiewise, auto"]["milliseconds"] / fastest, AUTO_LIMIT))
    return bars


def find_default_row(rows: dict[str, Record]) -> Record | None:
    """Return the row of today's default, with the Triton kernel; older runs name it, or lack it."""
    if "tiewise, triton" in rows:
        return rows["tiewise, triton"]
    return rows.get("tiewise") if "tiewise, chunked" in rows else None


def list_check_bars(record: Record) -> list[Bar]:
    """Return the bars of the phase `checks`: wrong checks, and losses that wait for the GPU."""
    checks = {check["check"]: check for check in record["checks"]}
    wrong = sum(check["state"] == "wrong" for check in checks.values())
    waits = checks.get("synchronisations")
    count = sum(figure["value"] for figure in waits["figures"]) if waits else None
    return [Bar("wrong checks", wrong, 0), Bar("losses and models that wait for the GPU", count, 0)]


def list_memory_bars(record: Record | None) -> list[Bar]:
    """Return the bars of the phase `memory`; None has not run."""
    checks = {check["check"]: check for check in record["checks"]} if record else {}
    one_buffer = checks.pop(ONE_BUFFER, None)
    predictions = [figure["value"] for check in checks.values() for figure in check["figures"]]
    return [
        Bar("share of one [V, D] that one buffer does not save", _worst(one_buffer), 0.1),
        Bar("predicted peak of a step: distance", max(predictions, default=None), 0.1),
    ]


def list_install_bars(record: Record | None) -> list[Bar]:
    """Return the bar of the phase `install`: its worst family; None has not run."""
    families = list(record["families"].values()) if record else []
    values = [value for family in families if (value := _worst(family)) is not None]
    return [Bar("twelve families, 20 steps: distance of losses and weights", max(values, default=None), 1e-5)]


def _worst(outcome: Record | None) -> float | None:
    """Return the largest figure of a check, None without one."""
    return max((figure["value"] for figure in outcome["figures"]), default=None) if outcome else None
