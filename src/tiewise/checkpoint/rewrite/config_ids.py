"""Token ids in configs: finding them, and replacing them by new ids.

The padding row of a stored boundary (`tied+pad=0`) is such an id.
Ids of another vocabulary stay unchanged: ids of a codec (`codebook_pad_token_id`), and ids in the level of a part
without text (`vision_config`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from tiewise.checkpoint.claims import SPEC, is_foreign_level
from tiewise.checkpoint.rules.token_ids import OTHER_VOCABULARY
from tiewise.checkpoint.tokenizer_ids import is_id
from tiewise.core.errors import SpecError
from tiewise.core.spec import BoundarySpec

_KEYS = re.compile(
    r"token_(ids?|index|indices)$|suppress_tokens$|(bad|force)_words_ids$|(^|\.)(lang|task)_to_id\.|forced_decoder_ids$"
    r"|sequence_bias$"
)
# lists of [position, id] and of [ids, number] → index of the ids
_IN_PAIRS = {"forced_decoder_ids": 1, "sequence_bias": 0}
_GONE: Final = object()  # marks an entry whose token was dropped
PADDING = "pad_token_id"
MAP = "vocabulary_map"  # {text of a token: its id}, in Chameleon's and Emu3's configs
DECODER = "added_tokens_decoder"  # {id as text: the token}, in tokenizer_config.json
_ID_AS_TEXT = re.compile(r"[0-9]{1,18}")  # longer numbers are no ids

NewId = Callable[[int], int | None]  # function from old id to new id; None for a dropped token


def id_values(record: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every entry of a config that consists of token ids."""
    for key, value in record.items():
        place = str(key)
        if path:
            place = f"{path}.{key}"
        if not isinstance(value, Mapping):
            if key == SPEC or (_KEYS.search(place) and not OTHER_VOCABULARY.search(str(key))):
                yield place, value
        elif key == MAP:
            yield place, value
        elif not is_foreign_level(str(key)):
            yield from id_values(value, place)


def padding_ids(record: Mapping[str, Any]) -> dict[str, int]:
    """Return {dotted path: id} of every id of padding in a config."""
    ids = dict[str, int]()
    for path, value in id_values(record):
        if path.rpartition(".")[2] == PADDING and is_id(value):
            ids[path] = value
    return ids


def replace_ids(path: str, value: Any, new_id: NewId) -> Any:
    """Return a value of `id_values` with new ids.

    An entry is removed if it has an id for which `new_id` returns None.
    """
    if path.rpartition(".")[2] == SPEC:
        return _with_new_padding(value, new_id)
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


def _with_new_padding(spec: Any, new_id: NewId) -> Any:
    """Return a boundary's spec with the new id of its padding row.

    `pad` is left out if the row was dropped. Anything else stays unchanged.
    """
    try:
        boundary = BoundarySpec.parse(spec)
    except SpecError:
        return spec
    if boundary.pad is None:
        return spec
    return str(replace(boundary, pad=new_id(boundary.pad)))


def _replaced_entries(entries: list[Any], place: int | None, new_id: NewId) -> list[Any]:
    """Return a list with new ids, and with `_GONE` for entries to remove.

    Args:
        place: index of the ids in each entry, if the entries are pairs.
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
    """Return a pair with new ids at index `place`, `_GONE` if one of them was dropped."""
    replaced = _replaced(pair[place], new_id)
    if replaced is _GONE:
        return _GONE
    result = list(pair)
    result[place] = replaced
    return result


def _replaced(value: Any, new_id: NewId) -> Any:
    """Return the new id of an id, or the new ids of a list (a word).

    Return `_GONE` if one of the tokens was dropped. A value that is no id stays unchanged.
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
        """Record an id, and return it unchanged."""
        ids.append(number)
        return number

    for path, value in id_values(record):
        replace_ids(path, value, note)
    return ids


def renumber_config(record: Mapping[str, Any], new_ids: Mapping[int, int]) -> dict[str, Any]:
    """Return {dotted path: new value} of every entry of a config that names tokens.

    A negative number names no token, and stays.

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
    """Return the new id as a key if `key` is an id, else `key`."""
    if _ID_AS_TEXT.fullmatch(key) is None:
        return key
    return str(new_ids[int(key)])
