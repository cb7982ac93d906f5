"""Ten new seeds for the change of the cost of tying: `python -m benchmarks.table_rate_seeds OLD NEW FOLDER`.

`benchmarks.cost_change` found that tying costs more where tables have their own tuned rate, by a test that was added
after the rows were seen, and both results hung on single documents or seeds. Here the same two settings, on 100,000 and
on 400,000 tokens, get seeds 6 to 15.

Fixed before any run: the change of tied less untied on each text, paired over seeds and held-out documents, with Holm's
correction over the two texts. Earlier seeds do not count. Every arm has the rates that the trials of the finished
studies OLD (`gain-by-text`) and NEW (`table-rate-by-text`) chose. All runs take about 25 minutes of one core; a second
call continues. The table is printed and written to `benchmarks/results/table_rate_seeds.csv`.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.cost_change import table
from benchmarks.study_runs import later_seeds, train_comparison
from benchmarks.tables import write_table
from tiewise.training.compare import Display, start
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings
from tiewise.training.study.grid import GRID, StudyGrid
from tiewise.training.tuning import TUNING

CELLS = ("train_tokens=100000", "train_tokens=400000")
EARLIER_SEEDS, SEEDS = 5, 10
CSV_FILE = Path(__file__).parent / "results" / "table_rate_seeds.csv"


def train_cell(settings: Settings, cell: Path, out: Path) -> Comparison:
    """Train new seeds of a study's cell at the rates that its trials chose."""
    command = "benchmarks.table_rate_seeds"
    if not out.exists():
        start(settings, out, command, Display.on_stderr())
        shutil.copy(cell / TUNING, out)  # so that no trial is repeated
    with later_seeds(EARLIER_SEEDS):
        return train_comparison(settings, out, command)


def train_study(study: Path, folder: Path) -> dict[str, Comparison]:
    """Train new seeds of both cells of a finished study, and return their comparisons."""
    cells = StudyGrid.named(str(study / GRID)).cells()
    return {
        name: train_cell(replace(cells[name], seeds=SEEDS), study / name, folder / study.name / name) for name in CELLS
    }


def main(old: Path, new: Path, folder: Path) -> None:
    """Train what is missing, and write the table."""
    write_table(CSV_FILE, table(train_study(old, folder), train_study(new, folder)))
    print(CSV_FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
