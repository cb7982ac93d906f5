"""A corpus as parallel streams: cut into steps for truncated back-propagation, and measured in one pass.

    stream b of B:  x_0 x_1 … x_{n−1}        step reads x_i … x_{i+t−1} and predicts x_{i+1} … x_{i+t}

The last words that do not fill a stream are left out of training. Every epoch begins at the beginning, with no state;
its last step is as long as what is left. A whole run is one list of steps, so that a resumed run finds its place.

A split is measured as the papers do: the state carried from end to end, `<eos>` a word too, in a few streams side by
side for speed. Each has no state where it begins, and each word but the first is predicted once, the first word of a
stream from the word before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from tiewise.boundary.install import Installed
from tiewise.core.errors import DataError
from tiewise.training.run import MeasuredSplit, evaluating, measured

_SHORTEST = 5  # words of a step of varied length
_SPREAD = 5.0  # its standard deviation
_HALVED = 0.05  # how often it is drawn around half the length
AT_ONCE = 4096  # words of a forward pass that measures
_IGNORED = -100


@lru_cache(8)  # a run asks several times
def cut(room: int, length: int, epochs: int, vary: int | None = None) -> np.ndarray:
    """(first position, words that each stream predicts, epoch from 0) [3, steps] of streams with `room` such words.

    `vary` is the seed of lengths drawn anew for every step, as AWD-LSTM does: normal around `length`, around half of it
    once in twenty.
    """
    draw = None if vary is None else np.random.Generator(np.random.PCG64(vary))
    found: list[tuple[int, int, int]] = []
    for epoch in range(epochs):
        start = 0
        while start < room:
            step = length
            if draw is not None:
                around = length / 2 if draw.random() < _HALVED else length
                step = max(_SHORTEST, int(draw.normal(around, _SPREAD)))
            found.append((start, min(step, room - start), epoch))
            start += step
    return np.array(found).T


class Steps(Dataset):
    """Every step of a run, in order: `tokens` [N] in `batch` streams, `cut` over and over, at most the first `most`.

    Each is `{"input_ids": int64[B, t], "labels": int64[B, t], "begins": bool[]}`; labels are the next words.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch: int,
        length: int,
        epochs: int,
        *,
        vary: int | None = None,
        most: int | None = None,
    ) -> None:
        room = len(tokens) // batch - 1
        if room < 1:
            what = f"the training text has {len(tokens):,} words, too few for {batch} streams"
            raise DataError(what, "give more text, or --set batch to a smaller number")
        self.starts, self.lengths, self.epochs = cut(room, length, epochs, vary)[:, :most]
        self.streams = tokens[: len(tokens) // batch * batch].reshape(batch, -1)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        start, length = int(self.starts[step]), int(self.lengths[step])
        rows = torch.from_numpy(self.streams[:, start : start + length + 1].astype(np.int64))
        read, following = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return {"input_ids": read, "labels": following, "begins": torch.tensor(start == 0)}

    def ends_epoch(self, step: int) -> bool:
        """Whether a step is the last of its epoch in this run."""
        return step + 1 == len(self) or self.epochs[step + 1] != self.epochs[step]

    def words(self) -> np.ndarray:
        """Words that were predicted up to and with each step [steps]."""
        return np.cumsum(self.lengths) * len(self.streams)


@torch.no_grad()
def measure_streams(
    installed: Installed,
    tokens: np.ndarray,
    counts: np.ndarray,
    parallel: int,
    most: int | None = None,
    at_once: int = AT_ONCE,
) -> MeasuredSplit:
    """Evaluate a split [N], or its first `most` words, as `parallel` streams.

    `counts` [V] are those in training. A forward pass has about `at_once` words.
    """
    inputs, targets = side_by_side(np.asarray(tokens[:most]), parallel)
    device, length = installed.tables()[0].device, max(1, at_once // len(inputs))

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        state: object = None
        for read, wanted in zip(inputs.split(length, 1), targets.split(length, 1), strict=True):
            output = installed.model(input_ids=read.to(device), state=state)
            state, wanted = output.state, wanted.reshape(-1).to(device)
            known = wanted != _IGNORED
            logits = output.logits.reshape(-1, output.logits.shape[-1])
            yield F.cross_entropy(logits, wanted, reduction="none", ignore_index=_IGNORED)[known], wanted[known]

    with evaluating(installed.model), installed.deferred():
        return measured(pieces(), counts)


def side_by_side(tokens: np.ndarray, parallel: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) [streams, n] of a split: every word but the first is a target once; padding is ignored."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    predicted = len(ids) - 1
    streams = max(1, min(parallel, predicted))
    each = -(-predicted // streams)
    padding = streams * each - predicted
    inputs = F.pad(ids[:-1], (0, padding)).view(streams, each)
    return inputs, F.pad(ids[1:], (0, padding), value=_IGNORED).view(streams, each)
