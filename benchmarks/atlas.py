"""Put finished studies into the atlas: `python -m benchmarks.atlas runs/gain-by-text runs/rank …`.

`src/tiewise/planning/data/atlas.csv` receives every row of each study's `sweep.csv`, with the study's name and with the
settings that give its distance from another model. The file's earlier rows of these studies are replaced.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from tiewise.planning import catalogue
from tiewise.training.study import study
from tiewise.training.study.grid import GRID, StudyGrid

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


def main(folders: list[Path]) -> None:
    """Read the studies, merge them with the atlas, and write it."""
    old_rows = list(csv.DictReader(ATLAS.open(newline="", encoding="utf-8"))) if ATLAS.exists() else []
    names = {folder.name for folder in folders}
    table = [row for row in old_rows if row["study"] not in names] + [
        row for folder in folders for row in read_rows(folder)
    ]
    columns = list(dict.fromkeys(name for row in table for name in row))
    with ATLAS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(table)
    print(f"{ATLAS}: {len(table)} rows of {len({row['study'] for row in table})} studies")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
