"""Sentences and words in a stream of tokens, and pairs of segments for pretraining.

    text ──► pieces: the bytes that each token adds to a text
    "… he said. ”Come!” She …"
               └ a sentence ends after . ! ? … (closing quotes belong to it) before white space and no small letter,
                 and at every blank line; not after a title (Mr.) or a single letter (J. Smith)

A sentence begins with the first token that begins at its start or later. White space around it is left out. The rules
are those of English prose.

Objectives on pairs of segments: does the second follow the first?

    sop    label 1: as in the document        0: the same two, swapped              ALBERT, arXiv:1909.11942 §3.1
    nsp    label 1: as in the document        0: the second from another document   BERT, arXiv:1810.04805 §3.1
    none   always as in the document, no label

A document's sentences are packed in order into rows of up to `length` tokens, `[CLS] A [SEP] B [SEP]`. A and B are one
sentence or more, divided at random. If two sentences alone are too long, each loses its beginning or its end, at
random, so a cut tells nothing about the label. In transformers the label of sentence order is 1 − label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.token_bytes import BYTE
from tiewise.core.errors import DataError, suggest_choices
from tiewise.core.records import require
from tiewise.core.text import byte_letters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Ints = NDArray[np.int64]
OBJECTIVES = ("sop", "nsp", "none")
MARKS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
AROUND = 3  # marks in a row: [CLS], [SEP], [SEP]

_END = re.compile(
    rb"(?P<mark>[.!?]+|\xe2\x80\xa6)(?:[\"')\]*_]|\xe2\x80[\x99\x9d])*(?=\s+[^\sa-z])"  # a mark, then closing quotes
    rb"|(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n)"  # a blank line
)
_byte_letters = cache(byte_letters)
_WORD = re.compile(rb"[A-Za-z.]*$")
_TITLES = frozenset(b"mr mrs ms dr st prof rev gen col capt lieut messrs vs no e.g i.e cf viz".split())
_LETTERS = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz") | frozenset(range(128, 256))


@dataclass(frozen=True)
class Vocabulary:
    """Texts of the tokens of a vocabulary, all [V], and its marks."""

    pieces: tuple[bytes, ...]  # bytes that each token adds to a text
    begins: NDArray[np.bool_]  # True if the token's first byte is a letter or digit
    finishes: NDArray[np.bool_]  # True if its last byte is one
    spaced: Ints  # id of the token with the same text after a space, else the same id
    marks: tuple[int, ...]  # ids of [CLS], [SEP], [MASK], [PAD]; empty if the tokenizer lacks one

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, vocab: int) -> Vocabulary:
        """Read a tokenizer's vocabulary.

        Special tokens, and rows without a token, have no text.
        """
        pieces = _read_pieces(tokenizer, vocab)
        begins = np.array([_is_letter_at(piece, 0) for piece in pieces])
        finishes = np.array([_is_letter_at(piece, -1) for piece in pieces])
        marks = tuple(getattr(tokenizer, f"{name}_id") for name in MARKS)
        return cls(pieces, begins, finishes, _spaced_ids(pieces), marks if None not in marks else ())

    @cached_property
    def ordinary(self) -> Ints:
        """Ids of tokens that may replace a masked one: those with text."""
        return np.flatnonzero([bool(piece) for piece in self.pieces])

    @cached_property
    def blank(self) -> NDArray[np.bool_]:
        """True for each token without text or with white space alone."""
        return np.array([not piece.strip() for piece in self.pieces])

    def word_starts(self, ids: Ints) -> NDArray[np.bool_]:
        """Return True for each of `ids` [N] that begins a word.

        The others continue the word before them.
        """
        starts = np.ones(len(ids), bool)
        starts[1:] = ~(self.begins[ids[1:]] & self.finishes[ids[:-1]])
        return starts


def _read_pieces(tokenizer: PreTrainedTokenizerFast, vocab: int) -> tuple[bytes, ...]:
    """Return the bytes that each token adds to a text.

    b"" for special tokens and rows without a token.
    """
    names = tokenizer.convert_ids_to_tokens(list(range(vocab)))
    special = set(tokenizer.all_special_ids)
    ordinary = {i: name for i, name in enumerate(names) if name is not None and i not in special}
    read = _reader(ordinary.values())
    return tuple(read(ordinary[i]) if i in ordinary else b"" for i in range(vocab))


def _is_letter_at(piece: bytes, end: int) -> bool:
    """Return whether a piece has a letter or digit at `end`: 0 first, −1 last."""
    return bool(piece) and piece[end] in _LETTERS


def _spaced_ids(pieces: Sequence[bytes]) -> Ints:
    """Return for each token the one with the same text after a space, else itself."""
    ids: dict[bytes, int] = {}
    for i, piece in enumerate(pieces):
        if piece:
            ids.setdefault(piece, i)  # the first of equal pieces
    spaced = [ids.get(b" " + piece, i) if piece else i for i, piece in enumerate(pieces)]
    return np.array(spaced, np.int64)


def _reader(names: Collection[str]) -> Callable[[str], bytes]:
    """Return the function from a token's name to its bytes.

    The names show whether the tokenizer is byte-level, SentencePiece or WordPiece.
    """
    if any(name.startswith("▁") for name in names):
        return _sentencepiece_bytes
    if any(name.startswith("##") for name in names):
        return _wordpiece_bytes
    return _byte_level_bytes


def _sentencepiece_bytes(name: str) -> bytes:
    """Return the bytes of `▁word` or `<0x0A>`."""
    byte = BYTE.fullmatch(name)
    if byte:
        return bytes.fromhex(byte[1])
    return name.replace("▁", " ").encode()


def _wordpiece_bytes(name: str) -> bytes:
    """Return the bytes of `word`, with a space before it, or of `##part`."""
    if name.startswith("##"):
        return name[2:].encode()
    return b" " + name.encode()


def _byte_level_bytes(name: str) -> bytes:
    """Return the bytes that a name's letters represent.

    A name with other letters represents its UTF-8 bytes.
    """
    letters = _byte_letters()
    if letters.keys() >= set(name):
        return bytes(letters[letter] for letter in name)
    return name.encode()


@dataclass(frozen=True)
class Sentences:
    """Positions of the sentences of a stream of tokens."""

    vocabulary: Vocabulary
    tokens: np.ndarray  # the stream [N], possibly memory-mapped
    starts: Ints  # first token of each sentence [S]
    ends: Ints  # token after the last one of each sentence [S]
    documents: Ints  # first sentence of each document, and S at the end [D + 1]

    def __len__(self) -> int:
        return len(self.starts)

    def between(self, first: int, last: int) -> Ints:
        """Return the tokens of the sentences `first` … `last` − 1, of one document."""
        return self.tokens[self.starts[first] : self.ends[last - 1]].astype(np.int64)


def find_sentences(tokens: np.ndarray, vocabulary: Vocabulary, eos: int) -> Sentences:
    """Find the sentences of a stream [N] whose documents end with `eos`.

    No sentence contains `eos`.
    """
    starts, ends, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [0]
    begin = 0
    for stop in [*np.flatnonzero(tokens == eos).tolist(), len(tokens)]:
        first, behind = _sentences_of_document(tokens[begin:stop], vocabulary)
        if len(first):
            starts.append(begin + first)
            ends.append(begin + behind)
            counts.append(len(first))
        begin = stop + 1
    return Sentences(vocabulary, tokens, np.concatenate(starts), np.concatenate(ends), np.cumsum(counts))


def _sentences_of_document(tokens: np.ndarray, vocabulary: Vocabulary) -> tuple[Ints, Ints]:
    """Return the first token of each sentence of a document, and the token after its last."""
    pieces = [vocabulary.pieces[i] for i in tokens.tolist()]
    lengths = [len(piece) for piece in pieces]
    offsets = np.cumsum([0, *lengths][:-1])  # byte at which each token begins
    cuts = np.unique(np.append(0, np.searchsorted(offsets, _sentence_ends(b"".join(pieces)))))
    solid = np.flatnonzero(~vocabulary.blank[tokens])  # tokens that are not white space
    low = np.searchsorted(solid, cuts)
    high = np.searchsorted(solid, np.append(cuts[1:], len(pieces)))
    has_text = high > low
    return solid[low[has_text]], solid[high[has_text] - 1] + 1


def _sentence_ends(text: bytes) -> list[int]:
    """Return the byte offsets after which sentences end."""
    ends = []
    for match in _END.finditer(text):
        word = _WORD.search(text, max(0, match.start() - 12), match.start())
        before = word[0] if word else b""
        is_title = before.lower() in _TITLES
        is_initial = len(before) == 1 and before != b"I"
        if match["mark"] != b"." or not (is_title or is_initial):
            ends.append(match.end())
    return ends


@dataclass(frozen=True)
class Packing:
    """Rules for packing sentences into pairs."""

    length: int = 128  # T, tokens of a row, marks included
    objective: str = "sop"
    in_order: float = 0.5  # share of pairs in the document's order
    short: float = 0.1  # share of rows packed to a random shorter length, as in BERT and ALBERT

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise DataError(f"unknown objective {self.objective[:40]!r}", suggest_choices(self.objective, OBJECTIVES))
        if self.length < AROUND + 2:
            raise DataError(f"rows of {self.length} tokens", f"a pair and its marks need {AROUND + 2} or more")
        require(self, "in_order short", lambda share: 0 <= share <= 1, "use a share from 0 to 1", DataError)

    @property
    def room(self) -> int:
        """Number of tokens of A and B together."""
        return self.length - AROUND


def make_pairs(sentences: Sentences, packing: Packing, draw: np.random.Generator) -> Ints:
    """Pack a split once, in a random order and with random labels from `draw`.

    Returns:
        Pairs by their sentences [P, 6]: A is first … middle − 1, B is middle … last − 1. The label is 1 if they are as
            in
        the document. If it is 0 under nsp, B is other … other's last − 1 instead.
    """
    spans = _pack_rows(sentences, packing, draw)
    if not len(spans):
        problem = (
            f"no document has two sentences ({len(sentences.documents) - 1} documents, {len(sentences)} sentences)"
        )
        raise DataError(problem, "give text of several sentences per document; a sentence ends with . ! or ?")
    first, last = spans[draw.permutation(len(spans))].T
    middle = draw.integers(first + 1, last)
    order = packing.in_order if packing.objective != "none" else 1.0
    label = (draw.random(len(first)) < order).astype(np.int64)
    other = other_last = np.zeros(len(first), np.int64)
    if packing.objective == "nsp":
        other, other_last = _draw_segments(sentences, middle, last, draw)
    return np.stack([first, middle, last, label, other, other_last], axis=1)


def _draw_segments(sentences: Sentences, middle: Ints, last: Ints, draw: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw a segment of another document for each B, with about as many tokens.

    Return its first sentence, and the one after its last.
    """
    documents = sentences.documents
    if len(documents) < 3:
        raise DataError("nsp in one document: no other has a segment to lend", "give more documents, or use sop")
    document = np.searchsorted(documents, middle, side="right") - 1
    before, after = documents[document], documents[document + 1]
    chosen = draw.integers(0, len(sentences) - (after - before))  # one of the sentences of other documents
    other = chosen + np.where(chosen < before, 0, after - before)
    size = sentences.ends[last - 1] - sentences.starts[middle]
    until = np.searchsorted(sentences.ends, sentences.starts[other] + size, side="right")
    end_of_document = documents[np.searchsorted(documents, other, side="right")]
    return other, np.clip(until, other + 1, end_of_document)


def _pack_rows(sentences: Sentences, packing: Packing, draw: np.random.Generator) -> Ints:
    """Return (first, last) sentence of every row [P, 2].

    A row takes as many sentences as fit, two or more; a single one left over is left out. A document is packed from its
    beginning or from its end, at random. The last sentence of a row is one that still fitted, so it tends to be short.
    If it were always in B, the shorter segment would reveal the order.
    """
    spans: list[tuple[int, int]] = []
    for begin, stop in pairwise(sentences.documents.tolist()):
        starts, ends = sentences.starts[begin:stop], sentences.ends[begin:stop]
        if draw.random() < 0.5:  # backwards: mirrored positions
            rows = _pack_document(-ends[::-1], -starts[::-1], packing, draw)
            spans += [(stop - last, stop - first) for first, last in rows]
        else:
            rows = _pack_document(starts, ends, packing, draw)
            spans += [(begin + first, begin + last) for first, last in rows]
    return np.array(spans, np.int64).reshape(-1, 2)


def _pack_document(starts: Ints, ends: Ints, packing: Packing, draw: np.random.Generator) -> list[tuple[int, int]]:
    """Return (first, last) of the rows of a document, counted from its first sentence."""
    rows = []
    first, count = 0, len(starts)
    while first + 2 <= count:
        room = packing.room
        if packing.short and draw.random() < packing.short:
            room = int(draw.integers(2, packing.room + 1))
        fits = int(np.searchsorted(ends, starts[first] + room, side="right"))
        last = min(max(fits, first + 2), count)
        rows.append((first, last))
        first = last
    return rows


def segments(sentences: Sentences, pair: Ints, packing: Packing, draw: np.random.Generator) -> tuple[Ints, Ints]:
    """Return (A, B) of a pair as tokens, in the order of the model's input.

    Both fit into a row.
    """
    first, middle, last, label, other, other_last = pair.tolist()
    a, b = sentences.between(first, middle), sentences.between(middle, last)
    if packing.objective == "nsp" and not label:
        b = sentences.between(other, other_last)
    if len(a) + len(b) > packing.room:
        half = (packing.room + int(draw.integers(2))) // 2
        keep_a = min(len(a), max(packing.room - len(b), half))
        a, b = _truncated(a, keep_a, draw), _truncated(b, packing.room - keep_a, draw)
    if packing.objective == "sop" and not label:
        return b, a
    return a, b


def _truncated(segment: Ints, keep: int, draw: np.random.Generator) -> Ints:
    """Return `keep` tokens of a segment, without its beginning or its end, at random."""
    if draw.random() < 0.5:
        return segment[:keep]
    return segment[len(segment) - keep :]
