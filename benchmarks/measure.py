"""Timing on a noisy machine: candidates alternate in one process, and ratios are per round.

Absolute times drift, so a claim is the median over rounds of (time of A / time of B in the same round). The order
reverses every round. Peak memory is the growth of the process's peak resident size over what was resident before.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

Candidate = Callable[[], object]


def wall_seconds(work: Candidate) -> float:
    """Seconds of one call by the clock."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(
    candidates: dict[str, Candidate],
    rounds: int = 7,
    uncounted: int = 1,
    timed: Callable[[Candidate], float] = wall_seconds,
) -> dict[str, list[float]]:
    """Seconds of each candidate in each round, after some rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.freeze()  # what stands already need not be searched again, which takes most of a second once JAX is loaded
    for number in range(-uncounted, rounds):
        names = list(candidates)
        for name in names if number % 2 else reversed(names):
            gc.collect()
            seconds = timed(candidates[name])
            if number >= 0:
                times[name].append(seconds)
    gc.unfreeze()
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """Median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))


def spread(values: list[float]) -> str:
    """Median and range in milliseconds."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{1e3 * middle:.0f} ({1e3 * low:.0f}–{1e3 * high:.0f})"


def peak_megabytes(work: Candidate) -> float:
    """Growth of the peak resident size (Linux) while `work` runs, in MB; use a fresh process."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1e3


def in_fresh_process(module: str, *arguments: str) -> str:
    """Standard output of `python -m module arguments`."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1])
    raise RuntimeError(f"{field} is not in /proc/self/status")
