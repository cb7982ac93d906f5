"""Change a few values of a JSON file and leave every other character as it was written.

Order, nesting, indentation, the spelling of numbers and unknown keys stay: a config is edited by people too, and a
difference between two versions should show what was meant and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.rewrite.change import DELETE

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class _Member:
    """One `"key": value` of an object; `lead` is where the white space before its key starts."""

    key: str
    lead: int
    start: int
    value: int
    end: int


def edited(text: str, changes: Mapping[str, Any]) -> str:
    """Return JSON text with the values at dotted paths set, or gone where `DELETE`.

    A new key goes to its alphabetical place where the keys of its object are sorted, else to the end.

    Raises:
        KeyError: a level above the last key does not exist.
    """
    for path, value in changes.items():
        *levels, key = path.split(".")
        text = _edited(text, levels, key, value)
    return text


def _edited(text: str, levels: list[str], key: str, value: Any) -> str:
    at = _after_space(text, 0)
    for level in levels:
        at = {member.key: member.value for member in _members(text, at)}[level]
    members = _members(text, at)
    found = next((member for member in reversed(members) if member.key == key), None)  # of two, readers take the last
    if value is DELETE:
        if found is None:
            return text
        place = members.index(found)
        if place + 1 < len(members):
            return text[: found.lead] + text[members[place + 1].lead :]
        return text[: members[place - 1].end if place else found.lead] + text[found.end :]
    if found is not None:
        return text[: found.value] + json.dumps(value) + text[found.end :]
    return _with(text, at, members, key, json.dumps(value))


def _with(text: str, at: int, members: list[_Member], key: str, value: str) -> str:
    entry = f"{json.dumps(key)}: {value}"
    if not members:
        return f"{text[: at + 1]}{entry}{text[at + 1 :]}"
    keys = [member.key for member in members]
    later = next((m for m in members if m.key > key), None) if keys == sorted(keys) else None
    if later is not None:
        lead = text[later.lead : later.start]
        return f"{text[: later.lead]}{lead}{entry},{text[later.lead :]}"
    last = members[-1]
    lead = text[last.lead : last.start]
    return f"{text[: last.end]},{lead}{entry}{text[last.end :]}"


def _members(text: str, at: int) -> list[_Member]:
    if text[at] != "{":
        raise KeyError("no object")
    found: list[_Member] = []
    lead = at + 1
    while True:
        start = _after_space(text, lead)
        if text[start] == "}":
            return found
        key, end = _DECODER.raw_decode(text, start)
        value = _after_space(text, _after_space(text, end) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, value)
        found.append(_Member(key, lead, start, value, end))
        comma = _after_space(text, end)
        if text[comma] == "}":
            return found
        lead = comma + 1


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def like(text: str, record: Any) -> str:
    """Return a record as JSON, indented and ended as `text` is."""
    match = re.match(r"\s*[\[{][ \t]*\r?\n([ \t]+)", text)
    made = json.dumps(record, indent=match.group(1) if match else None)
    return made + ("\n" if text.endswith("\n") else "")
