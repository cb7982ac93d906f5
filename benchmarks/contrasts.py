"""Contrasts of a finished study with another reference: `python -m benchmarks.contrasts STUDY REFERENCE FILE`.

The table of a study compares each arm with its first one. This one compares the arms with another, in nats per token of
held-out text, with intervals over seeds and documents and Holm's correction over all rows. It is written to
`benchmarks/results/FILE.csv`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.tables import write_table
from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison, Difference, correct_by_holm, differences
from tiewise.training.study.grid import GRID, StudyGrid

OUT = Path(__file__).parent / "results"


class Contrast(NamedTuple):
    """A subtraction in a cell of a study: arm − reference."""

    cell: str
    arm: str
    reference: str


def read_cells(study: Path) -> dict[str, Comparison]:
    """Return the comparison of every cell of a finished study.

    FileNotFoundError: a cell is not finished.
    """
    cells = {}
    for cell in StudyGrid.named(str(study / GRID)).cells():
        results = read_json(study / cell / RESULTS)
        if results is None:
            raise FileNotFoundError(f"{study / cell} has no {RESULTS}; finish the study first")
        cells[cell] = Comparison.from_dict(results)
    return cells


def contrast_rows(comparisons: Mapping[str, Comparison], contrasts: Sequence[Contrast]) -> list[dict[str, str]]:
    """Return a row for each contrast, with parameters, mean losses and their difference."""
    found = [differences(comparisons[c.cell], c.reference, c.arm)["heldout_nll"] for c in contrasts]
    corrected = correct_by_holm(found)
    return [_row(comparisons[c.cell], c, d) for c, d in zip(contrasts, corrected, strict=True)]


def _row(comparison: Comparison, contrast: Contrast, d: Difference) -> dict[str, str]:
    """Return the row of one contrast."""
    row = dict(contrast._asdict())
    row["parameters"] = str(comparison.of(contrast.arm)[0].total_parameters)
    row["reference_parameters"] = str(comparison.of(contrast.reference)[0].total_parameters)
    numbers = {"loss": _mean_loss(comparison, contrast.arm)}
    numbers["reference_loss"] = _mean_loss(comparison, contrast.reference)
    row |= {name: f"{loss:.5f}" for name, loss in numbers.items()}
    values = {"difference": d.mean, "low": d.low, "high": d.high, "p_holm": d.p}
    row |= {name: "" if value is None else f"{value:.5f}" for name, value in values.items()}
    return row | {"seeds": str(d.n), "documents": str(d.documents)}


def _mean_loss(comparison: Comparison, arm: str) -> float:
    """Return the mean held-out loss of an arm, in nats per token."""
    return fmean(run.heldout_nll for run in comparison.of(arm))


def main(arguments: Sequence[str]) -> None:
    """Write the table of a study."""
    folder, reference, name = arguments
    cells = read_cells(Path(folder))
    contrasts = [
        Contrast(cell, arm, reference)
        for cell, comparison in cells.items()
        for arm in comparison.arms
        if arm not in (reference, comparison.reference)
    ]
    write_table(OUT / f"{name}.csv", contrast_rows(cells, contrasts))
    print((OUT / f"{name}.csv").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(sys.argv[1:])
