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


def time_call(call: Candidate) -> float:
    """Return the wall-clock seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(
    candidates: dict[str, Candidate],
    rounds: int = 7,
    uncounted: int = 1,
    timed: Callable[[Candidate], float] = time_call,
) -> dict[str, list[float]]:
    """Return the seconds of each candidate in each round.

    The first `uncounted` rounds are left out.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.freeze()  # later collections skip existing objects; with JAX loaded they would take most of a second
    for number in range(-uncounted, rounds):
        names = list(candidates)
        for name in names if number % 2 else reversed(names):
            gc.collect()
            seconds = timed(candidates[name])
            if number >= 0:
                times[name].append(seconds)
    gc.unfreeze()
    return times


def median_ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """Return the median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))


def format_spread(values: list[float]) -> str:
    """Return median and range in milliseconds, as text."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{1e3 * middle:.0f} ({1e3 * low:.0f}–{1e3 * high:.0f})"


def measure_peak_megabytes(call: Candidate) -> float:
    """Return the growth of the peak resident size (Linux) during a call, in MB.

    Call it in a fresh process.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _read_status("VmRSS")
    call()
    return (_read_status("VmHWM") - before) / 1e3


def run_in_fresh_process(module: str, *arguments: str) -> str:
    """Return the standard output of `python -m module arguments`."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def _read_status(field: str) -> float:
    """Return a size of this process from /proc/self/status, in kB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return float(line.split()[1])
    raise RuntimeError(f"{field} is not in /proc/self/status")
