"""Comparisons trained on a GPU: a phase of `benchmarks.gpu`.

    short_runs          three arms for a few steps in fp32, against the same runs on the CPU
    comparison          three arms with three seeds at about 30 million parameters, in bf16, one run at a time
    several_at_a_time   the same runs, as many at a time as a trial chooses, against those one at a time

The folders `compare-NAME` next to the phase's file keep all curves, results and the report.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tiewise
from benchmarks import gpu_packages
from benchmarks.gpu_checks import Figure, NotRun, Setup, run_checks
from benchmarks.gpu_record import PhaseResult

ARMS = ("tied", "untied", "factored:64")
SEEDS = 3
TINY: dict[str, Any] = {
    "text": "synthetic:words=4000",
    "tokenizer": "bytes",
    "width": 16,
    "heads": 2,
    "layers": 1,
    "length": 8,
    "batch": 4,
    "steps": 12,
    "measured": 512,
}
TINY_ARMS = ("tied", "untied", "factored:4")
LARGE: dict[str, Any] = {  # with 4,096 tokens 27 M parameters tied and 29 M untied
    "width": 512,
    "heads": 8,
    "layers": 8,
    "length": 256,
    "batch": 32,
    "steps": 300,
    "learning_rate": 1e-3,
    "measured": 65_536,
    "bf16": True,
}
CURVE = ("train_nll", "tune_nll", "path_a", "path_b", "cosine")  # values of a point that both devices must share
CURVE_LIMIT = 2e-3  # largest difference of a value between devices, relative if the value exceeds 1
LARGEST_LOSS = 0.95  # last tuning loss of a run as a share of the first, at most
PARALLEL_LIMIT = 0.05  # nats per token; runs of the same seed on a GPU differ by the order of their sums


@dataclass(frozen=True)
class Point:
    """A point of a run's curve."""

    arm: str
    seed: str
    values: dict[str, float]

    def distances(self, other: Point) -> dict[str, float]:
        """Return the difference of each value from that of another point."""
        distances = {}
        for name in CURVE:
            if name in self.values or name in other.values:
                here, there = self.values.get(name, math.nan), other.values.get(name, math.nan)
                distances[name] = abs(here - there) / max(1.0, abs(there))
        return distances


def read_points(folder: Path) -> list[Point]:
    """Return the points of all runs of a comparison, in order of runs and steps."""
    points = []
    for path in sorted(folder.glob("*/seed-*/metrics.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            points.append(Point(path.parts[-3], path.parts[-2], json.loads(line)))
    return points


def train_here(folder: Path, settings: dict[str, Any], arms: tuple[str, ...], seeds: int, jobs: int | str = 1) -> None:
    """Run `tiewise.compare` in this process, on the GPU if torch has one."""
    tiewise.compare(out=folder, overwrite=True, jobs=jobs, quiet=True, arms=arms, seeds=seeds, **settings)


def train_on_cpu(folder: Path, settings: dict[str, Any], arms: tuple[str, ...], seeds: int) -> None:
    """Run `tiewise compare` in a process that sees no GPU."""
    options = dict(settings)
    command = [sys.executable, "-m", "tiewise", "compare", "--out", str(folder), "--overwrite", "--quiet"]
    command += ["--jobs", "1", "--arms", ",".join(arms), "--seeds", str(seeds)]
    for name in ("text", "tokenizer", "steps"):
        command += [f"--{name}", str(options.pop(name))]
    for name, value in options.items():
        command += ["--set", f"{name}={value}"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, env=hidden, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"the runs on the CPU failed: {' '.join(process.stderr.split())[-200:]}")


def short_runs(setup: Setup, folder: Path) -> list[Figure]:
    """Compare the curves of short fp32 runs on this device with those on the CPU."""
    require_packages()
    train_here(folder / "compare-short", TINY, TINY_ARMS, 1)
    train_on_cpu(folder / "compare-short-cpu", TINY, TINY_ARMS, 1)
    points, expected = read_points(folder / "compare-short"), read_points(folder / "compare-short-cpu")
    figures = [Figure("points missing", float(abs(len(expected) - len(points)) + (not expected)), 0)]
    for arm in dict.fromkeys(point.arm for point in expected):
        worst: dict[str, float] = {}
        for point, other in zip(points, expected, strict=False):
            if other.arm == arm:
                for name, distance in point.distances(other).items():
                    worst[name] = max(distance, worst.get(name, 0.0), key=_nan_last)
        figures += [Figure(f"{arm}: {name}", distance, CURVE_LIMIT) for name, distance in worst.items()]
    return figures


def _nan_last(value: float) -> float:
    """Return a key by which nan is the largest value."""
    return math.inf if math.isnan(value) else value


def comparison(setup: Setup, folder: Path) -> list[Figure]:
    """Check that nine runs of about 30 million parameters all learn."""
    require_packages()
    settings, arms = choose_settings(setup)
    train_here(folder / "compare-one", settings, arms, SEEDS)
    return describe_descents(read_points(folder / "compare-one"), len(arms) * SEEDS)


def choose_settings(setup: Setup) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return settings and arms of the comparison; a small one on a CPU."""
    return (LARGE, ARMS) if setup.on_gpu else (TINY | {"steps": 24}, TINY_ARMS)  # in 12 some losses hardly fall


def describe_descents(points: list[Point], runs: int) -> list[Figure]:
    """Return the number of missing runs, and each run's last tuning loss as a share of the first."""
    curves: dict[tuple[str, str], list[float]] = {}
    for point in points:
        curves.setdefault((point.arm, point.seed), []).append(point.values.get("tune_nll", math.nan))
    figures = [Figure("runs missing", float(runs - len(curves)), 0)]
    for (arm, seed), losses in curves.items():
        figures.append(Figure(f"{arm}, {seed}: last loss / first", losses[-1] / losses[0], LARGEST_LOSS))
    return figures


def several_at_a_time(setup: Setup, folder: Path) -> list[Figure]:
    """Compare runs that share the GPU with the same runs one at a time."""
    require_packages()
    settings, arms = choose_settings(setup)
    alone = _last_losses(read_points(folder / "compare-one"))
    if len(alone) < len(arms) * SEEDS:
        raise NotRun("needs the runs of the check `comparison`")
    train_here(folder / "compare-several", settings, arms, SEEDS, jobs="auto" if setup.on_gpu else 2)
    together = _last_losses(read_points(folder / "compare-several"))
    return [
        Figure(f"{' '.join(run)}: difference, nats", abs(together.get(run, math.nan) - loss), PARALLEL_LIMIT)
        for run, loss in alone.items()
    ]


def _last_losses(points: list[Point]) -> dict[tuple[str, str], float]:
    """Return the last tuning loss of every run."""
    return {(point.arm, point.seed): point.values.get("tune_nll", math.nan) for point in points}


def require_packages() -> None:
    """Raise NotRun if a package that trains is missing."""
    missing = [package.name for package in gpu_packages.OF_COMPARE if not gpu_packages.find_version(package)]
    if missing:
        raise NotRun(f"needs {', '.join(missing)}")


CHECKS: tuple[Callable[[Setup, Path], list[Figure]], ...] = (short_runs, comparison, several_at_a_time)


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Run the checks that the file does not have as right, until the deadline."""
    checks = {check.__name__: partial(check, folder=path.parent) for check in CHECKS}
    return run_checks(checks, setup, path, deadline)
