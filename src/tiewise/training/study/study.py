"""What a study has found so far: a row for every cell and contrast, as one table on the disk.

A contrast is arm − reference, paired over seeds. Every interval stands on its own (95 % each); a difference counts as
detected where its p is below 0.05 with Holm's correction over all rows of the study, so that one false detection among
all of them is as rare as in a single comparison.
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

from tiewise.core.estimates import critical
from tiewise.core.files import strict, write_whole, written_whole
from tiewise.training.results import Comparison, Difference, by_holm, differences
from tiewise.training.settings import DECODER, Settings
from tiewise.training.study.grid import StudyGrid

TABLE = "sweep"  # .csv and .parquet


@dataclass(frozen=True)
class SweepRow:
    """One contrast in one cell. Losses are in nats per token."""

    cell: str  # its folder
    at: dict[str, Any]  # axis → its value here
    arm: str
    reference: str
    heldout: Difference  # with Holm's p over the study
    training: Difference
    nll: float  # of the arm on held-out text, mean over seeds
    parameters: int  # of the arm
    reference_parameters: int
    rank: int | None  # table width k, or r of residual, where the arm has one
    alpha: float  # scale of the lookup's gradient
    vocab: int
    tokens: int  # of training text
    seen: int  # of them, each as often as it came
    demo: bool
    command: str  # repeats the comparison that the row is of

    @property
    def contrast(self) -> str:
        """Which is subtracted from which."""
        return f"{self.arm} − {self.reference}"

    @property
    def sign(self) -> int:
        """−1 where the arm is better, 1 where it is worse, 0 where neither is detected."""
        return 0 if not self.heldout.detected else -1 if self.heldout.mean < 0 else 1

    @property
    def half(self) -> float:
        """Half of the held-out difference's interval; nan without one."""
        return math.nan if self.heldout.high is None else self.heldout.high - self.heldout.mean

    @property
    def error(self) -> float:
        """Standard error of the held-out difference, which its interval is made of."""
        return self.half / critical(max(self.heldout.n - 1, 1))

    def measure(self, axis: str) -> float:
        """Size of this cell along an axis, nan of what has none: tokens of a text, V of a tokenizer."""
        value = {"tokenizer": self.vocab, "train_tokens": self.tokens}.get(axis, self.at[axis])
        return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else math.nan

    def flat(self) -> dict[str, Any]:
        """Return the row of a table: where it stands, then what was found there."""
        found: dict[str, Any] = {"cell": self.cell}
        found |= {k: v if isinstance(v, int | float | str | None) else str(v) for k, v in self.at.items()}
        found |= {"contrast": self.contrast, "sign": self.sign, "seeds": self.heldout.n}
        for name, d in (("heldout", self.heldout), ("training", self.training)):
            found |= {name: d.mean, f"{name}_low": d.low, f"{name}_high": d.high}
        found |= {"p_holm": self.heldout.p, "detectable": self.heldout.detectable, "error": self.error}
        rest = {name: value for name, value in vars(self).items() if name not in ("at", *found)}
        return {name: strict(value) for name, value in (found | rest).items()}


@dataclass(frozen=True)
class Study:
    """A grid, and the rows of its cells that are finished."""

    grid: StudyGrid
    rows: tuple[SweepRow, ...]
    left: int  # cells that are not finished
    folder: Path

    @classmethod
    def of(cls, grid: StudyGrid, done: Mapping[str, Comparison], folder: Path) -> Study:
        """Gather the rows of finished cells, each a comparison by the name of its folder."""
        cells = grid.cells()
        rows = [row for cell, made in cells.items() if cell in done for row in _rows(grid, cell, made, done[cell])]
        differences = by_holm([row.heldout for row in rows])
        rows = [replace(row, heldout=d) for row, d in zip(rows, differences, strict=True)]
        return cls(grid, tuple(rows), len(cells) - len(done), folder)

    def save(self) -> None:
        """Write `sweep.csv` and `sweep.parquet`, each whole."""
        table, text = [row.flat() for row in self.rows], io.StringIO()
        writer = csv.DictWriter(text, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
        write_whole(self.folder / f"{TABLE}.csv", text.getvalue())
        with written_whole(self.folder / f"{TABLE}.parquet") as path:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)

    def record(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return {**asdict(self.grid), "left": self.left, "rows": [row.flat() for row in self.rows]}


def _rows(grid: StudyGrid, cell: str, settings: Settings, comparison: Comparison) -> Iterator[SweepRow]:
    specs, reference = settings.specs(), comparison.reference
    for arm in (arm for arm in comparison.arms if arm != reference):
        measured, own = differences(comparison, reference, arm), comparison.of(arm)
        if "heldout_nll" in measured:  # a seed has finished with both
            yield SweepRow(
                cell,
                {axis: " ".join(v) if isinstance(v := flat(settings)[axis], tuple) else v for axis in grid.axes},
                arm,
                reference,
                heldout=measured["heldout_nll"],
                training=measured["train_nll"],
                nll=fmean(run.heldout_nll for run in own),
                parameters=own[0].total_parameters,
                reference_parameters=comparison.of(reference)[0].total_parameters,
                rank=specs[arm].width or specs[arm].rank,
                alpha=specs[arm].alpha,
                vocab=comparison.setting["vocab"],
                tokens=comparison.data["splits"]["train"]["tokens"],
                seen=comparison.setting["tokens_per_run"],
                demo=comparison.demo,
                command=repeated(settings, f"runs/{cell}"),
            )


def flat(settings: Settings) -> dict[str, Any]:
    """Return settings and those of their kind, by name."""
    record = asdict(settings)
    return record | (record.pop("own") or {})


def repeated(settings: Settings, out: str) -> str:
    """Return the command whose comparison has these settings, whatever recipe or grid they came from."""
    default = {**flat(Settings.of({"kind": settings.kind})), "kind": DECODER}
    words = ["tiewise", "compare", "--arms", ",".join(settings.arms)]
    for name, value in flat(settings).items():
        if name in ("arms", "recipe") or value == default[name]:
            continue
        if name == "text":
            words += [word for one in value for word in ("--text", one)]
        elif name in ("seeds", "steps", "tokenizer", "model", "match", "split"):
            words += [f"--{name}", str(value)]
        else:
            words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join([*words, "--out", out])
