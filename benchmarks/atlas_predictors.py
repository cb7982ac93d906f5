"""Prediction of the tying gap from an untied model: `python -m benchmarks.atlas_predictors STUDY …`.

It collects three things from every cell of these studies that compared tied with untied: results of `tiewise inspect`
for the first seed's models, logged gradients of both paths, and the difference in held-out loss. It writes each cell to
`benchmarks/results/atlas_predictors.csv`, and later calls read it from there. Then a line is fitted to each predictor
on all settings except one, and scored on that one.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import scipy

import tiewise
from benchmarks.tables import write_table
from tiewise.core.estimates import holm_adjusted
from tiewise.inspection.tables.bigram_counts import irreversibility
from tiewise.training.data.corpus import load_prepared
from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison, differences

CSV_FILE = Path(__file__).parent / "results" / "atlas_predictors.csv"
SECTIONS = ("alignment", "bottleneck")
PREDICTORS = (
    "log tokens of text", "log width", "log V", "untied alignment", "irreversibility", "lookup share",
    "head's share over chance",
)  # fmt: skip


def measure_cell(cell: Path) -> dict[str, float | str]:
    """Return the predictors and the tying gap of one cell."""
    comparison, text = Comparison.from_dict(read_json(cell / RESULTS)), load_prepared(cell / "data")
    models = {arm: cell / arm / "seed-1" / "final" for arm in ("untied", "tied")}
    inspection = tiewise.inspect(models["untied"], models["tied"], text="builtin", only=SECTIONS, windows=32)

    def read_quantity(section: str, arm: str, name: str) -> tuple[float, float]:
        """Return a quantity of an arm and its chance value, or 1 without one."""
        (quantities,) = (
            measurement for label, measurement in inspection.found(section).items() if label.startswith(arm)
        )
        return float(quantities[name].value), float(quantities[name].chance or 1)

    points = [p for run in comparison.of("untied") for p in run.curve if p.path_a is not None]
    train = np.array(text.split("train"))
    share, chance = read_quantity("bottleneck", "untied", "share of the squared gradient")
    row: dict[str, float | str] = {
        "study": cell.parent.name,
        "cell": cell.name,
        "tied − untied": differences(comparison, "untied", "tied")["heldout_nll"].mean,
        "log tokens of text": float(np.log(len(train))),
        "log width": float(np.log(comparison.setting["width"])),
        "log V": float(np.log(text.vocab)),
        "untied alignment": read_quantity("alignment", "untied", "after the best rotation")[0],
        "irreversibility": irreversibility(train, text.vocab).heldout.value,
        "lookup share": fmean(p.path_a / (p.path_a + p.path_b) for p in points),
        "head's share over chance": share / chance,
    }
    return {name: item if isinstance(item, str) else round(item, 5) for name, item in row.items()}


def score_predictors(rows: list[dict[str, str]]) -> str:
    """Return the table of predictors: rank correlation, and error on left-out settings."""
    gap = np.array([float(row["tied − untied"]) for row in rows])
    n = len(gap)

    def left_out_error(x: np.ndarray) -> float:
        """Return the root mean square error when the other settings predict each setting.

        The errors are the residuals divided by 1 − leverage.
        """
        q, _ = np.linalg.qr(x)
        return float(np.sqrt(np.mean(((gap - q @ (q.T @ gap)) / (1 - np.sum(q * q, 1))) ** 2)))

    lines, columns = [], {name: np.array([float(row[name]) for row in rows]) for name in PREDICTORS}
    correlations = [scipy.stats.spearmanr(column, gap) for column in columns.values()]
    adjusted = holm_adjusted([float(correlation.pvalue) for correlation in correlations])
    for (name, column), correlation, p in zip(columns.items(), correlations, adjusted, strict=True):
        error = left_out_error(np.column_stack([np.ones(n), column]))
        lines.append(f"| {name} | {correlation.statistic:+.2f} | {p:.2g} | {error:.3f} |")
    mean = left_out_error(np.ones((n, 1)))
    both = left_out_error(np.column_stack([np.ones(n), *(columns[name] for name in PREDICTORS[:3])]))
    lines += [f"| the mean of the others | | | {mean:.3f} |", f"| text, width and V together | | | {both:.3f} |"]
    head = ["| predictor | rank correlation | p, Holm | error left out, nats |", "|---|---:|---:|---:|"]
    return "\n".join([*head, *lines]).replace("+", "").replace("| -", "| −")


def main(studies: list[Path]) -> None:
    """Measure the cells that the file lacks, and print the scores."""
    rows = list(csv.DictReader(CSV_FILE.open(newline="", encoding="utf-8"))) if CSV_FILE.exists() else []
    measured = {(row["study"], row["cell"]) for row in rows}
    for cell in sorted(path.parent for study in studies for path in study.glob(f"*/{RESULTS}")):
        if (cell.parent.name, cell.name) not in measured:
            rows.append({name: str(item) for name, item in measure_cell(cell).items()})
            write_table(CSV_FILE, rows)
            print(rows[-1], file=sys.stderr)
    print(score_predictors(rows))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
