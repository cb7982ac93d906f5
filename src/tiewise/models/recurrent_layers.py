"""Layers of recurrent cells between the two ends of a language model: [B, T, E] -> [B, T, H], with a state.

    Elman   h' = f(W x + b + U h + c)                               f = tanh or relu
    GRU     r, z = σ(W x + b + U h + c)                             n = tanh(W x + b + r · (U h + c))
            h' = (1 - z) · n + z · h
    LSTM    i, f, o = σ(W x + b + U h + c), g = tanh(…)             s' = f · s + i · g,  h' = o · tanh(s')

Matrices are stacked by gate, in torch's order (GRU r z n, LSTM i f g o), so that torch's own modules can lend theirs.
One layer's state is (h,) or (h, s), each [B, H].

One call of torch's kernel runs as many layers as it can: all of one width, where no mask is shared over time. Masks
between layers divide the calls; only a mask on h itself is stepped through in Python, and only in training. What is
dropped in training:

    fresh      a mask per token                     Zaremba et al., arXiv:1409.2329
    locked     a mask per sequence, at every token  Gal & Ghahramani, arXiv:1512.05287
    of words   whole rows of a table                the same
    of weights a mask per matrix (DropConnect)      Merity et al., arXiv:1708.02182

What is kept is divided by the share that is kept, so that evaluation needs no correction. A mask is drawn anew by every
forward: for a text in pieces a sequence is one piece.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tiewise.core.errors import SpecError

LayerState = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, LayerState], LayerState]


@dataclass(frozen=True)
class Cell:
    """One kind: its gates, the tensors of its state, torch's kernel, and one step.

    `step(given, recalled, state)` takes W x + b and U h + c, both [B, G·H], and the state before.
    """

    gates: int
    states: int
    kernel: Callable[..., tuple[Tensor, ...]]
    step: Step


def _elman(function: Callable[[Tensor], Tensor]) -> Step:
    return lambda given, recalled, state: (function(given + recalled),)


def _gru(given: Tensor, recalled: Tensor, state: LayerState) -> LayerState:
    given_r, given_z, given_n = given.chunk(3, -1)
    recalled_r, recalled_z, recalled_n = recalled.chunk(3, -1)
    r, z = torch.sigmoid(given_r + recalled_r), torch.sigmoid(given_z + recalled_z)
    n = torch.tanh(given_n + r * recalled_n)
    return (torch.lerp(n, state[0], z),)


def _lstm(given: Tensor, recalled: Tensor, state: LayerState) -> LayerState:
    i, f, g, o = (given + recalled).chunk(4, -1)
    s = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(s), s


CELLS = {
    "tanh": Cell(1, 1, torch.rnn_tanh, _elman(torch.tanh)),
    "relu": Cell(1, 1, torch.rnn_relu, _elman(torch.relu)),
    "gru": Cell(3, 1, torch.gru, _gru),
    "lstm": Cell(4, 2, torch.lstm, _lstm),
}


@dataclass(frozen=True)
class Weights:
    """What one layer multiplies by: input [G·H, E] or None (the identity), recurrent [G·H, H], biases [G·H] or None."""

    input: Tensor | None
    recurrent: Tensor
    input_bias: Tensor
    recurrent_bias: Tensor | None

    def flat(self) -> list[Tensor]:
        """All four, as torch's kernels take them."""
        like, bias = self.recurrent, self.recurrent_bias
        matrix = torch.eye(len(like), dtype=like.dtype, device=like.device) if self.input is None else self.input
        return [matrix, like, self.input_bias, torch.zeros_like(self.input_bias) if bias is None else bias]


def run_fused(
    cell: Cell, x: Tensor, states: Sequence[LayerState], weights: Sequence[Weights], dropout: float
) -> tuple[Tensor, list[LayerState]]:
    """Run layers of one width over x [B, T, E] in one call; `dropout` of every token stands between them.

    Returns: the last layer's h [B, T, H], and every layer's state behind the last token.
    """
    before = [torch.stack(parts) for parts in zip(*states, strict=True)]
    flat = [tensor for layer in weights for tensor in layer.flat()]
    # as in training wherever a gradient is wanted: cuDNN keeps nothing for the backward pass otherwise
    keeps = dropout > 0 or torch.is_grad_enabled()
    hidden = before if cell.states > 1 else before[0]
    with warnings.catch_warnings():
        if x.is_cuda:  # its kernel copies weights into one buffer, a small part of the work, and warns that it does
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        y, *after = cell.kernel(x, hidden, flat, True, len(weights), dropout, keeps, False, True)
    return y, list(zip(*(part.unbind(0) for part in after), strict=True))


def run_stepped(cell: Cell, x: Tensor, state: LayerState, weights: Weights, mask: Tensor) -> tuple[Tensor, LayerState]:
    """Run one layer over x [B, T, E], h multiplied by `mask` [B, H] before its matrix at every step.

    Returns: h [B, T, H], and the state behind the last token.
    """
    given = x + weights.input_bias if weights.input is None else F.linear(x, weights.input, weights.input_bias)
    read: list[Tensor] = []
    biases = _Together.apply(weights.recurrent, weights.recurrent_bias, read, x.shape[:2])
    matrix, hidden = weights.recurrent.detach().T, []
    for now, bias in zip(given.unbind(1), biases, strict=True):
        masked = state[0] * mask
        read.append(masked.detach())
        state = cell.step(now, torch.addmm(bias, masked, matrix), state)
        hidden.append(state[0])
    return torch.stack(hidden, 1), state


class _Together(Function):
    """The recurrent bias of every step [T, B, G·H], whose gradient tells that of the matrix in one product.

    Step by step autograd would add T matrices [G·H, H], which takes longer than the steps themselves. `read` is filled
    while stepping: what the matrix was multiplied by, without history.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, bias: Tensor | None, read: list[Tensor], sizes: tuple[int, int]) -> Tensor:
        ctx.read, ctx.dtype, ctx.biased = read, matrix.dtype, bias is not None
        rows, steps = sizes
        begin = matrix.new_zeros(len(matrix)) if bias is None else bias
        return begin.repeat(steps, rows, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat = grad.flatten(0, 1)
        matrix = flat.T @ torch.cat(ctx.read).to(flat.dtype)
        return matrix.to(ctx.dtype), flat.sum(0).to(ctx.dtype) if ctx.biased else None, None, None


def mask(like: Tensor, shape: tuple[int, ...], share: float) -> Tensor:
    """Factors of `shape`: 0 with probability `share`, else 1 / (1 - share)."""
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - share).div_(1 - share)


def drop(x: Tensor, share: float, locked: bool) -> Tensor:
    """Drop features of x [B, T, D], anew at every token or alike over each sequence."""
    if share == 0:
        return x
    return x * mask(x, (x.shape[0], 1, x.shape[2]), share) if locked else F.dropout(x, share, training=True)


def drop_words(x: Tensor, ids: Tensor, words: int, share: float) -> Tensor:
    """Drop words from x [B, T, D], the vectors of `ids` [B, T]: every occurrence of a dropped one, of `words` in all.

    The same as dropping rows of the table (and it may be done behind a linear map), without a second table.
    """
    return x if share == 0 else x * mask(x, (words, 1), share)[ids]


State = tuple[LayerState, ...]  # of every layer


def detached(state: State) -> State:
    """Return the same values without their history: truncated back-propagation ends here."""
    return tuple(tuple(part.detach() for part in layer) for layer in state)


class RecurrentLayer(nn.Module):
    """One layer's matrices and biases."""

    def __init__(self, config: Any, width_from: int, width: int) -> None:
        super().__init__()
        rows = CELLS[config.cell].gates * width
        self.weight_ih = nn.Parameter(torch.empty(rows, width_from)) if config.input_matrix else None  # [G·H, E]
        self.weight_hh = nn.Parameter(torch.empty(rows, width))  # [G·H, H]
        self.bias_ih = nn.Parameter(torch.empty(rows))
        self.bias_hh = nn.Parameter(torch.empty(rows)) if config.lstm_bias == "two" else None

    @property
    def width(self) -> int:
        """H."""
        return self.weight_hh.shape[1]

    @property
    def reads(self) -> int:
        """E."""
        return self.width if self.weight_ih is None else self.weight_ih.shape[1]

    def weights(self, dropped: float) -> Weights:
        """Return what to multiply by, a share of the recurrent weights dropped."""
        recurrent = F.dropout(self.weight_hh, dropped) if dropped else self.weight_hh
        return Weights(self.weight_ih, recurrent, self.bias_ih, self.bias_hh)


class RecurrentStack(nn.Module):
    """All layers, with dropout between them, on h and on its matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.kind = config.cell
        self.between, self.locked = config.layer_dropout, config.variational
        self.on_h, self.on_weights = config.recurrent_dropout, config.weight_dropout
        pairs = zip(config.widths, config.widths[1:], strict=False)
        self.layers = nn.ModuleList(RecurrentLayer(config, width_from, width) for width_from, width in pairs)

    @property
    def cell(self) -> Cell:
        """What one step computes."""
        return CELLS[self.kind]

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Run over x [B, T, E] from `state` (None: zeros); return the last layer's h [B, T, H] and the state behind.

        Raises:
            SpecError: a state of another shape, or x of another width, which the kernel of an LSTM does not notice.
        """
        if x.shape[2] != self._layers()[0].reads:
            what = f"the first layer reads vectors of {self._layers()[0].reads}, and is given {x.shape[2]} columns"
            raise SpecError(what, f"let a map stand between: projected:{x.shape[2]} without in=none")
        before = self._started(x, state)
        after: list[LayerState] = []
        for run in self._runs():
            if after:
                x = drop(x, self.between if self.training else 0.0, self.locked)
            x, states = self._run(run, x, before[len(after) : len(after) + len(run)])
            after += states
        return x, tuple(after)

    def _runs(self) -> Iterator[list[RecurrentLayer]]:
        """Consecutive layers that one call can run."""
        if self.training and (self.on_h > 0 or (self.between > 0 and self.locked)):
            yield from ([layer] for layer in self._layers())
        else:
            yield from (list(run) for _, run in groupby(self._layers(), lambda layer: layer.width))

    def _layers(self) -> list[RecurrentLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _run(
        self, run: list[RecurrentLayer], x: Tensor, states: Sequence[LayerState]
    ) -> tuple[Tensor, list[LayerState]]:
        weights = [layer.weights(self.on_weights if self.training else 0.0) for layer in run]
        if self.training and self.on_h:
            kept = mask(x, (len(x), run[0].width), self.on_h)
            y, state = run_stepped(self.cell, x, states[0], weights[0], kept)
            return y, [state]
        return run_fused(self.cell, x, states, weights, self.between if self.training and len(run) > 1 else 0.0)

    def _started(self, x: Tensor, state: State | None) -> State:
        shapes = [(len(x), layer.width) for layer in self._layers()]
        if state is None:
            return tuple(tuple(x.new_zeros(shape) for _ in range(self.cell.states)) for shape in shapes)
        found = [[tuple(part.shape) for part in layer] for layer in state]
        if found != [[shape] * self.cell.states for shape in shapes]:
            what = f"the state has the shapes {found}, and {len(x)} sequences need {[shapes] * self.cell.states}"
            raise SpecError(what, "give each sequence the state that its own last piece returned")
        return tuple(tuple(part.to(x.dtype) for part in layer) for layer in state)
