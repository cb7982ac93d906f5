"""Layers of recurrent cells between the two ends of a language model: [B, T, E] -> [B, T, H], with a state.

One call of torch's kernel runs as many layers as it can: all of one width, where no mask is shared over time. Masks
between layers divide the calls; only a mask on h itself is stepped through in Python, and only in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tiewise.core.errors import SpecError
from tiewise.models.cells import CELLS, Cell, LayerState, Weights, fused, stepped
from tiewise.models.dropout import drop, mask
from tiewise.models.rnn_config import RNNConfig

State = tuple[LayerState, ...]  # of every layer


def detached(state: State) -> State:
    """Return the same values without their history: truncated back-propagation ends here."""
    return tuple(tuple(part.detach() for part in layer) for layer in state)


class Layer(nn.Module):
    """One layer's matrices and biases.

    Attributes:
        weight_ih: [G·H, E], or None for a cell without an input matrix.
        weight_hh: [G·H, H].
        bias_ih, bias_hh: [G·H]; `bias_hh` is None with one bias.
    """

    def __init__(self, config: RNNConfig, width_from: int, width: int) -> None:
        super().__init__()
        rows = CELLS[config.cell].gates * width
        self.weight_ih = nn.Parameter(torch.empty(rows, width_from)) if config.input_matrix else None
        self.weight_hh = nn.Parameter(torch.empty(rows, width))
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


class Recurrent(nn.Module):
    """All layers, with dropout between them, on h and on its matrix."""

    def __init__(self, config: RNNConfig) -> None:
        super().__init__()
        self.kind = config.cell
        self.between, self.locked = config.layer_dropout, config.variational
        self.on_h, self.on_weights = config.recurrent_dropout, config.weight_dropout
        pairs = zip(config.widths, config.widths[1:], strict=False)
        self.layers = nn.ModuleList(Layer(config, width_from, width) for width_from, width in pairs)

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

    def _runs(self) -> Iterator[list[Layer]]:
        """Consecutive layers that one call can run."""
        if self.training and (self.on_h > 0 or (self.between > 0 and self.locked)):
            yield from ([layer] for layer in self._layers())
        else:
            yield from (list(run) for _, run in groupby(self._layers(), lambda layer: layer.width))

    def _layers(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _run(self, run: list[Layer], x: Tensor, states: Sequence[LayerState]) -> tuple[Tensor, list[LayerState]]:
        weights = [layer.weights(self.on_weights if self.training else 0.0) for layer in run]
        if self.training and self.on_h:
            kept = mask(x, (len(x), run[0].width), self.on_h)
            y, state = stepped(self.cell, x, states[0], weights[0], kept)
            return y, [state]
        return fused(self.cell, x, states, weights, self.between if self.training and len(run) > 1 else 0.0)

    def _started(self, x: Tensor, state: State | None) -> State:
        shapes = [(len(x), layer.width) for layer in self._layers()]
        if state is None:
            return tuple(tuple(x.new_zeros(shape) for _ in range(self.cell.states)) for shape in shapes)
        found = [[tuple(part.shape) for part in layer] for layer in state]
        if found != [[shape] * self.cell.states for shape in shapes]:
            what = f"the state has the shapes {found}, and {len(x)} sequences need {[shapes] * self.cell.states}"
            raise SpecError(what, "give each sequence the state that its own last piece returned")
        return tuple(tuple(part.to(x.dtype) for part in layer) for layer in state)
