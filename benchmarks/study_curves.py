"""Curves of a finished study in one compact file: `benchmarks/results/curves/<study>.jsonl`.

    {"steps": [30, 60, …]}
    {"cell": "train_tokens=25000", "arm": "tied", "seed": 1, "selected": 180, "tune_nll": [6.1234, 5.9021, …]}

Each run is a line. Its losses on the tuning split, in nats per token, are rounded to four digits after the point. The
steps of its curve are those of the last line with `steps`. `python -m benchmarks.atlas FOLDER…` writes the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiewise.training.folder import RESULTS, read_json
from tiewise.training.results import Comparison, RunResult

CURVES = Path(__file__).parent / "results" / "curves"
DIGITS = 4  # of a loss, after the point
MOST_BYTES = 200_000  # of a study's file


@dataclass(frozen=True)
class RunCurve:
    """Tuning losses of one run, in nats per token, and the step whose model it keeps."""

    cell: str
    arm: str
    seed: int
    selected: int
    steps: tuple[int, ...]
    tune_nll: tuple[float, ...]


def collect(study: Path) -> list[RunCurve]:
    """Return the curves of all runs in a study's folder, by cell, arm and seed.

    Cells that are not finished are left out, and runs of older versions, whose curves have no tuning loss.
    """
    return [curve for results in sorted(study.glob(f"*/{RESULTS}")) for curve in collect_cell(results.parent)]


def collect_cell(cell: Path) -> list[RunCurve]:
    """Return the curves of a comparison in its folder, by arm and seed."""
    comparison = Comparison.from_dict(read_json(cell / RESULTS))
    curves = [_curve_of(cell.name, run) for run in comparison.runs]
    return [curve for curve in curves if curve.steps]


def _curve_of(cell: str, run: RunResult) -> RunCurve:
    """Return the points of a run that have a tuning loss."""
    losses = {point.step: round(point.tune_nll, DIGITS) for point in run.curve if point.tune_nll is not None}
    selected = run.selected_step or run.steps
    return RunCurve(cell, run.arm, run.seed, selected, tuple(losses), tuple(losses.values()))


def write(curves: Sequence[RunCurve], path: Path) -> None:
    """Write the curves of a study.

    ValueError: the file would have more than `MOST_BYTES` bytes.
    """
    text = "".join(f"{line}\n" for line in _lines(curves))
    if len(text) > MOST_BYTES:
        raise ValueError(f"{path.name} would have {len(text):,} bytes, more than {MOST_BYTES:,}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _lines(curves: Sequence[RunCurve]) -> Iterator[str]:
    """Yield the lines of a file; steps are written where they change."""
    steps: tuple[int, ...] = ()
    for curve in curves:
        if curve.steps != steps:
            steps = curve.steps
            yield json.dumps({"steps": steps})
        record = {name: value for name, value in vars(curve).items() if name != "steps"}
        yield json.dumps(record, ensure_ascii=False)


def read(path: Path) -> list[RunCurve]:
    """Return the curves of a file that `write` wrote."""
    curves: list[RunCurve] = []
    steps: tuple[int, ...] = ()
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "steps" in record:
            steps = tuple(record["steps"])
        else:
            record["tune_nll"] = tuple(record["tune_nll"])
            curves.append(RunCurve(steps=steps, **record))
    return curves
