"""Blocks of tokens for training, and what the training tokens say: how frequent each is, which pairs are one-way.

`Blocks` cuts a stream of tokens into contiguous pieces of equal length; the rest at its end is left out. The counts are
of the training split: whether a token is rare is a matter of what the model saw.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tiewise.core.errors import DataError

_CHUNK = 1 << 22  # tokens counted at once
_PAIRED = 2000  # tokens of which pairs are counted: 2,000² counts take 32 MB


class Blocks(Dataset):
    """`{"input_ids": int64[length], "labels": int64[length]}` for every block; labels are the inputs, not shifted.

    Args:
        tokens: one-dimensional token ids, also memory-mapped; these are opened again by each worker, not copied.
        length: T, the tokens of a block.

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


def token_counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Return how often each token occurs, int64[V], from `tokens` of any size.

    Raises:
        DataError: where a token is outside the vocabulary.
    """
    counts = np.zeros(vocab, np.int64)
    for start in range(0, len(tokens), _CHUNK):
        found = np.bincount(tokens[start : start + _CHUNK], minlength=vocab)
        if len(found) > vocab:
            raise DataError(f"token {len(found) - 1} in a vocabulary of {vocab}", "prepare the text again")
        counts += found
    return counts


@dataclass(frozen=True)
class Bigram:
    """Two tokens that follow each other one way more than the other.

    `forward` counts left-right, `backward` right-left; `p_forward` = p(next is right | left) and
    `p_backward` = p(next is left | right) are the two cells of the bigram table that a symmetric direct path,
    W_U after a tied W_E, cannot tell apart.
    """

    left: int
    right: int
    forward: int
    backward: int
    p_forward: float
    p_backward: float


def asymmetric_bigrams(
    tokens: np.ndarray, vocab: int, top: int = 12, minimum: int | None = None, eos_id: int | None = None
) -> list[Bigram]:
    """Return the `top` adjacent pairs with the largest p_forward − p_backward, largest first.

    Only the 2,000 most frequent tokens are paired, and only pairs that occur `minimum` times (once in 5,000 tokens and
    5 times, unless given); a token is not paired with itself, nor with `eos_id`, across which nothing follows.
    """
    minimum = max(5, len(tokens) // 5000) if minimum is None else minimum
    counts = token_counts(tokens, vocab)
    ranked = np.argsort(-counts, kind="stable")
    frequent = ranked[(ranked != (-1 if eos_id is None else eos_id)) & (counts[ranked] > 0)][:_PAIRED]
    pairs = _pair_counts(tokens, frequent, vocab)
    rates = pairs / counts[frequent][:, None]
    gain = np.where(pairs >= minimum, rates - rates.T, 0.0)
    best = np.argsort(-gain, axis=None, kind="stable")[:top]
    found = []
    for left, right in zip(*np.unravel_index(best, gain.shape), strict=True):
        if gain[left, right] > 0:
            ids = (int(frequent[left]), int(frequent[right]))
            both = (int(pairs[left, right]), int(pairs[right, left]))
            found.append(Bigram(*ids, *both, float(rates[left, right]), float(rates[right, left])))
    return found


def _pair_counts(tokens: np.ndarray, frequent: np.ndarray, vocab: int) -> np.ndarray:
    """Return how often frequent[i] is followed by frequent[j], int64[K, K]."""
    size = len(frequent)
    place = np.full(vocab, -1, np.int64)
    place[frequent] = np.arange(size)
    pairs = np.zeros(size * size, np.int64)
    for start in range(0, len(tokens) - 1, _CHUNK):
        places = place[tokens[start : start + _CHUNK + 1]]
        left, right = places[:-1], places[1:]
        known = (left >= 0) & (right >= 0)
        pairs += np.bincount(left[known] * size + right[known], minlength=size * size)
    return pairs.reshape(size, size)
