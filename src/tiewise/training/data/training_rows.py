"""Rows that an ALBERT is trained on: pairs of segments with masked tokens, drawn anew in every epoch.

    text = mark(prepare(...))                      # the tokenizer gets [CLS], [SEP], [MASK] and [PAD] where it has none
    rows = PairRows(split_sentences(text, "train"), Packing(), Masking(), seed=1, count=100_000)
    rows[0]["input_ids"], rows[0]["labels"], rows[0]["pair_labels"]

Row i is a function of the seed and i alone: an interrupted run goes on with the rows that it would have had.

Masked are whole words in runs of up to three, replaced in the input, and predicted:

    runs of n words with p(n) ∝ 1/n, n ≤ 3        ALBERT, arXiv:1909.11942 §4.1 (from SpanBERT, arXiv:1907.10529)
    until 15 % of the tokens are chosen; of these  80 % become [MASK], 10 % another token at random, 10 % stay

A run ends early where a segment does, and is shortened where all of it would be more than is left to choose.
"""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer

from tiewise.core.errors import DataError
from tiewise.core.files import write_atomically
from tiewise.core.records import require
from tiewise.training.data.corpus import FACTS, TOKENIZER, PreparedText, load_prepared, token_type
from tiewise.training.data.sentence_pairs import (
    MARKS,
    Packing,
    Sentences,
    Vocabulary,
    find_sentences,
    make_pairs,
    segments,
)

Ints = NDArray[np.int64]
Draw = np.random.Generator
IGNORED = -100


def add_marks(text: PreparedText, marks: Mapping[str, str] = MARKS, more: Sequence[str] = ()) -> PreparedText:
    """Give a prepared text's tokenizer the marks that it lacks, as new tokens behind all others, on disk.

    `marks` are by transformers' names for them; `more` have none.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(text.folder / TOKENIZER), local_files_only=True)
    vocabulary = tokenizer.get_vocab()
    missing = {name: piece for name, piece in marks.items() if getattr(tokenizer, name) is None}
    unknown = [piece for piece in more if piece not in vocabulary]
    if not missing and not unknown:
        return text
    tokenizer.add_special_tokens(missing)
    tokenizer.add_tokens(unknown, special_tokens=True)
    vocab = max(text.vocab, max(tokenizer.get_vocab().values()) + 1)
    if token_type(vocab) != token_type(text.vocab):
        problem = f"{text.vocab:,} tokens leave no room for {len(missing) + len(unknown)} marks"
        raise DataError(problem, "use a few tokens fewer")
    facts = {**text.facts, "tokenizer": {**text.facts["tokenizer"], "vocab": vocab}}
    tokenizer.save_pretrained(text.folder / TOKENIZER)
    write_atomically(text.folder / FACTS, json.dumps(facts, indent=2))
    return load_prepared(text.folder)


def split_sentences(text: PreparedText, split: str, most: int | None = None) -> Sentences:
    """Find the sentences of a split, or of its first `most` tokens."""
    vocabulary = Vocabulary.of(text.tokenizer, text.vocab)
    return find_sentences(np.asarray(text.split(split)[:most]), vocabulary, text.eos_id)


@dataclass(frozen=True)
class Masking:
    """How tokens are masked."""

    share: float = 0.15  # of a sequence's tokens that are predicted
    longest: int = 3  # words of the longest run
    masked: float = 0.8  # of the chosen tokens, the share that becomes the mask
    random: float = 0.1  # the share that becomes a token at random; the rest stays
    whole_words: bool = True  # False masks tokens, not words

    def __post_init__(self) -> None:
        require(self, "share masked random", lambda share: 0 <= share <= 1, "use a share from 0 to 1", DataError)
        require(self, "longest", lambda words: words >= 1, "use 1 or more", DataError)
        if self.share == 0:
            raise DataError("nothing is masked", "use a share above 0")
        if self.masked + self.random > 1 + 1e-12:
            raise DataError(f"{self.masked} masked and {self.random} at random", "the two shares are of one whole")

    @property
    def lengths(self) -> NDArray[np.float64]:
        """p(n) of a run of n words, n = 1 … longest."""
        weights = 1 / np.arange(1, self.longest + 1)
        return np.asarray(weights / weights.sum())


def choose_masked(words: Ints, options: Masking, draw: Draw) -> NDArray[np.bool_]:
    """Choose the tokens of a sequence that are to be predicted, bool [T].

    `words` are the numbers of each token's word [T], not falling; −1 for tokens that are never chosen. A run of words
    goes on only where their numbers do: leave a number out to end it. Chosen are as many tokens as `options.share` of
    those that may be, one or more, less what no whole word fits in; where not one word fits, the beginning of one.
    """
    chosen = np.zeros(len(words), bool)
    numbers, begins, sizes = _words_to_choose(words)
    order = draw.permutation(len(numbers)).tolist()
    runs = (1 + draw.choice(options.longest, len(numbers), p=options.lengths)).tolist()
    if not numbers:
        return chosen
    left = max(1, round(options.share * sum(sizes)))
    for first, run in zip(order, runs, strict=True):
        for i in range(first, min(first + run, len(numbers))):
            follows = numbers[i] == numbers[first] + i - first
            is_free = sizes[i] <= left and not chosen[begins[i]]
            if not follows or not is_free:
                break
            left -= sizes[i]
            chosen[begins[i] : begins[i] + sizes[i]] = True
        if left <= 0:
            break
    if not chosen.any():
        begin = begins[order[0]]
        chosen[begin : begin + left] = True
    return chosen


def _words_to_choose(words: Ints) -> tuple[list[int], list[int], list[int]]:
    """Return (number, first token, tokens) of every word that may be chosen, in order."""
    numbers, begins, sizes = np.unique(words, return_index=True, return_counts=True)
    may_be_chosen = numbers >= 0
    return numbers[may_be_chosen].tolist(), begins[may_be_chosen].tolist(), sizes[may_be_chosen].tolist()


def apply_mask(
    ids: Ints, chosen: NDArray[np.bool_], mask_id: int, ordinary: int | Ints, options: Masking, draw: Draw
) -> tuple[Ints, Ints]:
    """Replace the `chosen` of tokens [T], each by a separate draw; one at random is of `ordinary`, or below it.

    Return inputs [T], and labels [T]: the tokens that were there where they were chosen, −100 elsewhere.
    """
    inputs, count = ids.copy(), int(chosen.sum())
    fate = draw.random(count)
    if isinstance(ordinary, int):
        others = draw.integers(ordinary, size=count)
    else:
        others = draw.choice(ordinary, count)
    unmasked = np.where(fate < options.masked + options.random, others, ids[chosen])
    inputs[chosen] = np.where(fate < options.masked, mask_id, unmasked)
    return inputs, np.where(chosen, ids, IGNORED)


class PairRows(Dataset[dict[str, Tensor]]):
    """`{"input_ids", "token_type_ids", "attention_mask", "labels": int64[T], "pair_labels": int64[]}`, one per row.

    `count` rows in all, where the epochs follow each other; one epoch unless given. `seed` is of every draw.
    """

    def __init__(
        self, sentences: Sentences, packing: Packing, masking: Masking, *, seed: int, count: int | None = None
    ) -> None:
        self.sentences, self.packing, self.masking, self.seed = sentences, packing, masking, seed
        self._begins = [0]  # first row of each epoch so far, and of the next
        self._turn_to(0)
        self.count = self.rows_per_epoch if count is None else count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        draw = _draw(self.seed, 1, index)
        a, b, label = self.pair(index, draw)
        vocabulary = self.sentences.vocabulary
        cls, sep, masked, pad = vocabulary.marks
        ids = np.concatenate([[cls], a, [sep], b, [sep]])
        chosen = choose_masked(self._word_numbers(a, b), self.masking, draw)
        inputs, labels = apply_mask(ids, chosen, masked, vocabulary.ordinary, self.masking, draw)
        position = np.arange(self.packing.length)
        is_token = position < len(ids)
        padding = (0, self.packing.length - len(ids))
        arrays = {
            "input_ids": np.pad(inputs, padding, constant_values=pad),
            "attention_mask": is_token,
            "labels": np.pad(labels, padding, constant_values=IGNORED),
            "token_type_ids": is_token & (position > len(a) + 1),
        }
        row = {name: torch.from_numpy(array).long() for name, array in arrays.items()}
        if label is not None:
            row["pair_labels"] = torch.tensor(label)
        return row

    def _word_numbers(self, a: Ints, b: Ints) -> Ints:
        """Number each token's word, or each token; marks have −1, and no run spans both segments."""
        starts = self.sentences.vocabulary.word_starts if self.masking.whole_words else np.ones_like
        in_a = np.cumsum(starts(a)) - 1
        in_b = np.cumsum(starts(b)) + in_a[-1] + 1
        return np.concatenate([[-1], in_a, [-1], in_b, [-1]])

    def pair(self, index: int, draw: Draw | None = None) -> tuple[Ints, Ints, int | None]:
        """Return (A, B, label) of a row before it is masked; the label is None where there is no objective."""
        if draw is None:
            draw = _draw(self.seed, 1, index)
        while self._begins[-1] <= index:
            self._turn_to(len(self._begins) - 1)
        epoch = bisect(self._begins, index) - 1
        if self._epoch != epoch:
            self._turn_to(epoch)
        pair = self._pairs[index - self._begins[epoch]]
        a, b = segments(self.sentences, pair, self.packing, draw)
        for segment in (a, b):  # as it would begin within a text, wherever it was in one
            segment[0] = self.sentences.vocabulary.spaced[segment[0]]
        if self.packing.objective == "none":
            return a, b, None
        return a, b, int(pair[3])

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch; the others have about as many."""
        return self._begins[1]

    def _turn_to(self, epoch: int) -> None:
        """Pack the rows of an epoch, and note where the next one begins."""
        self._epoch, self._pairs = epoch, make_pairs(self.sentences, self.packing, _draw(self.seed, 0, epoch))
        if epoch == len(self._begins) - 1:
            self._begins.append(self._begins[-1] + len(self._pairs))


def _draw(*key: int) -> Draw:
    return Draw(np.random.PCG64(list(key)))
