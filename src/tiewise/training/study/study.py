"""Results of a study so far: one result for every cell and contrast.

A contrast is arm − reference, paired over seeds. Every interval is a separate 95 % interval; that of a held-out loss
covers seeds and held-out documents. A difference counts as
detected if its p is below 0.05 with Holm's correction over all results of the study, so one false detection among
all of them is as rare as in a single comparison. `verdicts` has the rule of better, worse, equivalent and undecided.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
import pyarrow.parquet

from tiewise.core.files import atomic_replacement, write_atomically
from tiewise.core.records import to_strict_json
from tiewise.core.result import PrintedResult, Row
from tiewise.core.step_names import BEST
from tiewise.training.results import AT_LAST, Comparison, Difference, differences
from tiewise.training.settings import DECODER, Settings
from tiewise.training.study.grid import StudyGrid
from tiewise.training.verdicts import VERDICTS, sign_of, verdict_of, with_verdicts

TABLE = "sweep"  # name of the table's files, .csv and .parquet


@dataclass(frozen=True)
class SweepResult:
    """One contrast in one cell, with losses in nats per token."""

    cell: str  # folder of the cell
    at: dict[str, Any]  # axis → its value in this cell
    arm: str
    reference: str
    heldout: Difference  # held-out nll, with Holm's p over the study
    training: Difference
    nll: float  # held-out nll of the arm, mean over seeds
    parameters: int  # parameters of the arm
    reference_parameters: int
    rank: int | None  # table width k, or rank r of residual; None for an arm without
    alpha: float  # scale of the input embedding's gradient
    vocab: int
    tokens: int  # tokens of the training text
    seen: int  # training tokens read, with repetitions
    demo: bool
    command: str  # command that repeats the result's comparison
    bits: Difference | None = None  # held-out loss in bits per byte; None for masked tokens, which form no text
    bits_per_byte: float | None = None  # of the arm, mean over seeds
    last: Difference | None = None  # held-out nll at the last step; None if every run keeps that step

    @property
    def contrast(self) -> str:
        """The subtraction as text, "arm − reference"."""
        return f"{self.arm} − {self.reference}"

    @property
    def sign(self) -> int:
        """−1 if the arm is better, 1 if worse, 0 if equivalent or undecided."""
        return sign_of(self.heldout)

    @property
    def half(self) -> float:
        """Half the width of the held-out difference's interval; nan without one."""
        if self.heldout.high is None:
            return math.nan
        return self.heldout.high - self.heldout.mean

    @property
    def error(self) -> float:
        """Standard error of the held-out difference; nan without an interval."""
        estimated = self.heldout.estimated
        return math.nan if estimated is None else estimated.standard_error

    def measure(self, axis: str) -> float:
        """Return the cell's size along an axis: tokens of a text, V of a tokenizer.

        nan: the axis has no size.
        """
        if axis == "tokenizer":
            value: object = self.vocab
        elif axis == "train_tokens":
            value = self.tokens
        else:
            value = self.at[axis]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return math.nan
        return value if value > 0 else math.nan

    def flat(self) -> dict[str, Any]:
        """Return the result as a flat record: its cell, then its results."""
        result: dict[str, Any] = {"cell": self.cell}
        for axis, value in self.at.items():
            result[axis] = value if isinstance(value, int | float | str | None) else str(value)
        result |= {"contrast": self.contrast, "sign": self.sign, "verdict": self.heldout.verdict}
        result |= {"margin": self.heldout.margin, "seeds": self.heldout.n}
        result |= {"documents": self.heldout.documents, "df": self.heldout.df}
        for name, d in (("heldout", self.heldout), ("training", self.training)):
            result |= {name: d.mean, f"{name}_low": d.low, f"{name}_high": d.high}
        result |= _optional_columns("bits", self.bits) | _optional_columns("last", self.last)
        result |= {"p_equivalence": self.heldout.p_equivalence}
        result |= {"p_holm": self.heldout.p, "detectable": self.heldout.detectable, "error": self.error}
        for name, value in vars(self).items():
            if name != "at":
                result.setdefault(name, value)
        return {name: to_strict_json(value) for name, value in result.items()}


def _optional_columns(name: str, difference: Difference | None) -> dict[str, float | None]:
    """Return mean and interval of a difference that some results lack, by column."""
    if difference is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: difference.mean, f"{name}_low": difference.low, f"{name}_high": difference.high}


@dataclass(frozen=True, repr=False)
class Study(PrintedResult):
    """A grid, and the results of its finished cells.

    Attributes:
        grid: question, fixed settings and axes.
        results: one for every finished cell and contrast.
        left: number of unfinished cells.
        folder: folder of the study.

    >>> import tiewise
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "seeds": 2, "tokenizer": "bytes"}
    >>> settings = {**small, "arms": ["untied", "tied"], "text": ["synthetic:words=4000"]}
    >>> grid = {"asks": "Does depth matter?", "settings": settings, "axes": {"layers": [0, 1]}}
    >>> study = tiewise.sweep(grid, out="depth", jobs=1, quiet=True)
    >>> [(result.cell, result.contrast) for result in study.results], study.left
    ([('layers=0', 'tied − untied'), ('layers=1', 'tied − untied')], 0)
    """

    grid: StudyGrid
    results: tuple[SweepResult, ...]
    left: int
    folder: Path

    @classmethod
    def of(cls, grid: StudyGrid, done: Mapping[str, Comparison], folder: Path) -> Study:
        """Gather the results of finished cells; `done` has a comparison by cell folder."""
        cells = grid.cells()
        results: list[SweepResult] = []
        for cell, settings in cells.items():
            if cell in done:
                results += _results(grid, cell, settings, done[cell])
        corrected = with_verdicts([result.heldout for result in results])
        results = [replace(result, heldout=d) for result, d in zip(results, corrected, strict=True)]
        return cls(grid, tuple(results), len(cells) - len(done), folder)

    def save(self) -> None:
        """Write `sweep.csv` and `sweep.parquet`, each complete or not at all."""
        table, text = [result.flat() for result in self.results], io.StringIO()
        writer = csv.DictWriter(text, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
        write_atomically(self.folder / f"{TABLE}.csv", text.getvalue())
        with atomic_replacement(self.folder / f"{TABLE}.parquet") as path:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)

    def answer_text(self) -> str:
        """Return a sentence for every contrast, with its signs in all cells."""
        lines = [_signs_sentence(contrast, results) for contrast, results in self._by_contrast().items()]
        if self.left:
            lines.append(f"{self.left} cells are not finished.")
        return "\n".join(lines)

    def rows(self) -> list[Row]:
        """Return a row for every finished cell and contrast."""
        return [result.flat() for result in self.results]

    def summary_rows(self) -> list[Row]:
        """Return a row for every finished cell and contrast: the difference and its interval."""
        columns = ("cell", "contrast", "heldout", "heldout_low", "heldout_high", "verdict", "seeds")
        return [{column: row[column] for column in columns} for row in self.rows()]

    def _by_contrast(self) -> dict[str, list[SweepResult]]:
        """Return the results of each contrast."""
        by_contrast: dict[str, list[SweepResult]] = {}
        for result in self.results:
            by_contrast.setdefault(result.contrast, []).append(result)
        return by_contrast

    def record(self) -> dict[str, Any]:
        """Return the study as `--json` prints it."""
        return {**asdict(self.grid), "left": self.left, "rows": [result.flat() for result in self.results]}


def _signs_sentence(contrast: str, results: list[SweepResult]) -> str:
    """Return in how many cells a contrast has each verdict."""
    verdicts = [verdict_of(result.heldout) for result in results]
    counts = ", ".join(f"{verdict} in {verdicts.count(verdict)}" for verdict in VERDICTS)
    return f"{contrast}: {counts} of {len(verdicts)} settings."


def _results(grid: StudyGrid, cell: str, settings: Settings, comparison: Comparison) -> Iterator[SweepResult]:
    """Yield the contrast of every arm to the reference in a cell.

    An arm is left out if no seed has finished with both.
    """
    specs, reference = settings.specs(), comparison.reference
    at = _axis_values(grid, settings)
    for arm in comparison.arms:
        if arm == reference:
            continue
        by_metric, runs = differences(comparison, reference, arm), comparison.of(arm)
        if "heldout_nll" not in by_metric:
            continue
        yield SweepResult(
            cell,
            at,
            arm,
            reference,
            heldout=replace(by_metric["heldout_nll"], margin=settings.margin),
            training=by_metric["train_nll"],
            nll=fmean(run.heldout_nll for run in runs),
            parameters=runs[0].total_parameters,
            reference_parameters=comparison.of(reference)[0].total_parameters,
            rank=specs[arm].width or specs[arm].rank,
            alpha=specs[arm].alpha,
            vocab=comparison.setting["vocab"],
            tokens=comparison.data["splits"]["train"]["tokens"],
            seen=comparison.setting["tokens_per_run"],
            demo=comparison.demo,
            command=command_for(settings, f"runs/{cell}"),
            bits=by_metric.get("bits_per_byte"),
            bits_per_byte=fmean(run.bits_per_byte for run in runs) if "bits_per_byte" in by_metric else None,
            last=by_metric.get(f"{AT_LAST}heldout_nll"),
        )


def _axis_values(grid: StudyGrid, settings: Settings) -> dict[str, Any]:
    """Return the value of a cell on each axis; several texts are joined."""
    values = flat_settings(settings)
    axis_values = {}
    for axis in grid.axes:
        value = values[axis]
        axis_values[axis] = " ".join(value) if isinstance(value, tuple) else value
    return axis_values


def flat_settings(settings: Settings) -> dict[str, Any]:
    """Return settings and the options of their kind, by name."""
    record = asdict(settings)
    return record | (record.pop("kind_options") or {})


def command_for(settings: Settings, out: str) -> str:
    """Return the command of a comparison with these settings.

    It does not depend on the recipe or grid that they came from.
    """
    defaults = {**flat_settings(Settings.of({"kind": settings.kind})), "kind": DECODER}
    defaults["select"] = defaults["select"] or BEST
    words = ["tiewise", "compare", "--arms", ",".join(settings.arms)]
    for name, value in flat_settings(settings).items():
        if name not in ("arms", "recipe") and value != defaults[name]:
            words += _option(name, value)
    return shlex.join([*words, "--out", out])


def _option(name: str, value: Any) -> list[str]:
    """Return the words of a command line that set a setting's value."""
    if name == "text":
        return [word for text in value for word in ("--text", text)]
    if name in ("seeds", "steps", "tokenizer", "model", "match", "split", "select", "margin"):
        return [f"--{name}", str(value)]
    return ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
