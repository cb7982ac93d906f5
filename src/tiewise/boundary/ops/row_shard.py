"""The fused loss of a table over several ranks, with two Triton kernels.

They run between the products of each chunk. A chunk's rows are read, the ranks exchange two or three numbers a token
(`vocabulary_shard`), and the slopes are written over the products. The exchanges are those of `chunked`, so that ranks
may differ in their choice of a pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.chunked import shard_chunk_size
from tiewise.boundary.ops.gpu_chunks import PassInputs, run_chunks
from tiewise.boundary.ops.problem import LossTensors
from tiewise.boundary.ops.row_statistics import ColumnSums, RowCoefficients, RowKernels
from tiewise.boundary.ops.vocabulary_shard import LOWEST, ShardRows, VocabularyShard
from tiewise.core.backends import LossOptions

ELSEWHERE = -1  # local column of a target on another rank


def loss_pass(
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    needs: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None,
    shard: VocabularyShard,
) -> tuple[Tensor, Gradients]:
    """Compute the results of `chunked.loss_pass` on one rank of a shard."""
    rows = shard_chunk_size(shard, len(tensors.targets), tensors.features, product_dtype, options)
    inputs = PassInputs(replace(options, chunk=rows), tensors, product_dtype, needs, row_weight, into)
    return run_chunks(inputs, lambda losses: _ShardStep(inputs, shard))


class _ShardStep:
    """Step of `gpu_chunks` in which ranks exchange sums between reading and writing rows."""

    def __init__(self, inputs: PassInputs, shard: VocabularyShard) -> None:
        """Convert the options."""
        options, bias = inputs.options, inputs.tensors.bias
        self.inputs, self.shard, self.class_weight = inputs, shard, options.class_weight
        local = options
        if options.class_weight is not None:
            self.class_weight = options.class_weight.float()
            local = replace(options, class_weight=self.class_weight[shard.start : shard.stop])
        self.kernels = RowKernels(local, bias, inputs.tensors.features)

    def run(self, products: Tensor, slopes: Tensor, losses: Tensor, targets: Tensor, part: slice) -> None:
        """Write the losses [n] and the slopes [n, V_r] of one chunk."""
        options, shard = self.inputs.options, self.shard
        _, is_here = shard.columns(targets)
        column = (targets - shard.start).where(is_here, ELSEWHERE)
        sums = ColumnSums.allocate(len(targets), losses)
        self.kernels.read(products, column, sums, ELSEWHERE, with_tilt=False)
        top, total = sums.top.clamp(min=LOWEST), sums.total.clamp(min=1)
        spread = sums.weighted / shard.total if options.label_smoothing else None
        rows = shard.combine(top, total, -sums.below_top, targets, spread)
        is_counted = targets != options.ignore_index
        hit, even = self._target_weights(targets, is_counted)
        losses.copy_(self._losses(rows, hit, even).where(is_counted, 0))
        if any(self.inputs.needs):
            r = self._row_weights(part, is_counted)
            self.kernels.write(products, slopes, column, self._coefficients(top, rows, r, hit, even))

    def _coefficients(self, top: Tensor, rows: ShardRows, r: Tensor, hit: Tensor, even: Tensor) -> RowCoefficients:
        """Return the coefficients of the slopes of r ∘ losses."""
        options = self.inputs.options
        level = r * rows.share * (hit + even + 2 * options.z_loss * rows.lse)
        spread = r * (options.label_smoothing / self.shard.total) if options.label_smoothing else None
        return RowCoefficients(top, level, None, -r * hit, spread)

    def _target_weights(self, targets: Tensor, is_counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return (1 − ε) w_t [n] and ε mean(w) []."""
        smoothing, one = self.inputs.options.label_smoothing, self.inputs.tensors.features.new_ones
        w = self.class_weight
        if w is None:
            return one(len(targets), dtype=torch.float32) * (1 - smoothing), one((), dtype=torch.float32) * smoothing
        return w[targets.where(is_counted, 0)] * (1 - smoothing), w.mean() * smoothing

    def _losses(self, rows: ShardRows, hit: Tensor, even: Tensor) -> Tensor:
        """Return the losses [n] of tokens with targets."""
        options = self.inputs.options
        losses = hit * rows.nll
        if options.z_loss:
            losses += options.z_loss * rows.lse.square()
        if rows.spread is not None:
            losses += even * rows.lse - options.label_smoothing * rows.spread
        return losses

    def _row_weights(self, part: slice, is_counted: Tensor) -> Tensor:
        """Return the factor [n] on each loss of a chunk, 0 for ignored tokens."""
        row_weight = self.inputs.row_weight
        if row_weight is None:
            return is_counted.float()
        if row_weight.dim():
            row_weight = row_weight[part]
        return is_counted * row_weight.float()
