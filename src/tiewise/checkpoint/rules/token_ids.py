"""Ids of tokenizer and config have rows; other rows are padding: B031, B032, B034."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import count
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import CONFIG
from tiewise.checkpoint.rules.rule import (
    CONFIG_FIX,
    Said,
    Severity,
    Told,
    dotted,
    names,
    numbers,
    rule,
    value_text,
)
from tiewise.checkpoint.stored import FLOATING, Stored, widened
from tiewise.checkpoint.table_scans import SAMPLED_ROWS, row_lengths
from tiewise.checkpoint.tokenizer_ids import PIECES, Tokenizer, is_id
from tiewise.checkpoint.untrusted import items_of, short

_GENERATION = "generation_config.json"
_MODALITY = re.compile(r"image|audio|video|vision", re.IGNORECASE)


def _room(facts: Facts) -> int | None:
    """Return the number of ids that have a row. Idefics has some in an extra table.

    None where the rows of the input table are not counted.
    """
    table = facts.roles.counted
    if table is None:
        return None
    extra = (count(level.get("additional_vocab_size")) or 0 for level in facts.levels.values())
    return table.rows + max(extra, default=0)


@rule("B031", "fatal", "every id of the tokenizer has a row")
def ids_without_row(facts: Facts) -> Told:
    """An id beyond the table reads outside it: a crash on the CPU, a device-side assert on a GPU, a wrong row in
    kernels that do not check. It comes from adding tokens to the tokenizer without resizing the model, or from saving
    the tokenizer of another version beside the weights. Where only added tokens lie beyond, text without them still
    works, and this is an error rather than fatal; where they stand for images or sounds that a text model cannot see,
    as in Gemma 3 1B, a warning.
    What to do: `tiewise resize --vocab N` gives both ends the missing rows, drawn like the existing ones.
    Sources: LlamaFactory#10547; unsloth-zoo#923; transformers#32852
    """
    tokenizer, room = facts.tokenizer, _room(facts)
    if tokenizer is None or room is None or tokenizer.max_id < room:
        return
    over = sorted(number for number in tokenizer.added if number >= room)
    severity: Severity = "error"
    if tokenizer.base_max >= room:
        how, severity = f"its vocabulary reaches id {tokenizer.base_max:,}", "fatal"
    else:
        listed = names([f"{number} {tokenizer.added[number]!r}" for number in over])
        how = f"{len(over):,} added tokens: {listed}"
        if all(_MODALITY.search(tokenizer.added[number]) for number in over):
            severity = "warning"  # a text model never sees them
    what = f"the tokenizer ({', '.join(tokenizer.files)}) gives ids up to {tokenizer.max_id:,}"
    what += f" and the input table has {room:,} rows; {how}"
    fix = facts.command("resize", f"--vocab {tokenizer.max_id + 1}")
    yield Said(tokenizer.files[0], what, fix, severity=severity)


@rule("B032", "info", "rows without a token are padding", reads="headers, rows of padding and a sample of the others")
def padding(facts: Facts) -> Told:
    """Tables are often longer than the tokenizer, so that the row count divides by 64 or by the number of ranks. Some
    vocabularies leave out ids too, and their rows have no token either. That is healthy. It bites when a script calls
    resize_token_embeddings(len(tokenizer)), which then shrinks the table, or when new tokens land on padding rows that
    were never trained (unsloth-zoo#923, LlamaFactory#10547). Generation masks no padding row: one that
    is far longer in the head than every token's, or whose bias is larger, can be sampled, and decodes to nothing
    (vllm#13175, NeMo-RL#237). That is a warning; the padding rows and a sample of the others are read for it.
    What to do: nothing for short rows. tiewise never shrinks padded rows unless told to, and initialises rows that
    become tokens. Long rows: suppress their ids, or cut them off and pad with --rows zero.
    Sources: unsloth-zoo#923; LlamaFactory#10547; vllm#13175; NeMo-RL#237
    """
    tokenizer, table = facts.tokenizer, facts.roles.counted
    if tokenizer is None or table is None or not 0 <= tokenizer.max_id < table.rows:
        return
    has_token = _rows_with_token(tokenizer, table.rows)
    spare, used = np.flatnonzero(~has_token), np.flatnonzero(has_token)
    if not len(spare):
        return
    what = f"{table.rows:,} rows, ids up to {tokenizer.max_id:,}: {len(spare):,} rows of padding"
    between = int((spare < tokenizer.max_id).sum())
    if between:
        what += f", {between:,} of them between the tokens"
    fix = "none; new tokens may use them, and resize_token_embeddings(len(tokenizer)) would cut them off"
    yield short(table.name), what, fix
    are_positions = bool(set(tokenizer.files) & set(PIECES[1:]))  # which may not be the ids
    if facts.scan and not are_positions:
        yield from _strong_padding(facts, spare, used, tokenizer.max_id)


def _rows_with_token(tokenizer: Tokenizer, rows: int) -> NDArray[np.bool_]:
    """Return for each row of a table whether a token has it. Without a vocabulary, all up to the last do."""
    has_token = np.zeros(rows, bool)
    if not tokenizer.base:
        has_token[: tokenizer.max_id + 1] = True
    for ids in (tokenizer.base.values(), tokenizer.added):
        for number in ids:
            if number < rows:
                has_token[number] = True
    return has_token


FEWEST_USED = 20  # rows whose lengths say how long a row can be


def _fence(lengths: NDArray[np.float64]) -> float:
    """Return a length above which a row is none of these. It is two spans from median to longest beyond the longest."""
    return float(3 * lengths.max() - 2 * np.median(lengths))


def _strong_padding(facts: Facts, spare: NDArray[np.int64], used: NDArray[np.int64], last_id: int) -> Told:
    """Report padding rows of the head that outweigh every used row, by length or by bias."""
    roles = facts.roles
    if roles.headless or not len(used):
        return
    fix = f"list their ids under suppress_tokens in {_GENERATION}"
    if spare[-1] > last_id:
        fix += f", or cut them off: {facts.command('resize', f'--vocab {last_id + 1}')}"
    last_row = max(spare[-1], used[-1])
    head = roles.output
    if head is None and facts.tied:
        head = roles.input
    if head is not None and not roles.packed(head) and head.rows > last_row:
        yield from _long_padding(head, spare, used, fix)
    for bias in roles.biases:
        if bias.dtype in FLOATING and math.prod(bias.shape) == bias.shape[-1] > last_row:
            yield from _large_bias(bias, spare, used, fix)


def _long_padding(head: Stored, spare: NDArray[np.int64], used: NDArray[np.int64], fix: str) -> Told:
    """Report a padding row of the head that is far longer than every used row."""
    if len(used) < FEWEST_USED:
        return
    lengths = row_lengths(head, spare)
    step = -(-len(used) // SAMPLED_ROWS)
    sample = row_lengths(head, used[::step])
    longest = int(lengths.argmax())
    # the sample spares most checkpoints the reading of all used rows
    if lengths[longest] <= _fence(sample) or lengths[longest] <= _fence(row_lengths(head, used)):
        return
    median = float(np.median(sample))
    longer = f"{int((lengths > median).sum()):,} of {len(spare):,} padding rows of {short(head.name)}"
    what = f"{longer} are longer than the median used row ({median:.3g}), and row {spare[longest]:,}"
    what += f" ({lengths[longest]:.3g}) is far longer than any: nothing keeps it from being sampled"
    yield Said(short(head.name), what, fix, severity="warning")


def _large_bias(bias: Stored, spare: NDArray[np.int64], used: NDArray[np.int64], fix: str) -> Told:
    """Report a bias that is larger at padding rows than at any token."""
    values = widened(bias.read()).reshape(-1)
    largest = values[used].max()
    above = spare[values[spare] > largest]
    if len(above):
        what = f"{short(bias.name)} is larger at {len(above):,} padding rows ({numbers(above[:8], len(above))})"
        what += f" than at any token: {values[above].max():.3g} and {largest:.3g}; they are sampled first"
        yield Said(short(bias.name), what, fix, severity="warning")


_ID_KEY = re.compile(r"(^|_)token_(ids?|index|indices)$")
_ID_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "forced_decoder_ids")
OTHER_VOCABULARY = re.compile(r"codebook|codec|t2u")  # in keys of ids that speech models look up in other tables
_STRICT = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "unk", "decoder_start"))
_SPECIAL = (*_STRICT, *(f"{name}_token_id" for name in ("sep", "cls", "mask", "forced_bos", "forced_eos")))


@rule("B034", "warning", "special ids lie inside the vocabulary")
def special_ids_outside(facts: Facts) -> Told:
    """Every level of config.json, and generation_config.json, name tokens by id: bos, eos, pad, decoder_start and every
    other key that ends in token_id, token_ids or token_index, and the lists suppress_tokens, begin_suppress_tokens,
    forced_decoder_ids, bad_words_ids and force_words_ids. A pad id beyond the tables crashes at the first padded batch,
    and without an end token generation never stops. An id in one of the lists raises an IndexError in generate, or does
    nothing. The placeholder of a picture or sound is an error: most classes look it up before they put the picture's
    vectors there, so that the first picture raises an IndexError (transformers#35683). Gemma 3, PaliGemma and their kin
    replace it first, and are not reported. Neither are ids that Idefics and Mllama look up in rows of their own, nor
    those of a codec. A negative pad id counts rows from the end. Ids go stale when a vocabulary is trimmed, or a
    tokenizer replaced. Ids that are absent are not reported: many families have none.
    What to do: write the ids that the tokenizer has; `tiewise resize` gives a placeholder the row that it lacks.
    Sources: LlamaFactory#6749; skeletoken#108; transformers#35683; transformers#36491; transformers#29836
    """
    rows = [table.rows for table in facts.roles.tables if not facts.roles.packed(table)]
    if not rows:
        return
    room = max(*rows, *facts.vocabularies, _room(facts) or 0)
    places = dict(facts.levels)
    if isinstance(facts.generation, Mapping):
        places[_GENERATION] = facts.generation
    for level, record in places.items():
        strict = _STRICT if level in ("", facts.text.level, _GENERATION) else ()
        for name, value in record.items():
            if not _names_tokens(name):
                continue
            outside = _outside(name, value, room, name in strict)
            if outside:
                yield from _outside_findings(facts, level, name, outside, room)


def _outside_findings(facts: Facts, level: str, name: str, outside: list[Any], room: int) -> Told:
    """Report the ids under one key that no row has. A placeholder that the class looks up is an error."""
    key = dotted(level, short(name))
    listed = ", ".join(f"{number:,}" if is_id(number) else value_text(number) for number in outside[:4])
    if len(outside) > 4:
        listed += f" and {len(outside) - 4:,} more"
    what = f"{key} is {listed}; ids are whole numbers from 0 to {room - 1:,}, the largest vocabulary's last"
    if level == _GENERATION:
        yield key, what, f"edit {_GENERATION} by hand: {key}"
        return
    is_placeholder = _ID_KEY.search(name) and name not in _SPECIAL
    if not is_placeholder:
        yield key, what, f"edit {CONFIG} by hand: {key}"
        return
    for record in (facts.config, facts.levels[level]):
        if family(record.get("model_type")).replaces_placeholders:
            return  # the class puts another id there before it looks anything up
    fix = f"{facts.command('resize', f'--vocab {max(outside) + 1}')}, or {CONFIG_FIX}: {key}"
    yield Said(key, f"{what}: the first use of this token reads outside the table", fix, severity="error")


def _names_tokens(name: object) -> bool:
    """Return whether the value of a config's key is ids of tokens of the vocabulary."""
    if not isinstance(name, str) or name.startswith("_"):  # a class keeps what begins so to itself
        return False
    if OTHER_VOCABULARY.search(name):
        return False
    return name in _ID_LISTS or _ID_KEY.search(name) is not None


def _outside(name: str, value: Any, room: int, strict: bool) -> list[Any]:
    """Return those ids of a config's value that none of `room` rows has. If `strict`, also what is no id."""
    if strict:
        listed = value if isinstance(value, list) else [value]
        return [item for item in listed if _is_refused(item, room)]
    if name == "forced_decoder_ids":  # pairs of a position and the id that is forced there
        value = [pair[1] for pair in items_of(list, value) if len(pair) == 2]
    return [item for item in _items_below(value) if is_id(item) and item >= room]


def _items_below(value: Any) -> Iterator[Any]:
    """Yield what nested lists hold, in order."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += reversed(item)
        else:
            yield item


def _is_refused(item: Any, room: int) -> bool:
    """Return whether a value is neither absent nor the id of one of `room` rows."""
    return item is not None and (not is_id(item) or item >= room)
