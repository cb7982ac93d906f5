"""`resize`: change the number of rows of tables and head biases, and `vocab_size`.

Every tensor with a row for each token changes, and so does every level of the config.

Retained rows keep their bytes. New rows are drawn from the normal distribution that has the mean and covariance of
the rows in use:

    x_new = m + 1/√(n−1) · Σᵢ gᵢ (xᵢ − m)        gᵢ ~ N(0, 1), independent; i over the n rows in use, m their mean

That is N(m, Σ̂) exactly: a sum of independent normal vectors, of mean m and covariance Σᵢ (xᵢ − m)(xᵢ − m)ᵀ / (n−1);
Σ̂ [D, D] is never formed. xᵢ is the concatenation of all that the checkpoint stores for token i: input row, output row
and bias. The rows of a new token are thus correlated as those of existing tokens are. Each part can be drawn
separately, since gᵢ depends only on the seed, the number of the existing row and the number of the new row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.checkpoint.indexed_tensors import DRAFT_MAP, MODALITY, NGRAM
from tiewise.checkpoint.rewrite.change import Change, NothingToDo, Pieces, stored_bytes
from tiewise.checkpoint.rewrite.config_ids import named_ids
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.token_rows import (
    ROWS_STAY,
    TokenParts,
    notes_on_other_tables,
    parts_of_tokens,
    resized_tensors,
    vocab_size_changes,
)
from tiewise.checkpoint.stored import NUMPY, Reader, Stored, widened
from tiewise.checkpoint.tokenizer_ids import Tokenizer, read_tokenizer
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, suggest_choices
from tiewise.core.written_options import written_option

OLD_BLOCK, NEW_BLOCK = 512, 256  # g is drawn in blocks of this shape; results depend on it, so it must not change
RANDOM, ZERO = "drawn", "zero"  # values of the option `rows`
SUM_BYTES = 64 * 2**20  # memory for the sums during one pass over the table
BYTE_HASH = "encoder_hash_tok_embedding"  # last part of the module of BLT's n-gram tables, which hash bytes, not ids
NOT_RESIZABLE = {  # role of a table → why `resize` cannot change its rows, and the remedy
    NGRAM: (
        "its rows are found by a hash of vocab_size, so that under another one every n-gram reads another row",
        "train it with the vocabulary that it shall have",
    ),
    MODALITY: (
        "the class reads it for every id from an offset on, so that a token behind the last would read outside it",
        "give new tokens ids that are there already and unused",
    ),
    DRAFT_MAP: ("it maps a draft's tokens to those of a target", "resize the target, and make the draft's map anew"),
}


@verb(
    order=50,
    group="vocab",
    details="",
    live="model.resize_token_embeddings",
    keeps_logits="first",
    example="tied --vocab=50",
)
def resize(
    facts: Facts,
    *,
    vocab: Annotated[int | None, Option("Number of rows of both ends.")] = None,
    multiple_of: Annotated[int | None, Option("Round the rows up to a multiple of this.")] = None,
    tokenizer: Annotated[
        str | os.PathLike[str] | None, Option("Give every token of this tokenizer a row.", metavar="DIR")
    ] = None,
    shrink: Annotated[bool, Option("Allow dropping rows from the end.")] = False,
    rows: Annotated[str, Option("Values of new rows; zeros are padding.", metavar="drawn|zero")] = RANDOM,
    seed: Annotated[int, Option("Seed of the new rows.")] = 0,
    force: bool = False,
) -> Change:
    """Change the number of rows of both ends and of the head's bias. New rows resemble the existing ones.

    They are drawn from the normal distribution with the mean and covariance of the rows in use. With `force`, other
    tables with as many rows stay as they are.

    >>> import tiewise  # `tied` is a folder with a vocabulary of 40
    >>> receipt = tiewise.checkpoint.resize("tied", "longer", vocab=50)
    >>> receipt.written, receipt.bytes_after - receipt.bytes_before
    (('model.embed_tokens.weight',), 320)

    Args:
        vocab: number of rows of both ends in the result.
        multiple_of: round the number of rows up to a multiple of this.
        tokenizer: folder of a tokenizer. The result has a row for each of its tokens, and no fewer than the source.
        shrink: allow dropping rows from the end, down to the largest id that the tokenizers and the config name.
        rows: "drawn": the input row, output row and bias of a new token are drawn jointly. "zero": all are zeros, as
            padding is.
        seed: seed of the new rows, 0 or more.
    """
    _require_arguments(vocab, multiple_of, tokenizer, rows, seed)
    new_tokenizer = None
    if tokenizer is not None:
        new_tokenizer = _tokenizer_of(tokenizer)
    _require_resizable(facts)
    parts = parts_of_tokens(facts, "resize", may_lack_rows=True)
    notes = notes_on_other_tables(facts, parts.names, parts.rows, force)
    count = _requested_rows(parts.rows, vocab, multiple_of, new_tokenizer, shrink)
    if count == parts.rows == parts.fewest_rows:
        raise NothingToDo(f"{facts.path}: it has {parts.rows:,} rows already", "there is nothing to do")
    if count < parts.rows:
        _require_unused_end(facts, count, parts.rows, new_tokenizer, shrink)

    row_lengths = _row_lengths(parts)
    in_use = _rows_in_use(facts, new_tokenizer, row_lengths)
    if rows == RANDOM and count > parts.fewest_rows:
        _require_rows_to_draw_from(facts, parts, in_use)
    repeats_first = family(facts.text.model_type).repeats_first_row
    resized = _ResizedParts(parts, count, in_use, rows == RANDOM, seed, repeats_first)
    return Change(
        ROWS_STAY,
        put=resized_tensors(facts, parts.all, count, resized.pieces),
        config=vocab_size_changes(facts, parts.rows, count),
        notes=(*resized.notes(), *resized.length_notes(row_lengths), *notes),
        summary=f"{count:,} rows instead of {parts.rows:,}; the rows that stay keep every byte",
    )


def _require_arguments(
    vocab: int | None, multiple_of: int | None, tokenizer: str | os.PathLike[str] | None, rows: str, seed: int
) -> None:
    """Raise if the options of `resize` contradict each other or are out of range."""
    if rows not in (RANDOM, ZERO):
        remedy = suggest_choices(rows, (RANDOM, ZERO))
        if rows.isdecimal():
            remedy = f"did you mean {written_option('vocab', int(rows))}? rows are {RANDOM} or {ZERO}"
        raise CheckpointError(f"no choice {written_option('rows', rows)}", remedy)
    options = [written_option(name) for name in ("vocab", "tokenizer", "multiple_of")]
    if vocab is not None and tokenizer is not None:
        raise CheckpointError(f"{options[0]} and {options[1]} both set the number of rows", "give one of them")
    if (vocab, tokenizer, multiple_of) == (None, None, None):
        raise CheckpointError("the new number of rows is missing", f"give {options[0]}, {options[2]} or {options[1]}")
    for name, value, least in (("vocab", vocab, 1), ("multiple_of", multiple_of, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise CheckpointError(f"{written_option(name, value)} is too small", f"it must be {least} or more")


def _tokenizer_of(folder: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a folder; raise if it is missing or damaged."""
    new_tokenizer = read_tokenizer(open_folder(folder))
    if new_tokenizer is not None:
        if new_tokenizer.faults:
            raise CheckpointError(new_tokenizer.faults[0].problem, new_tokenizer.faults[0].remedy)
        if new_tokenizer.max_id >= 0:
            return new_tokenizer
    remedy = "give the folder that holds tokenizer.json, vocab.json, vocab.txt or tokenizer.model"
    raise CheckpointError(f"{os.fspath(folder)}: no tokenizer was found in it", remedy)


def _require_resizable(facts: Facts) -> None:
    """Raise if the class would read other rows of a table after a resize."""
    for other in facts.roles.indexed_tensors:
        if other.role in NOT_RESIZABLE and not other.module.endswith(BYTE_HASH):
            why, remedy = NOT_RESIZABLE[other.role]
            raise CheckpointError(f"{facts.path}: {short(other.tensor.name)}: {why}", remedy)


def _requested_rows(
    rows: int, vocab: int | None, multiple_of: int | None, new_tokenizer: Tokenizer | None, shrink: bool
) -> int:
    """Return the number of rows that the options request; `rows` is the present number."""
    needed = 0
    if new_tokenizer is not None:
        needed = new_tokenizer.max_id + 1
    if vocab is not None:
        count = vocab
    elif shrink and needed:
        count = needed
    else:
        count = max(rows, needed)
    if multiple_of is not None:
        count = -(-count // multiple_of) * multiple_of  # rounded up, exactly
    return count


def _require_unused_end(facts: Facts, count: int, rows: int, new_tokenizer: Tokenizer | None, shrink: bool) -> None:
    """Raise if rows from `count` on must stay.

    They must stay if `shrink` is false, or if a tokenizer or a config names one of them.
    """
    if not shrink:
        remedy = "--shrink removes the last rows; other tools may need this padding"
        raise CheckpointError(f"{facts.path}: {count:,} rows are fewer than the present {rows:,}", remedy)
    largest = _largest_id(facts, rows, new_tokenizer)
    if count <= largest:
        remedy = f"choose {largest + 1:,} or more"
        raise CheckpointError(f"{facts.path}: its tokenizer and config name token {largest:,}", remedy)


def _largest_id(facts: Facts, rows: int, new_tokenizer: Tokenizer | None) -> int:
    """Return the largest id that a tokenizer or a config names, -1 if there is none.

    Ids of `rows` or more in a config are ignored.
    """
    ids = [-1]
    for tokenizer in (new_tokenizer, facts.tokenizer):
        if tokenizer is not None:
            ids.append(tokenizer.max_id)
    for record in (facts.config, facts.generation):
        if isinstance(record, Mapping):  # false for a generation_config.json that cannot be read
            ids += [number for number in named_ids(record) if number < rows]
    return max(ids)


def _row_lengths(parts: TokenParts) -> NDArray[np.float64]:
    """Return the Euclidean length of every row of every table, as [tables, V].

    The length of a row that a table lacks is 0.
    """
    row_lengths = np.zeros((len(parts.lookups), parts.rows))
    for table, length in zip(parts.lookups, row_lengths, strict=True):
        with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):
            for start, stop in reader.spans():
                length[start:stop] = np.linalg.norm(reader.rows(start, stop).astype(np.float64), axis=1)
    return row_lengths


def _rows_in_use(facts: Facts, new_tokenizer: Tokenizer | None, row_lengths: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask [V] of the rows in use.

    A row is in use if a tokenizer can produce its id, and if it is finite and not zero in every table. The
    checkpoint's tokenizer takes precedence over `new_tokenizer`. Without a tokenizer, every id counts as produced.
    """
    is_sound: NDArray[np.bool_] = np.all(np.isfinite(row_lengths) & (row_lengths > 0), axis=0)
    for tokenizer in (facts.tokenizer, new_tokenizer):
        if tokenizer is not None and tokenizer.base_max >= 0:
            return is_sound & np.isin(np.arange(len(is_sound)), list(tokenizer.used))
    return is_sound


def _require_rows_to_draw_from(facts: Facts, parts: TokenParts, in_use: NDArray[np.bool_]) -> None:
    """Raise if no row is in use, so that no new row can be drawn."""
    if not in_use.any():
        remedy = "train or repair the model first: new rows are drawn from those in use"
        raise CheckpointError(f"{facts.path}: no row of {short(parts.tables[0].name)} is in use", remedy)


@dataclass(frozen=True)
class _ResizedParts:
    """The tensors of tokens after a resize."""

    parts: TokenParts
    count: int
    in_use: NDArray[np.bool_]  # [V] mask of the rows whose mean and covariance new rows get
    is_random: bool  # True if new rows are drawn, False if they are zeros
    seed: int
    repeats_first: bool  # the class reads row 0 of a per-layer table for ids beyond its end

    @property
    def added(self) -> int:
        """Number of rows that are new in every tensor."""
        return max(0, self.count - self.parts.rows)

    def notes(self) -> list[str]:
        """Return notes on dropped and new rows."""
        rows, count, notes = self.parts.rows, self.count, []
        how = f"drawn like the {int(self.in_use.sum()):,} rows in use, with seed {self.seed}"
        if not self.is_random:
            how = "zero: their logits are always 0, so mask them in generation"
        if count < rows:
            notes.append(f"rows {count:,} to {rows - 1:,} are removed")
        if self.added:
            notes.append(f"rows {rows:,} to {count - 1:,} are new and {how}")
        become = f"are {how}"
        if self.repeats_first:
            become = "repeat its first row, which these ids read before"
        end = min(rows, count)
        for part in self.parts.others:
            if part.rows < end:
                notes.append(f"{short(part.name)} lacks rows {part.rows:,} to {end - 1:,}, which {become}")
        return notes

    def length_notes(self, row_lengths: NDArray[np.float64]) -> list[str]:
        """Return notes that compare the lengths of new rows with those of rows in use.

        Args:
            row_lengths: Euclidean lengths of the rows of all tables, [tables, V].
        """
        if not self.added or not self.is_random:
            return []
        notes = []
        for table, length in zip(self.parts.lookups, row_lengths, strict=True):
            block = next(new_rows(table, self.in_use, self.added, self.seed))
            new = np.linalg.norm(block, axis=1)
            low, high = np.quantile(length[self.in_use], (0.05, 0.95))
            which = "new rows"
            if len(new) < self.added:
                which = f"the first {len(new):,} new rows"
            others = f"nine in ten rows in use have {low:.4g} to {high:.4g}"
            notes.append(f"{short(table.name)}: {which} have lengths {new.min():.4g} to {new.max():.4g}; {others}")
        return notes

    def pieces(self, part: Stored) -> Pieces:
        """Yield the bytes of a tensor with `count` rows.

        Retained rows come first, then copies of the first row, then new rows.
        """
        row_bytes = part.nbytes // max(1, part.rows)
        stay = min(part.rows, self.count)
        yield from stored_bytes(_first_rows(part, stay, row_bytes))
        copies = 0
        if self.repeats_first:
            copies = max(0, min(self.parts.rows, self.count) - part.rows)
        for _ in range(copies):
            yield from stored_bytes(_first_rows(part, 1, row_bytes))
        left = self.count - stay - copies
        if not self.is_random:
            yield from repeat(bytes(row_bytes), max(0, left))
            return
        for block in new_rows(part, self.in_use, left, self.seed):
            yield block.astype(NUMPY[part.dtype]).tobytes()


def _first_rows(part: Stored, count: int, row_bytes: int) -> Stored:
    """Return the first `count` rows of a stored tensor, without reading them."""
    return replace(part, shape=(count, *part.shape[1:]), end=part.start + count * row_bytes)


def new_rows(part: Stored, in_use: NDArray[np.bool_], count: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """Yield `count` new rows of a table [V, E] or a bias [V], in blocks.

    A block is [≤ 256, E]. One pass over the stored tensor serves as many blocks as fit in `SUM_BYTES`. A new row
    depends on the seed and on its number, not on how many rows are drawn with it.
    """
    blocks, used_count = range(-(-count // NEW_BLOCK)), int(in_use.sum())
    width = math.prod(part.shape[1:])  # 1 for a bias
    at_once = max(1, SUM_BYTES // (8 * NEW_BLOCK * width))
    for first in blocks[::at_once]:  # one pass over the tensor for each group
        group = blocks[first : first + at_once]
        sums, weights, total = _weighted_sums(part, in_use, group, seed)
        mean = total / used_count
        sums -= weights * mean  # in place: the sums are most of the memory
        sums /= max(1, used_count - 1) ** 0.5
        sums += mean
        for new, block in zip(group, sums, strict=True):
            yield block[: count - new * NEW_BLOCK].reshape(-1, *part.shape[1:])


def _weighted_sums(
    part: Stored, in_use: NDArray[np.bool_], group: range, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Read the rows in use once, and return weighted sums of them.

    Args:
        group: numbers of the blocks of new rows; each block has different gᵢ.

    Returns:
        Σ gᵢ xᵢ [blocks, 256, E], Σ gᵢ [blocks, 256, 1] and Σ xᵢ [E].
    """
    width = math.prod(part.shape[1:])  # 1 of a bias
    sums = np.zeros((len(group), NEW_BLOCK, width))
    weights = np.zeros((len(group), NEW_BLOCK, 1))
    total = np.zeros(width)
    with Reader(part) as reader:
        for old, start in enumerate(range(0, part.rows, OLD_BLOCK)):
            block_rows = np.flatnonzero(in_use[start : start + OLD_BLOCK])
            if not len(block_rows):
                continue
            rows = widened(reader.rows(start, start + OLD_BLOCK)).reshape(-1, width)[block_rows]
            total += rows.sum(axis=0, dtype=np.float64)
            for at, new in enumerate(group):
                draw = np.random.default_rng([seed, new, old])
                g = draw.standard_normal((OLD_BLOCK, NEW_BLOCK), np.float32)[block_rows]
                sums[at] += g.T @ rows
                weights[at, :, 0] += g.sum(axis=0, dtype=np.float64)
    return sums, weights, total
