"""Runs as the page shows them, several side by side: the verdict, differences with their intervals, and curves.

A comparison that is not finished has the curves that it has logged so far, and no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiewise.core.errors import RunError
from tiewise.core.found import COLOURS, Curve, places
from tiewise.inspection.bench import comparison_of
from tiewise.inspection.inspection import labels
from tiewise.report import comparison_found as told
from tiewise.training.folder import METRICS, RESULT, RESULTS, read_lines, seed_folder
from tiewise.training.results import CurvePoint
from tiewise.training.settings import FILE, read_yaml

MEASURES = {"validation": told.VALIDATION, "ahead": told.AHEAD, "training": told.TRAINING}
MEASURES |= {"share": told.OUTPUT_SHARE, "cosine": told.COSINE}
RANGES = {"share": [0, 1], "cosine": [-1, 1]}
MOST_POINTS = 400  # of a curve, evenly
FIELDS = ("train_nll", "heldout_nll", "path_a", "path_b", "cosine")  # of a line of metrics, as of a `CurvePoint`

Curves = Mapping[str, Mapping[int, Sequence[CurvePoint]]]


def is_run(path: Path) -> bool:
    """Whether `tiewise compare` or `tiewise train` has begun a run in this folder."""
    return (path / FILE).is_file()


def compared(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what the page shows of these runs; choices of one name have one colour in all.

    Raises:
        RunError: a folder's files cannot be read.
    """
    names = labels([path.resolve() for path in paths])
    made = [_finished(path) if (path / RESULTS).is_file() else _unfinished(path) for path in paths]
    placed = places(arm for run in made for arm in run["arms"])
    colours = {arm: COLOURS[place % len(COLOURS)] for arm, place in placed.items()}
    return {"colours": colours, "runs": [{"name": name} | run for name, run in zip(names, made, strict=True)]}


def _finished(path: Path) -> dict[str, Any]:
    comparison = comparison_of(path)
    table, validation = told.results(comparison), [comparison.difference(arm, "heldout_nll") for arm in comparison.arms]
    curves = {arm: {run.seed: run.curve for run in comparison.of(arm)} for arm in comparison.arms}
    return {
        "arms": comparison.arms,
        "verdict": told.verdict(comparison),
        "notes": [*comparison.finding.splitlines(), *([f"{told.DEMO.capitalize()}."] if comparison.demo else [])],
        "command": comparison.command,
        "results": {"header": list(table.header), "rows": [list(row) for row in table.rows]},
        "reference": comparison.reference,
        "differences": [
            {"arm": d.arm, "mean": d.mean, "low": d.low, "high": d.high, "said": str(told.difference(d))}
            | {"detected": d.detected, "seeds": d.n}
            for d in validation
            if d is not None and d.mean == d.mean  # a diverged run has none
        ],
        "measures": _measures(curves, comparison.reference),
    }


def _unfinished(path: Path) -> dict[str, Any]:
    record = read_yaml(path / FILE)
    arms, single = record.get("arms"), record.get("seed")
    seeds = record.get("seeds") if single is None else 1
    if not (isinstance(arms, list) and all(isinstance(arm, str) for arm in arms) and arms and isinstance(seeds, int)):
        raise RunError(f"{path / FILE} names no arms and seeds", "run the comparison again")
    there = {own.name.removeprefix("seed-") for own in path.glob("*/seed-*")}  # the file may claim any number of runs
    numbers = [single] if single else sorted(int(n) for n in there if n.isdecimal() and 0 < int(n) <= seeds)
    folders = {arm: {seed: seed_folder(path, arm, seed) for seed in numbers} for arm in arms}
    begun = {arm: {seed: points for seed, own in of.items() if (points := _logged(own))} for arm, of in folders.items()}
    ended = sum((folder / RESULT).is_file() for of in folders.values() for folder in of.values())
    said = f"Not finished: {ended} of {len(arms) * seeds} runs have ended, so no difference is told yet."
    if single is not None:
        said = f"One run of {arms[0]} by itself: there is nothing to compare it with."
    command = f"tiewise {'compare' if single is None else 'train'} --out {path} --resume"
    found = {"arms": arms, "verdict": said, "command": command, "reference": arms[0]}
    return found | {"notes": [], "results": None, "differences": [], "measures": _measures(begun, arms[0])}


def _logged(folder: Path) -> list[CurvePoint]:
    """What a run has logged so far."""
    return [
        CurvePoint(line["step"], 0, **{name: x for name in FIELDS if isinstance(x := line.get(name), int | float)})
        for line in read_lines(folder / METRICS)
        if isinstance(line, dict) and isinstance(line.get("step"), int)
    ]


def _measures(curves: Curves, reference: str) -> dict[str, Any]:
    """Curves of every measure that any arm has, by its name."""
    found = {}
    for name, measured in MEASURES.items():
        means, single = told.over_training(curves, reference, measured)
        if means:
            first = {"title": means[0].name, "unit": measured.unit, "caption": means[0].why, "level": measured.level}
            lines = [{"arm": one.of, "points": _points(one)} for one in (*means, *single)]
            thin = [line | {"thin": True} for line in lines[len(means) :]]
            found[name] = first | {"range": RANGES.get(name), "lines": [*lines[: len(means)], *thin]}
    return found


def _points(curve: Curve) -> list[tuple[float, float]]:
    every, last = -(-len(curve.x) // MOST_POINTS), len(curve.x) - 1
    pairs = zip(curve.x, curve.y, strict=True)
    return [(x, round(y, 6)) for i, (x, y) in enumerate(pairs) if i % every == 0 or i == last]
