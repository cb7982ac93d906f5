"""JSON from strangers: bounded in memory and depth, and nothing said twice where a name must mean one thing."""

from __future__ import annotations

import json
import re
from typing import Any

from tiewise.checkpoint.open_file import read_whole
from tiewise.core.errors import CheckpointError, printable

MOST_BYTES = 256 * 2**20  # the largest tokenizer.json known is 35 MB
MOST_VALUES = 6_000_000  # and holds two million commas, colons and brackets
MOST_MEMORY = 420 * 2**20  # that a file may take as objects, so that the process stays below 512 MB
VALUE_BYTES = 75  # of memory for each comma, colon and bracket: a token with its id has two


def read_json(path: str, *, most: int = MOST_BYTES, unique: bool = False) -> Any:
    """Return what a JSON file holds.

    Args:
        path: the file.
        most: refuse more bytes than this.
        unique: refuse an object that names a key twice (elsewhere the last wins, as in every other reader).

    Raises:
        CheckpointError: not a readable file, not JSON, or beyond the bounds.
    """
    return parse_json(read_whole(path, most), path, unique=unique)


def parse_json(data: bytes, where: str, *, unique: bool = False) -> Any:
    """Return what JSON text in UTF-8 holds; `where` is named in errors.

    `NaN` and `Infinity` are taken as transformers writes them (Mamba's configs do).

    Raises:
        CheckpointError: not JSON, of too many values, nested beyond the parser's stack, or a key named twice where
            `unique`.
    """
    values = sum(map(data.count, (b",", b":", b"[", b"{"))) if len(data) > 2**20 else 0
    if values > MOST_VALUES:
        fix = "no file of this kind is that long: take it from its source again"
        raise CheckpointError(f"{where}: more than {MOST_VALUES:,} values", fix)
    require_bounded(data, values, where)
    try:
        text = data.decode()
        del data  # text and objects take enough
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except _Twice as twice:
        raise CheckpointError(f"{where}: names {short(twice.key)} twice", "one of the two must go") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        fix = "the file is damaged or is no JSON: take it from its source again"
        raise CheckpointError(f"{where}: not readable as JSON ({short(str(error), 80)})", fix) from None


def require_bounded(data: bytes, values: int, where: str) -> None:
    """Raise where text in UTF-8 and the `values` in it would take more memory than any file of its kind.

    Raises:
        CheckpointError: naming `where`.
    """
    if len(data) < 2**20:
        return
    width = 1 if data.isascii() else 4 if re.search(rb"[\xf0-\xff]", data) else 2  # bytes of a character in Python
    characters = len(data) if width == 1 else len(data) - len(data.translate(None, _FIRST))
    if 2 * width * characters + VALUE_BYTES * values > MOST_MEMORY:  # the text, and the same text in pieces
        fix = "no file of this kind is that large: take it from its source again"
        raise CheckpointError(f"{where}: reading it would take more than {MOST_MEMORY // 2**20} MB of memory", fix)


_FIRST = bytes(byte for byte in range(256) if not 0x80 <= byte < 0xC0)  # of a character; the others continue one


def short(text: Any, most: int = 60) -> str:
    """Return printable text of bounded length, for names that come from a file."""
    plain = printable(str(text)[: most + 1])
    return plain if len(plain) <= most else plain[: most - 1] + "…"


class _Twice(Exception):
    def __init__(self, key: str) -> None:
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return made
