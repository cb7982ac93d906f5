"""The main job on its demo corpus: one run at a time against `--jobs auto`, and where the time of a run goes.

python -m benchmarks.main_job [STEPS]
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tiewise.training.compare import Display, finish_one, start
from tiewise.training.settings import Settings

# what each line of the profile is: (its name, file, function), none within another but as "of it" says
PARTS = (
    ("forward and backward", "transformers/trainer.py", "training_step"),
    ("of it the vocabulary loss, with its gradients", "ops/chunked.py", "sweep"),
    ("norms of both paths", "boundary/install.py", "path_norms"),
    ("clipping", "transformers/trainer.py", "_clip_grad_norm"),
    ("optimizer", "accelerate/optimizer.py", "step"),
    ("batches", "transformers/trainer.py", "get_batch_samples"),
    ("points of the curve", "training/run.py", "point"),
    ("checkpoints", "transformers/trainer.py", "_save_checkpoint"),
    ("last losses", "training/run.py", "_result"),
    ("final model and result", "training/run.py", "_keep"),
    ("building", "training/run.py", "build_causal"),
)


def seconds(jobs: str, steps: int, out: Path) -> tuple[float, list[dict[str, float]], dict[str, int]]:
    """Seconds of the whole command, its runs, and what trained them."""
    begin = time.perf_counter()
    command = ("compare", "--out", str(out), "--steps", str(steps), "--jobs", jobs, "--quiet", "--json")
    said = subprocess.run([sys.executable, "-m", "tiewise", *command], check=True, capture_output=True, text=True)
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
    with tempfile.TemporaryDirectory() as folder:
        one, alone, _ = seconds("1", steps, Path(folder) / "one")
        auto, beside, env = seconds("auto", steps, Path(folder) / "auto")
        table = profile(steps, Path(folder) / "profile")
    losses = [[run["heldout_nll"] for run in runs] for runs in (alone, beside)]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    arms = len({run["arm"] for run in alone})
    deviation = statistics.mean(statistics.stdev(losses[0][arm::arms]) for arm in range(arms))
    how = f"`--jobs auto`: {env['jobs']} at a time, threads {env['threads']} each"
    print(f"`tiewise compare --steps {steps}`, {len(alone)} runs of the demo, the whole command\n")
    print("| | seconds | × one at a time |\n|---|---|---|")
    print(f"| one at a time | {one:.0f} | 1.00 |\n| {how} | {auto:.0f} | {auto / one:.2f} |\n")
    print(
        f"- validation nll of a run differs by at most {apart:.5f}; the seeds' deviation is {deviation:.5f}\n\n{table}"
    )


if __name__ == "__main__":
    main()
