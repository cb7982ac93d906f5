"""Editing of JSON files as text.

Order, nesting, indentation, the spelling of numbers and unknown keys stay unchanged. People edit these files too, and a
diff between two versions should show the intended change only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.rewrite.change import DELETE
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def edit_json_file(folder: Folder, name: str, changes: Mapping[str, Any]) -> bytes:
    """Return the new content of a JSON file in a folder.

    Args:
        changes: {dotted path: new value or `DELETE`}, as in `edit_json`.
    """
    try:
        return edit_json(folder.read(name)[name].decode(), changes).encode()
    except (KeyError, RecursionError) as error:  # a key contains a dot, or the nesting is deeper than the parser allows
        problem = f"{folder.path / name}: {short(', '.join(changes))} cannot be written into it ({short(error)})"
        raise CheckpointError(problem, "write it by hand at every level, then run again") from None


def edit_json(text: str, changes: Mapping[str, Any]) -> str:
    """Return JSON text with new values at dotted paths; `DELETE` removes a key.

    If the keys of an object are sorted, a new key is inserted in alphabetical order, else at the end.

    Raises:
        KeyError: a level above the last key does not exist.
    """
    for path, value in changes.items():
        text = _with_change(text, path.split("."), value)
    return text


def _with_change(text: str, path: Sequence[str], value: Any) -> str:
    """Return JSON text with one value set or removed."""
    *levels, key = path
    start = _after_space(text, 0)
    for level in levels:
        start = _members(text, start)[level].value
    members = _members(text, start)
    member = members.get(key)
    if member is None:
        if value is DELETE:
            return text
        return _with_member(text, start, members, key, value)
    if value is DELETE:
        return _without_member(text, member)
    return text[: member.value] + json.dumps(value) + text[member.end :]


class _Member(NamedTuple):
    """Offsets of one member of a JSON object in the text."""

    lead: int  # start of the white space before the key
    key: int  # start of the key
    value: int  # start of the value
    end: int  # end of the value


def _with_member(text: str, start: int, members: Mapping[str, _Member], key: str, value: Any) -> str:
    """Return JSON text with a new member in the object at `start`.

    The new member has the same white space as its neighbour.
    """
    entry = f"{json.dumps(key)}: {json.dumps(value)}"
    if not members:
        return text[: start + 1] + entry + text[start + 1 :]
    keys = list(members)
    later = next((name for name in keys if name > key), None)
    if later is not None and keys == sorted(keys):
        neighbour = members[later]
        space = text[neighbour.lead : neighbour.key]
        return f"{text[: neighbour.lead]}{space}{entry},{text[neighbour.lead :]}"
    last = members[keys[-1]]
    space = text[last.lead : last.key]
    return f"{text[: last.end]},{space}{entry}{text[last.end :]}"


def _without_member(text: str, member: _Member) -> str:
    """Return JSON text without a member and one comma.

    The comma after the member goes. For the last member, the comma before it goes.
    """
    start, end = member.lead, member.end
    behind = _after_space(text, end)
    if text[behind] == ",":
        end = behind + 1
    elif text[start - 1] == ",":
        start -= 1
    return text[:start] + text[end:]


def _members(text: str, start: int) -> dict[str, _Member]:
    """Return {key: member} of the object at `start`; the last member with a key wins."""
    if text[start] != "{":
        raise KeyError("no object")
    members: dict[str, _Member] = {}
    lead = start + 1
    key_start = _after_space(text, lead)
    while text[key_start] != "}":
        key, key_end = _DECODER.raw_decode(text, key_start)
        colon = _after_space(text, key_end)
        value = _after_space(text, colon + 1)
        _, end = _DECODER.raw_decode(text, value)
        members[key] = _Member(lead, key_start, value, end)
        comma = _after_space(text, end)
        if text[comma] == "}":
            break
        lead = comma + 1
        key_start = _after_space(text, lead)
    return members


def _after_space(text: str, at: int) -> int:
    """Return the offset of the first character at or after `at` that is no white space."""
    match = _SPACE.match(text, at)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
