"""What a model that repeats one block of layers predicts if the block is applied more or less often than in training.

    found = application_sweep(open_model("checkpoint"), ids)       # a text in the model's tokens [N]
    found.course[11].nll       # nll of the text after 12 applications, with its interval over windows
    found.course[11].more      # the same less the nll after as many as in training, window by window
    found.unigram              # nll of the same tokens by their frequencies in the text alone

The model's own masks, positions, norms and head are used throughout: after as many applications as in training, the
nll is the model's own. A model applied less often is the same one cut off. See docs/refinement.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tiewise.analysis.estimates import Estimate, mean_interval
from tiewise.core.progress import progress
from tiewise.data.blocks import token_counts
from tiewise.data.windows import Ids
from tiewise.internals.applications import Call, Repeat, applied, one_block
from tiewise.internals.asked import Asked, questions
from tiewise.internals.iteration import relative
from tiewise.internals.loaded import Opened
from tiewise.internals.stack import Stack, find_stack
from tiewise.internals.translators import chunks
from tiewise.training.results import to_record

MOST = 24


@dataclass(frozen=True)
class Applied:
    """The block applied `times` times; estimates are over windows, None where a window gave no number.

    Args:
        times: n.
        nll: nats per predicted token; each window counts alike.
        more: nll less that of the same window after as many applications as in training.
        change: ‖h_n − h_{n−1}‖ / ‖h_{n−1}‖ of the states before and after the n-th application.
    """

    times: int
    nll: Estimate | None
    more: Estimate | None
    change: Estimate | None


@dataclass(frozen=True)
class Sweep:
    """A block applied from once to 24 times, or to as often as the model applies it.

    Args:
        objective: what is predicted, as `asked` names it: the next token, or hidden ones.
        predicted: tokens that are.
        windows: windows of text they stand in.
        layers: layers in the block.
        trained: how often the model applies it.
        parameters: of the whole model, each counted once.
        separate: of the same model if every application had parameters of its own.
        unigram: nll of the predicted tokens by their frequencies in the whole text, one added to each count.
        course: n = 1, 2, ….
    """

    objective: str
    predicted: int
    windows: int
    layers: int
    trained: int
    parameters: int
    separate: int
    unigram: Estimate
    course: tuple[Applied, ...]

    @property
    def own(self) -> Applied:
        """As the model was trained."""
        return self.course[self.trained - 1]

    @property
    def best(self) -> Applied:
        """Where the nll is lowest; the model's own where no other is lower, or none is a number."""
        own_first = [self.own, *self.course]
        return min(own_first, key=lambda one: math.inf if one.nll is None else one.nll.value)

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return to_record(self)


def application_sweep(opened: Opened, ids: Ids, length: int = 128, count: int = 64, seed: int = 0) -> Sweep:
    """Apply a model's one repeated block 1, 2, … 24 times and measure the nll of a text each time.

    Args:
        opened: the model.
        ids: the text in the model's tokens [N].
        length: tokens of a window, or as many as the model has positions.
        count: most windows; one gives no intervals.
        seed: of which tokens are hidden, where the model predicts hidden tokens.

    Raises:
        DataError: a text, or a tokenizer, that this model cannot be asked by (`asked.questions`).
        UnsupportedError: the model has not one stack of layers, or its stack is not one block that is repeated.
    """
    stack = find_stack(opened)
    block = one_block(applied(stack, torch.full((1, 2), stack.token))[1])
    asked = questions(opened, stack.causal, ids, length, count, seed)
    shares = _frequencies(opened, ids)
    parts, unigram, predicted = [], [], 0
    for batch in asked.batches:
        parts.append(torch.stack(list(_measured(stack, block, batch))))
        unigram.append(_by_window(-shares[batch.targets], batch.where))
        predicted += len(batch.targets)
        progress("applications", sum(map(len, unigram)), asked.windows)
    nll, change = torch.cat(parts, -1).numpy().transpose(1, 0, 2)  # [n, windows] each
    return Sweep(
        objective=asked.kind,
        predicted=predicted,
        windows=asked.windows,
        layers=block.period,
        trained=block.times,
        parameters=sum(p.numel() for p in opened.model.parameters()),
        separate=_separate(stack, block),
        unigram=mean_interval(torch.cat(unigram)),
        course=tuple(
            Applied(n, _estimate(nll[n - 1]), _estimate(nll[n - 1] - nll[block.times - 1]), _estimate(change[n - 1]))
            for n in range(1, len(nll) + 1)
        ),
    )


@torch.no_grad()
def _measured(stack: Stack, block: Repeat, batch: Asked) -> Iterator[Tensor]:
    """Nll and change [2, b] after each application of the block."""
    states, calls = applied(stack, batch.given["input_ids"], **_others(batch))
    before = states[0]
    for state in islice(_states(states, calls, block), max(MOST, block.times)):
        nll = _nll(stack, state[batch.where], batch.targets)
        change = relative(state[batch.readable][:, None], before[batch.readable][:, None])  # [N, 1, D]: each by itself
        yield torch.stack([_by_window(nll, batch.where), _by_window(change.double(), batch.readable)])
        before = state


def _others(batch: Asked) -> dict[str, Tensor]:
    return {name: value for name, value in batch.given.items() if name != "input_ids"}


def _by_window(values: Tensor, where: Tensor) -> Tensor:
    """Mean [b] over each window's positions `where`, bool [b, T], of their values [M]."""
    sums = values.new_zeros(len(where)).index_add_(0, where.nonzero()[:, 0], values)
    return sums / where.sum(1)


def _states(states: list[Tensor], calls: list[Call], block: Repeat) -> Iterator[Tensor]:
    """Yield what each application of the block writes: the model's own, and then further ones without end.

    A call after the last stands for the first again: where layers differ in their masks (some see a part of the text
    only), these go on in turn, as in a deeper model.
    """
    yield from states[block.period :: block.period]
    state = states[-1]
    while True:
        for start in range(0, len(calls), block.period):
            for call in calls[start : start + block.period]:
                state = call.again(state)
            yield state


def _nll(stack: Stack, hidden: Tensor, targets: Tensor) -> Tensor:
    """Nll [M] in fp64 of `targets` if the last layer had written `hidden` [M, D]; few logits are held at once."""
    parts = chunks(len(targets), stack.opened.vocab)
    found = [F.cross_entropy(stack.to_logits(hidden[part]), targets[part], reduction="none") for part in parts]
    return torch.cat(found).double()


def _frequencies(opened: Opened, ids: Ids) -> Tensor:
    """Logarithms [V] of the tokens' shares in a text, each count plus one: the best that a bias alone can be."""
    counts = torch.from_numpy(token_counts(ids, opened.vocab)).double() + 1
    return (counts / counts.sum()).log()


def _separate(stack: Stack, block: Repeat) -> int:
    """Parameters of the model if no application shared any."""
    members = [one.module for one in stack.applications[: block.period]]
    own = {id(p): p.numel() for module in members for p in module.parameters()}
    return sum(p.numel() for p in stack.opened.model.parameters()) + (block.times - 1) * sum(own.values())


def _estimate(values: NDArray[np.float64]) -> Estimate | None:
    return mean_interval(values) if np.isfinite(values).all() else None
