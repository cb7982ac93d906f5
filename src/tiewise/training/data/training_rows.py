"""Training rows of an ALBERT: pairs of segments with masked tokens, drawn for every epoch.

    text = add_marks(prepare(...))                 # adds [CLS], [SEP], [MASK] and [PAD] to a tokenizer that lacks them
    rows = PairRows(split_sentences(text, "train"), Packing(), Masking(), seed=1, count=100_000)
    rows[0]["input_ids"], rows[0]["labels"], rows[0]["pair_labels"]

Row i depends only on the seed and i, so a resumed run continues with the same rows.

Whole words in runs of up to three are masked, replaced in the input, and predicted:

    runs of n words with p(n) ∝ 1/n, n ≤ 3        ALBERT, arXiv:1909.11942 §4.1 (from SpanBERT, arXiv:1907.10529)
    until 15 % of the tokens are chosen; of these  80 % become [MASK], 10 % another token at random, 10 % stay

A run ends at the end of a segment, and it is shortened if it has more tokens than are left to choose.
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
    """Add the marks that a prepared text's tokenizer lacks, as new last tokens, on disk.

    `marks` are by transformers' names for them; `more` are tokens without such a name.
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
    """Rules for masking tokens."""

    share: float = 0.15  # share of a sequence's tokens that are predicted
    longest: int = 3  # words of the longest run
    masked: float = 0.8  # share of the chosen tokens that becomes the mask
    random: float = 0.1  # share of them that becomes a random token; the rest stays
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
        """Probabilities p(n) of a run of n words, n = 1 … longest."""
        weights = 1 / np.arange(1, self.longest + 1)
        return np.asarray(weights / weights.sum())


def choose_masked(words: Ints, options: Masking, draw: Draw) -> NDArray[np.bool_]:
    """Choose the tokens of a sequence to predict, bool [T].

    `words` are the numbers of each token's word [T], not falling; −1 marks tokens that are never chosen. A run of words
    continues only if their numbers do: leave a number out to end it. The choice has `options.share` of the tokens that
    may be chosen, one or more, less the rest in which no complete word fits. If no word fits at all, the beginning of
    one is chosen.
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
    """Replace the `chosen` of tokens [T], each by a separate draw.

    A random token is one of `ordinary`, or below it if it is a number. Return inputs [T] and labels [T]: the replaced
    tokens, and −100 elsewhere.
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
    """Rows of masked pairs as a dataset.

    Each is `{"input_ids", "token_type_ids", "attention_mask", "labels": int64[T], "pair_labels": int64[]}`. `count` is
    the total number of rows over all epochs, by default one epoch. `seed` determines every draw.
    """

    def __init__(
        self, sentences: Sentences, packing: Packing, masking: Masking, *, seed: int, count: int | None = None
    ) -> None:
        self.sentences, self.packing, self.masking, self.seed = sentences, packing, masking, seed
        self._begins = [0]  # first row of each epoch drawn so far, and of the next one
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
        """Return the number of each token's word, or of each token.

        Marks have −1. No number continues from one segment to the other, so no run spans both.
        """
        starts = self.sentences.vocabulary.word_starts if self.masking.whole_words else np.ones_like
        in_a = np.cumsum(starts(a)) - 1
        in_b = np.cumsum(starts(b)) + in_a[-1] + 1
        return np.concatenate([[-1], in_a, [-1], in_b, [-1]])

    def pair(self, index: int, draw: Draw | None = None) -> tuple[Ints, Ints, int | None]:
        """Return (A, B, label) of a row before masking; label None without an objective."""
        if draw is None:
            draw = _draw(self.seed, 1, index)
        while self._begins[-1] <= index:
            self._turn_to(len(self._begins) - 1)
        epoch = bisect(self._begins, index) - 1
        if self._epoch != epoch:
            self._turn_to(epoch)
        pair = self._pairs[index - self._begins[epoch]]
        a, b = segments(self.sentences, pair, self.packing, draw)
        for segment in (a, b):  # starts with the spaced token, as within a text
            segment[0] = self.sentences.vocabulary.spaced[segment[0]]
        if self.packing.objective == "none":
            return a, b, None
        return a, b, int(pair[3])

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the first epoch; the others have about as many."""
        return self._begins[1]

    def _turn_to(self, epoch: int) -> None:
        """Pack the rows of an epoch, and note the first row of the next one."""
        self._epoch, self._pairs = epoch, make_pairs(self.sentences, self.packing, _draw(self.seed, 0, epoch))
        if epoch == len(self._begins) - 1:
            self._begins.append(self._begins[-1] + len(self._pairs))


def _draw(*key: int) -> Draw:
    return Draw(np.random.PCG64(list(key)))
