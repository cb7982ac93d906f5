"""Runner of all benchmarks except the loss (`benchmarks.loss`), for `make bench`.

python -m benchmarks.run [startup|check|alignment|step|recurrent|sharing|decoding|wire|main_job|launchers|pages …]

It prints each table and writes it to `benchmarks/results/`. `subspace` needs a corpus of words, so it runs only as
`subspace=CORPUS`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.measure import run_in_fresh_process
from tiewise.training.compare import environment

RESULTS = Path(__file__).parent / "results"
NAMES = (
    "startup",
    "check",
    "alignment",
    "step",
    "recurrent",
    "sharing",
    "decoding",
    "wire",
    "main_job",
    "launchers",
    "pages",
)


def main() -> None:
    """Run the named benchmarks, or all."""
    env = environment()
    machine = f"{env['processor']}, {env['cores']} cores, {env['device']}; torch {env['torch']}, Python {env['python']}"
    for argument in sys.argv[1:] or NAMES:
        name, _, corpus = argument.partition("=")
        if (name == "subspace") != bool(corpus):
            raise SystemExit("subspace=CORPUS: it needs a corpus, and nothing else takes one")
        load = os.getloadavg()[0]
        text = run_in_fresh_process(f"benchmarks.{name}", *filter(None, [corpus]))
        module = f"benchmarks.{name}" + (" CORPUS" if corpus else "")
        page = f"# {name}\n\n`python -m {module}` on {machine}; load before it {load:.1f}.\n\n{text}\n"
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(page, encoding="utf-8")
        print(page, flush=True)


if __name__ == "__main__":
    main()
