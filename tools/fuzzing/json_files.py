"""Mutations of JSON text that leave it parseable, and of safetensors files whose header is such text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

HUGE = 2**60
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 0.5, 1e308, HUGE, -HUGE, 2**31, 2**63 - 1, 2**63, 2**64, 10**400),
    *(
        float("nan"),
        float("inf"),
        "",
        "0",
        "true",
        "x" * 300,
        "\0",
        "a\nb\x1b[31m",
        "\ud800",
        "../secret",
        "/etc/passwd",
    ),
    *([], {}, [[]], [1, [2, [3]]], {"a": {"b": {}}}, [24, 8], [0, 0], [2**40, 2**40], [None], [True, "a"]),
)
CHANGES = (1, 1, 1, 2, 3, 6)  # parts that one mutation changes
DEEP = "\x1e"  # a value that stands for many nested lists while a record is written
NESTED = (3, 60, 300, 700, 1500)  # levels of such lists
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}  # bytes by dtype


def mutate_json(data: bytes, rng: Random, words: Sequence[str]) -> bytes | None:
    """Return JSON text in which a few parts changed; None if `data` is no JSON.

    Args:
        data: the text.
        rng: source of every choice.
        words: keys and texts that mean something to the reader.
    """
    try:
        record = _changed_record(data, rng, words)
        return _as_text(record, rng)
    except (ValueError, LookupError, RecursionError):
        return None


def _changed_record(data: bytes, rng: Random, words: Sequence[str]) -> Any:
    """Return the value of JSON text, in which a few parts changed."""
    whole = {"": json.loads(data)}
    parts = list(parts_of(whole))
    for _ in range(rng.choice(CHANGES)):
        holder, key = parts[int(rng.random() * len(parts))]
        if key in holder if isinstance(holder, dict) else key < len(holder):  # an earlier change may have removed it
            _change(holder, key, parts, rng, words)
    return whole[""]


def _as_text(record: Any, rng: Random) -> bytes:
    """Return JSON text with nested lists in place of `DEEP`, and rarely with every key twice."""
    text = json.dumps(record)
    if json.dumps(DEEP) in text:
        levels = rng.choice(NESTED)
        text = text.replace(json.dumps(DEEP), "[" * levels + "]" * levels, 1)
    if rng.random() < 0.02 and text.startswith("{") and len(text) > 2:
        text = f"{text[:-1]},{text[1:]}"
    return text.encode()


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every part of a JSON value, below the value itself."""
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict):
            keys: Any = holder
        elif isinstance(holder, list):
            keys = range(len(holder))
        else:
            continue
        for key in keys:
            yield holder, key
            waiting.append(holder[key])


def _change(holder: Any, key: Any, parts: Sequence[tuple[Any, Any]], rng: Random, words: Sequence[str]) -> None:
    """Change one part of a value; `parts` lists all parts, from which copies come."""
    how = rng.random()
    if how < 0.25:
        holder[key] = _new_value(rng, words)
    elif how < 0.45:
        holder[key] = _near(holder[key], rng, words)
    elif how < 0.55:
        other, other_key = parts[int(rng.random() * len(parts))]
        holder[key] = json.loads(json.dumps(other[other_key]))
    elif how < 0.7 and key != "":
        del holder[key]
    elif how < 0.85:
        _add(holder, rng, words)
    elif isinstance(holder, dict) and key != "":
        holder[rng.choice(words)] = holder.pop(key)
    else:
        _add(holder[key], rng, words)


def _add(holder: Any, rng: Random, words: Sequence[str]) -> None:
    """Add a part to a list or an object; another value stays."""
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), _new_value(rng, words))
    elif isinstance(holder, dict) and "" not in holder:
        holder[rng.choice(words)] = _new_value(rng, words)


def _new_value(rng: Random, words: Sequence[str]) -> Any:
    """Return an odd value, a word, or a value with many levels."""
    how = rng.random()
    if how < 0.02:
        return DEEP
    if how < 0.35:
        return rng.choice(words)
    value = rng.choice(ODD)
    return json.loads(json.dumps(value)) if isinstance(value, list | dict) else value


def _near(value: Any, rng: Random, words: Sequence[str]) -> Any:
    """Return a value of the same type that differs a little."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, float(max(-HUGE, min(value, HUGE))), str(value)[:40])
        )
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice((value[:at], value[at:], value.upper(), f"{value[:at]}{rng.choice(words)}{value[at:]}"))
    return [value]


def mutate_safetensors(data: bytes, rng: Random, words: Sequence[str]) -> bytes | None:
    """Return a safetensors file with a changed header and the right length of it; None if `data` is no such file.

    In half of the cases the tensors of the header get offsets without gaps, and the file gets their bytes.
    """
    length = int.from_bytes(data[:8], "little")
    tensors = data[8 + length :]
    try:
        record = _changed_record(data[8 : 8 + length], rng, words)
        if rng.random() < 0.5:
            tensors = bytes(_refit(record))
        text = _as_text(record, rng)
    except (ValueError, LookupError, RecursionError):
        return None
    return len(text).to_bytes(8, "little") + text + tensors


def _refit(record: Any) -> int:
    """Give every tensor of a header its offsets, where its type and shape say them; return the bytes of all."""
    if not isinstance(record, dict):
        return 0
    end = 0
    for name, entry in record.items():
        nbytes = _nbytes(entry)
        if nbytes is None or name == "__metadata__":
            continue
        entry["data_offsets"] = [end, end + nbytes]
        end += nbytes
    return end


def _nbytes(entry: Any) -> int | None:
    """Return the bytes of a tensor of at most 4096 bytes by its entry in a header; None for any other entry."""
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        return None
    lengths = entry["shape"]
    if not all(type(length) is int and 0 <= length < 4096 for length in lengths) or len(lengths) > 80:
        return None
    nbytes = math.prod(lengths) * WIDTHS.get(str(entry.get("dtype")), 1)
    return nbytes if nbytes <= 4096 else None
