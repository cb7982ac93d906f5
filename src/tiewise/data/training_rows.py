"""Rows that models are trained on: blocks of a stream, or pairs of segments with masked tokens.

`Blocks` cuts a stream of tokens into contiguous pieces of equal length; the rest at its end is left out. `PairRows`
draws pairs anew in every epoch:

    text = mark(prepare(...))                      # the tokenizer gets [CLS], [SEP], [MASK] and [PAD] where it has none
    rows = PairRows(split_sentences(text, "train"), Marks.of(text), Packing(), Masking(), seed=1, count=100_000)
    rows[0]["input_ids"], rows[0]["labels"], rows[0]["pair_labels"]

Row i is a function of the seed and i alone: an interrupted run goes on with the rows that it would have had.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiewise.core.errors import DataError
from tiewise.core.files import write_whole
from tiewise.data.masking import IGNORED, Masking, choose, mask
from tiewise.data.prepared import FACTS, TOKENIZER, PreparedText, load_prepared, token_type
from tiewise.data.sentence_pairs import (
    Packing,
    SentencePairs,
    Sentences,
    Vocabulary,
    find_sentences,
    make_pairs,
    segments,
)

Ints = NDArray[np.int64]
MARKS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}


class Blocks(Dataset):
    """`{"input_ids": int64[length], "labels": int64[length]}` for every block; labels are the inputs, not shifted.

    Tokens [N] that are memory-mapped are opened again by each worker, not copied.

    Raises:
        DataError: where there is not one block.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        if not 1 <= length <= len(tokens):
            raise DataError(f"{len(tokens)} tokens hold no block of {length}", "give more text, or another length")
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        block = self.tokens[index * self.length : (index + 1) * self.length]
        ids = torch.from_numpy(block.astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def __getstate__(self) -> dict[str, Any]:
        tokens = self.tokens
        if isinstance(tokens, np.memmap) and isinstance(tokens.base, mmap.mmap):  # a file, not a part of one
            return {"length": self.length, "file": (tokens.filename, tokens.dtype, tokens.shape, tokens.offset)}
        return {"length": self.length, "tokens": np.asarray(tokens)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.length = state["length"]
        if "file" in state:
            name, dtype, shape, offset = state["file"]
            self.tokens = np.memmap(name, dtype, mode="r", shape=shape, offset=offset)
        else:
            self.tokens = state["tokens"]


def mark(text: PreparedText) -> PreparedText:
    """Give a prepared text's tokenizer the marks that it lacks, as new tokens behind all others, on disk.

    Raises:
        DataError: so many tokens that the text would have to be written anew.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(text.folder / TOKENIZER), local_files_only=True)
    missing = {name: piece for name, piece in MARKS.items() if getattr(tokenizer, name) is None}
    if not missing:
        return text
    tokenizer.add_special_tokens(missing)
    vocab = max(text.vocab, max(tokenizer.get_vocab().values()) + 1)
    if token_type(vocab) != token_type(text.vocab):
        raise DataError(f"{text.vocab:,} tokens leave no room for {len(missing)} marks", "use a few tokens fewer")
    facts = {**text.facts, "tokenizer": {**text.facts["tokenizer"], "vocab": vocab}}
    tokenizer.save_pretrained(text.folder / TOKENIZER)
    write_whole(text.folder / FACTS, json.dumps(facts, indent=2))
    return load_prepared(text.folder)


@dataclass(frozen=True)
class Marks:
    """Tokens that stand for no text, and what the others read as."""

    cls: int
    sep: int
    mask: int
    pad: int
    vocabulary: Vocabulary
    ordinary: Ints  # tokens that may replace a masked one

    @classmethod
    def of(cls, text: PreparedText) -> Marks:
        """Read those of a marked text."""
        return cls.read(text.tokenizer(), text.vocab)

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerFast, vocab: int) -> Marks:
        """Read those of a tokenizer that has them, for a table of `vocab` rows."""
        vocabulary = Vocabulary.of(tokenizer, vocab)
        cls_, sep, mask_, pad = (getattr(tokenizer, f"{name}_id") for name in MARKS)
        ordinary = np.array([i for i, piece in enumerate(vocabulary.pieces) if piece], np.int64)
        return cls(cls_, sep, mask_, pad, vocabulary, ordinary)


def split_sentences(text: PreparedText, split: str, most: int | None = None) -> Sentences:
    """Find the sentences of a split, or of its first `most` tokens."""
    vocabulary = Vocabulary.of(text.tokenizer(), text.vocab)
    return find_sentences(np.asarray(text.split(split)[:most]), vocabulary, text.eos_id)


class PairRows(Dataset):
    """`{"input_ids", "token_type_ids", "attention_mask", "labels": int64[T], "pair_labels": int64[]}`, one per row.

    `count` rows in all, where the epochs follow each other; one epoch unless given. `seed` is of every draw.

    Raises:
        DataError: a text that makes no pairs.
    """

    def __init__(
        self,
        sentences: Sentences,
        marks: Marks,
        packing: Packing,
        masking: Masking,
        *,
        seed: int,
        count: int | None = None,
    ) -> None:
        self.sentences, self.marks, self.packing, self.masking, self.seed = sentences, marks, packing, masking, seed
        self._epochs: list[int] = [0]  # first row of each epoch known so far
        self._pairs: tuple[int, SentencePairs] = (0, self._make(0))
        self._epochs.append(len(self._pairs[1]))
        self.count = self._epochs[1] if count is None else count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        draw = _draw(self.seed, 1, index)
        a, b, label = self._pair(index, draw)
        m, t = self.marks, self.packing.length
        ids = np.concatenate([[m.cls], a, [m.sep], b, [m.sep]])
        # each token's word, numbered; marks have none, and no run spans both segments
        starts = m.vocabulary.word_starts if self.masking.whole_words else np.ones_like
        in_a = np.cumsum(starts(a)) - 1
        in_b = np.cumsum(starts(b)) + in_a[-1] + 1
        chosen = choose(np.concatenate([[-1], in_a, [-1], in_b, [-1]]), self.masking, draw)
        inputs, labels = mask(ids, chosen, m.mask, m.ordinary, self.masking, draw)
        size = len(ids)
        row = {"input_ids": np.full(t, m.pad), "labels": np.full(t, IGNORED), "token_type_ids": np.zeros(t, np.int64)}
        row["input_ids"][:size], row["labels"][:size] = inputs, labels
        row["token_type_ids"][len(a) + 2 : size] = 1
        found = {name: torch.from_numpy(value) for name, value in row.items()}
        found["attention_mask"] = (torch.arange(t) < size).long()
        if label is not None:
            found["pair_labels"] = torch.tensor(label)
        return found

    def pair(self, index: int) -> tuple[Ints, Ints, int | None]:
        """(A, B, label) of a row before it is masked; the label is None where there is no objective."""
        return self._pair(index, _draw(self.seed, 1, index))

    def _pair(self, index: int, draw: np.random.Generator) -> tuple[Ints, Ints, int | None]:
        while self._epochs[-1] <= index:
            epoch = len(self._epochs) - 1
            self._pairs = (epoch, self._make(epoch))
            self._epochs.append(self._epochs[-1] + len(self._pairs[1]))
        epoch = int(np.searchsorted(self._epochs, index, side="right")) - 1
        if self._pairs[0] != epoch:
            self._pairs = (epoch, self._make(epoch))
        pairs, place = self._pairs[1], index - self._epochs[epoch]
        label = int(pairs.label[place]) if self.packing.objective != "none" else None
        a, b = segments(self.sentences, pairs, place, self.packing, draw)
        for segment in (a, b):  # as it would begin within a text, wherever it was found
            segment[0] = self.marks.vocabulary.spaced[segment[0]]
        return a, b, label

    @cached_property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch; the others have about as many."""
        return self._epochs[1]

    def _make(self, epoch: int) -> SentencePairs:
        return make_pairs(self.sentences, self.packing, _draw(self.seed, 0, epoch))


def _draw(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(key)))
