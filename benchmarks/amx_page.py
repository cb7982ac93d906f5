"""Section of `docs/dev/performance.md` about AMX, rendered from a folder of `benchmarks.amx`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.amx import MEASUREMENTS

RESULTS = Path(__file__).parent / "results" / "amx"
HEAD = """## AMX

`PYTHONPATH=src python -m benchmarks.amx --out FOLDER` compares the bf16 kernel for AMX with fp64 and measures it.
Times are multiples of the three bare matrix products of the same type, and of `torch.compile(plain)`.
"""
Record = dict[str, Any]


def render_section(folder: Path) -> str:
    """Return the section; without measurements it says so."""
    paths = sorted(folder.glob("times-*.json"))
    if not paths:
        return f"{HEAD}\nThe kernel has never run on a processor with AMX. Its numbers are tested by emulation.\n"
    machine, numbers = _read(folder / "machine.json"), _read(folder / "numbers.json")
    models = [line.partition(":")[2].strip() for line in machine["lscpu"] if line.startswith("Model name")]
    wrong = sum(not figure["is_right"] for figure in numbers)
    described = f"{' '.join(models)}, torch {machine['torch']}: {len(numbers)} figures with a limit, {wrong} wrong."
    records = [_read(path) for path in paths]
    measured = {path.stem.removeprefix("times-") for path in paths}
    return "\n".join([HEAD, f"{described}\n", describe_absent(measured), *(_render_table(one) for one in records)])


def describe_absent(measured: set[str]) -> str:
    """Return a line about the measurements of `benchmarks.amx` that have not run, by their names."""
    absent = [one for one in MEASUREMENTS if one.name not in measured]
    if not absent:
        return ""
    cases = [one for one in absent if one.name.startswith(("large", "few", "fp32"))]
    shapes = [f"{one.kind} {' × '.join(map(str, one.shape))}" for one in cases]
    further = "; two cores, slower computations and other constants" if len(absent) > len(cases) else ""
    return f"**Measured:** {len(measured)} of {len(MEASUREMENTS)}. Never measured: {', '.join(shapes)}{further}.\n"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _render_table(record: Record) -> str:
    """Return the table of one measurement."""
    shape = " × ".join(map(str, record["shape"]))
    rounds = len(record["rows"][0]["seconds"])
    corner = f"{record['kind']}, {shape}, {record['threads']} threads, {rounds} rounds"
    lines = [f"| {corner} | × products | × compile | ms | loss | features | table |", "|---" * 7 + "|"]
    for row in record["rows"]:
        errors = row["errors"] or {}
        cells = [f"{row['ratio']:.2f}", f"{row['to_compiled']:.2f}", f"{row['milliseconds']:.1f}"]
        cells += [f"{errors[name]:.0e}" if name in errors else "" for name in ("loss", "features", "table")]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])
