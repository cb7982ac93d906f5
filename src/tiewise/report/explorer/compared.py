"""Records of comparisons for the page, side by side: verdict, differences with intervals, and curves.

A single run of `tiewise train` counts as a comparison without differences.

The record of an unfinished comparison has the curves logged so far, and no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeGuard

from tiewise.core.errors import RunError
from tiewise.core.measurement import COLOURS, Curve, places
from tiewise.inspection.inspection import labels
from tiewise.inspection.workspace import comparison_of
from tiewise.report import comparison_measurement
from tiewise.report.explorer.story_numbers import story_numbers
from tiewise.report.training_curves import (
    AHEAD,
    COSINE,
    OUTPUT_SHARE,
    TRAINING,
    TUNING,
    Moments,
    moments_of,
    over_training,
)
from tiewise.training.finding import explanations, sentences
from tiewise.training.folder import METRICS, REPORT, RESULT, RESULTS, read_lines, seed_folder
from tiewise.training.results import CurvePoint, Difference
from tiewise.training.settings import FILE, read_yaml

MEASURES = {
    "tuning": TUNING,
    "ahead": AHEAD,
    "training": TRAINING,
    "share": OUTPUT_SHARE,
    "cosine": COSINE,
}
RANGES = {"share": [0, 1], "cosine": [-1, 1]}
MOST_POINTS = 400  # maximum number of points of a curve, evenly spaced
# fields of a line of metrics and of a `CurvePoint`
FIELDS = ("train_nll", "tune_nll", "heldout_nll", "path_a", "path_b", "cosine")


def is_comparison(path: Path) -> bool:
    """Return whether `tiewise compare` or `tiewise train` has started in this folder."""
    return (path / FILE).is_file()


def report_mark(index: int) -> str:
    """Return the text that `Explorer.write` replaces with the address of a comparison's report."""
    return f"report-of-comparison:{index}"


def compared(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the page's record of these comparisons. Equal arms have the same colour in all.

    Raises:
        RunError: the files of a folder cannot be read.
    """
    names = labels([path.resolve() for path in paths])
    records: list[dict[str, Any]] = []
    arms: list[str] = []
    for name, path in zip(names, paths, strict=True):
        record = {"name": name, "report": ""} | _comparison_record(path)
        if (path / REPORT).is_file():
            record["report"] = report_mark(len(records))
        records.append(record)
        arms += record["arms"]
    colours = {arm: COLOURS[place % len(COLOURS)] for arm, place in places(arms).items()}
    return {"colours": colours, "runs": records}


def _comparison_record(path: Path) -> dict[str, Any]:
    """Return the page's record of one comparison, with or without results."""
    if (path / RESULTS).is_file():
        return _finished(path)
    return _unfinished(path)


def _finished(path: Path) -> dict[str, Any]:
    """Return the record of a comparison that has results."""
    comparison = comparison_of(path)
    table = comparison_measurement.results(comparison)
    differences = [comparison.difference(arm, "heldout_nll") for arm in comparison.arms]
    verdict, *others = sentences(comparison)
    notes = [*others, *explanations(comparison)]
    if comparison.demo:
        notes.append(comparison_measurement.DEMO)
    return {
        "arms": comparison.arms,
        "verdict": verdict,
        "notes": notes,
        "command": comparison.command,
        "results": {"header": list(table.header), "rows": [list(row) for row in table.rows]},
        "reference": comparison.reference,
        "differences": _difference_records(differences),
        "measures": _measures(moments_of(comparison), comparison.reference),
        "story": story_numbers(comparison),
    }


def _difference_records(differences: Iterable[Difference | None]) -> list[dict[str, Any]]:
    """Return each difference with its interval, as number and text, without diverged runs."""
    records: list[dict[str, Any]] = []
    for d in differences:
        if d is None or math.isnan(d.mean):
            continue
        record = {"arm": d.arm, "mean": d.mean, "low": d.low, "high": d.high}
        record |= {"said": str(comparison_measurement.difference(d)), "detected": d.detected, "seeds": d.n}
        records.append(record)
    return records


@dataclass(frozen=True)
class _ArmsAndSeeds:
    """Arms and seeds that the settings of a comparison name."""

    arms: list[str]
    seeds: int
    single: int | None  # seed of a single run; None for a comparison


def _arms_and_seeds(path: Path) -> _ArmsAndSeeds:
    """Read the arms and seeds of a comparison from its settings.

    Raises:
        RunError: the settings name none.
    """
    record = read_yaml(path / FILE)
    arms, seeds, single = record.get("arms"), record.get("seeds"), record.get("seed")
    if single is not None:
        seeds = 1
    if not _are_names(arms) or not isinstance(seeds, int):
        raise RunError(f"{path / FILE} names no arms and seeds", "run the comparison again")
    return _ArmsAndSeeds(arms, seeds, single)


def _are_names(value: Any) -> TypeGuard[list[str]]:
    """Return whether a value of YAML is a non-empty list of strings."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(name, str) for name in value)


def _unfinished(path: Path) -> dict[str, Any]:
    """Return the record of a comparison without results: the curves logged so far."""
    named = _arms_and_seeds(path)
    reference = named.arms[0]
    logged: dict[str, dict[int, list[CurvePoint]]] = {arm: {} for arm in named.arms}
    ended = 0
    for arm, seed in product(named.arms, _started_seeds(path, named)):
        folder = seed_folder(path, arm, seed)
        points = _logged(folder)
        if points:
            logged[arm][seed] = points
        ended += (folder / RESULT).is_file()
    if named.single is None:
        runs = len(named.arms) * named.seeds
        verdict = f"Not finished: {ended} of {runs} runs have ended, so there is no result yet."
        command = f"tiewise compare --out {path} --resume"
    else:
        verdict = f"One run of {reference} by itself: there is nothing to compare it with."
        command = f"tiewise train --out {path} --resume"
    return {
        "arms": named.arms,
        "verdict": verdict,
        "command": command,
        "reference": reference,
        "notes": [],
        "results": None,
        "differences": [],
        "measures": _measures(logged, reference),
        "story": [],
    }


def _started_seeds(path: Path, named: _ArmsAndSeeds) -> list[int]:
    """Return the seeds that have a folder; the settings may list more."""
    if named.single:
        return [named.single]
    started = set()
    for folder in path.glob("*/seed-*"):
        number = folder.name.removeprefix("seed-")
        if number.isdecimal() and 0 < int(number) <= named.seeds:
            started.add(int(number))
    return sorted(started)


def _logged(folder: Path) -> list[CurvePoint]:
    """Return the points that a run has logged so far. Other lines are left out."""
    points = []
    for line in read_lines(folder / METRICS):
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            numbers = {name: line[name] for name in FIELDS if isinstance(line.get(name), int | float)}
            points.append(CurvePoint(line["step"], 0, **numbers))
    return points


def _measures(curves: Moments, reference: str) -> dict[str, Any]:
    """Return the curves of every measure that any arm has: means first, then thin single seeds."""
    measures = {}
    for name, measured in MEASURES.items():
        means, single = over_training(curves, reference, measured)
        if not means:
            continue
        lines = [_line_record(curve) for curve in means]
        lines += [_line_record(curve) | {"thin": True} for curve in single]
        measures[name] = {
            "title": means[0].name,
            "unit": measured.unit,
            "caption": means[0].why,
            "level": measured.level,
            "range": RANGES.get(name),
            "lines": lines,
        }
    return measures


def _line_record(curve: Curve) -> dict[str, Any]:
    """Return a curve's record for the page."""
    return {"arm": curve.of, "points": _points(curve)}


def _points(curve: Curve) -> list[tuple[float, float]]:
    """Return about `MOST_POINTS` points of a curve at most, always with the last."""
    stride = -(-len(curve.x) // MOST_POINTS)
    points = [(x, round(y, 6)) for x, y in zip(curve.x, curve.y, strict=True)]
    last = len(points) - 1
    chosen = points[::stride]
    if last % stride:
        chosen.append(points[last])
    return chosen
