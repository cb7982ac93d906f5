"""`Boundary`: the one owner of a model's table or tables, with the two verbs that touch the vocabulary.

    boundary = Boundary("factored:64+bias", vocab=10_000, width=256)

    rows = boundary.embed(ids)              # [..] -> [.., D]
    logits = boundary.logits(hidden)        # [.., D] -> [.., V]
    loss = boundary.loss(hidden, targets)   # the same, fused, without logits

    loss = boundary(ids, body, targets)     # all of it: body maps [.., D] to [.., D]

The last form threads the table from the lookup to the head, so that a tied table has one gradient buffer (see
`tiewise.ops.path_gradient`); the single verbs are as exact and use one more. Tied means that `table_out` is
`table_in`: one Parameter, which appears once in the state dict, in `parameters()` and in the optimizer.

The side note that catches everyone: a table is [V, E] at both ends, one row per token. The head multiplies by its
transpose; nothing is ever stored transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.maps import ParametricMap, dense_input, dense_output, make_maps, penalty_of
from tiewise.boundary.vectors import start_from_rows
from tiewise.core.errors import SpecError
from tiewise.core.first_loss import starting_nll
from tiewise.core.spec import BoundarySpec, Vocabularies
from tiewise.ops.chunked import LossOptions
from tiewise.ops.cross_entropy import linear_cross_entropy
from tiewise.ops.path_gradient import LookupOptions, PathRecord, tied_lookup, without_row


def sound_std(d: int) -> float:
    """Return the default scale of a table's entries, d^-½: embedded rows of unit norm, whatever the table's width.

    The body gets an input of the size that its norms expect to add to, and the loss starts within half a nat of ln V at
    both ends. Half and twice this scale end higher for every arm on the built-in text (the table in docs/compare.md).
    """
    return d**-0.5


def draw(table: Tensor, std: float, pad: int | None = None) -> None:
    """Fill `table` [V, E] with N(0, std²) from torch's global generator; the padding row becomes zero."""
    with torch.no_grad():
        nn.init.normal_(table, std=std)
        if pad is not None:
            table[pad].zero_()


class Boundary(nn.Module):
    """Tables, maps, bias and scales of one spec; letters as in `tiewise.core`.

    Args:
        spec: what to build.
        vocab: V, or `Vocabularies` where input and output differ.
        width: D.

    Attributes:
        table_in, table_out: [V, E] Parameters; the same object where tied.
        in_map, out_map: modules of `tiewise.boundary.maps`, or None.
        bias: [V_out] Parameter, or None.
        record: where the lookup path is kept for `path_norms`; None (the default) records nothing.

    Raises:
        SpecError: a spec that these sizes cannot have, or a schedule (which belongs to a training run).
    """

    def __init__(self, spec: BoundarySpec | str, vocab: int | Vocabularies, width: int) -> None:
        super().__init__()
        self.spec = BoundarySpec.parse(spec)
        self.vocab = vocab if isinstance(vocab, Vocabularies) else Vocabularies.same(vocab)
        if not hasattr(width, "__index__") or width < 1:
            raise SpecError(f"a width of {width!r}", "give D, a whole number")
        self.width = width
        if self.spec != self.spec.plainly():
            fix = "give the schedule to a training run; build the boundary without it"
            raise SpecError(f"{self.spec} changes during training", fix)
        rows = self.vocab.rows(self.tied)
        if self.spec.pad is not None and self.spec.pad >= rows:
            raise SpecError(f"pad={self.spec.pad} is outside the table of {rows} rows", "lower it")
        in_width, out_width = self.spec.table_widths(width)
        self.table_in = nn.Parameter(torch.empty(rows, in_width))
        self.table_out = self.table_in if self.tied else nn.Parameter(torch.empty(self.vocab.outputs, out_width))
        self.in_map, self.out_map = make_maps(self.spec, width)
        self.bias = nn.Parameter(torch.empty(self.vocab.outputs)) if self.spec.bias else None
        self.input_scale, self.output_scale = self.spec.scales(width)
        rows_out = self.vocab.output_index() if self.tied else None
        self.output_index: Tensor | None
        self.register_buffer("output_index", None if rows_out is None else torch.tensor(rows_out), persistent=False)
        self.record: PathRecord | None = None
        self.reset_parameters()

    @property
    def tied(self) -> bool:
        """Whether both ends use one table."""
        return self.spec.tables == 1

    def reset_parameters(self) -> None:
        """Draw tables N(0, σ²), σ = `init` of the spec or `sound_std`, and maps; bias and padding row become zero."""
        std = self.spec.init or sound_std(self.width)
        draw(self.table_in, std, self.spec.pad)
        if not self.tied:
            draw(self.table_out, std, self.spec.pad)
        for module in (self.in_map, self.out_map):
            if isinstance(module, ParametricMap):
                module.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def load_rows(self, rows: Tensor, freeze: bool = False) -> None:
        """Start the input table (and a tied output) from pretrained rows [V, E]; rows of nan keep their drawn values.

        Raises:
            SpecError: rows of another shape.
        """
        start_from_rows(self.table_in, rows, freeze, self.spec)

    def predicted_nll(self) -> float:
        """Expected loss (nats) of the first step around a body of two Llama layers, on targets drawn uniformly."""
        return starting_nll(self.spec, self.vocab, self.width, self.spec.init or sound_std(self.width))

    def embed(self, ids: Tensor) -> Tensor:
        """Map tokens [..] to the body's input [.., D] ([.., E] where the spec has no input map)."""
        return self._embed(ids)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [.., D] to logits [.., V_out], all of them."""
        z = F.linear(self._features(hidden), self._output_rows(self._head_table())) * self.output_scale
        z = z if self.bias is None else z + self.bias
        cap = self.spec.softcap
        return z if cap is None else cap * torch.tanh(z / cap)

    def loss(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Cross-entropy of `logits(hidden)` against `targets`, fused; options of `linear_cross_entropy`.

        Returns:
            fp32 scalar, or the shape of `targets` for `reduction="none"`. `penalty()` is not included.
        """
        return self._loss(hidden, self._head_table(), targets, options)

    def forward(self, ids: Tensor, body: Callable[[Tensor], Tensor], targets: Tensor, **options: Any) -> Tensor:
        """Loss of `body` between lookup and head, the table threaded through: one gradient buffer where tied."""
        rows, after = self._embed(ids)
        return self._loss(body(rows), after if self.tied else self._head_table(), targets, options)

    def penalty(self) -> Tensor:
        """Penalty of a `projected` spec, to be added to the loss (`tiewise.boundary.maps.penalty_of`); 0 elsewhere."""
        found = penalty_of(self.spec, self.out_map)
        return self.table_out.new_zeros(()) if found is None else found

    def dense(self) -> tuple[Tensor, Tensor]:
        """Tables [V_in, D] and [V_out, D] of a plain untied boundary with the same function, scales included.

        Raises:
            SpecError: where a soft-cap stands behind the product, or a bias before it, which no table can hold.
        """
        self.spec.require_tables_alone()
        table_in = self.table_in.detach()[: self.vocab.inputs]
        table_out = self._output_rows(self.table_out.detach())
        dense_in, dense_out = dense_input(table_in, self.in_map), dense_output(table_out, self.out_map, self.width)
        return dense_in * self.input_scale, dense_out * self.output_scale

    def extra_repr(self) -> str:
        """Spec, sizes and whether one table serves both ends."""
        return f"{self.spec}, vocab={self.vocab}, width={self.width}, tables={self.spec.tables}"

    def _embed(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for the body, and the table to use from here on."""
        if ids.is_floating_point():
            raise SpecError(f"token ids of type {ids.dtype}", "cast them to an integer type")
        # elsewhere than on a CPU the lookup itself asserts, without a synchronisation
        if not torch.compiler.is_compiling() and ids.device.type == "cpu" and ids.numel():
            low, high = (int(v) for v in ids.aminmax())
            if low < 0 or high >= self.vocab.inputs:
                wrong = low if low < 0 else high
                raise IndexError(f"token {wrong} is outside the input vocabulary of {self.vocab.inputs}")
        options = LookupOptions(stop_both=self.spec.pad, alpha=self.spec.alpha, record=self.record)
        rows, after = tied_lookup(self.table_in, ids, options)
        rows = rows if self.in_map is None else self.in_map(rows)
        return (rows if self.input_scale == 1.0 else rows * self.input_scale), after

    def _head_table(self) -> Tensor:
        """Return the output table, guarded where its padding row must get no gradient."""
        return without_row(self.table_out, self.spec.pad)

    def _output_rows(self, table: Tensor) -> Tensor:
        """[V_out, E]: the output tokens' rows, in their order; a view where no index map reorders them."""
        return table[: self.vocab.outputs] if self.output_index is None else table[self.output_index]

    def _features(self, hidden: Tensor) -> Tensor:
        return hidden if self.out_map is None else self.out_map(hidden)

    def _loss(self, hidden: Tensor, table: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
        chosen = LossOptions(scale=self.output_scale, softcap=self.spec.softcap)
        rows = self._output_rows(table)
        return linear_cross_entropy(self._features(hidden), rows, targets, self.bias, chosen, **options)
