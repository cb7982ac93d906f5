"""Sentences and words within a stream of tokens, found from what the tokens read as.

    text ──► pieces: what each token adds to a text, as bytes
    "… he said. ”Come!” She …"
               └ a sentence ends behind . ! ? … (closing quotes belong to it) before white space and no small letter,
                 and at every blank line; not behind a title (Mr.) or a single letter (J. Smith)

A sentence begins with the first token that begins where it does or later; white space around it is left out. The rules
are those of English prose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tiewise.data.byte_letters import byte_letters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ints = NDArray[np.int64]

_END = re.compile(
    rb"(?P<mark>[.!?]+|\xe2\x80\xa6)(?:[\"')\]*_]|\xe2\x80[\x99\x9d])*(?=\s+[^\sa-z])"  # a mark, then closing quotes
    rb"|(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n)"  # a blank line
)
_WORD = re.compile(rb"[A-Za-z.]*$")
_TITLES = frozenset(b"mr mrs ms dr st prof rev gen col capt lieut messrs vs no e.g i.e cf viz".split())
_LETTERS = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") | frozenset(range(128, 256))


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a vocabulary read as.

    Attributes:
        pieces: bytes that each token adds to a text [V].
        begins: whether a token begins inside a word, with a letter or digit [V].
        finishes: whether it ends with one [V].
        blank: whether it is white space alone, or nothing [V].
        spaced: the token that reads as a space and then this one, where there is one; else this one [V].
    """

    pieces: tuple[bytes, ...]
    begins: NDArray[np.bool_]
    finishes: NDArray[np.bool_]
    blank: NDArray[np.bool_]
    spaced: Ints

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, vocab: int) -> Vocabulary:
        """Read a tokenizer's vocabulary; special tokens and rows without one read as nothing."""
        names = tokenizer.convert_ids_to_tokens(list(range(vocab)))
        special = set(tokenizer.all_special_ids)
        known = [n for i, n in enumerate(names) if n is not None and i not in special]
        read = _reader(known)
        pieces = tuple(b"" if n is None or i in special else read(n) for i, n in enumerate(names))
        begins = np.array([p[:1] != b"" and p[0] in _LETTERS for p in pieces])
        finishes = np.array([p[-1:] != b"" and p[-1] in _LETTERS for p in pieces])
        blank = np.array([not p.strip() for p in pieces])
        known_as = {p: i for i, p in reversed(list(enumerate(pieces))) if p}
        spaced = np.array([known_as.get(b" " + p, i) if p else i for i, p in enumerate(pieces)], np.int64)
        return cls(pieces, begins, finishes, blank, spaced)

    def word_starts(self, ids: Ints) -> NDArray[np.bool_]:
        """Whether each of `ids` [N] begins a word; the rest go on with the word before them."""
        starts = np.ones(len(ids), bool)
        starts[1:] = ~(self.begins[ids[1:]] & self.finishes[ids[:-1]])
        return starts


def _reader(names: Sequence[str]) -> Callable[[str], bytes]:
    """Return what turns a token's name into its bytes: byte-level, SentencePiece or WordPiece, as the names say."""
    if any(name.startswith("▁") for name in names):
        return lambda name: name.replace("▁", " ").encode()
    if any(name.startswith("##") for name in names):
        return lambda name: name[2:].encode() if name.startswith("##") else b" " + name.encode()
    bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}

    def read(name: str) -> bytes:
        if all(letter in bytes_of for letter in name):
            return bytes(bytes_of[letter] for letter in name)
        return name.encode()

    return read


@dataclass(frozen=True)
class Sentences:
    """Where the sentences of a stream are.

    Attributes:
        tokens: the stream [N], also memory-mapped.
        starts: first token of each sentence [S].
        ends: the token behind its last [S].
        documents: first sentence of each document, and S at the end [D + 1].
    """

    tokens: np.ndarray
    starts: Ints
    ends: Ints
    documents: Ints

    def __len__(self) -> int:
        return len(self.starts)

    def between(self, first: int, last: int) -> Ints:
        """Tokens of the sentences `first` … `last` − 1, of one document."""
        return self.tokens[self.starts[first] : self.ends[last - 1]].astype(np.int64)


def find_sentences(tokens: np.ndarray, vocabulary: Vocabulary, eos: int) -> Sentences:
    """Find the sentences of a stream [N] whose documents end with `eos`; `eos` itself is in none."""
    starts: list[Ints] = []
    ends: list[Ints] = []
    counts: list[int] = []
    begin = 0
    for stop in [*np.flatnonzero(tokens == eos).tolist(), len(tokens)]:
        if stop > begin:
            pieces = [vocabulary.pieces[i] for i in tokens[begin:stop].tolist()]
            first, behind = _trimmed(_cuts(pieces), vocabulary.blank[tokens[begin:stop]])
            starts.append(begin + first)
            ends.append(begin + behind)
            counts.append(len(first))
        begin = stop + 1
    empty = np.zeros(0, np.int64)
    return Sentences(
        tokens,
        np.concatenate([empty, *starts]),
        np.concatenate([empty, *ends]),
        np.concatenate([[0], np.cumsum([n for n in counts if n])]).astype(np.int64),
    )


def _trimmed(cuts: Ints, blank: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """(first, behind the last) token that is not blank of every piece that begins at a cut and has one."""
    solid = np.flatnonzero(~blank)
    low, high = np.searchsorted(solid, cuts), np.searchsorted(solid, np.append(cuts[1:], len(blank)))
    some = high > low
    return solid[low[some]], solid[high[some] - 1] + 1


def _cuts(pieces: list[bytes]) -> Ints:
    """First tokens of a document's sentences."""
    text = b"".join(pieces)
    begins = np.cumsum([0, *map(len, pieces)][:-1])
    found = [m.end() for m in _END.finditer(text) if not _abbreviates(text, m)]
    cuts = np.unique(np.append(0, np.searchsorted(begins, found)))
    return cuts[cuts < len(pieces)].astype(np.int64)


def _abbreviates(text: bytes, match: re.Match[bytes]) -> bool:
    if match["mark"] != b".":
        return False
    word = _WORD.search(text, max(0, match.start() - 12), match.start())
    before = b"" if word is None else word[0]
    return before.lower() in _TITLES or (len(before) == 1 and before != b"I")
