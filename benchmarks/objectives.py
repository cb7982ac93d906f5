"""Effect of ALBERT's sentence-order objective on accuracy: `python -m benchmarks.objectives RUNS`.

It is compared with next-sentence prediction and with no such objective. RUNS holds one comparison of one arm for each
objective and setting, on numbered sentences (docs/albert.md, "A control"; docs/dev/atlas.md has the commands). Text,
sizes, steps and seeds are the same, so the cost of an objective is lower accuracy on masked tokens. Each run keeps its
best step by the masked tokens of the tuning split.

A first study has the recipe's init of 0.02 and 1,500 steps; two of its five seeds were added after a look. Three
trials then chose init and steps of the second study before any of its runs. They trained on order alone with seed 101,
which it does not use. With init 0.06 the loss of held-out pairs fell below 0.6 by step 300 of 1,500 and 450 of 1,000;
with init 0.12 by step 180 of 1,200. An objective counts as learnt if every seed is right in nine of ten pairs or more.
Holm's correction is over the six differences of both studies.

The accuracies go into `benchmarks/results/objectives.csv`, the losses on the tuning split and the best steps into
`benchmarks/results/curves/objectives.jsonl`. Masked tokens are judged twice: in rows of the model's objective, and in
the same rows for all models, whose pairs are in order.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import study_curves
from benchmarks.tables import write_table
from tiewise.boundary.hf import load
from tiewise.boundary.installation import installed
from tiewise.training.compare import all_runs, make_jobs, open_run
from tiewise.training.folder import read_json
from tiewise.training.kinds.albert import ACCURACIES, evaluation_rows, measure_pretrained
from tiewise.training.models.open_albert import OpenAlbertConfig  # the import registers the ALBERT class for `load`

CSV_FILE = Path(__file__).parent / "results" / "objectives.csv"
IN_ORDER = "masked tokens, in order"


def main(runs: Path) -> None:
    """Collect the accuracies, and measure all models on the same rows."""
    rows: list[dict[str, str]] = []
    for cell in sorted(path.parent for path in runs.glob("*/results.json")):
        settings, text = open_run(cell, single=False)
        for job in all_runs(make_jobs(settings, text, cell), settings.seeds, ()):
            accuracies = read_json(job.folder / ACCURACIES)
            shares = {"masked tokens": accuracies["tokens"], **accuracies["pairs"]}
            common_rows = evaluation_rows(job, "heldout", ("none",), settings.measured // settings.length)
            tokens = measure_pretrained(installed(load(job.folder / "final")), common_rows, text.counts).shares[
                "masked"
            ]
            shares[IN_ORDER] = vars(tokens)
            for name, share in shares.items():
                accuracy, nll = f"{share['share']:.4f}", f"{share['nll']:.4f}"
                init = settings.init or OpenAlbertConfig.initializer_range
                run_columns = {
                    "init": str(init),
                    "steps": str(settings.steps),
                    "objective": settings.kind_options.objective,
                }
                run_columns |= {"seed": str(job.seed), "judged": name}
                rows.append(
                    run_columns
                    | {
                        "right": accuracy,
                        "of": share["count"],
                        "nll": nll,
                        "unigram": f"{accuracies['unigram_nll']:.4f}",
                    }
                )
    write_table(CSV_FILE, sorted(rows, key=lambda row: (float(row["init"]), row["objective"], int(row["seed"]))))
    study_curves.write(study_curves.collect(runs), study_curves.CURVES / "objectives.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
