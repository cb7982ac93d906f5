"""Section of `docs/dev/performance.md` about GPUs, rendered from `benchmarks/results/gpu/`.

The phases of `benchmarks.gpu` write them. A card may lack the files of some phases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_bars import Bar, list_check_bars, list_install_bars, list_memory_bars, list_time_bars

RESULTS = Path(__file__).parent / "results" / "gpu"
HEAD = """## GPU

`PYTHONPATH=src python -m benchmarks.gpu --out FOLDER` checks losses, gradients, memory, synchronisations and installed
models against fp64, and measures the loss with both gradients beside its peers.
Times are multiples of the three bare matrix products of the same type; memory is the peak above the state before.

**Measured:** the tables, with torch 2.11, before the Triton kernel became the default. The 16 checks of both cards
ran the path that is now `backend="chunked"`; in the tables it is `tiewise`. The H100 compared the Triton kernel, now
the default, with fp64 without options and with a soft-cap only (24 figures of `other_kernels`), and timed it as
`tiewise, triton`. The H200 ran no Triton kernel of ours, and its `auto` had none to choose.

**Changed since, and never run on a GPU:**

* the default with programs of 8192 columns and chunks of a 32nd of the card's memory; before, 4096 and a 64th
* rows whose second reading goes backward: the L2 cache has what the first reading read last
* times of a step that the host queues while the GPU works, so that the host's own time is hidden
* `backend="compile"`, `"torch"` and `"liger-sm90"`; the choice of `"auto"` among them
* `TIEWISE_LOSS=triton` for log-probabilities, entropies and tables over ranks
* `into` without a wait in the backward pass; `path_sums`; several runs on one card (`--jobs auto`)
"""
AFTER_PHASES = """
Their numbers were compared with fp64 on CPU tensors that take the code path of a GPU, and in triton's interpreter.
"""
PHASES = ("checks", "install", "times", "memory", "compare", "nccl", "sanitizer", "rows")
PHASES_OF_CHECKS = ("memory", "compare", "nccl", "sanitizer")
Record = dict[str, Any]


def render_section(folder: Path) -> str:
    """Return the section about all cards that were measured."""
    head = render_head(folder)
    cards = sorted(path.stem.removeprefix("checks-") for path in folder.glob("checks-*.json"))
    if not cards:
        return f"{head}\nThe loss has never run on a GPU.\n"
    blocks = [head]
    for card in cards:
        checks, times = read_results(folder / f"checks-{card}.json"), read_results(folder / f"times-{card}.json")
        blocks += [render_checks(checks), *render_install(folder, card), *render_further_checks(folder, card)]
        blocks.append(render_bars(list_bars(folder, card)))
        blocks += [render_table(measurement) for measurement in times["measurements"]]
        parts = folder / f"rows-{card}.json"
        if parts.exists():
            blocks.append(render_parts(read_results(parts)))
    return "\n".join(blocks)


def render_head(folder: Path) -> str:
    """Return the introduction, with the phases that no card has run."""
    absent = [f"`{phase}`" for phase in PHASES if not list(folder.glob(f"{phase}-*.json"))]
    line = f"* the phases {', '.join(absent)}, and what they would measure\n" if absent else ""
    return f"{HEAD}{line}{AFTER_PHASES}"


def list_bars(folder: Path, card: str) -> list[Bar]:
    """Return every bar of one card; those of a phase without a file have never run."""
    checks, times, memory, install = (
        read_results(path) if (path := folder / f"{phase}-{card}.json").exists() else None
        for phase in ("checks", "times", "memory", "install")
    )
    bars = list_check_bars(checks) if checks else []
    for measurement in times["measurements"] if times else []:
        bars += list_time_bars(measurement)
    return [*bars, *list_memory_bars(memory), *list_install_bars(install)]


def render_bars(bars: list[Bar]) -> str:
    """Return the table of bars, each with its value and the verdict."""
    lines = ["| bar | measured | at most | |", "|---|---|---|---|"]
    lines += [f"| {bar.name} | {bar.shown} | {bar.limit:g} | {bar.verdict} |" for bar in bars]
    return "\n".join([*lines, ""])


def render_install(folder: Path, card: str) -> list[str]:
    """Return a line about the installed families that the card has run."""
    path = folder / f"install-{card}.json"
    if not path.exists():
        return ["install, twelve families over 20 steps: never run.\n"]
    families = read_results(path)["families"]
    states = [f"`{name}` {family['state']}" for name, family in families.items()]
    return [f"install: {', '.join(states)}.\n"]


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
