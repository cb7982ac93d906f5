"""Ids of tokenizer and config have rows; other rows are padding: B031, B032, B034."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import positive_int
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.hf_folder import CONFIG
from tiewise.checkpoint.rules.rule import (
    CONFIG_FIX,
    Observation,
    Observations,
    Severity,
    counted,
    dotted,
    names,
    numbers,
    resize_command,
    rule,
    value_text,
)
from tiewise.checkpoint.stored import FLOATING, Stored, widened
from tiewise.checkpoint.table_scans import SAMPLED_ROWS, compares_random_rows, row_lengths
from tiewise.checkpoint.tokenizer_ids import Tokenizer, is_id
from tiewise.checkpoint.untrusted import items_of, short

_GENERATION = "generation_config.json"
_MODALITY = re.compile(r"image|audio|video|vision", re.IGNORECASE)


def _rows_for_ids(facts: Facts) -> int | None:
    """Return the number of ids that have a row.

    Idefics has further rows in an extra table. Return None if the input table's rows are unknown.
    """
    table = facts.lookup_table
    if table is None:
        return None
    extra = [positive_int(level.get("additional_vocab_size")) or 0 for level in facts.levels.values()]
    return table.rows + max(extra, default=0)


@rule("B031", "fatal", "every id of the tokenizer has a row")
def ids_without_row(facts: Facts) -> Observations:
    """An id beyond the table reads outside it. That is a crash on the CPU, a device-side assert on a GPU, and a wrong
    row in kernels that do not check. It comes from adding tokens to the tokenizer without resizing the model, or from
    saving another version's tokenizer with the weights. If only added tokens lack a row, text without them still works,
    and the finding is an error instead of fatal. It is a warning if these tokens mean images or sounds that a text
    model cannot see, as in Gemma 3 1B.
    What to do: `tiewise vocab resize --vocab N` gives both ends the missing rows, drawn like the existing ones.
    Sources: LlamaFactory#10547; unsloth-zoo#923; transformers#32852
    """
    tokenizer, room = facts.tokenizer, _rows_for_ids(facts)
    if tokenizer is None or room is None:
        return
    last = tokenizer.max_id
    if last < room:
        return
    if tokenizer.base_max >= room:
        severity: Severity = "fatal"
        how = f"Its vocabulary reaches id {tokenizer.base_max:,}"
    else:
        beyond = {number: text for number, text in sorted(tokenizer.added.items()) if number >= room}
        severity = _severity_of_added(beyond)
        listed = names([f"{number} {text!r}" for number, text in beyond.items()])
        how = f"These are added tokens: {listed}"
    problem = f"the tokenizer gives ids up to {last:,}, and the input table has {room:,} rows"
    problem += f". {how} ({', '.join(tokenizer.files)})"
    remedy = resize_command(facts, last + 1)
    yield Observation(tokenizer.files[0], problem, remedy, severity=severity)


def _severity_of_added(beyond: Mapping[int, str]) -> Severity:
    """Return the severity of added tokens {id: text} without a row.

    A text model never sees images or sounds.
    """
    for text in beyond.values():
        if not _MODALITY.search(text):
            return "error"
    return "warning"


@rule("B032", "info", "rows without a token are padding", reads="headers, rows of padding and a sample of the others")
def padding(facts: Facts) -> Observations:
    """Tables often have more rows than the tokenizer has ids. The number of rows then divides by 64 or by the number of
    ranks. Some vocabularies also leave out ids, and their rows have no token either. That is correct. It becomes a
    problem when a script calls resize_token_embeddings(len(tokenizer)), which then shrinks the table, or when new
    tokens land on padding rows that were never trained (unsloth-zoo#923, LlamaFactory#10547). Generation masks no
    padding row: one that is far longer in the head than every token's, or whose bias is larger, can be sampled, and
    decodes to nothing (vllm#13175, NeMo-RL#237). That is a warning; for it the rule reads the padding rows and a sample
    of the others.
    What to do: nothing for short rows. tiewise drops padding rows only on request, and initialises rows that become
    tokens. Long rows: suppress their ids, or cut them off and pad with --rows zero.
    Sources: unsloth-zoo#923; LlamaFactory#10547; vllm#13175; NeMo-RL#237
    """
    tokenizer, table = facts.tokenizer, facts.roles.plain_input_table
    if tokenizer is None or table is None:
        return
    last = tokenizer.max_id
    if not 0 <= last < table.rows:
        return
    has_token = _rows_with_token(tokenizer, table.rows)
    rows = _PaddedRows(np.flatnonzero(~has_token), np.flatnonzero(has_token))
    if not len(rows.spare):
        return
    yield _padding_rows(table, rows, last)
    if facts.scan and not tokenizer.lists_positions:
        yield from _strong_padding(facts, rows, last)


class _PaddedRows(NamedTuple):
    """The numbers of a table's rows, in order."""

    spare: NDArray[np.int64]  # rows without a token: padding
    used: NDArray[np.int64]  # rows with a token

    @property
    def last(self) -> int:
        """Return the largest of all numbers."""
        return int(max(self.spare[-1], self.used[-1]))


def _padding_rows(table: Stored, rows: _PaddedRows, last_id: int) -> Observation:
    """Return the finding about rows of a table that have no token."""
    problem = f"{len(rows.spare):,} of {table.rows:,} rows have no token; ids reach {last_id:,}"
    between = int((rows.spare < last_id).sum())
    if between:
        problem += f", and {between:,} of these rows are below it"
    remedy = "none needed; new tokens may use them. resize_token_embeddings(len(tokenizer)) cuts them off"
    return Observation(short(table.name), problem, remedy)


def _rows_with_token(tokenizer: Tokenizer, rows: int) -> NDArray[np.bool_]:
    """Return a mask of the rows that have a token.

    Without a vocabulary, all rows up to the largest id have one.
    """
    has_token = np.zeros(rows, bool)
    if not tokenizer.base:
        has_token[: tokenizer.max_id + 1] = True
    for ids in (tokenizer.base.values(), tokenizer.added):
        for number in ids:
            if number < rows:
                has_token[number] = True
    return has_token


FEWEST_USED = 20  # smallest number of used rows for an estimate of the longest plausible row


def _length_limit(lengths: NDArray[np.float64]) -> float:
    """Return the limit of plausible row lengths, from the lengths of used rows.

    It is longest + 2 · (longest − median).
    """
    return float(3 * lengths.max() - 2 * np.median(lengths))


def _strong_padding(facts: Facts, rows: _PaddedRows, last_id: int) -> Observations:
    """Report padding rows of the head that exceed every used row in length or bias."""
    if facts.roles.headless or not len(rows.used):
        return
    remedy: tuple[str, ...] = (f"list their ids under suppress_tokens in {_GENERATION}",)
    if rows.spare[-1] > last_id:
        remedy = (*remedy, f"or cut them off: {facts.command('vocab resize', f'--vocab {last_id + 1}', '--shrink')}")
    head = _head_with_rows(facts, rows.last)
    if head is not None:
        yield from _long_padding(head, rows, remedy)
    for bias in _biases_with_rows(facts, rows.last):
        yield from _large_bias(bias, rows, remedy)


def _head_with_rows(facts: Facts, last_row: int) -> Stored | None:
    """Return the head's table, or the shared one. None unless it is plain and has `last_row`."""
    roles = facts.roles
    head = roles.output
    if head is None and facts.tied:
        head = roles.input
    if head is None or roles.is_packed(head):
        return None
    if head.rows <= last_row:
        return None
    return head


def _biases_with_rows(facts: Facts, last_row: int) -> Iterator[Stored]:
    """Yield the biases of the head that are plain vectors and have `last_row`."""
    for bias in facts.roles.biases:
        if bias.dtype not in FLOATING:
            continue
        if math.prod(bias.shape) == bias.columns > last_row:
            yield bias


def _long_padding(head: Stored, rows: _PaddedRows, remedy: tuple[str, ...]) -> Observations:
    """Report a padding row of the head that is far longer than every used row."""
    if len(rows.used) < FEWEST_USED or compares_random_rows(head):
        return
    where, lengths = short(head.name), row_lengths(head, rows.spare)
    longest = int(lengths.argmax())
    step = -(-len(rows.used) // SAMPLED_ROWS)
    sample = row_lengths(head, rows.used[::step])
    if lengths[longest] <= _length_limit(sample):
        return  # for most checkpoints, the sample suffices
    if lengths[longest] <= _length_limit(row_lengths(head, rows.used)):
        return
    median = float(np.median(sample))
    longer = int((lengths > median).sum())
    problem = f"the model may sample padding: row {rows.spare[longest]:,} of {where} is longer than any token's row"
    problem += f". Its length is {lengths[longest]:.3g}, and the median of used rows {median:.3g}"
    problem += f". {longer:,} of {len(rows.spare):,} padding rows are longer than that median"
    yield Observation(where, problem, remedy, severity="warning")


def _large_bias(bias: Stored, rows: _PaddedRows, remedy: tuple[str, ...]) -> Observations:
    """Report a bias that is larger at padding rows than at any token."""
    values = widened(bias.read()).reshape(-1)
    largest = values[rows.used].max()
    above = rows.spare[values[rows.spare] > largest]
    if len(above):
        where = short(bias.name)
        problem = f"the model samples padding first: {where} is larger there than at any token"
        problem += f" ({values[above].max():.3g} and {largest:.3g}). {counted(len(above), 'padding row')}: "
        problem += numbers(above[:8], len(above))
        yield Observation(where, problem, remedy, severity="warning")


_ID_KEY = re.compile(r"(^|_)token_(ids?|index|indices)$")
_ID_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "forced_decoder_ids")
OTHER_VOCABULARY = re.compile(r"codebook|codec|t2u")  # in keys whose ids speech models look up in other tables
_STRICT = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "unk", "decoder_start"))
_SPECIAL = (*_STRICT, *(f"{name}_token_id" for name in ("sep", "cls", "mask", "forced_bos", "forced_eos")))


@rule("B034", "warning", "special ids are inside the vocabulary")
def special_ids_outside(facts: Facts) -> Observations:
    """Every level of config.json, and generation_config.json, name tokens by id. The keys are bos, eos, pad,
    decoder_start and every other key that ends in token_id, token_ids or token_index, and the lists suppress_tokens,
    begin_suppress_tokens, forced_decoder_ids, bad_words_ids and force_words_ids. A pad id beyond the tables crashes at
    the first padded batch, and without an end token generation never stops. An id in one of the lists raises an
    IndexError in generate, or does nothing. The placeholder of a picture or sound is an error: most classes look it up
    before they insert the picture's vectors, so the first picture raises an IndexError (transformers#35683). Gemma 3,
    PaliGemma and similar classes replace it first, and are not reported. The rule also skips ids that Idefics and
    Mllama look up in extra rows, and those of a codec. A negative pad id counts rows from the end. Ids go stale when a
    vocabulary is trimmed, or a tokenizer replaced. Ids that are absent are not reported: many families have none.
    What to do: write the ids that the tokenizer has; `tiewise vocab resize` gives a placeholder the row that it lacks.
    Sources: LlamaFactory#6749; skeletoken#108; transformers#35683; transformers#36491; transformers#29836
    """
    room = _largest_vocabulary(facts)
    if room is None or facts.is_without_tokens:
        return
    for level, record in facts.levels.items():
        yield from _outside_of_level(facts, level, record, room)
    if isinstance(facts.generation, Mapping):
        yield from _outside_of_level(facts, _GENERATION, facts.generation, room)


def _largest_vocabulary(facts: Facts) -> int | None:
    """Return the largest number of ids of a table or the config.

    Return None without a plain table."""
    sizes = set[int]()
    for table in facts.roles.tables:
        if not facts.roles.is_packed(table):
            sizes.add(table.rows)
    if not sizes:
        return None
    sizes |= facts.vocabularies
    return max(*sizes, _rows_for_ids(facts) or 0)


def _outside_of_level(facts: Facts, level: str, record: Mapping[str, Any], room: int) -> Observations:
    """Report the ids at one level of the config, or in generation_config.json, that no row has."""
    strict: tuple[str, ...] = ()
    if level in ("", facts.text.level, _GENERATION):
        strict = _STRICT
    for name, value in record.items():
        if name in strict:
            outside = _refused(value, room)
        elif _names_tokens(name):
            outside = _outside(name, value, room)
        else:
            continue
        if outside:
            yield from _outside_findings(facts, level, name, outside, room)


def _outside_findings(facts: Facts, level: str, name: str, outside: list[Any], room: int) -> Observations:
    """Report the ids under one key that have no row.

    A placeholder that the class looks up is an error.
    """
    key = dotted(level, short(name))
    listed = ", ".join(_id_text(number) for number in outside[:4])
    if len(outside) > 4:
        listed += f" and {len(outside) - 4:,} more"
    problem = f"{key} is {listed}, and ids of this vocabulary are whole numbers from 0 to {room - 1:,}"
    if level == _GENERATION:
        yield key, problem, f"edit {_GENERATION} by hand: {key}"
    elif name in _SPECIAL or not _ID_KEY.search(name):
        yield key, problem, f"edit {CONFIG} by hand: {key}"
    elif not _replaces_placeholders(facts, level):
        problem += "; the first use of this token reads outside the table"
        remedy = (resize_command(facts, max(outside) + 1), f"or {CONFIG_FIX}: {key}")
        yield Observation(key, problem, remedy, severity="error")


def _id_text(number: Any) -> str:
    """Return an id, or a value in its place, as text."""
    if is_id(number):
        return f"{number:,}"
    return value_text(number)


def _replaces_placeholders(facts: Facts, level: str) -> bool:
    """Return whether the class replaces a placeholder's id before it looks anything up."""
    of_model, of_level = family(facts.config.get("model_type")), family(facts.levels[level].get("model_type"))
    return of_model.replaces_placeholders or of_level.replaces_placeholders


def _names_tokens(name: object) -> bool:
    """Return whether the value of a config's key is ids of tokens of the vocabulary."""
    if not isinstance(name, str) or name.startswith("_"):  # private attributes of a class
        return False
    if OTHER_VOCABULARY.search(name):
        return False
    return name in _ID_LISTS or _ID_KEY.search(name) is not None


def _refused(value: Any, room: int) -> list[Any]:
    """Return entries of a value that are neither absent nor below `room`."""
    return [entry for entry in _as_list(value) if not _is_accepted(entry, room)]


def _is_accepted(entry: Any, room: int) -> bool:
    """Return whether a value is absent, or the id of one of `room` rows."""
    if entry is None:
        return True
    return is_id(entry) and entry < room


def _as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as the only entry of one."""
    if isinstance(value, list):
        return value
    return [value]


def _outside(name: str, value: Any, room: int) -> list[int]:
    """Return the ids of a config's value that are `room` or larger."""
    if name == "forced_decoder_ids":
        value = _forced_ids(value)
    return [number for number in _ids_below(value) if number >= room]


def _forced_ids(value: Any) -> list[Any]:
    """Return the ids in a list of pairs. A pair is a position and its id."""
    ids = list[Any]()
    for pair in items_of(list, value):
        if len(pair) == 2:
            ids.append(pair[1])
    return ids


def _ids_below(value: Any) -> Iterator[int]:
    """Yield the ids in nested lists, in order."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += reversed(item)
        elif is_id(item):
            yield item
