"""Compare the stated power of every study, and its rate of wrong verdicts, with simulations of its whole rule.

    python tools/power_check.py [--repetitions N]    prints a row for each study; exits with 1 if one misses its bar

A study states for each row the difference that a repetition detects in 80 of 100 cases ("could show"). One repetition
here is:

1. a study whose rows have the atlas's true differences and standard errors, with as many seeds. It states, for one row,
   the difference that could be shown;
2. a second study, in which that row truly has the stated difference. The whole rule judges it: Student's t, Holm's
   correction over all rows, of a difference and of equivalence, and the margin.

| column | |
|---|---|
| `power` | share of repetitions that detect the stated difference, mean over rows, then the least and most of a row |
| `as printed` | the same for the printed figures, if the printed standard errors are the true ones. It exceeds 80 %: |
| | the stated difference allows for a spread that is larger than its estimate from few seeds |
| `sign` | studies in which any row is called better or worse, if no row has a true difference; at most 5 % |
| `equivalent` | studies in which any row is called equivalent, if all rows truly differ by the margin; at most 2.5 % |

The simulation has its own Holm procedure; only the stated differences come from the package.
"""

from __future__ import annotations

import argparse
import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy
from numpy.typing import NDArray

import tiewise
from tiewise.core.estimates import detectable_difference

ATLAS = Path(tiewise.__file__).parent / "planning" / "data" / "atlas.csv"
ALPHA = 0.05
STATED, TOLERANCE = 0.80, 0.05  # of power
LUCK = 0.01  # by which a rate may exceed its bound, as repetitions are few
Array = NDArray[np.float64]


@dataclass(frozen=True)
class StudyRows:
    """Rows of a study [M]: true differences, standard errors with their degrees of freedom, and "could show"."""

    means: Array
    errors: Array
    freedom: Array
    printed: Array
    margin: float


@dataclass(frozen=True)
class Draw:
    """Simulated studies [R, M]: differences and their estimated standard errors."""

    means: Array
    errors: Array


@dataclass(frozen=True)
class RowPower:
    """Share of repetitions that detect a row's stated difference, and the printed one."""

    simulated: float
    as_printed: float


@dataclass(frozen=True)
class StudyPower:
    """Power of the rows of a study, and the shares of studies with a wrong verdict."""

    rows: list[RowPower]
    wrong_sign: float
    wrong_equivalence: float

    @property
    def mean(self) -> float:
        """Mean power over the rows."""
        return float(np.mean([row.simulated for row in self.rows]))

    def within_bars(self) -> bool:
        """Return whether power and both rates are as stated."""
        as_stated = abs(self.mean - STATED) <= TOLERANCE
        return as_stated and self.wrong_sign <= ALPHA + LUCK and self.wrong_equivalence <= ALPHA / 2 + LUCK


def read_studies(path: Path = ATLAS) -> dict[str, StudyRows]:
    """Return the rows of every study that have an interval."""
    by_study: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["error"]:
                by_study.setdefault(row["study"], []).append(row)
    return {study: _columns(rows) for study, rows in by_study.items()}


def _columns(rows: list[dict[str, str]]) -> StudyRows:
    """Return the columns of a study."""
    means, errors, printed = (
        np.array([float(row[name]) for row in rows]) for name in ("heldout", "error", "detectable")
    )
    freedom = np.array([float(row.get("df") or int(row["seeds"]) - 1) for row in rows])
    return StudyRows(means, errors, freedom, printed, float(rows[0]["margin"]))


def draw(rows: StudyRows, means: Array, generator: np.random.Generator) -> Draw:
    """Return simulated studies with the true differences `means` [R, M]."""
    spread = np.sqrt(generator.chisquare(rows.freedom, means.shape) / rows.freedom)
    return Draw(means + rows.errors * generator.standard_normal(means.shape), rows.errors * spread)


def p_values(rows: StudyRows, drawn: Draw) -> tuple[Array, Array]:
    """Return the unadjusted p of a difference and of equivalence [R, M]."""
    distance = np.maximum(rows.margin - np.abs(drawn.means), 0.0)
    return tuple(2 * scipy.special.stdtr(rows.freedom, -t / drawn.errors) for t in (np.abs(drawn.means), distance))


def divisors(p: Array, row: int) -> NDArray[np.int64]:
    """Return by what Holm divides 5 % for one row, given the p of the others [R, M]."""
    rows = p.shape[1]
    others = np.sort(np.delete(p, row, axis=1), axis=1)
    passed = np.cumprod(others * (rows - np.arange(rows - 1)) < ALPHA, axis=1).sum(axis=1)
    by: NDArray[np.int64] = rows - passed
    return by


def rejected_row(p: Array, row: int) -> NDArray[np.bool_]:
    """Return in which studies Holm's procedure rejects the hypothesis of one row, given all p [R, M]."""
    return p[:, row] < ALPHA / divisors(p, row)


def rejected(p: Array) -> NDArray[np.bool_]:
    """Return which hypotheses Holm's procedure rejects, given their p [R, M]."""
    return np.stack([rejected_row(p, row) for row in range(p.shape[1])], axis=1)


def stated_differences(rows: StudyRows, drawn: Draw, row: int) -> Array:
    """Return the difference that each simulated study states for a row [R]."""
    p_detected, _ = p_values(rows, drawn)
    by = divisors(p_detected, row)
    freedom = float(rows.freedom[row])
    stated = {divisor: detectable_difference(freedom, ALPHA / divisor) for divisor in set(by.tolist())}
    differences: Array = drawn.errors[:, row] * np.array([stated[divisor] for divisor in by.tolist()])
    return differences


def row_power(rows: StudyRows, row: int, repetitions: int, generator: np.random.Generator) -> RowPower:
    """Return the power of one row by simulation."""
    means = np.tile(rows.means, (repetitions, 1))
    stated = stated_differences(rows, draw(rows, means, generator), row)
    shares = []
    for true in (stated, np.full(repetitions, rows.printed[row])):
        repeated = means.copy()
        repeated[:, row] = true
        p_detected, _ = p_values(rows, draw(rows, repeated, generator))
        shares.append(float(rejected_row(p_detected, row).mean()))
    return RowPower(*shares)


def study_power(rows: StudyRows, repetitions: int, generator: np.random.Generator) -> StudyPower:
    """Return the power of every row of a study, and its rates of wrong verdicts."""
    by_row = [row_power(rows, row, repetitions, generator) for row in range(len(rows.means))]
    zero = np.zeros((repetitions, len(rows.means)))
    p_detected, p_equivalent = p_values(rows, draw(rows, zero, generator))
    wrong_sign = (rejected(p_detected) & ~rejected(p_equivalent)).any(axis=1).mean()
    _, p_equivalent = p_values(rows, draw(rows, zero + rows.margin, generator))
    return StudyPower(by_row, float(wrong_sign), float(rejected(p_equivalent).any(axis=1).mean()))


def line(name: str, rows: StudyRows, measured: StudyPower) -> str:
    """Return a row of the table."""
    by_row = [one.simulated for one in measured.rows]
    printed = float(np.mean([one.as_printed for one in measured.rows]))
    shares = (measured.mean, min(by_row), max(by_row), printed, measured.wrong_sign, measured.wrong_equivalence)
    return f"{name:22s} {len(by_row):4d} {min(rows.freedom):5.1f} " + " ".join(f"{share:10.1%}" for share in shares)


def main() -> None:
    """Print the table; exit with 1 if a study misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=16_000, metavar="N", help="simulated studies for each row")
    repetitions = parser.parse_args().repetitions
    columns = ("power", "least", "most", "as printed", "sign", "equivalent")
    print(f"{'study':22s} rows    df " + " ".join(f"{column:>10s}" for column in columns))
    generator, missed = np.random.default_rng(0), []
    for name, rows in read_studies().items():
        measured = study_power(rows, repetitions, generator)
        print(line(name, rows, measured), flush=True)
        if not measured.within_bars():
            missed.append(name)
    print(f"outside the bars: {', '.join(missed) or 'no study'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
