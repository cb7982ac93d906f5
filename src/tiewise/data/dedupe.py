"""Every paragraph once: repeated ones are dropped before the text is split, so that held-out text was never trained on.

Boilerplate repeats across documents, and a paragraph on both sides of the split would measure memory instead of
prediction. Paragraphs that differ in white space only count as the same. Only their 16-byte hashes are kept: newest in
a set, the others in one sorted array, so that memory is about 30 bytes per distinct paragraph at any length of text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from tiewise.data.document import BLANK_LINES, Document

_BYTES = 16
_BETWEEN = re.compile(f"({BLANK_LINES.pattern})")


class Seen:
    """A set of 16-byte strings that outgrows a Python set: `add` says whether one is new."""

    def __init__(self, newest: int = 250_000):
        self._limit = newest  # a Python set takes about 100 bytes for each
        self._newest: set[bytes] = set()
        self._sorted = np.empty(0, f"S{_BYTES}")

    def add(self, digest: bytes) -> bool:
        """Keep `digest`; whether it was not there before."""
        if digest in self._newest or self._in_sorted(digest):
            return False
        self._newest.add(digest)
        # an eighth of the array at least, or merging would be quadratic
        if len(self._newest) >= max(self._limit, len(self._sorted) // 8):
            newest = np.array(sorted(self._newest), self._sorted.dtype)
            self._sorted = np.sort(np.concatenate([self._sorted, newest]), kind="stable")  # merges sorted runs
            self._newest.clear()
        return True

    def _in_sorted(self, digest: bytes) -> bool:
        if not len(self._sorted):
            return False
        wanted = np.array(digest, self._sorted.dtype)
        place = int(self._sorted.searchsorted(wanted))
        return place < len(self._sorted) and bool(self._sorted[place] == wanted)


class Deduplicator:
    """Passes documents through without the paragraphs that it has passed before; counts what it dropped."""

    def __init__(self) -> None:
        self.dropped = 0
        self._seen = Seen()

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents in order, what is kept as it stands; one of which nothing is new is left out."""
        begins = False
        for document in documents:
            begins |= document.begins  # of a document that nothing is kept of yet
            text = self._once(document.text)
            if text.strip() or (text and not begins):
                yield replace(document, text=text, begins=begins)
                begins = False

    def _once(self, text: str) -> str:
        kept: list[str] = []
        parts = _BETWEEN.split(text)  # paragraph, blank lines, paragraph, … as they stand
        for i in range(0, len(parts), 2):
            if not parts[i].strip() or self._new(parts[i]):
                kept += [parts[i - 1], parts[i]] if kept else [parts[i]]  # one dropped goes with the blank lines before
        return "".join(kept)

    def _new(self, paragraph: str) -> bool:
        words = " ".join(paragraph.split())
        new = self._seen.add(blake2b(words.encode("utf-8", "replace"), digest_size=_BYTES).digest())
        self.dropped += not new
        return new
