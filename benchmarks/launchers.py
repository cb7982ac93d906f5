"""Time and results of twelve runs: two workers of local Ray, two local processes.

python -m benchmarks.launchers [SECONDS]

SECONDS are those of a run that is alone, 75 unless given; from them and a short run come the steps of all. Both ways
take the same steps by one thread each, so every figure must be the same to the last bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOBS, SEEDS, BAR = 2, 6, 1.1
SHORT = 60  # steps by which a run's pace is found
OPTIONS = ("--arms", "tied,untied", "--quiet", "--json")
TIMES = ("seconds", "tokens_per_second")  # of a run, which alone may differ


def whole(command: str, out: Path, *more: str) -> tuple[float, dict[str, Any]]:
    """Seconds of a command from its first moment to its end, and what it printed."""
    begin = time.perf_counter()
    run = [sys.executable, "-m", "tiewise", command, "--out", str(out), *more]
    said = subprocess.run(run, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return time.perf_counter() - begin, json.loads(said.stdout)


def main() -> None:
    wanted = float(sys.argv[1]) if len(sys.argv) > 1 else 75.0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _, alone = whole("train", folder / "pace", "--steps", str(SHORT), "--quiet", "--json")
        steps = max(SHORT, round(wanted / alone["seconds"] * SHORT))
        asked = (*OPTIONS, "--seeds", str(SEEDS), "--steps", str(steps), "--jobs", str(JOBS))
        local, here = whole("compare", folder / "local", *asked)
        ray, there = whole("compare", folder / "ray", *asked, "--launcher", "ray")
    figures = [[{k: v for k, v in run.items() if k not in TIMES} for run in found["runs"]] for found in (here, there)]
    print(f"{2 * SEEDS} runs of the demo, {steps} steps each, {JOBS} at a time, one thread each; whole commands\n")
    print("| | seconds | × local | shortest run, seconds |\n|---|---|---|---|")
    for name, took, found in (("local", local, here), ("Ray", ray, there)):
        shortest = min(run["seconds"] for run in found["runs"])
        print(f"| {name} | {took:.0f} | {took / local:.3f} | {shortest:.0f} |")
    print(f"\nFigures: {'equal' if figures[0] == figures[1] else 'DIFFERENT'}. Bar: {BAR} ×, runs of 60 s or more.")


if __name__ == "__main__":
    main()
