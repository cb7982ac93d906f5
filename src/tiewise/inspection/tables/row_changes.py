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

import numpy as np

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.rules.normalised_heads import normalised_heads
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, progress, refuse_live_model
from tiewise.core.found import Found, Listing, Quantity, count, plain, visible
from tiewise.inspection.tables.model_tables import StoredTable
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
    quantities, listings, notes, answers = list[Quantity](), list[Listing](), list[str](), list[str]()
    for folder in folders:
        for where, how in normalised_heads(Facts(folder)):
            notes.append(f"{folder.path}: {short(where)}: {how}, so of the output table only directions (cosine) count")
    same = all(each["output"] is each["input"] for each in ends)
    for end in ("input",) if same else ("input", "output"):
        before, after = (each[end] for each in ends)
        if before is None or after is None:
            notes.append(f"{old if before is None else new} has no {end} table that can be compared")
            continue
        one, other = StoredTable(before), StoredTable(after)
        name = "shared table" if same else f"{end} table"
        found, moved, lengths = _compared(one, other, name)
        quantities += found
        common = min(one.rows, other.rows)
        answers.append(f"{count(len(moved))} of {count(common)} rows of the {name} moved")
        if one.rows != other.rows:
            longer = new if other.rows > common else old
            notes.append(f"rows {common:,} to {max(one.rows, other.rows) - 1:,} of the {name} are in {longer} alone")
        most = moved[np.argsort(-lengths, kind="stable")[:top]]
        here, there = one.take(most), other.take(most)
        texts = read_as(folders[1], most.tolist())
        size, far = np.linalg.norm(here, axis=1), np.linalg.norm(there - here, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            cosine = (here * there).sum(1) / (size * np.linalg.norm(there, axis=1))
            share = far / size
        cells = zip(most.tolist(), texts, far, share, cosine, strict=True)
        rows = [(visible(t), count(i), plain(d, 5), plain(r, 4), plain(c, 4)) for i, t, d, r, c in cells]
        if rows:
            header = ("token", "row", "moved by", "of its length", "cosine")
            listings.append(Listing(f"Rows of the {name} that moved most", header, rows))
    if not answers:
        raise CheckpointError(f"{old} and {new} have no table in common", "`tiewise check` says what each holds")
    return Found("; ".join(answers), tuple(quantities), listings=tuple(listings), notes=tuple(notes))


def _tables(facts: Facts) -> dict[str, Stored | None]:
    """The tables at both ends, one and the same where the output has none of its own."""
    roles = facts.roles
    held = [None if table is None or roles.packed(table) else table for table in (roles.input, roles.output)]
    return {"input": held[0], "output": held[1] if roles.output is not None else held[0]}


def _compared(one: StoredTable, other: StoredTable, name: str) -> tuple[list[Quantity], np.ndarray, np.ndarray]:
    """(what is said of one pair, which rows moved [m], how far [m])."""
    if one.width != other.width:
        what = f"rows of {one.name} are {one.width} wide, those of {other.name} {other.width}"
        raise CheckpointError(what, "give two checkpoints of one width")
    common = min(one.rows, other.rows)
    squares, sizes, widest, columns = np.zeros((one.width, one.width)), 0.0, 0.0, np.zeros(one.width)
    moved, lengths = [], []
    bits = min(BITS.get(table.tensor.dtype, 2) for table in (one, other))
    for start, stop in one.spans(common, beside=one.width):
        a, b = one.read(start, stop), other.read(start, stop)
        changed = ~((a == b) | (np.isnan(a) & np.isnan(b))).all(1)
        a, b = a[changed], b[changed]
        step = b - a
        moved.append(start + np.flatnonzero(changed))
        lengths.append(np.linalg.norm(step, axis=1))
        fine = np.isfinite(step).all(1)
        step, b = step[fine], b[fine]
        squares += step.T @ step
        noise = np.square(np.ldexp(1.0, np.frexp(b)[1] - 1 - bits)) / 12
        widest, columns = max(widest, float(noise.sum(1).max(initial=0.0))), columns + noise.sum(0)
        sizes += float(np.square(a[fine]).sum())
        progress(f"comparing the {name}", stop, common)
    rows, far = np.concatenate(moved), np.concatenate(lengths)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(squares)[::-1], 0.0))
    edge = MARGIN * (math.sqrt(widest) + math.sqrt(columns.max(initial=0.0)))
    kept = values[values > max(edge, 1e-7 * values[0])]
    weights = kept / kept.sum() if len(kept) else np.ones(1)
    effective = float(np.exp(-(weights * np.log(weights)).sum()))
    share = math.sqrt(float(np.square(values).sum()) / sizes) if sizes else math.nan
    said = [Quantity("rows that moved", len(rows), n=common, of=name)]
    if len(rows):
        said += [
            Quantity("length of the change", share, of=name, unit="%", why="in parts of the rows that moved"),
            Quantity("rank", len(kept), of=name, why="directions of it beyond the rounding of what is stored"),
            Quantity("effective rank", effective, of=name, digits=1, why="as many as if all of them were equal"),
        ]
    return said, rows, far
