"""`make bench`: every table but the loss's (`benchmarks.loss`), printed and written under `benchmarks/results/`.

python -m benchmarks.run [startup|check|alignment|step|recurrent|sharing|decoding|wire|main_job|launchers …]

`subspace=CORPUS` needs a corpus of words, so it is run where one is named only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.measure import in_fresh_process
from tiewise.training.compare import environment

RESULTS = Path(__file__).parent / "results"
NAMES = ("startup", "check", "alignment", "step", "recurrent", "sharing", "decoding", "wire", "main_job", "launchers")


def main() -> None:
    env = environment()
    where = f"{env['processor']}, {env['cores']} cores, {env['device']}; torch {env['torch']}, Python {env['python']}"
    for asked in sys.argv[1:] or NAMES:
        name, _, corpus = asked.partition("=")
        if (name == "subspace") != bool(corpus):
            raise SystemExit("subspace=CORPUS: it needs a corpus, and nothing else takes one")
        load = os.getloadavg()[0]
        text = in_fresh_process(f"benchmarks.{name}", *filter(None, [corpus]))
        called = f"benchmarks.{name}" + (" CORPUS" if corpus else "")
        page = f"# {name}\n\n`python -m {called}` on {where}; load before it {load:.1f}.\n\n{text}\n"
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(page, encoding="utf-8")
        print(page, flush=True)


if __name__ == "__main__":
    main()
