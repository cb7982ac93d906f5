"""Time of `import tiewise`, `tiewise --help` and a plan, compared with an empty Python.

Each time is that of a full process.

The processor's time (user and system) says what a process does whatever else the machine does; the clock's does not.

python -m benchmarks.startup
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import alternate, spread


def table(rounds: int = 9) -> str:
    """Return the Markdown table."""
    command = str(Path(sys.executable).with_name("tiewise"))
    runs = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import tiewise'": [sys.executable, "-c", "import tiewise"],
        "tiewise --help": [command, "--help"],
        "tiewise compare --help": [command, "compare", "--help"],
        "tiewise plan --like gpt2": [command, "plan", "--like", "gpt2"],
    }
    worked: dict[str, list[float]] = {name: [] for name in runs}
    times = alternate(
        {name: (lambda n=name, run=run: worked[n].append(_run(run))) for name, run in runs.items()}, rounds
    )
    lines = ["| process | ms, median (range) | of the processor |", "|---|---|---|"]
    # the first round, which writes what Python compiles, counts for neither
    return "\n".join(lines + [f"| `{name}` | {spread(times[name])} | {spread(worked[name][1:])} |" for name in runs])


def _run(command: list[str]) -> float:
    """Run to the end, with compiled files kept as Python does by default; return seconds of the processor."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    print(table())
