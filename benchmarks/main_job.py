"""Time of `tiewise compare` on its demo corpus, and its parts.

By default it trains one run at a time with torch's own products.

python -m benchmarks.main_job [STEPS [SRC]]

SRC is the `src` of an earlier checkout, whose comparison of the same demo is timed too.
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

# what each line of the profile is: (its name, file, function), none within another but as "of it" says
PARTS = (
    ("forward and backward", "transformers/trainer.py", "training_step"),
    ("of it the vocabulary loss, with its gradients", "boundary/ops/native_loss.py", "fastest_sweep"),
    ("norms of both paths", "boundary/install.py", "path_norms"),
    ("clipping", "transformers/trainer.py", "_clip_grad_norm"),
    ("optimizer", "accelerate/optimizer.py", "step"),
    ("batches", "transformers/trainer.py", "get_batch_samples"),
    ("points of the curve", "training/run.py", "point"),
    ("checkpoints", "transformers/trainer.py", "_save_checkpoint"),
    ("last losses", "training/run.py", "_result"),
    ("final model and result", "training/run.py", "_save_models"),
    ("building", "training/built_models.py", "build_with_random_tables"),
)


def seconds(steps: int, out: Path, *more: str, **env: str) -> tuple[float, list[dict[str, float]], dict[str, Any]]:
    """Seconds of the whole command, its runs, and what trained them."""
    begin = time.perf_counter()
    command = ("compare", "--out", str(out), "--steps", str(steps), "--quiet", "--json", *more)
    run = [sys.executable, "-m", "tiewise", *command]
    said = subprocess.run(run, check=True, capture_output=True, text=True, env=os.environ | env)
    found = json.loads(said.stdout)
    return time.perf_counter() - begin, found["runs"], found["env"]


def profile(steps: int, out: Path) -> str:
    """Return the table of one run's parts."""
    display = Display(lambda line: None)
    start(Settings(arms=("tied",), steps=steps, seed=1).checked(), out, "benchmark", display)
    profiler, begin = cProfile.Profile(), time.perf_counter()
    profiler.runcall(finish_one, out, display)
    whole = time.perf_counter() - begin
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    lines = ["| part of a run, under the profiler | seconds | % |", "|---|---|---|"]
    for name, file, function in PARTS:
        spent = max((s[3] for (path, _, of), s in found.items() if path.endswith(file) and of == function), default=0.0)
        lines.append(f"| {name} | {spent:.2f} | {100 * spent / whole:.0f} |")
    return "\n".join([*lines, f"| whole run | {whole:.2f} | 100 |"])


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    with tempfile.TemporaryDirectory() as made:
        folder, rows = Path(made), []
        if len(sys.argv) > 2:
            rows.append(("the earlier checkout", *seconds(steps, folder / "before", PYTHONPATH=sys.argv[2])))
        took, runs, env = seconds(steps, folder / "one", "--jobs", "1", TIEWISE_PRODUCTS="default")
        rows.append(("one at a time, torch's own products", took, runs, env))
        took, runs, env = seconds(steps, folder / "auto")
        rows.append((f"by default: {env['jobs']} at a time, threads {env['threads']} each", took, runs, env))
        table = profile(steps, folder / "profile")
    _, first, reference, _ = rows[0]
    arms = len({run["arm"] for run in reference})
    losses = [[run["heldout_nll"] for run in runs] for _, _, runs, _ in rows]
    deviation = statistics.mean(statistics.stdev(losses[0][arm::arms]) for arm in range(arms))
    print(
        f"`tiewise compare --steps {steps}`, {len(reference)} runs of the demo, the whole command; {env['products']}\n"
    )
    print("| | seconds | × the first | a run's validation nll from the first's, at most |\n|---|---|---|---|")
    for (how, took, _, _), found in zip(rows, losses, strict=True):
        apart = max(abs(a - b) for a, b in zip(losses[0], found, strict=True))
        print(f"| {how} | {took:.0f} | {took / first:.2f} | {apart:.7f} |")
    print(f"\nThe seeds' standard deviation is {deviation:.5f}.\n\n{table}")


if __name__ == "__main__":
    main()
