"""Ids of tokens in configs: under which keys they are, and the same values with other ids.

Ids of another vocabulary are left alone: those of a codec (`codebook_pad_token_id`), and those in the level of a part
without text (`vision_config`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tiewise.checkpoint.claims import is_foreign_level
from tiewise.checkpoint.hf_folder import is_id
from tiewise.checkpoint.rules.integrity import OTHER_VOCABULARY

_KEYS = re.compile(
    r"token_(ids?|index|indices)$|suppress_tokens$|(bad|force)_words_ids$|(^|\.)(lang|task)_to_id\.|forced_decoder_ids$"
    r"|sequence_bias$"
)
_IN_PAIRS = {"forced_decoder_ids": 1, "sequence_bias": 0}  # lists of [place, id] and of [ids, number]: which is of ids
_GONE: Final = object()  # stands for an entry whose token is gone
MAP = "vocabulary_map"  # {text of a token: its id}, in Chameleon's and Emu3's configs


def values_with_ids(record: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything in a config that is ids of tokens of the text's vocabulary."""
    for key, value in record.items():
        place = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and key == MAP:
            yield place, value
        elif isinstance(value, Mapping):
            if not is_foreign_level(str(key)):
                yield from values_with_ids(value, place)
        elif _KEYS.search(place) and not OTHER_VOCABULARY.search(str(key)):
            yield place, value


def with_ids(path: str, value: Any, each: Callable[[int], int | None]) -> Any:
    """Return a value of `values_with_ids` with other ids. An entry of which `each` returns None for an id goes."""
    if isinstance(value, Mapping):
        made = {text: _replaced(number, each) for text, number in value.items()}
        return {text: number for text, number in made.items() if number is not _GONE}
    if not isinstance(value, list):
        return None if (made := _replaced(value, each)) is _GONE else made
    place = _IN_PAIRS.get(path.rpartition(".")[2])
    if place is not None and not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    kept = [_replaced(entry, each) if place is None else _pair(entry, place, each) for entry in value]
    return [entry for entry in kept if entry is not _GONE]


def _pair(pair: list[Any], place: int, each: Callable[[int], int | None]) -> Any:
    """A pair of which one place holds ids."""
    made = [_replaced(part, each) if at == place else part for at, part in enumerate(pair)]
    return _GONE if made[place] is _GONE else made


def _replaced(value: Any, each: Callable[[int], int | None]) -> Any:
    """An id, or a word as a list of ids, with other ids; `_GONE` if one of them is gone. Other values stay."""
    if isinstance(value, list):
        made = [_replaced(part, each) for part in value]
        return _GONE if any(part is _GONE for part in made) else made
    if not is_id(value):
        return value
    number = each(value)
    return _GONE if number is None else number


def ids_named(record: Mapping[str, Any]) -> list[int]:
    """Return every id that a config names."""
    found = list[int]()

    def note(number: int) -> int:
        found.append(number)
        return number

    for path, value in values_with_ids(record):
        with_ids(path, value, note)
    return found
