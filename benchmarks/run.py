"""`make bench`: every table, printed and written under `benchmarks/results/`.

python -m benchmarks.run [loss|step|startup|check|alignment …]
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.measure import in_fresh_process
from tiewise.training.environment import environment

RESULTS = Path(__file__).parent / "results"
NAMES = ("startup", "check", "alignment", "step", "loss")


def main() -> None:
    env = environment()
    where = f"{env['processor']}, {env['cores']} cores, {env['device']}; torch {env['torch']}, Python {env['python']}"
    for name in sys.argv[1:] or NAMES:
        text = in_fresh_process(f"benchmarks.{name}")
        page = f"# {name}\n\n`python -m benchmarks.{name}` on {where}.\n\n{text}\n"
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(page, encoding="utf-8")
        print(page, flush=True)


if __name__ == "__main__":
    main()
