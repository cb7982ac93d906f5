"""Contiguous streams for truncated back-propagation: the corpus in B equal pieces, read side by side, T words a step.

    stream b of B:  x_0 x_1 … x_{n−1}        step reads x_i … x_{i+t−1} and predicts x_{i+1} … x_{i+t}

The last words that do not fill a stream are left out. Every epoch begins at the beginning, with no state; the last step
of an epoch is as long as what is left. A whole run is one list of steps, so that a resumed run finds its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tiewise.core.errors import DataError

_SHORTEST = 5  # words of a step of varied length
_SPREAD = 5.0  # its standard deviation
_HALVED = 0.05  # how often it is drawn around half the length


@dataclass(frozen=True)
class Plan:
    """Every step of a run, in order.

    Attributes:
        starts: first position of each step in its streams [steps].
        lengths: words that it predicts in each stream [steps].
        epochs: its epoch, from 0 [steps].
    """

    starts: np.ndarray
    lengths: np.ndarray
    epochs: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def ends_epoch(self, step: int) -> bool:
        """Whether a step is the last of its epoch in this run."""
        return step + 1 == len(self) or self.epochs[step + 1] != self.epochs[step]

    def words(self, batch: int) -> np.ndarray:
        """Words that were predicted up to and with each step [steps]."""
        return np.cumsum(self.lengths) * batch


def plan(tokens: int, batch: int, length: int, epochs: int, *, vary: int | None = None) -> Plan:
    """Cut `tokens` words in `batch` streams into steps of `length`, `epochs` times.

    Args:
        tokens: N of the training split.
        batch: B.
        length: T.
        epochs: passes over the text.
        vary: seed of lengths drawn anew for every step, as AWD-LSTM does (normal around T, around T/2 once in twenty);
            None: all alike.

    Raises:
        DataError: streams of fewer than two words.
    """
    room = tokens // batch - 1
    if room < 1:
        what = f"the training text has {tokens:,} words, too few for {batch} streams"
        raise DataError(what, "give more text, or --set batch to a smaller number")
    draw = None if vary is None else np.random.Generator(np.random.PCG64(vary))
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for epoch in range(epochs):
        if draw is not None or epoch == 0:
            lengths = _lengths(room, length, draw)
        starts = np.cumsum(lengths) - lengths
        parts.append((starts, lengths))
    numbers = np.repeat(np.arange(epochs), [len(starts) for starts, _ in parts])
    return Plan(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), numbers)


def cut(whole: Plan, steps: int) -> Plan:
    """Return the first `steps` steps of a plan."""
    return Plan(whole.starts[:steps], whole.lengths[:steps], whole.epochs[:steps])


def _lengths(room: int, length: int, draw: np.random.Generator | None) -> np.ndarray:
    if draw is None:
        whole, rest = divmod(room, length)
        return np.array([length] * whole + [rest] * (rest > 0), np.int64)
    found: list[int] = []
    while room > 0:
        around = length / 2 if draw.random() < _HALVED else length
        found.append(min(room, max(_SHORTEST, int(draw.normal(around, _SPREAD)))))
        room -= found[-1]
    return np.array(found, np.int64)


class Steps(Dataset):
    """`{"input_ids": int64[B, t], "labels": int64[B, t], "begins": bool[]}` of every step; labels are the next words.

    Args:
        tokens: the training split, also memory-mapped.
        batch: B.
        plan: the run's steps.
    """

    def __init__(self, tokens: np.ndarray, batch: int, plan: Plan) -> None:
        self.streams = tokens[: len(tokens) // batch * batch].reshape(batch, -1)
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        start, length = int(self.plan.starts[step]), int(self.plan.lengths[step])
        rows = torch.from_numpy(self.streams[:, start : start + length + 1].astype(np.int64))
        return {
            "input_ids": rows[:, :-1].contiguous(),
            "labels": rows[:, 1:].contiguous(),
            "begins": torch.tensor(start == 0),
        }


def one_step(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate: a step is a batch already."""
    (item,) = items
    return item
