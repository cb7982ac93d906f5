"""Time of `tiewise compare` on its demo corpus, and of the parts of one run.

One measurement trains one run at a time with torch's own products; another uses the default options.

python -m benchmarks.main_job [STEPS [SRC]]

SRC is the `src` folder of an earlier checkout; its comparison of the same demo is timed too.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tiewise.training.compare import Display, finish_one, start
from tiewise.training.settings import Settings

# lines of the profile: (name, file, function); only a name with "of it" is part of the line above
PARTS = (
    ("forward and backward", "transformers/trainer.py", "training_step"),
    ("of it the vocabulary loss, with its gradients", "boundary/ops/native_loss.py", "native_or_chunked_pass"),
    ("norms of both paths", "boundary/installation.py", "path_norms"),
    ("clipping", "transformers/trainer.py", "_clip_grad_norm"),
    ("optimizer", "accelerate/optimizer.py", "step"),
    ("batches", "transformers/trainer.py", "get_batch_samples"),
    ("points of the curve", "training/run.py", "point"),
    ("checkpoints", "transformers/trainer.py", "_save_checkpoint"),
    ("last losses", "training/run.py", "_result"),
    ("final model and result", "training/run.py", "_save_models"),
    ("building", "training/built_models.py", "build_with_random_tables"),
)


def time_compare(
    steps: int, out: Path, *arguments: str, **variables: str
) -> tuple[float, list[dict[str, float]], dict[str, Any]]:
    """Return the seconds of the command, its runs, and its environment."""
    begin = time.perf_counter()
    command = ("compare", "--out", str(out), "--steps", str(steps), "--quiet", "--json", *arguments)
    command_line = [sys.executable, "-m", "tiewise", *command]
    process = subprocess.run(command_line, check=True, capture_output=True, text=True, env=os.environ | variables)
    record = json.loads(process.stdout)
    return time.perf_counter() - begin, record["runs"], record["env"]


def profile_run(steps: int, out: Path) -> str:
    """Return the table of one run's parts."""
    display = Display(lambda line: None)
    start(Settings(arms=("tied",), steps=steps, seed=1).checked(), out, "benchmark", display)
    profiler, begin = cProfile.Profile(), time.perf_counter()
    profiler.runcall(finish_one, out, display)
    total = time.perf_counter() - begin
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    lines = ["| part of a run, under the profiler | seconds | % |", "|---|---|---|"]
    for name, file, function in PARTS:
        spent = max(
            (timing[3] for (path, _, called), timing in stats.items() if path.endswith(file) and called == function),
            default=0.0,
        )
        lines.append(f"| {name} | {spent:.2f} | {100 * spent / total:.0f} |")
    return "\n".join([*lines, f"| whole run | {total:.2f} | 100 |"])


def main() -> None:
    """Time the comparisons and one profiled run, and print the tables."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows = Path(temporary), []
        if len(sys.argv) > 2:
            rows.append(("the earlier checkout", *time_compare(steps, folder / "before", PYTHONPATH=sys.argv[2])))
        duration, runs, env = time_compare(steps, folder / "one", "--jobs", "1", TIEWISE_PRODUCTS="default")
        rows.append(("one at a time, torch's own products", duration, runs, env))
        duration, runs, env = time_compare(steps, folder / "auto")
        rows.append((f"by default: {env['jobs']} at a time, threads {env['threads']} each", duration, runs, env))
        table = profile_run(steps, folder / "profile")
    _, first, reference, _ = rows[0]
    arms = len({run["arm"] for run in reference})
    losses = [[run["heldout_nll"] for run in runs] for _, _, runs, _ in rows]
    deviation = statistics.mean(statistics.stdev(losses[0][arm::arms]) for arm in range(arms))
    print(
        f"`tiewise compare --steps {steps}`, {len(reference)} runs of the demo, the whole command; {env['products']}\n"
    )
    print("| | seconds | × the first | a run's validation nll from the first's, at most |\n|---|---|---|---|")
    for (label, duration, _, _), values in zip(rows, losses, strict=True):
        difference = max(abs(a - b) for a, b in zip(losses[0], values, strict=True))
        print(f"| {label} | {duration:.0f} | {duration / first:.2f} | {difference:.7f} |")
    print(f"\nThe seeds' standard deviation is {deviation:.5f}.\n\n{table}")


if __name__ == "__main__":
    main()
