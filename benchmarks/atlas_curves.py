"""Compare tied with untied at their best steps as well: `python -m benchmarks.atlas_curves FOLDER`.

A row of the atlas compares the models of the last step. On little text a model is past its best by then. This script
repeats the two rows of the study `gain-by-text` with the least text, with the same seeds and settings. It measures
complete splits at the curves' points up to step 330, where all curves rise, and at the last step. It writes them to
`benchmarks/results/atlas_curves.csv`, from which `docs/make_atlas.py` makes the table of docs/dev/atlas.md.

The best step of a run has the least loss on the tuning split. Its held-out loss is compared. As in early stopping, the
choice of the step never reads the held-out text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.study_runs import train_comparison
from benchmarks.tables import write_table
from tiewise.core.step_names import LAST
from tiewise.training.folder import METRICS, read_lines
from tiewise.training.kinds.decoder import KIND, measure
from tiewise.training.study.grid import StudyGrid
from tiewise.training.trainer import Job, logging_window

STUDY, TOKENS = "gain-by-text", (25_000, 12_500)
LAST_DENSE_STEP = 330  # last step of the dense part of a curve
SPLITS = {"heldout": "heldout_nll", "tune": "tune_nll"}
CSV_FILE = Path(__file__).parent / "results" / "atlas_curves.csv"
Row = dict[str, str]


def measure_point(job: Job, installed: object) -> dict[str, float]:
    """Measure complete splits, where a point of a curve usually reads a few rows."""
    steps, window = job.settings.steps, logging_window(job.settings.steps)
    step = window * (len(read_lines(job.folder / METRICS)) + 1)
    if LAST_DENSE_STEP < step < steps:
        return {}
    text, length = job.text, job.settings.length
    return {
        name: measure(installed, text.split(split), length, text.counts).nll  # type: ignore[arg-type]
        for split, name in SPLITS.items()
    }


def train_curves(folder: Path) -> list[Row]:
    """Train the runs that the folder lacks, and return the curves of all runs."""
    KIND.point = measure_point  # type: ignore[method-assign]
    rows = []
    cells = StudyGrid.named(STUDY).cells()
    for tokens in TOKENS:
        out = folder / f"train_tokens={tokens}"
        comparison = train_comparison(replace(cells[out.name], select=LAST), out, "benchmarks.atlas_curves")
        for run in comparison.runs:
            run_columns = {"study": STUDY, "train_tokens": str(tokens), "arm": run.arm, "seed": str(run.seed)}
            for line in read_lines(out / run.arm / f"seed-{run.seed}" / METRICS):
                if line["step"] <= LAST_DENSE_STEP or line["step"] == run.steps:
                    losses = {name: f"{line[name]:.5f}" for name in ("train_nll", "tune_nll", "heldout_nll")}
                    rows.append(run_columns | {"step": str(line["step"])} | losses)
            assert abs(float(rows[-1]["heldout_nll"]) - run.heldout_nll) < 1e-4, "the curve ends in the result"
    return rows


def main(folders: Sequence[Path]) -> None:
    """Train in each folder and write the curves."""
    for folder in folders:
        rows = train_curves(folder)
        write_table(CSV_FILE, rows)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
