"""Tell the formats apart by their bytes, and read one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiewise.boundary.vector_files.fasttext import MAGIC, read_fasttext
from tiewise.boundary.vector_files.rows import Rows
from tiewise.boundary.vector_files.text import header_of, read_text, width_of
from tiewise.boundary.vector_files.word2vec import read_word2vec
from tiewise.core.errors import DataError

_HEAD = 1 << 20
_OTHERS = {  # first bytes of what is often given in place of vectors
    b"\x1f\x8b": ("compressed by gzip", "unpack it first: gunzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    **{
        bytes([0x80, version]): ("a pickle, which is never opened", "save its vectors as text (save_word2vec_format)")
        for version in (2, 3, 4, 5)
    },
}


@dataclass(frozen=True)
class Read:
    """What a file gave: rows, the format's name, and what is odd about the file, or nothing."""

    rows: Rows
    form: str
    odd: str = ""


def read_words(path: Path, tokens: Sequence[str | None]) -> Read:
    """Read the vectors of `tokens`; the file is streamed, and only their rows are kept.

    Raises:
        DataError: no file of vectors, or one that contradicts itself.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD)
        file.seek(0)
        _refuse(path, head)
        if head.startswith(MAGIC):
            return Read(read_fasttext(file, path, tokens, size), "fastText binary")
        header = header_of(head)
        sample = head[header[2] :] if header else head
        width = width_of(sample)
        if header and width is None:
            return Read(read_word2vec(file, path, tokens, header, size), "word2vec binary")
        if width is None:
            fix = "give GloVe, word2vec or fastText vectors, text or binary, or safetensors"
            raise DataError(f"vectors {path}: none of the formats that are known", fix)
        rows, lines = read_text(file, path, tokens, width)
    if header is None:
        return Read(rows, "GloVe text")
    odd = "" if lines == header[0] else f"its first line says {header[0]:,} words, and {lines:,} lines follow"
    return Read(rows, "word2vec text", odd)


def _refuse(path: Path, head: bytes) -> None:
    if not head:
        raise DataError(f"vectors {path}: an empty file", "take the file from its source again")
    for begins, (what, fix) in _OTHERS.items():
        if head.startswith(begins):
            raise DataError(f"vectors {path}: {what}", fix)
