"""`resize`: another number of tokens at both ends, in every head bias, and in the config at every level.

Rows that stay keep their bytes. New ones are drawn jointly for all parts; see `new_rows`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import in_layer, module_of
from tiewise.checkpoint.hf_folder import Tokenizer, open_folder, read_tokenizer
from tiewise.checkpoint.stored import FLOATING, NUMPY, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import Change, Measured, NewTensor, stored_bytes
from tiewise.rewrite.ends import opened, refuse
from tiewise.rewrite.new_rows import new_rows
from tiewise.rewrite.plain_ends import readable
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.transaction import apply
from tiewise.rewrite.vocabulary import Usage, largest_named_id, sizes

KEPT = Measured(0.0, 0.0, "nothing: every row that stays keeps its bytes")


@dataclass(frozen=True)
class Size:
    """How many tokens are wanted: `vocab` of them, or as many as a tokenizer needs; then up to the next multiple."""

    vocab: int | None
    multiple_of: int | None
    tokenizer: Tokenizer | None
    shrink: bool


def resize(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    vocab: int | None = None,
    multiple_of: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    shrink: bool = False,
    seed: int = 0,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Write a checkpoint with another number of tokens.

    Args:
        source: the checkpoint.
        to: the new folder.
        vocab: rows that both ends shall have.
        multiple_of: rows are rounded up to a multiple of this.
        tokenizer: folder of a tokenizer; there shall be a row for each of its tokens, and no fewer than there are.
        shrink: rows may be dropped from the end, down to what tokenizers and config need.
        seed: of the new rows, 0 or more.
        dry_run: foresee everything, write nothing.
        force: leave other tables with as many rows as they are.

    Raises:
        CheckpointError: nothing to do, rows would be lost that are needed or that nobody said may go, the two ends
            have not the same number of rows, or a third table has a row for each token too.
    """
    size = Size(vocab, multiple_of, None if tokenizer is None else _tokenizer(tokenizer), shrink)
    _check_arguments(size, seed)
    facts = opened(Path(source))
    parts = _parts(facts)
    left = _left(facts, parts, force)
    rows, count = parts[0].rows, _target(facts, size, parts[0].rows)
    tables = tuple(part for part in parts if len(part.shape) == 2)
    usage = Usage(tables, _own(facts) or size.tokenizer)
    if count > rows and not usage.used.any():
        fix = "train or repair the model first: new rows are drawn from those in use"
        raise CheckpointError(f"{facts.path}: no row of {short(tables[0].name)} is in use", fix)
    draw = _Draw(rows, count, usage, seed)
    stored = facts.folder.tensors
    change = Change(
        KEPT,
        put=tuple(draw.tensor(part, stored[part.name].shape) for part in parts),
        config=_config(facts, rows, count),
        notes=(*draw.notes(tables), *left),
    )
    return apply(facts.folder, change, Path(to), command="resize", dry_run=dry_run, force=force)


@dataclass(frozen=True)
class _Draw:
    """What makes `count` rows of `rows` stored ones."""

    rows: int
    count: int
    usage: Usage
    seed: int

    def tensor(self, part: Stored, shape: tuple[int, ...]) -> NewTensor:
        """Return a part with its new number of rows, in the shape that it is stored in: [V, E], [V] or [1, V]."""
        made = (*shape[:-1], self.count) if len(part.shape) == 1 else (self.count, *shape[1:])
        return NewTensor(part.name, part.dtype, made, part.path.name, lambda: self.pieces(part))

    def pieces(self, part: Stored) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a part: those that stay, then those of new rows."""
        stay = min(self.rows, self.count)
        yield from stored_bytes(replace(part, shape=(stay, *part.shape[1:]), end=part.start + stay * _row_bytes(part)))
        for block in self.new(part):
            yield block.astype(NUMPY[part.dtype]).tobytes()

    def new(self, part: Stored) -> Iterator[NDArray[np.float64]]:
        """Yield the new rows of a part in blocks."""
        return new_rows(part, self.usage.used, max(0, self.count - self.rows), self.seed)

    def notes(self, tables: tuple[Stored, ...]) -> Iterator[str]:
        """Say what comes or goes, and how long new rows are beside the others."""
        if self.count < self.rows:
            yield f"rows {self.count:,} to {self.rows - 1:,} are dropped"
            return
        like = f"drawn like the {int(self.usage.used.sum()):,} rows in use, with seed {self.seed}"
        yield f"rows {self.rows:,} to {self.count - 1:,} are new, {like}"
        for table in tables:
            drawn = np.linalg.norm(next(self.new(table)), axis=1)
            low, high = np.quantile(self.usage.lengths(table), (0.05, 0.95))
            of = f"the first {len(drawn):,} new rows" if len(drawn) < self.count - self.rows else "new rows"
            yield (
                f"{short(table.name)}: {of} are {drawn.min():.4g} to {drawn.max():.4g} long,"
                f" nine in ten of those in use {low:.4g} to {high:.4g}"
            )


def _row_bytes(part: Stored) -> int:
    return part.nbytes // max(1, part.rows)


def _check_arguments(size: Size, seed: int) -> None:
    if size.vocab is not None and size.tokenizer is not None:
        raise CheckpointError("vocab and tokenizer both say how many rows there shall be", "give one of them")
    if size.vocab is None and size.tokenizer is None and size.multiple_of is None:
        raise CheckpointError("nothing says how many rows there shall be", "give vocab, multiple_of or tokenizer")
    for name, value, least in (("vocab", size.vocab, 1), ("multiple_of", size.multiple_of, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise CheckpointError(f"{name} is {value}", f"it must be {least} or more")


def _tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    found = read_tokenizer(open_folder(path))
    for fault in found.faults if found is not None else ():
        raise CheckpointError(fault.what, fault.fix)
    if found is None or found.max_id < 0:
        fix = "give the folder that holds tokenizer.json, vocab.json, vocab.txt or tokenizer.model"
        raise CheckpointError(f"{os.fspath(path)}: no tokenizer was found in it", fix)
    return found


def _own(facts: Facts) -> Tokenizer | None:
    own = facts.tokenizer
    return own if own is not None and own.base_max >= 0 else None


def _parts(facts: Facts) -> tuple[Stored, ...]:
    """Everything with a row for each token: the tables first, then biases as vectors."""
    tables = readable(facts, "resize")
    biases = tuple(replace(bias, shape=(bias.shape[-1],)) for bias in facts.roles.biases)
    for part in (*tables, *biases):
        if part.rows != tables[0].rows or part.dtype not in FLOATING:
            what = f"{facts.path}: {short(part.name)} is {part.dtype} of {part.rows:,} rows, not {tables[0].rows:,}"
            raise CheckpointError(what, "both ends and every bias must have one number of rows first")
    return (*tables, *biases)


def _target(facts: Facts, size: Size, rows: int) -> int:
    given = size.tokenizer.max_id + 1 if size.tokenizer is not None else 0
    wanted = size.vocab or (given if size.shrink and given else max(rows, given))
    if size.multiple_of is not None:
        wanted = -(-wanted // size.multiple_of) * size.multiple_of
    if wanted == rows:
        raise CheckpointError(f"{facts.path}: it has {rows:,} rows already", "there is nothing to do")
    if wanted > rows:
        return wanted
    if not size.shrink:
        fix = "rows beyond the tokenizer are padding that other tools may count on; --shrink drops them all the same"
        raise CheckpointError(f"{facts.path}: {wanted:,} tokens are fewer than its {rows:,} rows", fix)
    own = facts.tokenizer.max_id + 1 if facts.tokenizer is not None else 0
    needed = max(own, given, largest_named_id(facts, rows) + 1)
    if wanted < needed:
        fix = f"choose {needed:,} or more"
        raise CheckpointError(f"{facts.path}: its tokenizer and config name token {needed - 1:,}", fix)
    return wanted


def _config(facts: Facts, rows: int, count: int) -> dict[str, int]:
    """Every key that gives the old size gives the new one; where none does, that of the vocabulary's level."""
    if facts.folder.config is None:
        return {}
    paths = tuple(sizes(facts.config, rows))
    level = facts.text.level if facts.text is not None and facts.text.level in facts.levels else ""
    return dict.fromkeys(paths or (f"{level}.vocab_size".lstrip("."),), count)


def _left(facts: Facts, parts: tuple[Stored, ...], force: bool) -> tuple[str, ...]:
    """What else the user should see to.

    Raises:
        CheckpointError: a table of neither end has as many rows: Gemma 4's per-layer table, a draft head's own pair.
    """
    notes = []
    if facts.folder.config is None:
        notes.append("there is no config.json: write the new vocab_size into the one that goes with this file")
    resized = {part.name for part in (*parts, *facts.roles.positions)}
    for name, tensor in facts.folder.tensors.items():
        if name not in resized and len(tensor.shape) == 2 and tensor.rows == parts[0].rows and _by_token(name):
            what = f"{facts.path}: {short(name)} has {tensor.rows:,} rows too, and belongs to neither end"
            notes += refuse(what, "nothing here resizes it: resize the model in transformers", force)
    return tuple(notes)


def _by_token(name: str) -> bool:
    """Whether a table with as many rows as there are tokens has them for tokens: any but a matrix within a layer."""
    return not in_layer(name) or "embed" in name or "head" in module_of(name)[0].rpartition(".")[2]
