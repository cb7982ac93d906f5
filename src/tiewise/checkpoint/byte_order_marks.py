"""JSON files in another encoding than UTF-8, which loaders refuse and `tiewise repair` rewrites."""

from __future__ import annotations

import codecs

from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.untrusted import parse_json
from tiewise.core.errors import CheckpointError

# a file starts with one of these; UTF-32 comes before UTF-16, whose mark is a prefix of it
_ENCODINGS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
LONGEST_MARK = 4  # bytes


def as_utf8(folder: Folder, file: str) -> bytes | None:
    """Return the text of a JSON file as UTF-8 without a byte order mark.

    Return None if the file does not start with such a mark, or if it is no JSON object.
    """
    try:
        encoding = _encoding(folder, file)
        if encoding is None:
            return None
        text = folder.read(file)[file].decode(encoding).encode()
        record = parse_json(text, file)
    except (CheckpointError, UnicodeError):
        return None
    if not isinstance(record, dict):
        return None
    return text


def _encoding(folder: Folder, file: str) -> str | None:
    """Return the encoding that the first bytes of a file mark; None without a mark."""
    with folder.source.open(file) as opened:  # a large file without a mark is not read
        beginning = bytearray(min(LONGEST_MARK, opened.size))
        opened.read_into(memoryview(beginning), 0)
    return next((name for mark, name in _ENCODINGS.items() if beginning.startswith(mark)), None)
