"""What a model that repeats one block of layers predicts if the block is applied more or less often than in training.

    opened = open_model("checkpoint")
    found = application_sweep(opened, windows(ids, 128, 64), counts)     # counts [V] of the text's other tokens
    found.course[11].nll                       # nll of the text after 12 applications, with its interval over windows
    found.course[11].more                      # the same less the nll after as many as in training, window by window
    found.unigram                              # nll of the same tokens by their frequencies alone

The model's own masks, positions, norms and head are used throughout: after as many applications as in training, the
nll is the model's own. A model applied less often is the same one cut off. See docs/refinement.md.
"""

from __future__ import annotations

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
from tiewise.checkpoint.facts import Progress, silent
from tiewise.data.windows import Ids
from tiewise.internals.applications import Call, Repeat, applied, one_block
from tiewise.internals.iteration import relative
from tiewise.internals.loaded import Opened
from tiewise.internals.stack import Stack, find_stack
from tiewise.internals.text_loss import TextLoss
from tiewise.internals.translators import chunks
from tiewise.training.results import to_record

MOST = 24
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
class Applied:
    """The block applied `times` times; estimates are over windows, None where a window gave no number.

    Args:
        times: n.
        nll: nats per predicted token.
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
        objective: what is predicted, as `TextLoss` names it: the next token, or hidden ones.
        predicted: tokens that are.
        windows: windows of text they stand in.
        layers: layers in the block.
        trained: how often the model applies it.
        parameters: of the whole model, each counted once.
        separate: of the same model if every application had parameters of its own.
        unigram: nll of the predicted tokens by their frequencies elsewhere in the text, one added to each count.
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
        """Where the nll is lowest, of those where it is a number; the model's own where it is nowhere."""
        measured = [one for one in self.course if one.nll is not None]
        return min(measured, key=lambda one: one.nll.value if one.nll else 0.0, default=self.own)

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return to_record(self)


def application_sweep(
    opened: Opened, windows: Ids, counts: NDArray[np.int64], seed: int = 0, progress: Progress = silent
) -> Sweep:
    """Apply a model's one repeated block 1, 2, … 24 times and measure the nll of a text each time.

    Args:
        opened: the model.
        windows: ids [n, T], T ≥ 2; one window gives no intervals.
        counts: how often each token stands in a text that the windows are no part of [V].
        seed: of which tokens are hidden, where the model predicts hidden tokens.
        progress: told of windows done.

    Raises:
        DataError: windows that this model cannot be run on, or a masked model without a mask token in its tokenizer.
        UnsupportedError: the model has not one stack of layers, or its stack is not one block that is repeated.
    """
    stack = find_stack(opened)
    block = one_block(applied(stack, torch.full((1, 2), stack.token))[1])
    loss = TextLoss(opened, windows, seed)
    step = min(loss.at_once, max(1, TOKENS_AT_ONCE // windows.shape[1]))
    parts, unigram = [], []
    for which in torch.arange(len(windows)).split(step):
        parts.append(torch.stack(list(_measured(stack, block, loss, which))))
        unigram.append(_by_frequency(loss.asked(which)[2], counts).reshape(len(which), -1).mean(-1))
        progress("applications", int(which[-1]) + 1, len(windows))
    nll, change = torch.cat(parts, -1).numpy().transpose(1, 0, 2)  # [n, windows] each
    return Sweep(
        objective=loss.kind,
        predicted=loss.per_window * len(windows),
        windows=len(windows),
        layers=block.period,
        trained=block.times,
        parameters=sum(p.numel() for p in opened.model.parameters()),
        separate=_separate(stack, block),
        unigram=mean_interval(np.concatenate(unigram)),
        course=tuple(
            Applied(n, _estimate(nll[n - 1]), _estimate(nll[n - 1] - nll[block.times - 1]), _estimate(change[n - 1]))
            for n in range(1, len(nll) + 1)
        ),
    )


@torch.no_grad()
def _measured(stack: Stack, block: Repeat, loss: TextLoss, which: Tensor) -> Iterator[Tensor]:
    """Nll and change [2, b] after each application of the block, of the windows `which` [b]."""
    ids, asked, targets = loss.asked(which)
    states, calls = applied(stack, ids)
    before = states[0]
    for state in islice(_states(states, calls, block), max(MOST, block.times)):
        nll = _nll(stack, state[asked], targets).reshape(len(which), -1).mean(-1)
        yield torch.stack([nll, relative(state, before).double()])
        before = state


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


def _by_frequency(tokens: Tensor, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """−ln of the tokens' shares in `counts`, each count plus one: the unigram model that a bias alone can be."""
    found: NDArray[np.float64] = -np.log((counts + 1) / (counts.sum() + len(counts)))[tokens.numpy()]
    return found


def _separate(stack: Stack, block: Repeat) -> int:
    """Parameters of the model if no application shared any."""
    members = [one.module for one in stack.applications[: block.period]]
    own = {id(p): p.numel() for module in members for p in module.parameters()}
    return sum(p.numel() for p in stack.opened.model.parameters()) + (block.times - 1) * sum(own.values())


def _estimate(values: NDArray[np.float64]) -> Estimate | None:
    return mean_interval(values) if np.isfinite(values).all() else None
