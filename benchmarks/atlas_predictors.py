"""Does what is seen in an untied model say what tying would cost? `python -m benchmarks.atlas_predictors STUDY …`.

Of every cell of these studies that compared tied with untied: what `tiewise inspect` finds in the first seed's models,
what the runs noted of both paths' gradients, and the difference in held-out loss. Written to
`benchmarks/results/atlas_predictors.csv` as it is found, and taken from there by a later call; then each predictor is
fitted on all settings but one, by a line, and scored on that one.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import scipy

import tiewise
from tiewise.core.estimates import holm_adjusted
from tiewise.inspection.tables.bigram_counts import irreversibility
from tiewise.training.data.corpus import load_prepared
from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison, differences

KEPT = Path(__file__).parent / "results" / "atlas_predictors.csv"
SECTIONS = ("alignment", "bottleneck")
PREDICTORS = (
    "log tokens of text", "log width", "log V", "untied alignment", "irreversibility", "lookup share",
    "head's share over chance",
)  # fmt: skip


def seen(cell: Path) -> dict[str, float | str]:
    """Everything of one cell."""
    comparison, text = Comparison.from_dict(read_json(cell / RESULTS)), load_prepared(cell / "data")
    models = {arm: cell / arm / "seed-1" / "final" for arm in ("untied", "tied")}
    found = tiewise.inspect(models["untied"], models["tied"], text="builtin", only=SECTIONS, windows=32)

    def value(section: str, arm: str, name: str) -> tuple[float, float]:
        (held,) = (one for label, one in found.found(section).items() if label.startswith(arm))
        return float(held[name].value), float(held[name].chance or 1)

    points = [p for run in comparison.of("untied") for p in run.curve if p.path_a is not None]
    train = np.array(text.split("train"))
    share, chance = value("bottleneck", "untied", "share of the squared gradient")
    row: dict[str, float | str] = {
        "study": cell.parent.name,
        "cell": cell.name,
        "tied − untied": differences(comparison, "untied", "tied")["heldout_nll"].mean,
        "log tokens of text": float(np.log(len(train))),
        "log width": float(np.log(comparison.setting["width"])),
        "log V": float(np.log(text.vocab)),
        "untied alignment": value("alignment", "untied", "after the best rotation")[0],
        "irreversibility": irreversibility(train, text.vocab).heldout.value,
        "lookup share": fmean(p.path_a / (p.path_a + p.path_b) for p in points),
        "head's share over chance": share / chance,
    }
    return {name: item if isinstance(item, str) else round(item, 5) for name, item in row.items()}


def scored(rows: list[dict[str, str]]) -> str:
    """A table of predictors: rank correlation over settings, and the error on settings left out."""
    gap = np.array([float(row["tied − untied"]) for row in rows])
    n = len(gap)

    def left_out(x: np.ndarray) -> float:
        """Root mean square error of a fit, each setting predicted by the others: residuals over 1 − leverage."""
        q, _ = np.linalg.qr(x)
        return float(np.sqrt(np.mean(((gap - q @ (q.T @ gap)) / (1 - np.sum(q * q, 1))) ** 2)))

    lines, columns = [], {name: np.array([float(row[name]) for row in rows]) for name in PREDICTORS}
    found = [scipy.stats.spearmanr(column, gap) for column in columns.values()]
    adjusted = holm_adjusted([float(one.pvalue) for one in found])
    for (name, column), one, p in zip(columns.items(), found, adjusted, strict=True):
        error = left_out(np.column_stack([np.ones(n), column]))
        lines.append(f"| {name} | {one.statistic:+.2f} | {p:.2g} | {error:.3f} |")
    mean = left_out(np.ones((n, 1)))
    both = left_out(np.column_stack([np.ones(n), *(columns[name] for name in PREDICTORS[:3])]))
    lines += [f"| the mean of the others | | | {mean:.3f} |", f"| text, width and V together | | | {both:.3f} |"]
    head = ["| predictor | rank correlation | p, Holm | error left out, nats |", "|---|---:|---:|---:|"]
    return "\n".join([*head, *lines]).replace("+", "").replace("| -", "| −")


def main(studies: list[Path]) -> None:
    """Look into what is not yet known, and score."""
    rows = list(csv.DictReader(KEPT.open(newline="", encoding="utf-8"))) if KEPT.exists() else []
    known = {(row["study"], row["cell"]) for row in rows}
    for cell in sorted(path.parent for study in studies for path in study.glob(f"*/{RESULTS}")):
        if (cell.parent.name, cell.name) not in known:
            rows.append({name: str(item) for name, item in seen(cell).items()})
            with KEPT.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            print(rows[-1], file=sys.stderr)
    print(scored(rows))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
