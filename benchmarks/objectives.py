"""What sentence order teaches an ALBERT, next sentences beside it, and at what cost: `-m benchmarks.objectives RUNS`.

RUNS holds comparisons of one arm, one for each objective, on sentences that say their place (docs/albert.md, "A
control"). Text, sizes, steps and seeds are the same, so what an objective costs is masked tokens:

    for objective in none sop nsp; do
        tiewise compare --recipe albert-small --text numbered.jsonl --tokenizer bpe:400 --arms factored:32 --seeds 3 \\
            --steps 1500 --set width=64 --set layers=3 --set heads=2 --set length=32 --set learning_rate=0.002 \\
            --set warmup=0.1 --set measured=65536 --set objective=$objective --out RUNS/$objective
    done

What each model judges goes into `benchmarks/results/objectives.csv`; masked tokens in the rows of its own objective,
and in the same rows for all, whose pairs are in order.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import tiewise.models  # noqa: F401  (an ALBERT is loaded by its name)
from tiewise.boundary.install import installed
from tiewise.hf import load
from tiewise.training.compare import all_runs, make_jobs, opened
from tiewise.training.folder import read_json
from tiewise.training.kinds.albert import FOUND, measure_pretrained, measured_rows

KEPT = Path(__file__).parent / "results" / "objectives.csv"
IN_ORDER = "masked tokens, in order"


def main(runs: Path) -> None:
    """Gather, and judge all on the same rows."""
    rows = []
    for cell in sorted(path.parent for path in runs.glob("*/results.json")):
        settings, text = opened(cell, single=False)
        for job in all_runs(make_jobs(settings, text, cell), settings.seeds, ()):
            found = read_json(job.folder / FOUND)
            judged = {"masked tokens": found["tokens"], **found["pairs"]}
            same = measured_rows(job, "heldout", ("none",), settings.measured // settings.length)
            tokens = measure_pretrained(installed(load(job.folder / "final")), same, text.counts).shares["masked"]
            judged[IN_ORDER] = vars(tokens)
            for name, share in judged.items():
                right, nll = f"{share['share']:.4f}", f"{share['nll']:.4f}"
                at = {"objective": settings.own.objective, "seed": job.seed, "judged": name}
                rows.append(
                    at | {"right": right, "of": share["count"], "nll": nll, "unigram": f"{found['unigram_nll']:.4f}"}
                )
    with KEPT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
