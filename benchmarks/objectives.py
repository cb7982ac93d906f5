"""What sentence order teaches an ALBERT, next sentences beside it, and at what cost: `-m benchmarks.objectives RUNS`.

RUNS holds comparisons of one arm, one for each objective, on sentences that say their place (docs/albert.md, "A
control"). Text, sizes, steps and seeds are the same, so what an objective costs is masked tokens:

    for objective in none sop nsp; do
        tiewise compare --recipe albert-small --text numbered.jsonl --tokenizer bpe:400 --arms factored:32 --seeds 5 \\
            --steps 1000 --set init=0.12 --set width=64 --set layers=3 --set heads=2 --set length=32 \\
            --set learning_rate=0.002 --set warmup=0.1 --set measured=65536 --set objective=$objective \\
            --out RUNS/$objective
    done

A first study had the recipe's init of 0.02, three seeds and 1,500 steps: one of three learnt order. Three trials of
seed 101, none of the study's, on order alone, then chose init and steps before any run of this one: at 0.06 the loss of
held-out pairs fell below 0.6 by step 300 of 1,500 and 450 of 1,000, at 0.12 by step 180 of 1,200. Learnt shall be
called what every seed tells in nine of ten pairs or more; Holm's correction is over the six differences of both.

What each model judges goes into `benchmarks/results/objectives.csv`; masked tokens in the rows of its own objective,
and in the same rows for all, whose pairs are in order. What stands there of another init or other steps stays.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tiewise.boundary.hf import load
from tiewise.boundary.install import installed
from tiewise.training.compare import all_runs, make_jobs, open_run
from tiewise.training.folder import read_json
from tiewise.training.kinds.albert import ACCURACIES, evaluation_rows, measure_pretrained
from tiewise.training.models.open_albert import OpenAlbertConfig  # and an ALBERT is loaded by its name

KEPT = Path(__file__).parent / "results" / "objectives.csv"
IN_ORDER = "masked tokens, in order"


def main(runs: Path) -> None:
    """Gather, and judge all on the same rows."""
    rows: list[dict[str, str]] = []
    for cell in sorted(path.parent for path in runs.glob("*/results.json")):
        settings, text = open_run(cell, single=False)
        for job in all_runs(make_jobs(settings, text, cell), settings.seeds, ()):
            found = read_json(job.folder / ACCURACIES)
            judged = {"masked tokens": found["tokens"], **found["pairs"]}
            same = evaluation_rows(job, "heldout", ("none",), settings.measured // settings.length)
            tokens = measure_pretrained(installed(load(job.folder / "final")), same, text.counts).shares["masked"]
            judged[IN_ORDER] = vars(tokens)
            for name, share in judged.items():
                right, nll = f"{share['share']:.4f}", f"{share['nll']:.4f}"
                init = settings.init or OpenAlbertConfig.initializer_range
                at = {"init": str(init), "steps": str(settings.steps), "objective": settings.kind_options.objective}
                at |= {"seed": str(job.seed), "judged": name}
                rows.append(
                    at | {"right": right, "of": share["count"], "nll": nll, "unigram": f"{found['unigram_nll']:.4f}"}
                )
    mine = {(row["init"], row["steps"]) for row in rows}
    with KEPT.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["init"], row["steps"]) not in mine] + rows
    with KEPT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
