"""The text on disk between reading and tokenizing.

Sources are read once (a stream cannot be read twice, and a file may change meanwhile), but the split needs all sizes
and the tokenizer needs the training split. So documents are appended to one UTF-8 file, and only where each ends is
kept in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from tiewise.core.progress import advance
from tiewise.data.document import Document


class Spool:
    """Documents, or their parts, in one file, read back by index.

    Attributes:
        characters: int64[n], the length of every part.
    """

    def __init__(self, path: Path, documents: Iterable[Document]):
        self._path = path
        ends, characters, numbers = array("q", [0]), array("q"), array("q")
        with path.open("wb") as file:
            for document in documents:
                ends.append(ends[-1] + file.write(document.text.encode("utf-8", "replace")))
                characters.append(len(document.text))
                numbers.append((numbers[-1] if numbers else 0) + document.begins)
                advance(ends[-1])
        self.characters = np.frombuffer(characters, np.int64) if characters else np.empty(0, np.int64)
        self._ends = np.frombuffer(ends, np.int64)
        self._numbers = np.frombuffer(numbers, np.int64) if numbers else np.empty(0, np.int64)  # each part's document

    def __len__(self) -> int:
        return len(self.characters)

    def read(self, indices: np.ndarray) -> Iterator[tuple[str, bool]]:
        """Yield the parts of `indices`, which ascend, and whether each is the last of its document among them."""
        for data, ends in self._read(indices):
            yield data.decode("utf-8"), ends

    def facts(self, indices: np.ndarray) -> dict[str, Any]:
        """Return documents, characters, bytes, and the sha256 of the documents, each followed by a zero byte."""
        digest = sha256()
        size = count = 0
        for data, ends in self._read(indices):
            size += len(data)
            count += ends
            digest.update(data)
            digest.update(b"\0" * ends)
        return {
            "documents": count,
            "characters": int(self.characters[indices].sum()),
            "bytes": size,
            "sha256": digest.hexdigest(),
        }

    def _read(self, indices: np.ndarray) -> Iterator[tuple[bytes, bool]]:
        last = np.diff(self._numbers[indices], append=-1) != 0
        with self._path.open("rb") as file:
            for index, ends in zip(indices, last.tolist(), strict=True):
                file.seek(self._ends[index])
                yield file.read(self._ends[index + 1] - self._ends[index]), ends
