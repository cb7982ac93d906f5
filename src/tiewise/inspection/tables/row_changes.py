"""`diff`: which rows of two checkpoints' tables moved, by how much, and how many directions the change has.

A row moved where one of its numbers is another; NaN equals NaN, and −0 equals 0. Let D [n, E] be the difference of the
rows that moved. Its singular values are the roots of the eigenvalues of DᵀD [E, E], which is summed in fp64 while both
tables are read once.

What is stored is rounded, and rounding has every direction: a number of |b| in [2ᵉ, 2ᵉ⁺¹) lies within half a unit
u = 2ᵉ⁻ᵖ of what it stands for, anywhere there, so that the error has the variance u²/12. A matrix of such errors has no
singular value beyond about the largest deviation of a row plus the largest of a column, √Σ u²/12 over each (Bandeira &
van Handel 2016, theorem 1.1). The rank of a change is the number of its singular values beyond that; the effective rank
is exp of the entropy of σ/Σσ over these (Roy & Vetterli 2007).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rules.normalised_heads import normalised_heads
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, progress, refuse_live_model
from tiewise.core.found import Found, Listing, Quantity, count, plain, visible
from tiewise.inspection.tables.model_tables import Array, Ids, StoredTable
from tiewise.inspection.tables.token_texts import read_as

BITS = {"F64": 52, "F32": 23, "F16": 10, "BF16": 7}  # p: bits of a number behind its leading one
MARGIN = 1.05  # above the expected edge, which few matrices pass
MOST_LISTED = 20


def diff(old: str | os.PathLike[str], new: str | os.PathLike[str], *, top: int = MOST_LISTED) -> Found:
    """Compare both ends of two checkpoints row by row; only their tables and tokenizer files are read.

    Args:
        old, new: Hugging Face folders or single `.safetensors`, of one width; rows that one of them lacks are counted.
        top: how many of the rows that moved most are listed.

    Raises:
        CheckpointError: a folder without tables that can be read, or tables of two widths.
    """
    for each in (old, new):
        refuse_live_model("diff", each)
    folders = open_folder(old), open_folder(new)
    ends = [_tables(Facts(folder)) for folder in folders]
    notes = []
    for folder in folders:
        for where, how in normalised_heads(Facts(folder)):
            notes.append(f"{folder.path}: {short(where)}: {how}, so of the output table only directions (cosine) count")
    is_shared = all(tables["output"] is tables["input"] for tables in ends)
    quantities: list[Quantity] = []
    listings: list[Listing] = []
    answers = []
    for end in ("input",) if is_shared else ("input", "output"):
        before, after = (tables[end] for tables in ends)
        if before is None or after is None:
            notes.append(f"{old if before is None else new} has no {end} table that can be compared")
            continue
        one, other = StoredTable(before), StoredTable(after)
        name = "shared table" if is_shared else f"{end} table"
        change = _compared(one, other, name)
        quantities += change.quantities(name)
        answers.append(f"{count(len(change.moved))} of {count(change.common)} rows of the {name} moved")
        if one.rows != other.rows:
            longer = new if other.rows > change.common else old
            last = max(one.rows, other.rows) - 1
            notes.append(f"rows {change.common:,} to {last:,} of the {name} are in {longer} alone")
        most = change.moved[np.argsort(-change.lengths, kind="stable")[:top]]
        texts = read_as(folders[1], most.tolist())
        if len(most):
            listings.append(_most_moved(name, one.take(most), other.take(most), most, texts))
    if not answers:
        raise CheckpointError(f"{old} and {new} have no table in common", "`tiewise check` says what each holds")
    return Found("; ".join(answers), tuple(quantities), listings=tuple(listings), notes=tuple(notes))


def _tables(facts: Facts) -> dict[str, Stored | None]:
    """Return the tables at both ends, the same one twice where the output has no separate table."""
    roles = facts.roles
    into = _readable(facts, roles.input)
    return {"input": into, "output": into if roles.output is None else _readable(facts, roles.output)}


def _readable(facts: Facts, table: Stored | None) -> Stored | None:
    """Return a table unless its numbers are packed."""
    return None if table is None or facts.roles.packed(table) else table


def _most_moved(name: str, before: Array, after: Array, ids: Ids, texts: tuple[str, ...]) -> Listing:
    """List rows [n, E] of one table as they were and as they are: how far each moved, and its direction."""
    size, distance = np.linalg.norm(before, axis=1), np.linalg.norm(after - before, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = (before * after).sum(1) / (size * np.linalg.norm(after, axis=1))
        share = distance / size
    rows = [
        (visible(text), count(row), plain(moved, 5), plain(part, 4), plain(angle, 4))
        for row, text, moved, part, angle in zip(ids.tolist(), texts, distance, share, cosine, strict=True)
    ]
    return Listing(f"Rows of the {name} that moved most", ("token", "row", "moved by", "of its length", "cosine"), rows)


@dataclass(frozen=True)
class _Change:
    """Difference of two tables over the rows that both have."""

    common: int  # rows that both have
    moved: Ids  # which of them moved [m]
    lengths: Array  # how far [m]
    share: float  # length of the change, relative to the rows that moved as they were
    rank: int  # directions beyond the rounding of what is stored
    effective_rank: float

    def quantities(self, name: str) -> list[Quantity]:
        """Report the change of the table of this name."""
        rows = Quantity("rows that moved", len(self.moved), n=self.common, of=name)
        if not len(self.moved):
            return [rows]
        why = "as many as if all of them were equal"
        return [
            rows,
            Quantity("length of the change", self.share, of=name, unit="%", why="in parts of the rows that moved"),
            Quantity("rank", self.rank, of=name, why="directions of it beyond the rounding of what is stored"),
            Quantity("effective rank", self.effective_rank, of=name, digits=1, why=why),
        ]


def _compared(one: StoredTable, other: StoredTable, name: str) -> _Change:
    """Compare two tables in one pass over the rows that both have."""
    if one.width != other.width:
        what = f"rows of {one.name} are {one.width} wide, those of {other.name} {other.width}"
        raise CheckpointError(what, "give two checkpoints of one width")
    common = min(one.rows, other.rows)
    squares = np.zeros((one.width, one.width))  # DᵀD
    sizes, widest, columns = 0.0, 0.0, np.zeros(one.width)  # of rounding: the largest row, and every column
    moved, lengths = [], []
    bits = min(BITS.get(table.tensor.dtype, 2) for table in (one, other))
    for start, stop in one.spans(common, beside=one.width):
        a, b = one.read(start, stop), other.read(start, stop)
        changed = ~((a == b) | (np.isnan(a) & np.isnan(b))).all(1)
        a, b = a[changed], b[changed]
        step = b - a
        moved.append(start + np.flatnonzero(changed))
        lengths.append(np.linalg.norm(step, axis=1))
        is_finite = np.isfinite(step).all(1)
        step, b = step[is_finite], b[is_finite]
        squares += step.T @ step
        noise = np.square(np.ldexp(1.0, np.frexp(b)[1] - 1 - bits)) / 12
        widest = max(widest, float(noise.sum(1).max(initial=0.0)))
        columns = columns + noise.sum(0)
        sizes += float(np.square(a[is_finite]).sum())
        progress(f"comparing the {name}", stop, common)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(squares)[::-1], 0.0))
    edge = MARGIN * (math.sqrt(widest) + math.sqrt(columns.max(initial=0.0)))
    beyond = values[values > max(edge, 1e-7 * values[0])]
    weights = beyond / beyond.sum() if len(beyond) else np.ones(1)
    return _Change(
        common,
        np.concatenate(moved),
        np.concatenate(lengths),
        share=math.sqrt(float(np.square(values).sum()) / sizes) if sizes else math.nan,
        rank=len(beyond),
        effective_rank=float(np.exp(-(weights * np.log(weights)).sum())),
    )
