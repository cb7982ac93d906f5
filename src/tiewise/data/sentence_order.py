"""Pairs of segments for pretraining: does the second follow the first?

    sop    label 1: as in the document        0: the same two, swapped              ALBERT, arXiv:1909.11942 §3.1
    nsp    label 1: as in the document        0: the second from another document   BERT, arXiv:1810.04805 §3.1
    none   always as in the document, no label

A document's sentences are packed in order into rows of up to `length` tokens, `[CLS] A [SEP] B [SEP]`; A and B are one
sentence or more, cut at random. Where two sentences alone are too long, each loses its beginning or its end, by chance:
no label can be read off from where a segment is torn. transformers counts the labels of sentence order the other way:
`swapped_labels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.core.errors import DataError
from tiewise.data.sentences import Sentences

Ints = NDArray[np.int64]
OBJECTIVES = ("sop", "nsp", "none")
MARKS = 3  # [CLS], [SEP], [SEP]


@dataclass(frozen=True)
class Packing:
    """How pairs are made.

    Args:
        length: T, tokens of a row, marks included.
        objective: sop, nsp or none.
        in_order: share of pairs that are as in the document.
        short: share of rows that are packed to a random shorter length, as BERT's and ALBERT's are.

    Raises:
        DataError: a value out of range.
    """

    length: int = 128
    objective: str = "sop"
    in_order: float = 0.5
    short: float = 0.1

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise DataError(f"unknown objective {self.objective[:40]!r}", f"choose one of {', '.join(OBJECTIVES)}")
        if self.length < MARKS + 2:
            raise DataError(f"rows of {self.length} tokens", f"a pair and its marks need {MARKS + 2} or more")
        for name in ("in_order", "short"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} = {getattr(self, name)}", "use a share from 0 to 1")

    @property
    def room(self) -> int:
        """Tokens of A and B together."""
        return self.length - MARKS


@dataclass(frozen=True)
class Pairs:
    """Pairs by their sentences: A is first … middle − 1, B middle … last − 1, all [P].

    `label` is 1 where they are as in the document. Where it is 0 under nsp, B is other … other_last − 1 instead.
    """

    first: Ints
    middle: Ints
    last: Ints
    label: Ints
    other: Ints
    other_last: Ints

    def __len__(self) -> int:
        return len(self.first)


def make_pairs(sentences: Sentences, packing: Packing, draw: np.random.Generator) -> Pairs:
    """Pack a split once, in an order and with labels of its own draw.

    Raises:
        DataError: no document has two sentences, or nsp in fewer than two documents.
    """
    spans = _packed(sentences, packing, draw)
    if not len(spans):
        what = f"no document has two sentences ({len(sentences.documents) - 1} documents, {len(sentences)} sentences)"
        raise DataError(what, "give text of several sentences per document; a sentence ends with . ! or ?")
    spans = spans[draw.permutation(len(spans))]
    first, last = spans[:, 0], spans[:, 1]
    middle = draw.integers(first + 1, last)
    order = packing.in_order if packing.objective != "none" else 1.0
    label = (draw.random(len(spans)) < order).astype(np.int64)
    other = other_last = np.zeros(len(spans), np.int64)
    if packing.objective == "nsp":
        other, other_last = _strangers(sentences, middle, last, draw)
    return Pairs(first, middle, last, label, other, other_last)


def _packed(sentences: Sentences, packing: Packing, draw: np.random.Generator) -> Ints:
    """(first, last) sentence of every row [P, 2]: as many as fit, two or more; one left over is left out.

    A document is packed from its beginning or from its end, by chance: the sentence that a row is filled up with is
    one that still fitted, and were it always in B, the shorter segment would tell the order.
    """
    found = []
    starts, ends = sentences.starts, sentences.ends
    for begin, stop in zip(sentences.documents[:-1].tolist(), sentences.documents[1:].tolist(), strict=True):
        backwards = draw.random() < 0.5
        at = stop if backwards else begin
        while (at - 2 >= begin) if backwards else (at + 2 <= stop):
            room = packing.room
            if packing.short and draw.random() < packing.short:
                room = int(draw.integers(2, room + 1))
            if backwards:
                first = begin + int(np.searchsorted(starts[begin:stop], ends[at - 1] - room))
                span = (max(min(first, at - 2), begin), at)
            else:
                last = begin + int(np.searchsorted(ends[begin:stop], starts[at] + room, side="right"))
                span = (at, min(max(last, at + 2), stop))
            found.append(span)
            at = span[0] if backwards else span[1]
    return np.array(found, np.int64).reshape(-1, 2)


def _strangers(sentences: Sentences, middle: Ints, last: Ints, draw: np.random.Generator) -> tuple[Ints, Ints]:
    """Sentences (first, last) of another document for every pair, about as many tokens as its B has."""
    documents = sentences.documents
    count = len(documents) - 1
    if count < 2:
        raise DataError("nsp in one document: no other has a segment to lend", "give more documents, or use sop")
    own = np.searchsorted(documents, middle, side="right") - 1
    before, after = documents[own], documents[own + 1]
    drawn = draw.integers(0, len(sentences) - (after - before))  # of all sentences but the document's own
    other = np.where(drawn < before, drawn, drawn + after - before)
    size = sentences.ends[last - 1] - sentences.starts[middle]
    until = np.searchsorted(sentences.ends, sentences.starts[other] + size, side="right")
    theirs = documents[np.searchsorted(documents, other, side="right")]
    return other, np.clip(until, other + 1, theirs)


def segments(
    sentences: Sentences, pairs: Pairs, index: int, packing: Packing, draw: np.random.Generator
) -> tuple[Ints, Ints]:
    """(A, B) of a pair as tokens, in the order that the model reads, within the room of a row."""
    first, middle, last = int(pairs.first[index]), int(pairs.middle[index]), int(pairs.last[index])
    a, b = sentences.between(first, middle), sentences.between(middle, last)
    if packing.objective == "nsp" and not pairs.label[index]:
        b = sentences.between(int(pairs.other[index]), int(pairs.other_last[index]))
    if len(a) + len(b) > packing.room:
        half = (packing.room + int(draw.integers(2))) // 2
        keep_a = min(len(a), max(packing.room - len(b), half))
        a, b = _torn(a, keep_a, draw), _torn(b, packing.room - keep_a, draw)
    return (b, a) if packing.objective == "sop" and not pairs.label[index] else (a, b)


def _torn(segment: Ints, keep: int, draw: np.random.Generator) -> Ints:
    """Leave out the beginning or the end."""
    return segment[:keep] if draw.random() < 0.5 else segment[len(segment) - keep :]


def swapped_labels(labels: Any) -> Any:
    """Turn labels of order (1 = in order) into transformers' `sentence_order_label` (1 = swapped), and back."""
    return 1 - labels
