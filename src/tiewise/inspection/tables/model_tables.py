"""Tables of a checkpoint, read a few rows at a time, and pairs of their rows.

A table [V, E] has one interface wherever it is stored: in memory, in a file, or as rows that a map computes. A factored
table has two views: its stored rows [V, k], and the rows [V, D] that its maps compute at each end.

Rows are paired by the token's text, never by their index: two tokenizers give one text two ids, and one id two texts.
Rows are paired by index only if both tables belong to one vocabulary: the two ends of one model, or equal texts in the
same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.indexed_tensors import IndexedTensor
from tiewise.checkpoint.roles import find_roles
from tiewise.checkpoint.rules.rule import names
from tiewise.checkpoint.stored import FLOATING, Reader, Stored, read_float64, widened
from tiewise.checkpoint.stored_boundary import Dense, FreeTokens, read_boundary
from tiewise.checkpoint.table_scans import scan_rows
from tiewise.checkpoint.tokenizer_ids import PIECES, read_tokenizer
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.progress import progress_of
from tiewise.core.spec_options import INSPECT

CHUNK_VALUES = 2**20  # values in memory at once: 8 MB in fp64
Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.floating]  # of a table, in the type that the caller requested


class TokenTable(ABC):
    """Rows of a table as floating numbers, independent of how they are stored.

    `name` is for messages.
    """

    name: str = "table"
    rows: int
    width: int
    turns: bool = False  # True if its rows have other directions than the stored ones

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in fp64."""

    def spans(self, rows: int | None = None, caller_width: int = 0, least: int = 1) -> Iterator[tuple[int, int]]:
        """Yield row ranges of a few MB each, in order.

        If `rows` is set, the ranges cover the first `rows` rows only. `caller_width` is the number of values that the
        caller
        stores per row, if it exceeds the row's width. `least` is the smallest number of rows of a range, however wide
        they are.
        """
        end = self.rows if rows is None else min(rows, self.rows)
        step = max(least, CHUNK_VALUES // max(1, self.width, caller_width))
        for start in range(0, end, step):
            yield start, min(start + step, end)

    @overload
    def take(self, ids: ArrayLike) -> Array:
        """Return rows [n, E] in fp64."""

    @overload
    def take(self, ids: ArrayLike, dtype: type[np.floating]) -> Rows:
        """Return rows [n, E] of `dtype`."""

    def take(self, ids: ArrayLike, dtype: type[np.floating] = np.float64) -> Rows:
        """Return the rows of tokens `ids`, in any order, as a new array [n, E]."""
        chosen = np.atleast_1d(np.asarray(ids, np.int64))
        outside = chosen[(chosen < 0) | (chosen >= self.rows)]
        if len(outside):
            raise DataError(f"token {int(outside[0])} is outside the table's {self.rows:,} rows", "check the tokens")
        if not len(chosen):
            return np.empty((0, self.width), dtype)
        return self._take(chosen, dtype)

    @abstractmethod
    def _take(self, ids: Ids, dtype: type[np.floating]) -> Rows:
        """Return one or more existing rows as a new array of `dtype`."""


class ArrayTable(TokenTable):
    """A table in memory."""

    def __init__(self, values: ArrayLike) -> None:
        self.values = np.asarray(values)
        if self.values.ndim != 2 or not np.issubdtype(self.values.dtype, np.floating):
            problem = (
                f"an array of {self.values.dtype} and shape {list(self.values.shape)} is no table of floating values"
            )
            raise CheckpointError(problem, "give one row per token: [V, E]")
        self.rows, self.width = self.values.shape

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in fp64."""
        return self.values[start:stop].astype(np.float64)

    def _take(self, ids: Ids, dtype: type[np.floating]) -> Rows:
        return self.values[ids].astype(dtype, copy=False)


class StoredTable(TokenTable):
    """A table in a checkpoint's file, of which only the requested rows are read.

    Raises:
        CheckpointError: the tensor is no matrix of floating numbers.
    """

    def __init__(self, tensor: Stored) -> None:
        if len(tensor.shape) != 2 or tensor.dtype not in FLOATING:
            problem = f"{tensor.path}: {short(tensor.name)} is {tensor.dtype} of shape {list(tensor.shape)}"
            raise CheckpointError(problem, "give a checkpoint whose tables are stored as plain floating numbers")
        self.tensor = tensor
        self.name = short(tensor.name)
        self.rows, self.width = tensor.shape

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in fp64."""
        return self.tensor.read(start, stop).astype(np.float64)

    def _take(self, ids: Ids, dtype: type[np.floating]) -> Rows:
        with Reader(self.tensor) as reader:
            rows = reader.take(ids)
        return widened(rows).astype(dtype, copy=False)


class FreeRowsTable(TokenTable):
    """Output rows [V, D] of a tied table with separate rows of some tokens (`+free=K`)."""

    turns = True

    def __init__(self, table: TokenTable, free: FreeTokens) -> None:
        self.table, self.free = table, free
        self.name, self.rows, self.width = table.name, table.rows, table.width

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in fp64."""
        rows = self.table.read(start, stop)
        self.free.add(rows, start)
        return rows

    def _take(self, ids: Ids, dtype: type[np.floating]) -> Rows:
        rows = self.table.take(ids)
        is_free = np.isin(ids, self.free.ids)
        rows[is_free] += self.free.correction[np.searchsorted(self.free.ids, ids[is_free])]
        return rows.astype(dtype, copy=False)


class MappedTable(TokenTable):
    """Rows [V, D] that `make` computes from the rows [V, k] of another table.

    `make` maps fp64 to fp64. It maps each row independently, a few rows at a time.
    """

    def __init__(
        self, table: TokenTable, make: Callable[[Array], Array], width: int, name: str = "", turns: bool = True
    ) -> None:
        self.table, self.make = table, make
        self.name, self.rows, self.width = name or table.name, table.rows, width
        self.turns = turns  # False for a scale alone

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in fp64."""
        return self.make(self.table.read(start, stop))

    def _take(self, ids: Ids, dtype: type[np.floating]) -> Rows:
        rows: Rows = np.empty((len(ids), self.width), dtype)
        step = max(1, CHUNK_VALUES // max(self.width, self.table.width))
        for start in range(0, len(ids), step):
            raw = self.table.take(ids[start : start + step])
            rows[start : start + step] = self.make(raw)
        return rows


AnyTable = TokenTable | Stored | Rows


def as_table(source: AnyTable) -> TokenTable:
    """Wrap a stored tensor or an array as a table; return a table unchanged."""
    if isinstance(source, TokenTable):
        return source
    if isinstance(source, Stored):
        return StoredTable(source)
    return ArrayTable(source)


@dataclass(frozen=True)
class Ends:
    """Input and output table of one model."""

    folder: Folder  # the checkpoint
    input: TokenTable  # the input table [V, D]
    output: TokenTable  # the output table [V', D']; the same object as `input` if the model is tied
    # the one stored table [V, E] that both ends read, directly or through maps; None for two tables
    shared: TokenTable | None
    stored: tuple[Stored, ...]  # the stored tensors of both ends, one or two, the input's first
    notes: tuple[str, ...] = ()  # facts about these tables for a reader
    indexed_tensors: tuple[IndexedTensor, ...] = ()  # further tensors that token ids index

    @property
    def tied(self) -> bool:
        """Return True if both ends are the same rows."""
        return self.input is self.output

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the stored tensors of the input and of the output."""
        return short(self.stored[0].name), short(self.stored[-1].name)

    @property
    def tables(self) -> tuple[tuple[str, TokenTable], ...]:
        """Return (end, table) pairs: `input` and `output`, or the one `table` of a tied model."""
        if self.tied:
            return (("table", self.input),)
        return ("input", self.input), ("output", self.output)

    def unusable(self) -> Mask:
        """Mark tokens [V] whose row in either table is zero, repeated or not finite.

        Both tables are read completely, a piece at a time.
        """
        mask = np.zeros(max(self.input.rows, self.output.rows), bool)
        for tensor in self.stored:
            with progress_of(f"rows of {short(tensor.name)}", tensor.nbytes):
                scan = scan_rows(tensor)
            for rows in (scan.not_finite, scan.zero, *scan.repeated):
                mask[list(rows)] = True
        return mask


def ends_of(folder: Folder) -> Ends:
    """Find the input and output table of a checkpoint.

    Tables of a stored boundary are read through its maps and scales.

    Raises:
        CheckpointError: no input table, no output head, or a table that is quantised.
    """
    facts = Facts(folder)
    if facts.is_tiewise_type:
        return _boundary_ends(facts)
    return _plain_ends(facts)


def _plain_ends(facts: Facts) -> Ends:
    """Return the ends of a model of another library, as they are stored."""
    table, head = stored_ends(facts)
    notes = []
    if facts.roles.maps:
        stands = f"{short(facts.roles.maps[0].name)} stands between a table and the body"
        notes.append(f"{stands}: tables are taken as stored")
    if head is not None and facts.tied:
        notes.append("the config says tied, and two different tables are stored: both are taken as stored")
    others = facts.roles.indexed_tensors
    source = StoredTable(table)
    if head is None:
        return Ends(facts.folder, source, source, source, (table,), tuple(notes), others)
    return Ends(facts.folder, source, StoredTable(head), None, (table, head), tuple(notes), others)


def _boundary_ends(facts: Facts) -> Ends:
    """Return the ends of a boundary that this package stored, after its maps and scales."""
    boundary = read_boundary(facts, INSPECT)
    lookup, head = boundary.lookup, boundary.head
    is_one_table = lookup.table.name == head.table.name
    notes = []
    if lookup.map is not None or head.map is not None:
        stored = "one stored table" if is_one_table else "two stored tables"
        notes.append(f"{stored} {lookup.table.shape[1]} wide; each end is taken behind its map")
    source = dense_table(lookup)
    # the last part of a mark is the scale, which does not change angles between rows
    if is_one_table and lookup.mark[:-1] == head.mark[:-1]:
        return Ends(facts.folder, source, source, source, (lookup.table,), tuple(notes))
    target = dense_table(head)
    if is_one_table:
        return Ends(facts.folder, source, target, StoredTable(lookup.table), (lookup.table,), tuple(notes))
    return Ends(facts.folder, source, target, None, (lookup.table, head.table), tuple(notes))


def stored_ends(facts: Facts) -> tuple[Stored, Stored | None]:
    """Return (input table, output table) as they are stored; None instead of a tied output."""
    roles, path = facts.roles, facts.path
    if roles.input is None:
        raise CheckpointError(f"{path}: no input table is stored", "`tiewise check` says what is")
    if roles.input_end.quantised or roles.output_end.quantised:
        raise CheckpointError(f"{path}: a table is quantised", "give the checkpoint that it was made from")
    if roles.output is not None:
        stored_twice = facts.ends_likeness is not None and facts.ends_likeness.equal
        return roles.input, None if stored_twice else roles.output
    if roles.headless:
        raise CheckpointError(f"{path}: a model without an output head", "give one with a token head")
    if facts.tied is False:
        raise CheckpointError(f"{path}: it says untied and stores no head", "`tiewise check` says how to repair it")
    return roles.input, None


def dense_table(dense: Dense) -> TokenTable:
    """Return the rows of one end of a stored boundary, after map and scale.

    The rows are computed when they are read.
    """
    table: TokenTable = StoredTable(dense.table)
    if dense.free is not None:
        table = FreeRowsTable(table, dense.free)
    if not dense.changed:
        return table
    mapped, scale = dense.map, dense.scale
    if mapped is None:
        return MappedTable(table, lambda rows: rows * scale, dense.width, turns=False)
    return MappedTable(table, lambda rows: mapped(rows) * scale, dense.width)


OUTWARD = "project_out"  # OPT's; every other map that families have between table and body is the input's
AFTER_MAP = "after its map"  # end of the name of a view behind a map
BOTH = "both ends"  # name of the one table of a tied model


def views_of(folder: Folder) -> tuple[dict[str, TokenTable], tuple[str, ...]]:
    """Return every view of a model's tables by name, stored ones first, and notes on them.

    An untied model has "input" and "output", a tied one "both ends". A table with a map to the body has a second view
    "after its map", for a factored boundary or a family's own linear map. Further tables of the same shape, such as
    those
    for further tokens, are named by their role and module.
    """
    ends = ends_of(folder)
    stored = [StoredTable(tensor) for tensor in ends.stored]
    further, unviewed = _further_tables(ends)
    views: dict[str, TokenTable] = {}
    if len(stored) == 1:
        views[BOTH] = stored[0]
    else:
        views["input"], views["output"] = stored
    views |= further
    notes = (*ends.notes, *left_out(unviewed))
    behind_maps = _behind_maps(ends)
    if behind_maps:
        return views | behind_maps, notes
    through_maps = _through_family_maps(folder, stored)
    if through_maps:
        notes = (*notes, "position rows and norms between a table and its map are left out")
    return views | through_maps, notes


def _further_tables(ends: Ends) -> tuple[dict[str, TokenTable], list[IndexedTensor]]:
    """Return (further tables that have the shape of the first end, all other tensors).

    Tables are named by role and module.
    """
    tables: dict[str, TokenTable] = {}
    rest = []
    for other in ends.indexed_tensors:
        is_like_first = other.tensor.dtype in FLOATING and other.tensor.shape == ends.stored[0].shape
        if other.has_row_per_token and is_like_first:
            tables[f"{other.role} {short(other.module)}"] = StoredTable(other.tensor)
        else:
            rest.append(other)
    return tables, rest


def _behind_maps(ends: Ends) -> dict[str, TokenTable]:
    """Return the ends of a stored boundary whose map changes the direction of rows."""
    by_end = {BOTH: ends.input} if ends.tied else dict(ends.tables)
    views: dict[str, TokenTable] = {}
    for end, table in by_end.items():
        if table.turns:
            views[_after_map(end)] = table
    return views


def _after_map(end: str) -> str:
    """Return the name of the view of a table after its map."""
    return f"{end} {AFTER_MAP}"


def _through_family_maps(folder: Folder, stored: Sequence[StoredTable]) -> dict[str, TokenTable]:
    """Return the tables after the linear maps of their family.

    A map that fits no table is left out.
    """
    views: dict[str, TokenTable] = {}
    source, target = stored[0], stored[-1]
    for tensor in find_roles(folder.tensors, folder.config).maps:
        module, parameter = module_of(tensor.name)
        if parameter != "weight":
            continue
        outputs, inputs = tensor.shape
        if module.rpartition(".")[2] != OUTWARD:
            if inputs == source.width:
                bias = folder.tensors.get(f"{module}.bias")
                views[_after_map("input")] = _through(source, read_float64(tensor).T, bias)
        elif outputs == target.width:
            views[_after_map("output")] = _through(target, read_float64(tensor), None)
    return views


def _through(table: StoredTable, matrix: Array, bias: Stored | None) -> MappedTable:
    """Return rows of a table times a matrix [width, out], plus a bias of fitting shape."""
    width = matrix.shape[1]
    shift = np.zeros(width)
    if bias is not None and bias.shape == shift.shape:
        shift = read_float64(bias)
    return MappedTable(table, lambda rows: rows @ matrix + shift, width)


def left_out(others: Collection[IndexedTensor]) -> tuple[str, ...]:
    """Return a note that names the indexed tensors which a section leaves out, if any."""
    if not others:
        return ()
    listed = names([f"{other.tensor.name} ({other.role})" for other in others])
    return (f"token ids index more, which is left out: {listed}",)


def texts_of(folder: str | Path | Folder, rows: int) -> list[str | None]:
    """Return the text of each of `rows` rows by a checkpoint's tokenizer files.

    A row without a token has None.

    Raises:
        CheckpointError: no folder, no tokenizer file with texts in it, or one that cannot be read.
    """
    opened = folder if isinstance(folder, Folder) else open_folder(folder)
    where = opened.path
    tokenizer = None
    if not opened.single:
        tokenizer = read_tokenizer(opened)
    if tokenizer is None:
        raise CheckpointError(f"{where}: no tokenizer.json, vocab.json or vocab.txt", "copy it from its source")
    if tokenizer.faults:
        fault = tokenizer.faults[0]
        raise CheckpointError(f"{where}: {fault.problem}", fault.remedy)
    if not set(tokenizer.files).isdisjoint(PIECES[1:]):
        problem = f"{where}: a SentencePiece model whose positions need not be ids"
        raise CheckpointError(problem, "add its tokenizer.json")
    texts = {number: text for text, number in tokenizer.base.items()}
    texts |= tokenizer.added
    return [texts.get(row) for row in range(rows)]


@dataclass(frozen=True)
class Pairs:
    """Paired rows of two tables: row a[i] and row b[i], int64 [n], sorted by a."""

    a: Ids
    b: Ids
    how: str  # `one vocabulary` or `by token text`

    def __len__(self) -> int:
        return len(self.a)

    def without(self, mask_a: Mask, mask_b: Mask | None = None) -> Pairs:
        """Leave out pairs whose row is marked in its table's mask [V]: zero, repeated, unused."""
        is_left_out = mask_a[self.a]
        if mask_b is not None:
            is_left_out = is_left_out | mask_b[self.b]
        keep = ~is_left_out
        return Pairs(self.a[keep], self.b[keep], self.how)


def one_vocabulary(rows_a: int, rows_b: int) -> Pairs:
    """Pair the rows of two tables of one model by index.

    Further rows (padding) of the longer table are left out.
    """
    rows = np.arange(min(rows_a, rows_b), dtype=np.int64)
    return Pairs(rows, rows, "one vocabulary")


def by_text(texts_a: Sequence[str | None], texts_b: Sequence[str | None]) -> Pairs:
    """Pair rows whose tokens have the same text.

    None is no token. If several rows have one text, the first counts.

    Raises:
        CheckpointError: the two vocabularies have no token in common.
    """
    rows_a, rows_b = _first_rows(texts_a), _first_rows(texts_b)
    common = sorted((row, rows_b[text]) for text, row in rows_a.items() if text in rows_b)
    if not common:
        raise CheckpointError(
            f"the two vocabularies ({len(texts_a):,} and {len(texts_b):,} rows) have no token in common",
            "give the tokenizer of each table; byte-level and SentencePiece vocabularies spell tokens differently",
        )
    rows = np.array(common, np.int64)
    return Pairs(rows[:, 0], rows[:, 1], "by token text")


def _first_rows(texts: Sequence[str | None]) -> dict[str, int]:
    """Return the first row of each text."""
    rows: dict[str, int] = {}
    for row, text in enumerate(texts):
        if text is not None:
            rows.setdefault(text, row)
    return rows
