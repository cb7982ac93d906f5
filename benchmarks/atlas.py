"""Put finished studies into the atlas: `python -m benchmarks.atlas runs/gain-by-text runs/rank …`.

Every row of each study's `sweep.csv`, under the name of its grid and beside the settings that say how near it is to
another model, goes into `src/tiewise/planning/data/atlas.csv`; what that file held of these studies is replaced.
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
# of a cell's settings: what a neighbour is near in, whether the study varies it or not
NEAR = ("kind", "model", "text", "tokenizer", "width", "layers", "heads", "match", "steps", "batch", "length")


def rows(folder: Path) -> list[dict[str, str]]:
    """Rows of a study's table with its name and the settings of their cells; nothing of cells without an interval."""
    with (folder / f"{study.TABLE}.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    cells = {cell: study.flat_settings(made) for cell, made in StudyGrid.named(str(folder / GRID)).cells().items()}
    found = []
    for row in table:
        near = {name: cells[row["cell"]][name] for name in NEAR}
        near["text"] = " ".join(near["text"])
        rest = {name: _short(value) for name, value in row.items() if name not in near}
        found.append({"study": folder.name} | near | rest)
    return found


def _short(value: str) -> str:
    """Six digits of a fraction."""
    return f"{float(value):.6g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", value) else value


def main(folders: list[Path]) -> None:
    """Read, merge, write."""
    kept = list(csv.DictReader(ATLAS.open(newline="", encoding="utf-8"))) if ATLAS.exists() else []
    names = {folder.name for folder in folders}
    table = [row for row in kept if row["study"] not in names] + [row for folder in folders for row in rows(folder)]
    columns = list(dict.fromkeys(name for row in table for name in row))
    with ATLAS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(table)
    print(f"{ATLAS}: {len(table)} rows of {len({row['study'] for row in table})} studies")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
