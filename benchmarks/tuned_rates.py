"""Learning rates that a study's trials chose: `benchmarks/results/tuned_rates.csv`.

A study with the setting `tune` runs trials for each arm in each cell. A row is one arm in one cell; `smallest` and
`largest` are the rates that were tried. The last three columns are those of tables with a rate of their own.
`python -m benchmarks.atlas FOLDER…` writes the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.tables import write_table
from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison
from tiewise.training.tuning import LEARNING_RATE, TABLE_RATE

CSV_FILE = Path(__file__).parent / "results" / "tuned_rates.csv"


def collect(study: Path) -> Iterator[dict[str, str]]:
    """Yield the row of each arm in each finished cell of a study's folder, if its arms were tuned."""
    for results in sorted(study.glob(f"*/{RESULTS}")):
        comparison = Comparison.from_dict(read_json(results))
        if not comparison.setting.get("tune"):  # some kinds of run have no such setting
            continue
        for arm in comparison.arms:
            trials = [trial for trial in comparison.tuning if trial["arm"] == arm]
            [chosen] = [trial for trial in trials if trial["chosen"]]
            row = {"study": study.name, "cell": results.parent.name, "arm": arm}
            for name, prefix in ((LEARNING_RATE, ""), (TABLE_RATE, "table_")):
                tried = [trial[name] for trial in trials if name in trial]
                if tried:
                    rates = {name: chosen[name], f"{prefix}smallest": min(tried), f"{prefix}largest": max(tried)}
                    row |= {column: f"{rate:g}" for column, rate in rates.items()}
            yield row


def replace_rows(studies: Sequence[Path]) -> None:
    """Replace the rows of these studies in the file."""
    names = {study.name for study in studies}
    rows = [row for row in read() if row["study"] not in names]
    for study in studies:
        rows += collect(study)
    write_table(CSV_FILE, rows)


def read() -> list[dict[str, str]]:
    """Return the rows of the file; none if it does not exist."""
    if not CSV_FILE.exists():
        return []
    with CSV_FILE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
