"""Put finished studies into the atlas: `python -m benchmarks.atlas runs/gain-by-text runs/rank …`.

`src/tiewise/planning/data/atlas.csv` receives every row of each study's `sweep.csv`, with the study's name and with the
settings that give its distance from another model. The file's earlier rows of these studies are replaced. The curves
of a study's runs are written to `benchmarks/results/curves/` (`study_curves`), and what trials chose for its arms to
`tuned_rates.csv`.

`python -m benchmarks.atlas --judge` reads no study. It repeats the verdicts of all rows by the present rule
(`training.verdicts`) and margin.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from benchmarks import study_curves, tuned_rates
from benchmarks.tables import write_table
from tiewise.core.estimates import two_sided_p
from tiewise.planning import catalogue
from tiewise.training.results import Difference
from tiewise.training.settings import Settings
from tiewise.training.study import study
from tiewise.training.study.grid import GRID, StudyGrid
from tiewise.training.verdicts import sign_of, with_verdicts

ATLAS = Path(catalogue.__file__).parent / "data" / "atlas.csv"
# settings that measure the distance between cells; a study varies some of them
DISTANCE_SETTINGS = (
    "kind",
    "model",
    "text",
    "tokenizer",
    "width",
    "layers",
    "heads",
    "match",
    "steps",
    "batch",
    "length",
)


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a study's table, with its name and the settings of their cells.

    Cells without an interval have no row.
    """
    with (folder / f"{study.TABLE}.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    cells = {
        cell: study.flat_settings(settings) for cell, settings in StudyGrid.named(str(folder / GRID)).cells().items()
    }
    rows = []
    for row in table:
        distance_settings = {name: cells[row["cell"]][name] for name in DISTANCE_SETTINGS}
        distance_settings["text"] = " ".join(distance_settings["text"])
        other_columns = {name: _round_fraction(value) for name, value in row.items() if name not in distance_settings}
        rows.append({"study": folder.name} | distance_settings | other_columns)
    return rows


def _round_fraction(value: str) -> str:
    """Return a decimal fraction with six digits, and other values unchanged."""
    return f"{float(value):.6g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", value) else value


def judge(rows: list[dict[str, str]]) -> None:
    """Write verdict and margin by the present rule into the rows of one study that have an interval."""
    judged = [row for row in rows if row["error"]]
    for row, d in zip(judged, with_verdicts([_difference(row) for row in judged]), strict=True):
        row |= {"sign": str(sign_of(d)), "verdict": d.verdict or "", "margin": f"{d.margin:g}"}
        row["p_equivalence"] = f"{d.p_equivalence:.6g}"


def _difference(row: dict[str, str]) -> Difference:
    """Return the held-out difference of a row, before Holm's correction."""
    mean, low, high, error = (float(row[name]) for name in ("heldout", "heldout_low", "heldout_high", "error"))
    n = int(row["seeds"])
    df = float(row.get("df") or n - 1)  # rows from before intervals over documents have none
    p = two_sided_p(mean / error, df)
    margin = float(row.get("margin") or Settings.margin)
    detected = low > 0 or high < 0
    return Difference(
        row["arm"], "heldout_nll", n, mean, low, high, None, detected, p, margin=margin, error=error, df=df
    )


def judge_all() -> None:
    """Judge the rows of every study in the atlas anew, and write it."""
    table = list(csv.DictReader(ATLAS.open(newline="", encoding="utf-8")))
    for study_name in dict.fromkeys(row["study"] for row in table):
        judge([row for row in table if row["study"] == study_name])
    _write(table)


def main(folders: list[Path]) -> None:
    """Read the studies, merge them with the atlas, and write it."""
    old_rows = list(csv.DictReader(ATLAS.open(newline="", encoding="utf-8"))) if ATLAS.exists() else []
    names = {folder.name for folder in folders}
    table = [row for row in old_rows if row["study"] not in names] + [
        row for folder in folders for row in read_rows(folder)
    ]
    _write(table)
    for folder in folders:
        study_curves.write(study_curves.collect(folder), study_curves.CURVES / f"{folder.name}.jsonl")
    tuned_rates.replace_rows(folders)


def _write(table: list[dict[str, str]]) -> None:
    """Write the atlas."""
    write_table(ATLAS, table)
    print(f"{ATLAS}: {len(table)} rows of {len({row['study'] for row in table})} studies")


if __name__ == "__main__":
    if sys.argv[1:] == ["--judge"]:
        judge_all()
    else:
        main([Path(name) for name in sys.argv[1:]])
