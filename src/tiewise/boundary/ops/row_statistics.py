"""The two Triton kernels that read rows of logits, and later write their slopes.

They compute log-probabilities and entropies (`statistics_operators`), and losses of a table over several ranks
(`row_shard`), in the chunks of `gpu_chunks`: the products of a chunk are the only matrix [n, V].

They never ran on a GPU, so `TIEWISE_LOSS=triton` has to request them. Products are fp32 or bf16: the slopes of
small upstream gradients would underflow in fp16.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import row_loss
from tiewise.boundary.ops.broken_device import VARIABLE
from tiewise.boundary.ops.gpu_kernels import TRITON
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions

TYPES = (torch.float32, torch.bfloat16)  # of the products


def is_requested(tensors: LossTensors, product_dtype: torch.dtype) -> bool:
    """Return whether statistics of these tensors take the kernels."""
    if os.environ.get(VARIABLE) != TRITON or product_dtype not in TYPES or not len(tensors.features):
        return False
    return not row_loss.missing_support(tensors, product_dtype)


class ColumnSums(NamedTuple):
    """Sums of each row of logits z over the local columns, each [N] in fp32."""

    top: Tensor  # the largest logit m
    total: Tensor  # Σ exp(z − m)
    below_top: Tensor  # z_t − m; 0 for a target that is elsewhere
    tilt: Tensor  # Σ exp(z − m) (z − m), if requested
    weighted: Tensor  # Σ w z, with label smoothing

    @classmethod
    def allocate(cls, n: int, like: Tensor) -> ColumnSums:
        """Return memory for `n` rows."""
        return cls(*like.new_zeros(len(cls._fields), n, dtype=torch.float32))

    def part(self, part: slice) -> ColumnSums:
        """Return the sums of some rows."""
        return ColumnSums(*(x[part] for x in self))


class RowCoefficients(NamedTuple):
    """Coefficients of each row's slopes, by the letters of `row_kernels`; each is [N] in fp32."""

    top: Tensor
    level: Tensor
    tilt: Tensor | None
    hit: Tensor
    spread: Tensor | None

    def part(self, part: slice) -> RowCoefficients:
        """Return the coefficients of some rows."""
        parts: list[Any] = [None if x is None else x[part].contiguous() for x in self]
        return RowCoefficients(*parts)


class RowKernels:
    """Both kernels, with the arguments that all chunks share."""

    def __init__(self, options: LossOptions, bias: Tensor | None, like: Tensor) -> None:
        """Convert the options to the kernels' arguments; `like` is a tensor on the device."""
        unread = like.new_empty(1, dtype=torch.float32)
        self.bias = unread if bias is None else bias.float().contiguous()
        self.class_weight = unread if options.class_weight is None else options.class_weight.float().contiguous()
        self.unread, self.numbers = unread, (float(options.scale), float(options.softcap or 1.0))
        self.flags = {
            "HAS_BIAS": bias is not None,
            "HAS_SOFTCAP": options.softcap is not None,
            "HAS_CLASS_WEIGHT": options.class_weight is not None,
            "HAS_SMOOTHING": options.label_smoothing != 0,
        }

    def read(self, products: Tensor, targets: Tensor, sums: ColumnSums, elsewhere: int, *, with_tilt: bool) -> None:
        """Write the sums of a chunk's rows; `elsewhere` marks targets without a column here."""
        vocab, width = products.shape[1], products.stride(0)
        sums.top.fill_(-torch.inf)  # the maximum on a rank without columns, where no kernel runs
        arguments = (products, targets, self.bias, self.class_weight, *sums, vocab, width, elsewhere, *self.numbers)
        self._launch("read_rows", len(targets), width, arguments, with_tilt)

    def write(self, products: Tensor, slopes: Tensor, targets: Tensor, rows: RowCoefficients) -> None:
        """Write the slopes of a chunk's rows over its products."""
        vocab, width = products.shape[1], products.stride(0)
        coefficients = (self.unread if x is None else x for x in rows)
        tensors = (products, slopes, targets, self.bias, self.class_weight, *coefficients)
        arguments = (*tensors, vocab, width, slopes.stride(0), *self.numbers)
        self._launch("write_rows", len(targets), width, arguments, rows.tilt is not None)

    def _launch(self, name: str, rows: int, width: int, arguments: tuple[Any, ...], with_tilt: bool) -> None:
        """Run a program of a kernel for each row of products, the first of its arguments."""
        if not arguments[0].numel():
            return
        program = row_loss.program_size(width)
        kernel = getattr(row_loss.load_kernels(), name)
        kernel[(rows,)](*arguments, **self.flags, HAS_TILT=with_tilt, BLOCK=program.columns, num_warps=program.warps)


class ReadingStep:
    """Step of `gpu_chunks` that writes the sums of all rows."""

    def __init__(self, kernels: RowKernels, sums: ColumnSums, elsewhere: int, *, with_tilt: bool) -> None:
        self.kernels, self.sums, self.elsewhere, self.with_tilt = kernels, sums, elsewhere, with_tilt

    def run(self, products: Tensor, slopes: Tensor, losses: Tensor, targets: Tensor, part: slice) -> None:
        """Write the sums of one chunk."""
        self.kernels.read(products, targets, self.sums.part(part), self.elsewhere, with_tilt=self.with_tilt)


class WritingStep:
    """Step of `gpu_chunks` that writes the slopes of all rows."""

    def __init__(self, kernels: RowKernels, coefficients: RowCoefficients) -> None:
        self.kernels, self.coefficients = kernels, coefficients

    def run(self, products: Tensor, slopes: Tensor, losses: Tensor, targets: Tensor, part: slice) -> None:
        """Write the slopes of one chunk."""
        self.kernels.write(products, slopes, targets, self.coefficients.part(part))
