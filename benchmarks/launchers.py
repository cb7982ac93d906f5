"""Time and results of twelve runs on two local Ray workers and on two processes.

python -m benchmarks.launchers [SECONDS]

SECONDS is the time of one run that is alone, 75 by default. A short run measures the pace, which gives the steps of all
runs. Both launchers take the same steps with one thread per run, so all figures must be equal to the last bit.
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
SHORT = 60  # steps of the run that measures the pace
OPTIONS = ("--arms", "tied,untied", "--quiet", "--json")
TIMES = ("seconds", "tokens_per_second")  # the only fields of a run that may differ


def time_command(command: str, out: Path, *arguments: str) -> tuple[float, dict[str, Any]]:
    """Run a command; return its seconds, start-up included, and the JSON that it prints."""
    begin = time.perf_counter()
    command_line = [sys.executable, "-m", "tiewise", command, "--out", str(out), *arguments]
    process = subprocess.run(
        command_line, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return time.perf_counter() - begin, json.loads(process.stdout)


def main() -> None:
    """Time both launchers, compare their figures and print the table."""
    target_seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 75.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _, pace_result = time_command("train", folder / "pace", "--steps", str(SHORT), "--quiet", "--json")
        steps = max(SHORT, round(target_seconds / pace_result["seconds"] * SHORT))
        arguments = (*OPTIONS, "--seeds", str(SEEDS), "--steps", str(steps), "--jobs", str(JOBS))
        local, local_result = time_command("compare", folder / "local", *arguments)
        ray, ray_result = time_command("compare", folder / "ray", *arguments, "--launcher", "ray")
    figures = [
        [{k: v for k, v in run.items() if k not in TIMES} for run in result["runs"]]
        for result in (local_result, ray_result)
    ]
    print(f"{2 * SEEDS} runs of the demo, {steps} steps each, {JOBS} at a time, one thread each; whole commands\n")
    print("| | seconds | × local | shortest run, seconds |\n|---|---|---|---|")
    for name, seconds, result in (("local", local, local_result), ("Ray", ray, ray_result)):
        shortest = min(run["seconds"] for run in result["runs"])
        print(f"| {name} | {seconds:.0f} | {seconds / local:.3f} | {shortest:.0f} |")
    print(f"\nFigures: {'equal' if figures[0] == figures[1] else 'DIFFERENT'}. Bar: {BAR} ×, runs of 60 s or more.")


if __name__ == "__main__":
    main()
