"""`diff`: the rows of two checkpoints' tables that moved, and the rank of the change.

A row moved if one of its numbers changed; NaN equals NaN, and −0 equals 0. Let D [n, E] be the difference of the rows
that moved. Its singular values are the roots of the eigenvalues of DᵀD [E, E], which is summed in fp64 while both
tables are read once.

Stored numbers are rounded, and rounding has every direction: a number of |b| in [2ᵉ, 2ᵉ⁺¹) differs from the exact value
by at most half a unit u = 2ᵉ⁻ᵖ, uniformly distributed, so that the error has the variance u²/12. A matrix of such
errors has no singular value beyond about the largest deviation of a row plus the largest of a column, √Σ u²/12 over
each (Bandeira & van Handel 2016, theorem 1.1). The rank of a change is the number of its singular values beyond that;
the effective rank is exp of the entropy of σ/Σσ over these (Roy & Vetterli 2007).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, HubReading, open_folder
from tiewise.checkpoint.rules.normalised_heads import normalised_heads
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, require_path
from tiewise.core.measurement import Listing, Measurement, Quantity, count, percent, plain, visible
from tiewise.core.progress import report_progress
from tiewise.inspection.tables.model_tables import Array, Ids, StoredTable
from tiewise.inspection.tables.token_texts import read_as

BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}  # p: stored bits of a number after its leading one
MARGIN = 1.05  # factor above the expected edge, which few matrices exceed
MOST_LISTED = 20


def diff(old: str | os.PathLike[str], new: str | os.PathLike[str], *, top: int = MOST_LISTED) -> Measurement:
    """Compare the input and output tables of two checkpoints row by row.

    Only their tables and tokenizer files are read. The rank follows Bandeira & van Handel (2016, theorem 1.1), the
    effective rank Roy & Vetterli (2007).

    Args:
        old, new: Hugging Face folders, single `.safetensors` or addresses hf://org/model, of one width; rows that one
            of them lacks are counted.
        top: the number of rows that are listed, those that moved farthest.

    Returns:
        A `Measurement`: for each table the rows that moved, the relative length of the change, its rank and effective
        rank.

    Raises:
        CheckpointError: a folder has no readable tables, or the tables have two widths.

    >>> import tempfile, numpy, safetensors.numpy
    >>> from tiewise import diff
    >>> folder = tempfile.TemporaryDirectory()
    >>> table = numpy.arange(12, dtype="float32").reshape(4, 3)
    >>> files = [f"{folder.name}/{name}.safetensors" for name in ("base", "finetuned")]
    >>> for file, change in zip(files, (0, 1)):
    ...     changed = table + change * numpy.eye(4, 3, dtype="float32")
    ...     safetensors.numpy.save_file({"model.embed_tokens.weight": changed}, file)
    >>> print(diff(*files).answer)
    3 of 4 rows of the shared table changed, by 12 % of their length; the change has rank 3
    """
    for each in (old, new):
        require_path("diff(FOLDER, FOLDER)", each)
    first, second = _EndTables.of(old), _EndTables.of(new)
    is_shared = first.is_shared and second.is_shared
    report = _ChangeReport(second.folder, top)
    report.notes += [*_head_notes(first.folder), *_head_notes(second.folder)]
    for end in ("input",) if is_shared else ("input", "output"):
        before, after = first.tables[end], second.tables[end]
        if before is None or after is None:
            lacking = old if before is None else new
            report.notes.append(f"the {end} table was not compared: {lacking} stores none, or stores it packed")
            continue
        one, other = StoredTable(before), StoredTable(after)
        name = "shared table" if is_shared else f"{end} table"
        change = _compared(one, other, name)
        report.add(name, change)
        if one.rows != other.rows:
            longer = new if other.rows > one.rows else old
            last = max(one.rows, other.rows) - 1
            report.notes.append(f"rows {change.common:,} to {last:,} of the {name} are only in {longer}")
        report.list_rows(name, change, one, other)
    if not report.answers:
        raise CheckpointError(f"{old} and {new} have no table in common", "tiewise check lists the tables of each")
    return report.measurement()


@dataclass(frozen=True)
class _EndTables:
    """One checkpoint and the tables at its ends."""

    folder: Folder
    tables: dict[str, Stored | None]  # `input` and `output`; None if there is no table with readable numbers

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> _EndTables:
        """Open a checkpoint."""
        folder = open_folder(path, HubReading(all_rows=True))
        return cls(folder, _tables(Facts(folder)))

    @property
    def is_shared(self) -> bool:
        """Return True if both ends are one table, or neither has one."""
        return self.tables["input"] is self.tables["output"]


def _head_notes(folder: Folder) -> Iterator[str]:
    """Yield a note for each head that normalises its rows, so that only directions count."""
    for where, how in normalised_heads(Facts(folder)):
        yield f"{folder.path}: {short(where)}: {how}, so only the direction (cosine) of its rows counts"


def _tables(facts: Facts) -> dict[str, Stored | None]:
    """Return the tables at both ends; one table twice if the output has no separate one."""
    source = _readable(facts, facts.roles.input)
    if facts.roles.output is None:
        return {"input": source, "output": source}
    return {"input": source, "output": _readable(facts, facts.roles.output)}


def _readable(facts: Facts, table: Stored | None) -> Stored | None:
    """Return a table unless its numbers are packed."""
    if table is None or facts.roles.is_packed(table):
        return None
    return table


class _ChangeReport:
    """Results of one table after the other; `add` takes the next."""

    def __init__(self, folder: Folder, top: int) -> None:
        """Store the folder whose tokenizer names tokens, and how many rows are listed."""
        self.folder, self.top = folder, top
        self.answers: list[str] = []
        self.quantities: list[Quantity] = []
        self.listings: list[Listing] = []
        self.notes: list[str] = []

    def add(self, name: str, change: _Change) -> None:
        """Report how many rows moved, and the change as a matrix."""
        self.quantities += change.quantities(name)
        self.answers.append(change.sentence(name))

    def list_rows(self, name: str, change: _Change, before: StoredTable, after: StoredTable) -> None:
        """List the rows that moved farthest, if any moved."""
        farthest = np.argsort(-change.lengths, kind="stable")[: self.top]
        ids = change.moved[farthest]
        texts = read_as(self.folder, ids.tolist())
        if len(ids):
            self.listings.append(_most_moved(name, before.take(ids), after.take(ids), ids, texts))

    def measurement(self) -> Measurement:
        """Return everything that was reported."""
        return Measurement(
            "; ".join(self.answers),
            tuple(self.quantities),
            listings=tuple(self.listings),
            notes=tuple(self.notes),
        )


def _most_moved(name: str, before: Array, after: Array, ids: Ids, texts: tuple[str, ...]) -> Listing:
    """List rows [n, E] of one table with their distance, relative distance and cosine.

    `before` and `after` are the rows of the two checkpoints.
    """
    size, distance = np.linalg.norm(before, axis=1), np.linalg.norm(after - before, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = (before * after).sum(1) / (size * np.linalg.norm(after, axis=1))
        share = distance / size
    rows = []
    for row, text, moved, part, angle in zip(ids.tolist(), texts, distance, share, cosine, strict=True):
        rows.append((visible(text), count(row), plain(moved, 5), plain(part, 4), plain(angle, 4)))
    header = ("token", "row", "changed by", "of its length", "cosine")
    return Listing(f"Rows of the {name} that changed most", header, rows)


@dataclass(frozen=True)
class _Change:
    """Difference of two tables over the rows that both have."""

    common: int  # number of rows that both have
    moved: Ids  # the rows that moved [m]
    lengths: Array  # distance of each [m]
    share: float  # length of the change, relative to the original rows that moved
    rank: int  # directions beyond the rounding of stored numbers
    effective_rank: float

    def sentence(self, name: str) -> str:
        """Return the change of the table of this name as a sentence, without a full stop."""
        if not len(self.moved):
            return f"none of {count(self.common)} rows of the {name} changed"
        rows = f"{count(len(self.moved))} of {count(self.common)} rows of the {name} changed"
        if math.isfinite(self.share):
            rows += f", by {percent(self.share)} of their length"
        return f"{rows}; the change has rank {count(self.rank)}"

    def quantities(self, name: str) -> list[Quantity]:
        """Return the quantities of the change of the table of this name."""
        rows = Quantity("rows that moved", len(self.moved), n=self.common, of=name)
        if not len(self.moved):
            return [rows]
        why = "directions of equal strength that would spread the change as widely"
        return [
            rows,
            Quantity("length of the change", self.share, of=name, unit="%", why="compared with the rows before"),
            Quantity("rank", self.rank, of=name, why="directions of the change that are larger than rounding"),
            Quantity("effective rank", self.effective_rank, of=name, digits=1, why=why),
        ]


def _compared(one: StoredTable, other: StoredTable, name: str) -> _Change:
    """Compare two tables in one pass over the rows that both have."""
    if one.width != other.width:
        problem = f"rows of {one.name} are {one.width} wide, and those of {other.name} are {other.width} wide"
        raise CheckpointError(problem, "give two checkpoints of the same width")
    common = min(one.rows, other.rows)
    sums = _ChangeSums(one.width, bits=min(BITS.get(table.tensor.dtype, 2) for table in (one, other)))
    for start, stop in one.spans(common, caller_width=one.width):
        sums.add(start, one.read(start, stop), other.read(start, stop))
        report_progress(f"comparing the {name}", stop, common)
    return sums.change(common)


class _ChangeSums:
    """Sums over the rows of two tables, updated piece by piece."""

    def __init__(self, width: int, bits: int) -> None:
        """Start at zero; both tables store `bits` bits of a number after its leading one."""
        self.bits = bits
        self.moved: list[Ids] = []  # row numbers, by piece
        self.lengths: list[Array] = []
        self.squares = np.zeros((width, width))  # DᵀD
        self.size = 0.0  # Σ‖row‖² of the original rows that moved
        # variances of rounding: of the row with the largest sum, and the sum of every column
        self.widest_row = 0.0
        self.columns = np.zeros(width)

    def add(self, start: int, before: Array, after: Array) -> None:
        """Add rows [n, E] of both tables from row `start` on."""
        both_nan = np.isnan(before) & np.isnan(after)
        changed = ~((before == after) | both_nan).all(1)
        before, after = before[changed], after[changed]
        step = after - before
        self.moved.append(start + np.flatnonzero(changed))
        self.lengths.append(np.linalg.norm(step, axis=1))
        is_finite = np.isfinite(step).all(1)
        before, after, step = before[is_finite], after[is_finite], step[is_finite]
        self.squares += step.T @ step
        self.size += float(np.square(before).sum())
        exponents = np.frexp(after)[1] - 1
        noise = np.square(np.ldexp(1.0, exponents - self.bits)) / 12
        self.widest_row = max(self.widest_row, float(noise.sum(1).max(initial=0.0)))
        self.columns = self.columns + noise.sum(0)

    def change(self, common: int) -> _Change:
        """Return the change over the `common` rows of both tables."""
        eigenvalues = np.linalg.eigvalsh(self.squares)[::-1]
        values = np.sqrt(np.maximum(eigenvalues, 0.0))
        edge = MARGIN * (math.sqrt(self.widest_row) + math.sqrt(self.columns.max(initial=0.0)))
        beyond = values[values > max(edge, 1e-7 * values[0])]
        share = math.nan
        if self.size:
            share = math.sqrt(float(np.square(values).sum()) / self.size)
        return _Change(
            common,
            np.concatenate(self.moved),
            np.concatenate(self.lengths),
            share=share,
            rank=len(beyond),
            effective_rank=_effective_rank(beyond),
        )


def _effective_rank(values: Array) -> float:
    """Return exp of the entropy of singular values; 1 for none."""
    if not len(values):
        return 1.0
    weights = values / values.sum()
    return float(np.exp(-(weights * np.log(weights)).sum()))
