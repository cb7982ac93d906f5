"""`resize`: another number of tokens at both ends, in every head bias and every other table with a row for each token,
and in the config at every level.

Rows that stay keep their bytes. New ones are drawn from the normal distribution that has the mean and covariance of
the rows in use:

    x_new = m + 1/√(n−1) · Σᵢ gᵢ (xᵢ − m)        gᵢ ~ N(0, 1), independent; i over the n rows in use, m their mean

That is N(m, Σ̂) exactly: a sum of independent normal vectors, of mean m and covariance Σᵢ (xᵢ − m)(xᵢ − m)ᵀ / (n−1);
Σ̂ [D, D] is never formed. xᵢ is all that the checkpoint holds for token i, its input row, output row and bias one behind
the other, so that the rows of a new token go together as those of existing ones do. Each part can be drawn by itself,
since gᵢ depends on nothing but the seed, the existing row and the new row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import Tokenizer, open_folder, read_tokenizer
from tiewise.checkpoint.indexed_tensors import DRAFT_MAP, MODALITY, NGRAM
from tiewise.checkpoint.rewrite.change import Change, NothingToDo, Pieces, stored_bytes
from tiewise.checkpoint.rewrite.config_ids import ids_named
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.token_rows import KEPT, parts_of_tokens, sizes_of, still_to_do, with_rows
from tiewise.checkpoint.stored import NUMPY, Reader, Stored, widened
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

OLD_BLOCK, NEW_BLOCK = 512, 256  # g is drawn in blocks of this shape; a part of the format, since results depend on it
DRAWN, ZERO = "drawn", "zero"  # what new rows are
SUM_BYTES = 64 * 2**20  # of sums held during one reading of the table
UNSIZED = {  # roles whose rows no resize can serve: why, and what to do
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
    details="",
    live="model.resize_token_embeddings",
    keeps_logits="first",
    example="tied --vocab=50",
)
def resize(
    facts: Facts,
    *,
    vocab: Annotated[int | None, Option("Rows that both ends shall have.")] = None,
    multiple_of: Annotated[int | None, Option("Round the rows up to a multiple of this.")] = None,
    tokenizer: Annotated[
        str | os.PathLike[str] | None, Option("Give every token of this tokenizer a row.", metavar="DIR")
    ] = None,
    shrink: Annotated[bool, Option("Rows may be dropped from the end.")] = False,
    rows: Annotated[str, Option("New rows; zeros are padding.", metavar="drawn|zero")] = DRAWN,
    seed: Annotated[int, Option("Of the new rows.")] = 0,
    force: bool = False,
) -> Change:
    """Give both ends, and the head's bias, another number of rows; new ones are drawn like the existing ones.

    With `force` other tables with as many rows are left as they are.

    Args:
        vocab: rows that both ends shall have.
        multiple_of: rows are rounded up to a multiple of this.
        tokenizer: folder of a tokenizer; there shall be a row for each of its tokens, and no fewer than there are.
        shrink: rows may be dropped from the end, down to what tokenizers and config need.
        rows: "drawn", new rows go together as those in use do; "zero", they and their biases are zeros, as padding is.
        seed: of the new rows, 0 or more.
    """
    if vocab is not None and tokenizer is not None:
        raise CheckpointError("vocab and tokenizer both say how many rows there shall be", "give one of them")
    if vocab is None and tokenizer is None and multiple_of is None:
        raise CheckpointError("nothing says how many rows there shall be", "give vocab, multiple_of or tokenizer")
    if rows not in (DRAWN, ZERO):
        raise CheckpointError(f"rows are {rows!r}", f"choose {DRAWN} or {ZERO}")
    for name, value, least in (("vocab", vocab, 1), ("multiple_of", multiple_of, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise CheckpointError(f"{name} is {value}", f"it must be {least} or more")
    given = read_tokenizer(open_folder(tokenizer)) if tokenizer is not None else None
    for fault in given.faults if given is not None else ():
        raise CheckpointError(fault.what, fault.fix)
    if tokenizer is not None and (given is None or given.max_id < 0):
        fix = "give the folder that holds tokenizer.json, vocab.json, vocab.txt or tokenizer.model"
        raise CheckpointError(f"{os.fspath(tokenizer)}: no tokenizer was found in it", fix)

    for other in facts.roles.others:
        if other.role in UNSIZED and not other.module.endswith("encoder_hash_tok_embedding"):  # BLT's hash is of bytes
            why, fix = UNSIZED[other.role]
            raise CheckpointError(f"{facts.path}: {short(other.tensor.name)}: {why}", fix)
    # a table beside the ends may be too short: a resize that passed it by left it so, and this one does not
    tables, biases, beside = parts_of_tokens(facts, "resize", may_lack_rows=True)
    before = tables[0].rows
    parts, lookups = (*tables, *biases, *beside), (*tables, *beside)
    left_to_do = still_to_do(facts, {part.name for part in parts}, before, force)
    count = _new_count(facts, before, vocab, multiple_of, given, shrink, any(part.rows < before for part in beside))

    # a row is in use where the tokenizer can produce its id, and at every table it is finite and not zero
    own = next((words for words in (facts.tokenizer, given) if words is not None and words.base_max >= 0), None)
    used = np.ones(before, np.bool_) if own is None else np.isin(np.arange(before), list(own.used))
    lengths = np.zeros((len(lookups), before))
    for table, length in zip(lookups, lengths, strict=True):
        with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):
            for start, stop in reader.spans():
                length[start:stop] = np.linalg.norm(reader.rows(start, stop).astype(np.float64), axis=1)
    used &= (np.isfinite(lengths) & (lengths > 0)).all(axis=0)
    if count > min(part.rows for part in parts) and rows == DRAWN and not used.any():
        fix = "train or repair the model first: new rows are drawn from those in use"
        raise CheckpointError(f"{facts.path}: no row of {short(tables[0].name)} is in use", fix)

    notes = [f"rows {count:,} to {before - 1:,} are dropped"] if count < before else []
    how = f"drawn like the {int(used.sum()):,} rows in use, with seed {seed}"
    if rows == ZERO:
        how = "zeros, whose logit is 0 whatever was read: mask them where tokens are chosen, as padding"
    if more := max(0, count - before):
        notes.append(f"rows {before:,} to {count - 1:,} are new, {how}")
    repeats_first = family(facts.text.model_type).repeats_first_row  # for ids beyond its per-layer table
    for part in (part for part in beside if part.rows < min(before, count)):
        how = "repeat its first, which their ids read so far" if repeats_first else f"are {how}"
        notes.append(f"{short(part.name)} lacks rows {part.rows:,} to {min(before, count) - 1:,}: they {how}")
    for table, length in zip(lookups if more and rows == DRAWN else (), lengths, strict=False):
        new = np.linalg.norm(next(new_rows(table, used, more, seed)), axis=1)
        low, high = np.quantile(length[used], (0.05, 0.95))
        of = f"the first {len(new):,} new rows" if len(new) < more else "new rows"
        others = f"nine in ten of those in use {low:.4g} to {high:.4g}"
        notes.append(f"{short(table.name)}: {of} are {new.min():.4g} to {new.max():.4g} long, {others}")

    def pieces(part: Stored) -> Pieces:
        first = max(0, min(before, count) - part.rows) if repeats_first else 0
        return _pieces(part, used if rows == DRAWN else None, count, seed, first)

    put = with_rows(facts, parts, count, pieces)
    return Change(KEPT, put=put, config=sizes_of(facts, before, count), notes=(*notes, *left_to_do))


def _new_count(
    facts: Facts, rows: int, vocab: int | None, multiple: int | None, words: Tokenizer | None, shrink: bool, again: bool
) -> int:
    """How many rows there shall be; `again`: a table lacks some, and may be given those that the others have."""
    given = words.max_id + 1 if words is not None else 0
    wanted = vocab or (given if shrink and given else max(rows, given))
    if multiple is not None:
        wanted = -(-wanted // multiple) * multiple
    if wanted == rows and not again:
        raise NothingToDo(f"{facts.path}: it has {rows:,} rows already", "there is nothing to do")
    if wanted >= rows:
        return wanted
    if not shrink:
        fix = "rows beyond the tokenizer are padding that other tools may count on; --shrink drops them all the same"
        raise CheckpointError(f"{facts.path}: {wanted:,} tokens are fewer than its {rows:,} rows", fix)
    needed = max(given, facts.tokenizer.max_id + 1 if facts.tokenizer is not None else 0)
    for record in (facts.config, facts.generation):  # which name tokens, at any level
        ids = ids_named(record) if isinstance(record, Mapping) else ()
        needed = max([needed, *(number + 1 for number in ids if number < rows)])
    if wanted < needed:
        fix = f"choose {needed:,} or more"
        raise CheckpointError(f"{facts.path}: its tokenizer and config name token {needed - 1:,}", fix)
    return wanted


def _pieces(part: Stored, used: NDArray[np.bool_] | None, count: int, seed: int, first: int) -> Pieces:
    """Yield the bytes of a part with `count` rows: those that stay, `first` times its first, new ones.

    New ones are zeros where none is `used`.
    """
    stay, nbytes = min(part.rows, count), part.nbytes // max(1, part.rows)
    yield from stored_bytes(replace(part, shape=(stay, *part.shape[1:]), end=part.start + stay * nbytes))
    for _ in range(first):
        yield from stored_bytes(replace(part, shape=(1, *part.shape[1:]), end=part.start + nbytes))
    stay += first
    if used is None:
        yield from repeat(bytes(nbytes), max(0, count - stay))
        return
    for block in new_rows(part, used, count - stay, seed):
        yield block.astype(NUMPY[part.dtype]).tobytes()


def new_rows(part: Stored, used: NDArray[np.bool_], count: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """Yield `count` new rows of a table [V, E] or a bias [V], in blocks [≤ 256, E], with few readings.

    A new row depends on the seed and its own number, not on how many are drawn with it.
    """
    blocks, n = range(-(-count // NEW_BLOCK)), int(used.sum())
    width = part.shape[1] if len(part.shape) == 2 else 1
    at_once = max(1, SUM_BYTES // (8 * NEW_BLOCK * width))
    for first in blocks[::at_once]:  # each with one reading of the part
        group = blocks[first : first + at_once]
        sums = np.zeros((len(group), NEW_BLOCK, width))  # Σ gᵢ xᵢ
        weights = np.zeros((len(group), NEW_BLOCK, 1))  # Σ gᵢ
        total = np.zeros(width)
        with Reader(part) as reader:
            for old, start in enumerate(range(0, part.rows, OLD_BLOCK)):
                inside = np.flatnonzero(used[start : start + OLD_BLOCK])
                if not len(inside):
                    continue
                rows = widened(reader.rows(start, start + OLD_BLOCK)).reshape(-1, width)[inside]
                total += rows.sum(axis=0, dtype=np.float64)
                for at, new in enumerate(group):
                    draw = np.random.default_rng([seed, new, old])
                    g = draw.standard_normal((OLD_BLOCK, NEW_BLOCK), np.float32)[inside]
                    sums[at] += g.T @ rows
                    weights[at, :, 0] += g.sum(axis=0, dtype=np.float64)
        mean = total / n
        sums -= weights * mean  # in place: the sums are most of the memory
        sums /= max(1, n - 1) ** 0.5
        sums += mean
        for new, made in zip(group, sums, strict=True):
            yield made[: count - new * NEW_BLOCK].reshape(-1, *part.shape[1:])
