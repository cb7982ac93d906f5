"""Every paragraph once, and then which document, or part of a long one, goes where.

Repeated paragraphs are dropped before the text is split, so that held-out text was never trained on: boilerplate
repeats across documents, and on both sides of the split it would measure memory instead of prediction. Paragraphs that
differ in white space only count as the same. Only their 16-byte hashes are kept: newest in a set, the others in one
sorted array, so that memory is about 30 bytes per distinct paragraph at any length of text.

The shares are met in characters. random: parts are taken in a seeded random order. `heldout` takes each one that brings
it nearer to its share, then `tune` does, and `train` keeps the rest. So each small split ends within half a document
of its share, and a single huge document stays in training. The parts of one long file fall into all splits.

contiguous: training, tuning and held-out text follow each other as they stand; the last parts are held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from tiewise.core.errors import DataError
from tiewise.data.plain_text import BLANK_LINES, Document

SPLITS = ("train", "tune", "heldout")
RANDOM, CONTIGUOUS = "random", "contiguous"
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


def assign(sizes: np.ndarray, fractions: Sequence[float], seed: int, how: str = RANDOM) -> np.ndarray:
    """Return the index in `SPLITS` of every document or part, int8[n], from its size in characters, int64[n].

    The same on every machine and every version of numpy: the generator is one whose stream numpy keeps frozen.

    Raises:
        DataError: where there are fewer documents than splits.
    """
    if len(sizes) < len(SPLITS):
        raise DataError(
            f"the text makes {len(sizes)} document{'s' * (len(sizes) != 1)} without its repetitions; "
            f"needs at least {len(SPLITS)} to hold some out",
            "give more text, or plain text, which is cut into parts",
        )
    if how == CONTIGUOUS:
        before = np.cumsum(sizes) / sizes.sum()  # share of the text up to the end of each
        tune = int(np.clip(np.abs(before - fractions[0]).argmin() + 1, 1, len(sizes) - 2))
        heldout = int(np.clip(np.abs(before - sum(fractions[:2])).argmin() + 1, tune + 1, len(sizes) - 1))
        return np.repeat(np.arange(3, dtype=np.int8), np.diff([0, tune, heldout, len(sizes)]))
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(len(sizes))
    where = np.zeros(len(sizes), np.int8)
    free = len(sizes)
    for split in (2, 1):
        wanted = fractions[split] * float(sizes.sum())
        for index in order:
            if wanted <= 0 or free == split:  # one document is left for each split to come
                break
            if where[index] == 0 and sizes[index] < 2 * wanted:
                where[index] = split
                wanted -= float(sizes[index])
                free -= 1
        if not (where == split).any():  # all documents are long; the shortest overshoots least
            left = np.flatnonzero(where == 0)
            where[left[np.argmin(sizes[left])]] = split
            free -= 1
    return where
