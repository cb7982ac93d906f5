"""Pretrained word vectors as rows of a table.

The format of a file is recognised by its first bytes. A safetensors file has one two-dimensional tensor, whose rows are
in the order of the vocabulary. Files of the other formats name their words (`vector_text`, `vector_binary`). They are
streamed, and only the rows of the vocabulary are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiewise.boundary.vector_binary import FASTTEXT_MAGIC, Cursor, read_fasttext, read_word2vec
from tiewise.boundary.vector_text import VectorHeader, find_header, find_text_width, read_text
from tiewise.boundary.word_rows import DOWNLOAD_AGAIN, WordRows
from tiewise.checkpoint.untrusted import LFS_POINTER
from tiewise.core.errors import DataError, SpecError, to_printable
from tiewise.core.spec import BoundarySpec

log = logging.getLogger(__name__)
_SAMPLE_BYTES = 1 << 20  # number of first bytes by which a format is recognised


def load_vectors(path: str | Path, tokens: Sequence[str | None]) -> Tensor:
    """Read the vectors [V, E] of `tokens` from a file.

    Tokens that the file lacks, and None in `tokens`, get a row of nan; missing tokens are logged as a warning.

    Raises:
        DataError: the file cannot be read, or has none of the tokens.
    """
    path = Path(path)
    try:
        return _load(path, tokens)
    except DataError as error:
        raise DataError(f"vectors {path}: {error.problem}", error.remedy) from None
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"vectors {path}: cannot be read ({reason})", "check the file") from None


def _load(path: Path, tokens: Sequence[str | None]) -> Tensor:
    """Read rows [V, E] with the reader of the file's format."""
    if not path.is_file():
        raise DataError("no such file", "give a GloVe, word2vec, fastText or safetensors file")
    with path.open("rb") as file:
        first_bytes = file.read(len(LFS_POINTER))
    if first_bytes == LFS_POINTER:
        raise DataError(*_POINTER)
    status = path.stat()
    # a safetensors file begins with the length of a JSON header and the header's brace
    header_length = int.from_bytes(first_bytes[:8], "little")
    begins_as_safetensors = first_bytes[8:9] == b"{" and header_length < status.st_size
    if begins_as_safetensors or path.suffix == ".safetensors":
        return _read_safetensors(path, len(tokens))
    changed = (status.st_mtime_ns, status.st_size)
    rows = _read_words(path.resolve(), path, changed, tuple(tokens))
    return rows.clone()  # a copy, since the cache returns the same tensor to the next call


def row_tokens(tokenizer: Any, rows: int) -> list[str | None]:
    """Return the token of each of a table's `rows` in a Hugging Face tokenizer.

    A row without a token gives None. Ids may have gaps, so the largest id may exceed the number of tokens.
    """
    ids = sorted(number for number in set(tokenizer.get_vocab().values()) if number < rows)
    tokens = dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
    return [tokens.get(row) for row in range(rows)]


def check_rows(table: Tensor, rows: Tensor, spec: BoundarySpec) -> None:
    """Raise SpecError if `rows` has another shape than `table` [V, E]."""
    if rows.shape != table.shape:
        remedy = f"use factored:{rows.shape[1]} or, beyond the model's width, projected:{rows.shape[1]}"
        raise SpecError(f"{spec}: vectors {tuple(rows.shape)} do not fit the table {tuple(table.shape)}", remedy)


def start_from_rows(table: Tensor, rows: Tensor, freeze: bool, spec: BoundarySpec) -> None:
    """Copy pretrained rows into `table` [V, E]; `freeze` stops the table's gradient.

    A row of nan leaves the table's row as it is, and so does the padding row of `spec`.

    Raises:
        SpecError: `rows` has another shape than `table`.
    """
    check_rows(table, rows, spec)
    rows = rows.to(table)
    is_unchanged = rows.isnan()
    if spec.pad is not None:
        is_unchanged[spec.pad] = True
    with torch.no_grad():
        table.copy_(torch.where(is_unchanged, table, rows))
    table.requires_grad_(not freeze)


def _read_safetensors(path: Path, vocab: int) -> Tensor:
    """Read the only table [V, E] of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            name = _only_table(file)
            rows: Tensor = file.get_tensor(name).float()
    except SafetensorError as error:
        raise DataError(f"not a safetensors file ({error})", "give the file that was saved") from None
    if len(rows) != vocab:
        remedy = "safetensors rows follow the vocabulary; use a text file to match by token"
        raise DataError(f"{len(rows)} rows for a vocabulary of {vocab}", remedy)
    is_finite = rows.isfinite()
    if not is_finite.all():
        broken = int((~is_finite).any(1).sum())
        problem = f"{broken:,} rows hold values that are no finite numbers"
        raise DataError(problem, "leave such rows out: give a text file, which names its words")
    return rows


def _only_table(file: Any) -> str:
    """Return the name of the only two-dimensional tensor of an open safetensors file."""
    names: list[str] = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118
    if len(names) != 1:
        problem = f"{len(names)} two-dimensional tensors ({', '.join(names[:4])})"
        raise DataError(problem, "keep the table alone in the file")
    return names[0]


# files that name their words


@lru_cache(maxsize=2)  # a training run reads its vectors when it is checked and when each model is built
def _read_words(real: Path, path: Path, changed: tuple[int, int], tokens: tuple[str | None, ...]) -> Tensor:
    """Read a file that names its words, and warn of missing words.

    `real` (the resolved path) and `changed` (time in ns and size in bytes) only identify the file in the cache.
    """
    with path.open("rb") as file:
        form, rows = _read(file, tokens)
    parts = "entries"
    if form.endswith("text"):
        parts = "lines"
    skipped = f"{len(rows.broken):,} broken {parts}"
    if not rows.filled:
        problem = f"none of the vocabulary's tokens in it ({form}, {skipped})"
        raise DataError(problem, "check that file and tokenizer write words the same way")
    _warn_of_gaps(f"{path} ({form})", rows, skipped)
    return torch.from_numpy(rows.values)


def _warn_of_gaps(label: str, rows: WordRows, skipped: str) -> None:
    """Log warnings about a file that may be cut short, skipped parts and missing words."""
    if rows.suspicion:
        log.warning(f"{label}: {rows.suspicion}: is the file whole?")
    if rows.broken:
        log.warning(f"{label}: {skipped} skipped: {_list_first(rows.broken)}")
    if rows.repeats:
        log.warning(f"{label}: a word stands in it again {rows.repeats:,} times; its first vector counts")
    missing = [word.decode(errors="replace") for word, row in rows.index.items() if row not in rows.filled]
    if missing:
        problem = f"{len(missing):,} of {len(rows.index):,} words have no vector and start at random"
        log.warning(f"{label}: {problem}: {_list_first(missing)}")


def _list_first(items: Sequence[object], count: int = 5) -> str:
    """Return the first `count` items, separated by commas."""
    listed = [to_printable(str(item)) for item in items[:count]]
    if len(items) > count:
        listed.append("…")
    return ", ".join(listed)


_POINTER = ("a Git LFS pointer, not the file that it names", "run `git lfs pull`, or download the file itself")
_PICKLE = ("a pickle, which is never opened", "save its vectors as text (save_word2vec_format)")
_UNSUPPORTED = {  # first bytes of files that users often pass instead of vectors: (problem, remedy)
    b"\x1f\x8b": ("compressed by gzip", "unpack it first: gunzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    **{bytes([0x80, version]): _PICKLE for version in (2, 3, 4, 5)},
}


def _read(file: BinaryIO, tokens: Sequence[str | None]) -> tuple[str, WordRows]:
    """Return the name of the file's format and the vectors of `tokens`."""
    first_bytes = file.read(_SAMPLE_BYTES)
    if not first_bytes:
        raise DataError("an empty file", DOWNLOAD_AGAIN)
    for magic, (problem, remedy) in _UNSUPPORTED.items():
        if first_bytes.startswith(magic):
            raise DataError(problem, remedy)
    if first_bytes.startswith(FASTTEXT_MAGIC):
        return "fastText binary", read_fasttext(Cursor(file), tokens)
    header = find_header(first_bytes)
    width = find_text_width(first_bytes, header)
    if header is None and width:
        return "GloVe text", read_text(file, tokens, header, width)
    if header is not None and width == header.width > 0:
        return "word2vec text", read_text(file, tokens, header, width)
    if header is not None:
        return "word2vec binary", _read_binary(file, tokens, header, width)
    remedy = "give GloVe, word2vec or fastText vectors, text or binary, or safetensors"
    raise DataError("none of the formats that are known", remedy)


def _read_binary(file: BinaryIO, tokens: Sequence[str | None], header: VectorHeader, text_width: int) -> WordRows:
    """Read a file whose lines are not text of the header's width.

    The bytes of binary vectors may look like lines of numbers. So a file with `text_width` numbers in a line is text
    with a wrong header only if it cannot be read as binary.
    """
    try:
        return read_word2vec(Cursor(file), tokens, header)
    except DataError:
        if text_width == 0:
            raise
    return read_text(file, tokens, header, text_width)  # raises the error about the two widths
