"""A corpus as parallel streams, cut into steps for truncated back-propagation.

    stream b of B:  x_0 x_1 … x_{n−1}        step reads x_i … x_{i+t−1} and predicts x_{i+1} … x_{i+t}

Training leaves out the last words that do not fill a stream. Every epoch starts at the beginning, without a state, and
its last step may be shorter. A run is one list of steps, so a resumed run can continue at its step.

A split is measured in one pass as in the papers: the state is carried from beginning to end, and `<eos>` counts as a
word. For speed it is measured in a few streams at a time. Each starts without a state. Every word but the first of the
split is predicted once, the first word of a stream from the word before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from tiewise.boundary.installation import Installed
from tiewise.core.errors import DataError
from tiewise.training.document_losses import TextUnits
from tiewise.training.measures import MeasuredSplit, evaluating, measure_by_frequency

_SHORTEST = 5  # words of a step of varied length
_SPREAD = 5.0  # standard deviation of a varied length, in words
_HALVED = 0.05  # probability that a length is drawn around half of `length`
AT_ONCE = 4096  # words of a forward pass that measures
_IGNORED = -100


@lru_cache(8)  # a run calls it several times
def cut_steps(room: int, length: int, epochs: int, vary: int | None = None) -> np.ndarray:
    """Return the steps of a run over streams with `room` words to predict.

    The rows of the result [3, steps] are the first position, the words that each stream predicts, and the epoch from 0.
    If `vary`, a seed, is given, every step draws its length as AWD-LSTM does: normal around `length`, and around half
    of it in one case of twenty.
    """
    draw = None
    if vary is not None:
        draw = np.random.Generator(np.random.PCG64(vary))
    steps: list[tuple[int, int, int]] = []
    for epoch in range(epochs):
        start = 0
        while start < room:
            step = length if draw is None else _draw_length(length, draw)
            steps.append((start, min(step, room - start), epoch))
            start += step
    return np.array(steps).T


def _draw_length(length: int, draw: np.random.Generator) -> int:
    """Draw the length of a step."""
    mean = length / 2 if draw.random() < _HALVED else length
    return max(_SHORTEST, int(draw.normal(mean, _SPREAD)))


class Steps(Dataset[dict[str, Tensor]]):
    """All steps of a run, in order: `tokens` [N] in `batch` streams, at most `most` steps.

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
            problem = f"the training text has {len(tokens):,} words, too few for {batch} streams"
            raise DataError(problem, "give more text, or --set batch to a smaller number")
        self.starts, self.lengths, self.epochs = cut_steps(room, length, epochs, vary)[:, :most]
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
        """Return whether a step is the last of its epoch in this run."""
        return step + 1 == len(self) or bool(self.epochs[step + 1] != self.epochs[step])

    def words(self) -> np.ndarray:
        """Return the number of words predicted up to and including each step [steps]."""
        return np.cumsum(self.lengths) * len(self.streams)


@torch.no_grad()
def measure_streams(
    installed: Installed,
    tokens: np.ndarray,
    counts: np.ndarray,
    parallel: int,
    most: int | None = None,
    at_once: int = AT_ONCE,
    units: TextUnits | None = None,
) -> MeasuredSplit:
    """Evaluate a split [N], or its first `most` words, in `parallel` streams.

    `counts` [V] are training counts. A forward pass reads about `at_once` words. With the `units` of the split, losses
    are also summed by them.
    """
    inputs, targets = split_into_streams(np.asarray(tokens[:most]), parallel)
    length = max(1, at_once // len(inputs))
    if units is not None:
        units = TextUnits(units.name, _as_measured(units.of_token[:most], parallel, length))
    with evaluating(installed.model), installed.deferred():
        return measure_by_frequency(_stream_losses(installed, inputs, targets, length), counts, units)


def _as_measured(values: np.ndarray, parallel: int, length: int) -> np.ndarray:
    """Return values [N] of a split's words in the order in which `_stream_losses` yields their losses."""
    _, of_targets = split_into_streams(values, parallel)
    measured = torch.cat([piece.reshape(-1) for piece in torch.split(of_targets, length, 1)])
    return measured[measured != _IGNORED].numpy()


def _stream_losses(
    installed: Installed, inputs: Tensor, targets: Tensor, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (losses, targets) [n] of streams [streams, n], `length` positions at a time.

    The state is carried from piece to piece.
    """
    device = installed.tables()[0].device
    state: object = None
    for read, following in zip(torch.split(inputs, length, 1), torch.split(targets, length, 1), strict=True):
        output = installed.model(input_ids=read.to(device), state=state)
        state, following = output.state, following.reshape(-1).to(device)
        is_word = following != _IGNORED
        logits = output.logits.reshape(-1, output.logits.shape[-1])
        losses = F.cross_entropy(logits, following, reduction="none", ignore_index=_IGNORED)
        yield losses[is_word], following[is_word]


def split_into_streams(tokens: np.ndarray, parallel: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets) [streams, n] of a split.

    Each word but the first is a target once; targets of padding are ignored.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))
    predicted = len(ids) - 1
    streams = max(1, min(parallel, predicted))
    each = -(-predicted // streams)
    padding = streams * each - predicted
    inputs = F.pad(ids[:-1], (0, padding)).view(streams, each)
    return inputs, F.pad(ids[1:], (0, padding), value=_IGNORED).view(streams, each)
