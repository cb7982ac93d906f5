"""The bf16 kernel for AMX on a processor that has it: numbers, and times next to the three products and torch.compile.

python -m benchmarks.amx --out FOLDER [--minutes 2.5] [--dry-run]

It compiles the kernels, compares them with fp64, and measures the loss at large and small numbers of tokens, and in
fp32. Then it measures on two cores, next to slower computations, and with other constants. Each measurement is one JSON
file in the folder, written at once; a later call with the same folder measures only what is missing. After `--minutes`
no further measurement starts. Measurements on all cores share this process, because the first `torch.compile` of a
process takes 20 s. The exit code is 1 if a figure is wrong. A missed time is printed, and is no error. `--dry-run`
emulates the tiles on tiny shapes on any processor with AVX-512 and its bf16 products.
To publish the figures, copy the folder to `benchmarks/results/amx/NAME` and run `python -m benchmarks.performance`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.amx_numbers import list_figures
from benchmarks.amx_times import COMPILED, KEPT, OURS, PLAIN, Settings, emulated_tiles, find_row, measure_into, nothing
from benchmarks.amx_variants import VARIANTS, build_variants
from tiewise.boundary.ops import compiled_kernels, few_tokens, native_loss
from tiewise.boundary.ops.native_loss import KernelProducts

LARGE = ((2048, 50304, 768), (4096, 32000, 512), (8192, 8192, 256), (1024, 128256, 2048))
FEW = ((512, 50304, 768), (256, 50304, 768), (128, 50304, 768), (128, 32000, 512))
TINY = (96, 700, 64)  # of a dry run
DRY = ("large-0", "few-0", "fp32", "two-cores-0", "rows-0", "variants-0")  # measurements of a dry run: one of each sort
LOSS_LIMIT = 1e-5
SLACK = 1.05  # factor of the naive computation's error; sampling moves both


@dataclass(frozen=True)
class Measurement:
    """Arguments of one measurement by `benchmarks.amx_times`."""

    name: str
    shape: tuple[int, int, int]
    kind: str = "bf16"
    cores: int = 0  # 0: all
    weight: float = 1.0  # share of the time
    has_every_row: bool = False  # slower computations, too
    with_variants: bool = False


MEASUREMENTS = (
    *(Measurement(f"large-{i}", shape, weight=2.0) for i, shape in enumerate(LARGE)),
    *(Measurement(f"few-{i}", shape, weight=0.5) for i, shape in enumerate(FEW)),
    Measurement("fp32", LARGE[0], kind="fp32", weight=2.0),
    Measurement("two-cores-0", LARGE[0], cores=2, weight=2.0),
    Measurement("two-cores-2", LARGE[2], cores=2),
    *(Measurement(f"rows-{i}", shape, has_every_row=True) for i, shape in enumerate(LARGE)),
    Measurement("variants-0", LARGE[0], with_variants=True, weight=1.5),
    Measurement("variants-2", LARGE[2], with_variants=True, weight=0.5),
)


@dataclass(frozen=True)
class Bar:
    """A bar of the issue: a measured value and the largest that meets it."""

    what: str
    value: float
    most: float
    is_time: bool = True

    def __str__(self) -> str:
        verdict = "met" if self.value <= self.most else "MISSED"
        return f"{verdict:6} {self.what}: {self.value:.3g} (at most {self.most:.3g})"


def main(arguments: list[str] | None = None) -> int:
    """Run all phases, and print the bars."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.amx", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.5, help="after them, no further measurement starts")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = math.inf if options.dry_run else time.monotonic() + 60 * options.minutes
    os.environ[compiled_kernels.SWITCH] = "auto"
    reason = prepare(options.dry_run)
    if reason:
        print(f"benchmarks.amx: {reason}", file=sys.stderr)
        return 2
    write(options.out / "machine.json", describe_machine())
    numbers_are_right = check_numbers(options.out / "numbers.json", options.dry_run)
    for measurement in list_missing(options.out, options.dry_run):
        if time.monotonic() > deadline:
            print(f"NOT REACHED {measurement.name}", flush=True)
            continue
        seconds = 60 * options.minutes * measurement.weight / sum(other.weight for other in MEASUREMENTS)
        run_measurement(measurement, options.out, seconds, options.dry_run)
    bars = [bar for path in sorted(options.out.glob("times-*.json")) for bar in list_bars(read(path))]
    for bar in bars:
        print(bar)
    wrong = [bar for bar in bars if not bar.is_time and not bar.value <= bar.most]
    return 0 if numbers_are_right and not wrong else 1


def list_missing(folder: Path, dry_run: bool) -> list[Measurement]:
    """Return the measurements without a file, in the order of their value."""
    wanted = [one for one in MEASUREMENTS if one.name in DRY] if dry_run else list_distinct()
    return [measurement for measurement in wanted if not find_path(folder, measurement).exists()]


def list_distinct() -> list[Measurement]:
    """Return the measurements that differ here: with few cores, `all` are not more than `two`."""
    return [measurement for measurement in MEASUREMENTS if measurement.cores < len(os.sched_getaffinity(0))]


def find_path(folder: Path, measurement: Measurement) -> Path:
    """Return the path of a measurement's file."""
    return folder / f"times-{measurement.name}.json"


def prepare(dry_run: bool) -> str:
    """Compile the kernels if they are missing; return why they cannot be measured, or nothing."""
    if compiled_kernels.kernels() is None:
        compiled_kernels.build()
        compiled_kernels._load.cache_clear()
    needed = "avx512_bf16" if dry_run else "amx_bf16"
    if compiled_kernels.kernels(needed) is None:
        return f"this processor or system has no {needed}; kernels: {compiled_kernels.kernels_state()}"
    return ""


def describe_machine() -> dict[str, Any]:
    """Return the processor, the system's state that matters for times, and versions."""
    listed = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "lscpu": [line for line in listed.splitlines() if not line.startswith(("Flags", "Vulnerability"))],
        "instructions": sorted(compiled_kernels.processor()),
        "large_pages": pages.read_text(encoding="utf-8").strip() if pages.exists() else "",
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernels": compiled_kernels.kernels_state(full=False),
    }


def check_numbers(path: Path, dry_run: bool) -> bool:
    """Compute the figures that have a limit unless the file has them; return whether all are right."""
    if not path.exists():
        products = KernelProducts.EMULATED_TILES if dry_run else KernelProducts.TILES
        thread_counts = (2,) if dry_run else tuple(sorted({1, 3, torch.get_num_threads()}))
        least, few = native_loss.LEAST, few_tokens.FEW_TOKENS
        native_loss.LEAST = few_tokens.FEW_TOKENS = 0  # all problems go to the kernel
        try:
            with emulated_tiles() if dry_run else nothing():
                figures = list(list_figures(compiled_kernels.kernels(), products, thread_counts))
        finally:
            native_loss.LEAST, few_tokens.FEW_TOKENS = least, few
        write(path, [asdict(figure) | {"is_right": figure.is_right} for figure in figures])
    figures_read = read(path)
    wrong = [figure for figure in figures_read if not figure["is_right"]]
    for figure in wrong:
        print(f"WRONG  {figure['name']}: {figure['value']:.2e} (at most {figure['limit']:.0e})")
    print(f"numbers: {len(figures_read)} figures, {len(wrong)} wrong", flush=True)
    return not wrong


def run_measurement(measurement: Measurement, folder: Path, seconds: float, dry_run: bool) -> None:
    """Run one measurement; a failure is printed and leaves no file."""
    variants = None
    if measurement.with_variants:
        variants = folder.resolve() / "variants"
        build_variants(VARIANTS[:1] if dry_run else VARIANTS, variants)
    settings = Settings(
        shape=TINY if dry_run else measurement.shape,
        kind=measurement.kind,
        cores=measurement.cores,
        seconds=seconds,
        variants=variants,
        has_every_row=measurement.has_every_row,
        emulate=dry_run,
    )
    path = find_path(folder, measurement)
    try:
        if measurement.cores:
            environment = os.environ | {"OMP_NUM_THREADS": str(measurement.cores)}
            command = [sys.executable, "-m", "benchmarks.amx_times", *settings.as_arguments(), "--out", str(path)]
            subprocess.run(command, env=environment, check=True)
        else:
            measure_into(path, settings)
    except Exception as error:  # the other measurements are independent of this one
        print(f"FAILED {measurement.name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)


def list_bars(record: dict[str, Any]) -> list[Bar]:
    """Return the bars of one measurement."""
    ours, plain = find_row(record, OURS), find_row(record, PLAIN)
    where = f"{record['kind']} {' x '.join(map(str, record['shape']))}, {record['threads']} threads"
    if record["kind"] == "fp32":
        return [
            Bar(f"{where}: × products", ours["ratio"], 1.08),
            Bar(f"{where}: × {COMPILED}", ours["to_compiled"], 1.0),
        ]
    bars = [Bar(f"{where}: error of the loss", ours["errors"]["loss"], LOSS_LIMIT, is_time=False)]
    for name in ("features", "table"):
        limit = SLACK * plain["errors"][name]
        bars.append(Bar(f"{where}: error of the gradient of {name}", ours["errors"][name], limit, is_time=False))
    if record["shape"][0] <= few_tokens.FEW_TOKENS:
        return [*bars, Bar(f"{where}: × {COMPILED}", ours["to_compiled"], 1.0)]
    kept = find_row(record, KEPT)
    bars.append(Bar(f"{where}: × products", ours["ratio"], 1.0))
    return [*bars, Bar(f"{where}, gradient kept: × products", kept["ratio"], 0.9)]


def write(path: Path, content: Any) -> None:
    """Write a file of results."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Any:
    """Read a file of results."""
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main())
