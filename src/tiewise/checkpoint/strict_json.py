"""JSON from strangers: bounded in size and depth, and nothing said twice where a name must mean one thing."""

from __future__ import annotations

import json
from typing import Any

from tiewise.checkpoint.open_file import read_whole
from tiewise.errors import CheckpointError, printable

MOST_BYTES = 256 * 2**20  # the largest tokenizer.json known is 35 MB
MOST_VALUES = 6_000_000  # and holds two million values; each takes up to a hundred bytes of memory


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
    if len(data) > MOST_VALUES and sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        fix = "no file of this kind is that long: take it from its source again"
        raise CheckpointError(f"{where}: more than {MOST_VALUES:,} values", fix)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except _Twice as twice:
        raise CheckpointError(f"{where}: names {short(twice.key)} twice", "one of the two must go") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        fix = "the file is damaged or is no JSON: take it from its source again"
        raise CheckpointError(f"{where}: not readable as JSON ({short(str(error), 80)})", fix) from None


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
