"""Section of `docs/dev/performance.md` about AMX, rendered from folders of `benchmarks.amx`, one for each machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.amx import MEASUREMENTS
from benchmarks.amx_times import COMPILED, KEPT, OURS, find_row

RESULTS = Path(__file__).parent / "results" / "amx"
HEAD = """## AMX

`PYTHONPATH=src python -m benchmarks.amx --out FOLDER` compares the bf16 kernel for AMX with fp64 and measures it.
Times are multiples of the three bare matrix products of the same type, and of `torch.compile(plain)`.
"""
SUMMARY_COLUMNS = (
    "tokens × vocabulary × width",
    "type",
    "threads",
    "tiewise",
    "gradient kept",
    COMPILED,
    "tiewise / compile",
)
ROWS = """All rows of each measurement. Errors of loss and gradients are relative to fp64 of the same inputs. A row pays
for memory that the row before has freed, so compare variants with *variant none* alone. The rows on 16 threads are
older than the rule that takes all tokens in one chunk where memory allows.
"""
Record = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """Measurements on one machine: a folder of `benchmarks.amx`."""

    description: str  # processor, torch, and how many figures were wrong
    records: dict[str, Record]  # by the names of MEASUREMENTS


def render_section(folder: Path) -> str:
    """Return the section; without measurements it says so."""
    machines = [_read_machine(path.parent) for path in sorted(folder.glob("*/machine.json"))]
    if not any(machine.records for machine in machines):
        return f"{HEAD}\nThe kernel has never run on a processor with AMX. Its numbers are tested by emulation.\n"
    tables = [_render_table(record) for machine in machines for record in machine.records.values()]
    return "\n".join(
        [
            HEAD,
            *(f"- {machine.description}" for machine in machines),
            "",
            _render_summary(machines),
            *describe_absent({name for machine in machines for name in machine.records}),
            ROWS,
            *tables,
        ]
    )


def _answer(records: list[Record]) -> str:
    """Return how the loss compares with `torch.compile`."""
    largest = " and ".join(filter(None, (_largest(kind, OURS, records) for kind in ("bf16", "fp32"))))
    kept = _largest("bf16", KEPT, records)
    return (
        f"The loss takes at most {largest} of the time of `{COMPILED}`, by medians. "
        f"*Gradient kept* also adds the table's gradient to one in fp32, which `{COMPILED}` does not: at most {kept}. "
        "The same computation measured again differs by up to 0.1.\n"
    )


def _largest(kind: str, name: str, records: list[Record]) -> str:
    """Return the largest time of a row over that of `torch.compile`, with its shape; empty without such a record."""
    found = [(find_row(record, name)["to_compiled"], record["shape"]) for record in records if record["kind"] == kind]
    if not found:
        return ""
    ratio, shape = max(found)
    return f"{ratio:.2f} in {kind} ({' × '.join(f'{size:,}' for size in shape)})"


def _read_machine(folder: Path) -> Machine:
    """Read a folder of `benchmarks.amx`, its measurements in the order of their value."""
    machine, numbers = _read(folder / "machine.json"), _read(folder / "numbers.json")
    models = [line.partition(":")[2].strip() for line in machine["lscpu"] if line.startswith("Model name")]
    wrong = sum(not figure["is_right"] for figure in numbers)
    threads = f"{machine['threads']} threads" if machine["threads"] > 1 else "1 thread"
    described = f"{' '.join(models)}, {threads}, torch {machine['torch']}"
    paths = {one.name: folder / f"times-{one.name}.json" for one in MEASUREMENTS}
    return Machine(
        description=f"{described}: {len(numbers)} figures with a limit, {wrong} wrong.",
        records={name: _read(path) for name, path in paths.items() if path.exists()},
    )


def _render_summary(machines: list[Machine]) -> str:
    """Return the answer, and a table row for each shape of each machine: the loss, and `torch.compile`."""
    records = [
        record
        for machine in machines
        for name, record in machine.records.items()
        if name.startswith(("large", "few", "fp32"))
    ]
    rows = [f"| {' | '.join(SUMMARY_COLUMNS)} |", "|---" * len(SUMMARY_COLUMNS) + "|", *map(_summarise, records)]
    return "\n".join([_answer(records), *rows, ""])


def _summarise(record: Record) -> str:
    """Return a measurement as one row of the first table."""
    ours, compiled = find_row(record, OURS), find_row(record, COMPILED)
    ratios = {row["name"]: f"{row['ratio']:.2f}" for row in record["rows"]}
    cells = [" × ".join(f"{size:,}" for size in record["shape"]), record["kind"], str(record["threads"])]
    cells += [ratios[OURS], ratios.get(KEPT, ""), f"{compiled['ratio']:.2f}", f"{ours['to_compiled']:.2f}"]
    return f"| {' | '.join(cells)} |"


def describe_absent(measured: set[str]) -> list[str]:
    """Return a line about the measurements of `benchmarks.amx` that no machine has run, by their names."""
    absent = [one for one in MEASUREMENTS if one.name not in measured and not one.cores]
    if not absent:
        return []
    cases = [one for one in absent if one.name.startswith(("large", "few", "fp32"))]
    shapes = [f"{one.kind} {' × '.join(map(str, one.shape))}" for one in cases]
    others = ["slower computations and other constants"] if len(absent) > len(cases) else []
    return [f"**Never measured:** {'; '.join([*shapes, *others])}.\n"]


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
