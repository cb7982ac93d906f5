"""Every paragraph once: repeated ones are dropped before the text is split, so that held-out text was never trained on.

Boilerplate repeats across documents, and a paragraph on both sides of the split would measure memory instead of
prediction. Paragraphs that differ in white space only count as the same. Only their 16-byte hashes are kept: newest in
a set, the others in one sorted array, so that memory is about 30 bytes per distinct paragraph at any length of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from tiewise.data.document import Document, paragraphs

_BYTES = 16


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
        """Yield the documents in order; one of which nothing is new is left out."""
        for document in documents:
            kept = [paragraph for paragraph in paragraphs(document.text) if self._new(paragraph)]
            if kept:
                yield replace(document, text="\n\n".join(kept))

    def _new(self, paragraph: str) -> bool:
        words = " ".join(paragraph.split())
        new = self._seen.add(blake2b(words.encode("utf-8", "replace"), digest_size=_BYTES).digest())
        self.dropped += not new
        return new
