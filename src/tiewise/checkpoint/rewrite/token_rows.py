"""Tensors with a row for each token: common code of `resize`, `trim` and `transplant`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiewise.checkpoint.claims import in_layer
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.indexed_tensors import PER_LAYER
from tiewise.checkpoint.numeric_ends import require_loadable_options, require_readable_tables
from tiewise.checkpoint.rewrite.change import Movement, NewTensor, Pieces, refuse
from tiewise.checkpoint.rewrite.config_ids import padding_ids
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

ROWS_STAY = Movement(0.0, 0.0, "nothing: every row that stays keeps its bytes")
SIZE = "vocab_size"
PER_LAYER_SIZE = "vocab_size_per_layer_input"
SEGMENTS = "type_vocab_size"  # BERT's number of segment types; no number of tokens


@dataclass(frozen=True)
class TokenParts:
    """All tensors with a row for each token."""

    tables: tuple[Stored, ...]  # tables of the two ends, the input table first
    biases: tuple[Stored, ...]  # biases of the head, as [V]
    others: tuple[Stored, ...]  # tables of layers or drafts

    @property
    def all(self) -> tuple[Stored, ...]:
        """Tables, biases and others, in this order."""
        return (*self.tables, *self.biases, *self.others)

    @property
    def lookups(self) -> tuple[Stored, ...]:
        """All tensors except the biases."""
        return (*self.tables, *self.others)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return {part.name for part in self.all}

    @property
    def rows(self) -> int:
        """Number of rows of the input table."""
        return self.tables[0].rows

    @property
    def fewest_rows(self) -> int:
        """Number of rows of the shortest tensor."""
        return min(part.rows for part in self.all)


def parts_of_tokens(facts: Facts, verb: str, *, may_lack_rows: bool = False) -> TokenParts:
    """Return all tensors with a row for each token.

    Args:
        verb: name of the verb, for messages.
        may_lack_rows: accept tables of layers or drafts that have fewer rows than the two ends.

    Raises:
        CheckpointError: a tensor has another number of rows, or it is quantised.
    """
    require_loadable_options(facts)
    parts = TokenParts(
        tables=tuple(require_readable_tables(facts, verb)),
        biases=tuple(replace(bias, shape=(bias.columns,)) for bias in facts.roles.biases),  # stored as [V] or [1, V]
        others=tuple(other.tensor for other in facts.roles.indexed_tensors if other.has_row_per_token),
    )
    if facts.unequal_on_purpose is not None:
        problem = f"{facts.path}: {facts.unequal_on_purpose}, and {verb} keeps one number of rows at both ends"
        raise CheckpointError(problem, "keep it: no command changes such a vocabulary")
    _require_plain_rows(facts, parts, may_lack_rows)
    return parts


def _require_plain_rows(facts: Facts, parts: TokenParts, may_lack_rows: bool) -> None:
    """Raise if a tensor is quantised or lacks the input table's number of rows.

    Args:
        may_lack_rows: accept tables of layers or drafts that have fewer rows.
    """
    for part in parts.all:
        has_rows = part.rows == parts.rows
        if may_lack_rows and part in parts.others:
            has_rows = part.rows <= parts.rows
        if not has_rows or part.dtype not in FLOATING:
            problem = f"{facts.path}: {short(part.name)} is {part.dtype} of {part.rows:,} rows, not {parts.rows:,}"
            remedy = "first give all tables and biases of tokens one number of rows"
            raise CheckpointError(problem, remedy)


def resized_tensors(
    facts: Facts, parts: Iterable[Stored], count: int, pieces: Callable[[Stored], Pieces]
) -> tuple[NewTensor, ...]:
    """Return tensors with `count` rows that replace some of `TokenParts`.

    Args:
        pieces: yields the bytes of the replacement of a tensor.
    """
    tensors = []
    for part in parts:
        shape = _shape_with_rows(facts, part, count)
        tensors.append(NewTensor.like(part, partial(pieces, part), shape=shape))
    return tuple(tensors)


def _shape_with_rows(facts: Facts, part: Stored, count: int) -> tuple[int, ...]:
    """Return the stored shape of a tensor that has `count` rows.

    The last axis of a bias is that of the tokens. `part` has the shape [V] even if the file stores [1, V].
    """
    stored = facts.folder.tensors[part.name].shape
    is_bias = part.shape != stored or len(stored) == 1
    if is_bias:
        return (*stored[:-1], count)
    return (count, *stored[1:])


def vocab_size_changes(facts: Facts, before: int, count: int) -> dict[str, int]:
    """Return {dotted path: `count`} for the config's entries that give the number of rows.

    These are the entries of the value `before`. If there is none, the result has a new one. The size of a per-layer
    table may have another value than `before`.
    """
    if facts.folder.config is None:
        return {}
    keys = [SIZE]
    roles = {other.role for other in facts.roles.indexed_tensors}
    if PER_LAYER in roles:
        keys.append(PER_LAYER_SIZE)
    level = ""
    if facts.text.level in facts.levels:
        level = facts.text.level
    sizes: dict[str, int] = {}
    for key in keys:
        new_path = f"{level}.{key}".lstrip(".")
        paths = _paths_of_size(facts.config, key, before) or [new_path]
        sizes |= dict.fromkeys(paths, count)
    return sizes


def _paths_of_size(config: Mapping[str, Any], key: str, rows: int) -> list[str]:
    """Return the dotted paths that end with `key` and have the value `rows`.

    For the size of a per-layer table, every value counts.
    """
    paths = []
    for path, value in config_leaves(config):
        if path.endswith(SEGMENTS) or not path.endswith(key):
            continue
        if value == rows or key == PER_LAYER_SIZE:
            paths.append(path)
    return paths


def notes_on_other_tables(facts: Facts, resized: set[str], rows: int, force: bool) -> tuple[str, ...]:
    """Return notes on a missing config.json and on tables that the verb does not resize.

    Args:
        resized: names of the tensors that the verb resizes.
        rows: present number of rows.

    Raises:
        CheckpointError: a table of unknown role has as many rows, and `force` is false.
    """
    notes: tuple[str, ...] = ()
    if facts.folder.config is None:
        notes = ("there is no config.json: write the new vocab_size into the one that goes with this file",)
    for problem in unknown_tables(facts, resized, rows):
        notes += refuse(problem, "nothing here resizes it: resize the model in transformers", force)
    return notes


def unknown_tables(facts: Facts, resized: set[str], rows: int) -> Iterator[str]:
    """Yield a sentence for each table of unknown role with this many rows or columns.

    They may belong to tokens. Tables in `resized` and tables of positions are skipped.
    """
    for table in head_columns(facts, rows):
        yield f"{facts.path}: {short(table.name)}, a part of the head, has a column for each of {rows:,} tokens"
    for name, tensor in facts.folder.tensors.items():
        if len(tensor.shape) != 2 or tensor.rows != rows:
            continue
        if name in resized or tensor in facts.roles.positions:
            continue
        if _may_be_of_tokens(name):
            yield f"{facts.path}: {short(name)} has {rows:,} rows too, and plays no part that is known"


@dataclass(frozen=True)
class PaddingChange:
    """A new id of padding, which shifts the positions of all tokens."""

    problem: str  # sentence
    old: int


def shift_of_positions(facts: Facts, new_id: Callable[[str, int], int | None]) -> PaddingChange | None:
    """Return the change of an id of padding from which the class counts positions.

    None: the positions stay. RoBERTa's first position is the id of padding plus one.

    Args:
        new_id: function from a dotted path in config.json and its id to the new id; None for a dropped token.
    """
    if not facts.class_ends.counts_from_pad:
        return None
    for path, number in padding_ids(facts.config).items():
        new = new_id(path, number)
        if new != number:
            problem = f"{facts.path}: its positions start after {path}, which would change from {number} to {new}"
            return PaddingChange(problem, number)
    return None


def head_columns(facts: Facts, rows: int) -> list[Stored]:
    """Return the stored matrices of the head that have a column for each token.

    MobileBERT's table is narrower than its body, and such a matrix of its head has the other columns of the table.
    """
    head = [facts.folder.tensors.get(facts.saved_name(name)) for name in facts.class_ends.head]
    return [matrix for matrix in head if matrix is not None and len(matrix.shape) == 2 and matrix.shape[1] == rows]


def _may_be_of_tokens(name: str) -> bool:
    """Return False for the name of a matrix within a layer, else True.

    An embedding or a head within a layer may also have rows of tokens; for it the result is True.
    """
    if not in_layer(name) or "embed" in name:
        return True
    modules = [part for part in module_of(name)[0].split(".") if not part.isdigit()]  # a list of heads has numbers
    return "head" in modules[-1]


def config_leaves(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every entry of a config, at any level."""
    for key, value in config.items():
        if not isinstance(value, Mapping):
            yield str(key), value
            continue
        for path, leaf in config_leaves(value):
            yield f"{key}.{path}", leaf
