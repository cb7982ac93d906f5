"""Recurrent cells: over a whole sequence by torch's fused kernels, or step by step where a mask stands in between.

    Elman   h' = f(W x + b + U h + c)                               f = tanh or relu
    GRU     r, z = σ(W x + b + U h + c)                             n = tanh(W x + b + r · (U h + c))
            h' = (1 - z) · n + z · h
    LSTM    i, f, o = σ(W x + b + U h + c), g = tanh(…)             s' = f · s + i · g,  h' = o · tanh(s')

Matrices are stacked by gate, in torch's order (GRU r z n, LSTM i f g o), so that torch's own modules can lend theirs.
One layer's state is (h,) or (h, s), each [B, H].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

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


def fused(
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


def stepped(cell: Cell, x: Tensor, state: LayerState, weights: Weights, mask: Tensor) -> tuple[Tensor, LayerState]:
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
