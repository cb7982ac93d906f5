"""Time to `import tiewise`, to `tiewise --help` and to a plan, whole processes, beside an empty Python.

python -m benchmarks.startup
"""

from __future__ import annotations

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
    times = alternate({name: (lambda run=run: _run(run)) for name, run in runs.items()}, rounds)
    lines = ["| process | ms, median (range) |", "|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {spread(values)} |" for name, values in times.items()])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    print(table())
