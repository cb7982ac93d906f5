"""Ids of tokens in configs: their keys, and the same values with other ids.

Ids of another vocabulary are left alone: those of a codec (`codebook_pad_token_id`), and those in the level of a part
without text (`vision_config`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tiewise.checkpoint.claims import is_foreign_level
from tiewise.checkpoint.rules.token_ids import OTHER_VOCABULARY
from tiewise.checkpoint.tokenizer_ids import is_id

_KEYS = re.compile(
    r"token_(ids?|index|indices)$|suppress_tokens$|(bad|force)_words_ids$|(^|\.)(lang|task)_to_id\.|forced_decoder_ids$"
    r"|sequence_bias$"
)
_IN_PAIRS = {"forced_decoder_ids": 1, "sequence_bias": 0}  # lists of [place, id] and of [ids, number]: which is of ids
_GONE: Final = object()  # replaces an entry whose token is gone
MAP = "vocabulary_map"  # {text of a token: its id}, in Chameleon's and Emu3's configs
DECODER = "added_tokens_decoder"  # {id as text: the token}, in tokenizer_config.json
_ID_AS_TEXT = re.compile(r"[0-9]{1,18}")  # longer ones are no ids

NewId = Callable[[int], int | None]  # the new id of a token, None where the token is gone


def id_values(record: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything in a config that is ids of the text's tokens."""
    for key, value in record.items():
        place = str(key)
        if path:
            place = f"{path}.{key}"
        if not isinstance(value, Mapping):
            if _KEYS.search(place) and not OTHER_VOCABULARY.search(str(key)):
                yield place, value
        elif key == MAP:
            yield place, value
        elif not is_foreign_level(str(key)):
            yield from id_values(value, place)


def replace_ids(path: str, value: Any, new_id: NewId) -> Any:
    """Return a value of `values_with_ids` with other ids.

    An entry with an id for which `new_id` returns None goes.
    """
    if isinstance(value, Mapping):
        entries: dict[Any, Any] = {}
        for text, old in value.items():
            number = _replaced(old, new_id)
            if number is not _GONE:
                entries[text] = number
        return entries
    if isinstance(value, list):
        place = _IN_PAIRS.get(path.rpartition(".")[2])
        replaced = _replaced_entries(value, place, new_id)
        return [entry for entry in replaced if entry is not _GONE]
    number = _replaced(value, new_id)
    if number is _GONE:
        return None
    return number


def _replaced_entries(entries: list[Any], place: int | None, new_id: NewId) -> list[Any]:
    """Return a list with other ids, `_GONE` for entries that go.

    `place` is where each pair of the list has ids.
    """
    if place is None:
        return [_replaced(entry, new_id) for entry in entries]
    if all(_is_pair(entry) for entry in entries):
        return [_replaced_in_pair(pair, place, new_id) for pair in entries]
    return entries


def _is_pair(entry: Any) -> bool:
    """Return True for a list of two items."""
    return isinstance(entry, list) and len(entry) == 2


def _replaced_in_pair(pair: list[Any], place: int, new_id: NewId) -> Any:
    """Return a pair with other ids at one of its places.

    `_GONE` if one of them is gone.
    """
    replaced = _replaced(pair[place], new_id)
    if replaced is _GONE:
        return _GONE
    result = list(pair)
    result[place] = replaced
    return result


def _replaced(value: Any, new_id: NewId) -> Any:
    """Return an id, or a word as a list of ids, with other ids.

    `_GONE` if one of them is gone. Other values stay.
    """
    if isinstance(value, list):
        word = [_replaced(part, new_id) for part in value]
        if _GONE in word:
            return _GONE
        return word
    if not is_id(value):
        return value
    number = new_id(value)
    if number is None:
        return _GONE
    return number


def named_ids(record: Mapping[str, Any]) -> list[int]:
    """Return every id that a config names."""
    ids: list[int] = []

    def note(number: int) -> int:
        ids.append(number)
        return number

    for path, value in id_values(record):
        replace_ids(path, value, note)
    return ids


def renumber_config(record: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Return {dotted path: new value} of everything in a config that names tokens.

    Negative numbers name none.

    Raises:
        KeyError: the config names a token that `new_ids` lacks.
    """
    changes: dict[str, Any] = {}
    for path, value in id_values(record):
        after = replace_ids(path, value, new_ids.__getitem__)
        if after != value:
            changes[path] = after
    decoder = record.get(DECODER)
    if isinstance(decoder, dict):
        changes[DECODER] = {_renumbered_key(key, new_ids): entry for key, entry in decoder.items()}
    return changes


def _renumbered_key(key: str, new_ids: Mapping[int, int]) -> str:
    """Return a key that is an id with the new id; other keys stay."""
    if _ID_AS_TEXT.fullmatch(key) is None:
        return key
    return str(new_ids[int(key)])
