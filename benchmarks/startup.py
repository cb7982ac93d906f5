"""Time of `import tiewise`, `tiewise --help` and a plan, compared with an empty Python.

Each time is that of a complete process. Processor time (user and system) hardly depends on other load of the machine;
wall-clock time does.

python -m benchmarks.startup
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import alternate, format_spread


def render_table(rounds: int = 9) -> str:
    """Return the Markdown table."""
    tiewise = str(Path(sys.executable).with_name("tiewise"))
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import tiewise'": [sys.executable, "-c", "import tiewise"],
        "tiewise --help": [tiewise, "--help"],
        "tiewise compare --help": [tiewise, "compare", "--help"],
        "tiewise plan --like gpt2": [tiewise, "plan", "--like", "gpt2"],
    }
    processor_seconds: dict[str, list[float]] = {name: [] for name in commands}
    times = alternate(
        {
            name: (
                lambda name=name, command_line=command_line: processor_seconds[name].append(
                    _time_processor(command_line)
                )
            )
            for name, command_line in commands.items()
        },
        rounds,
    )
    lines = ["| process | ms, median (range) | of the processor |", "|---|---|---|"]
    # the first round, in which Python writes compiled files, counts for neither column
    return "\n".join(
        lines
        + [
            f"| `{name}` | {format_spread(times[name])} | {format_spread(processor_seconds[name][1:])} |"
            for name in commands
        ]
    )


def _time_processor(command: list[str]) -> float:
    """Run a command and return its seconds of processor time.

    Python may write compiled files, as it does by default.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    print(render_table())
