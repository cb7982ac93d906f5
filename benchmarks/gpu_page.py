"""Section of `docs/dev/performance.md` about GPUs, rendered from `benchmarks/results/gpu/`.

The phases of `benchmarks.gpu` write them. A card may lack the files of some phases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "gpu"
HEAD = """## GPU

`PYTHONPATH=src python -m benchmarks.gpu --out FOLDER` checks losses, gradients, memory, synchronisations and installed
models against fp64, and measures the loss with both gradients beside its peers.
Times are multiples of the three bare matrix products of the same type; memory is the peak above the state before.

**Measured:** the tables below, on an H100 and an H200 with torch 2.11. Their `tiewise` is now `backend="chunked"`, and
their `tiewise, triton` is the default.

**Changed since, and never run on a GPU:**

* the default with programs of 8192 columns and chunks of a 32nd of the card's memory; before, 4096 and a 64th
* `backend="compile"`, `"torch"` and `"liger-sm90"`; the choice of `"auto"` among them
* `TIEWISE_LOSS=triton` for log-probabilities, entropies and tables over ranks
* `into` without a wait in the backward pass; `path_sums`; several runs on one card (`--jobs auto`)
* the phases `memory`, `compare`, `nccl` and `sanitizer`, and so the predicted peak memory of a step

Their numbers were compared with fp64 on CPU tensors that take the code path of a GPU, and in triton's interpreter.
"""
PHASES_OF_CHECKS = ("memory", "compare", "nccl", "sanitizer")
Record = dict[str, Any]


def render_section(folder: Path) -> str:
    """Return the section about all cards that were measured."""
    cards = sorted(path.stem.removeprefix("checks-") for path in folder.glob("checks-*.json"))
    if not cards:
        return f"{HEAD}\nThe loss has never run on a GPU.\n"
    blocks = [HEAD]
    for card in cards:
        checks, times = read_results(folder / f"checks-{card}.json"), read_results(folder / f"times-{card}.json")
        blocks += [render_checks(checks), *render_further_checks(folder, card)]
        blocks += [render_table(measurement) for measurement in times["measurements"]]
        parts = folder / f"rows-{card}.json"
        if parts.exists():
            blocks.append(render_parts(read_results(parts)))
    return "\n".join(blocks)


def read_results(path: Path) -> Record:
    """Read one file of results."""
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def render_checks(record: Record) -> str:
    """Return one card's counts of right, wrong and skipped checks, with reasons."""
    versions, checks = record["versions"], record["checks"]
    transformers = record.get("transformers") or versions["transformers"]
    states = [check["state"] for check in checks]
    figures = sum(len(check["figures"]) for check in checks)
    lines = [
        f"### {record['device']}, torch {versions['torch']}, transformers {transformers}\n",
        f"{states.count('right')} of {len(checks)} checks are right ({figures} figures), "
        f"{states.count('wrong')} wrong, {states.count('not run')} not run.\n",
    ]
    lines += [f"* `{check['check']}`: {check['why']}\n" for check in checks if check["state"] != "right"]
    return "\n".join(lines)


def render_further_checks(folder: Path, card: str) -> list[str]:
    """Return a line about each further phase of checks that the card has run."""
    blocks = []
    for phase in PHASES_OF_CHECKS:
        path = folder / f"{phase}-{card}.json"
        if path.exists():
            checks = read_results(path)["checks"]
            states = [f"`{check['check']}` {check['state']}" for check in checks]
            blocks.append(f"{phase}: {', '.join(states)}.\n")
    return blocks


def render_table(measurement: Record) -> str:
    """Return the table of one shape and type, with time, memory and error."""
    shape = " × ".join(f"{size}" for size in measurement["shape"])
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[measurement["dtype"]]
    products = f"{measurement['products_ms']:.1f}"
    lines = [
        f"| {dtype}, {shape}; three products {products} ms | × products | ms | extra MB | error of the table |",
        "|---|---|---|---|---|",
    ]
    for row in measurement["rows"]:
        lines.append(
            f"| {row['name']} | {row['ratio']:.2f} | {row['milliseconds']:.1f} | {row['megabytes']:,.0f} "
            f"| {row['error']:.0e} |"
        )
    return "\n".join([*lines, ""])


def render_parts(record: Record) -> str:
    """Return the table of the parts of one step, in milliseconds, with a column for each shape."""
    milliseconds: dict[str, dict[str, float | str]] = {}  # by part and shape
    for name, time in record["times"].items():
        shape, _, part = name.partition(": ")
        milliseconds.setdefault(part, {})[shape.replace("x", "×")] = time
    shapes = list(dict.fromkeys(shape for by_shape in milliseconds.values() for shape in by_shape))
    corner = "Milliseconds in bf16; parts of a step take at most 8192 tokens"
    lines = [f"| {corner} | {' | '.join(shapes)} |", "|---" * (len(shapes) + 1) + "|"]
    for part, by_shape in milliseconds.items():
        cells = [_format_time(by_shape.get(shape)) for shape in shapes]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _format_time(time: float | str | None) -> str:
    """Return milliseconds with two decimals, or the error of a part that did not run."""
    if isinstance(time, float):
        return f"{time:.2f}"
    return time or ""
