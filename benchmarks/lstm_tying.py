"""Does tying help an LSTM? Ten new seeds: `python -m benchmarks.lstm_tying FOLDER`.

The study `recurrent` cannot answer: two of its five seeds were added after a look at the first three. Here untied and
tied models get seeds 6 to 15, on both texts, with the settings of that study. The recipe keeps the best epoch by the
validation part, and has one learning rate.

Fixed before any run: tied less untied at each text, with an interval over seeds and held-out documents, Holm's
correction over the two texts, and the margin 0.02. The earlier seeds do not count. It needs the folder `wikitext-2`.
All runs take about 30 minutes of one core; a second call continues. The table is printed and written to
`benchmarks/results/lstm_tying.csv`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.study_runs import later_seeds, train_comparison
from benchmarks.tables import write_table
from tiewise.training.results import Comparison, Difference, differences
from tiewise.training.settings import Settings
from tiewise.training.study.grid import StudyGrid
from tiewise.training.verdicts import with_verdicts

STUDY, EARLIER_SEEDS = "recurrent", 5
ARMS, SEEDS = ("untied", "tied"), 10
CSV_FILE = Path(__file__).parent / "results" / "lstm_tying.csv"


def cells() -> dict[str, Settings]:
    """Return the settings of each text by the name of its folder."""
    by_name = StudyGrid.named(STUDY).cells()
    return {name: replace(settings, arms=ARMS, seeds=SEEDS) for name, settings in by_name.items()}


def train(folder: Path, by_name: dict[str, Settings]) -> list[Comparison]:
    """Train the runs that the folder lacks, and return the comparison of each text."""
    with later_seeds(EARLIER_SEEDS):
        return [
            train_comparison(settings, folder / name, "benchmarks.lstm_tying") for name, settings in by_name.items()
        ]


def table(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Return a row for each text: the arms' losses, and their difference with its verdict."""
    family = with_verdicts([differences(comparison, *ARMS)["heldout_nll"] for comparison in comparisons])
    return [_row(comparison, d) for comparison, d in zip(comparisons, family, strict=True)]


def _row(comparison: Comparison, d: Difference) -> dict[str, str]:
    """Return the row of one text, in nats per word."""
    numbers = {arm: fmean(run.heldout_nll for run in comparison.of(arm)) for arm in ARMS}
    training = differences(comparison, *ARMS)["train_nll"]
    numbers |= {"tied − untied": d.mean, "low": d.low, "high": d.high, "detectable": d.detectable}
    numbers |= {"on training text": training.mean}
    row = {"words": str(comparison.data["splits"]["train"]["tokens"])} | {
        name: f"{value:.5f}" for name, value in numbers.items()
    }
    return row | {"p_holm": f"{d.p:.3g}", "verdict": d.verdict or "", "seeds": str(d.n), "documents": str(d.documents)}


def main(folder: Path) -> None:
    """Train what is missing, and write the table."""
    write_table(CSV_FILE, table(train(folder, cells())))
    print(CSV_FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
