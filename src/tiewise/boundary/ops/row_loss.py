"""The fused loss on a GPU: products by cuBLAS with one Triton kernel between them.

For a chunk of n tokens with features h [n, E] and table W [V, E]:

    buffer = h Wᵀ                    fp32 sums [n, V]
    losses, slopes = kernel(buffer)  slopes of r ∘ losses [n, V], in the type of the products, over the same buffer
    dfeatures = scale · slopes W     dweight += scale · slopesᵀ h     dbias += Σ slopes

So logits are never rounded, the buffer is the only matrix [n, V], and nothing waits for the GPU.

A chunk takes at most a 32nd of the card's memory. Every chunk reads and writes the whole fp32 gradient of the table, so
a few large chunks are faster than many small ones. A single chunk writes that gradient once, in the table's type; so it
may take the memory of the fp32 gradient too. On an H100, bf16 losses in one chunk took 0.91 (8192 tokens, 128,256
words, width 4096) and 0.94 (16,384, 50,304, 768) of the time in four chunks. The limit is a share of the card and not
of its free memory, because the number of chunks changes the rounding. If the memory does not suffice, the chunk is
halved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import MINIMUM_ROWS, LossOptions

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # types of the products; the kernel computes in fp32
ALIGNED = 16  # numbers to a multiple of which a row of the buffer is padded, for wide loads of triton and cuBLAS
BLOCK = 8192  # most columns that a program of the kernel processes at a time; 2048 and 4096 were slower on an H100
LEAST_BLOCK = 512
COLUMNS_OF_A_WARP = 512  # columns of a block for each group of 32 threads
SCALED, SCALING_WARPS = 16_384, 16  # numbers that a program of `scale_unless_one` processes, and its warps


def missing_support(tensors: LossTensors, product_dtype: torch.dtype) -> str:
    """Return what this pass lacks for such tensors, as the rest of a sentence.

    It is empty if the pass runs.
    """
    features, weight, _, _ = tensors
    if product_dtype not in TYPES:
        return f"has no products in {product_dtype}".replace("torch.", "")
    missing = devices.missing_triton(features) or devices.missing_triton(weight)
    if missing:
        return missing
    if product_dtype != torch.float32 and not devices.has_wide_products(features):
        return "needs torch 2.8 or later for narrow products"
    return ""


def loss_pass(
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    needs: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Compute the results of `chunked.loss_pass` on one rank.

    It runs where `missing_support` is empty. Gradients of bf16 inputs are bf16, other gradients are fp32.
    """
    features, weight, bias, targets = tensors
    targets = targets.contiguous()
    with devices.on_device(features), devices.without_autocast(features), torch.no_grad():
        losses = features.new_empty(len(targets), dtype=torch.float32)
        table = weight.to(product_dtype)
        buffer, sums = _allocate(LossTensors(*tensors), product_dtype, needs, into, options.chunk)
        kernel = _RowKernel(options, bias, row_weight, losses, needs_slopes=any(needs))
        for part in buffer.parts(len(targets)):
            h = features[part].to(product_dtype)
            products, slopes = buffer.products(len(h)), buffer.slopes(len(h), product_dtype)
            devices.add_product(products, h, table.T, beta=0)
            kernel.run(products, slopes, losses[part], targets[part], part)
            sums.add(part, slopes, h, table, options.scale)
        return losses, sums.results()


class _PassMemory(NamedTuple):
    """Memory of one pass."""

    buffer: _ChunkBuffer
    sums: _GradientSums


def _allocate(
    tensors: LossTensors, product_dtype: torch.dtype, needs: tuple[bool, ...], into: Tensor | None, chunk: int | None
) -> _PassMemory:
    """Allocate the memory of a pass.

    The chunk is the largest within the limit that the card has room for.
    """
    features, weight, _, _ = tensors
    count, width = len(features), _padded_width(len(weight))
    saved = _numbers_saved_by_one_chunk(weight, product_dtype, needs, into)
    rows = min(count, devices.large_chunk_size(count, width, features, chunk, saved))
    while True:
        try:
            return _allocate_chunk(tensors, product_dtype, needs, into, rows)
        except torch.OutOfMemoryError:
            if chunk is not None or rows <= MINIMUM_ROWS:
                raise
            rows = max(MINIMUM_ROWS, -(-rows // 2))


def _allocate_chunk(
    tensors: LossTensors, product_dtype: torch.dtype, needs: tuple[bool, ...], into: Tensor | None, rows: int
) -> _PassMemory:
    """Allocate the memory of a pass whose chunks have so many rows."""
    buffer = _ChunkBuffer.allocate(tensors.features, len(tensors.weight), rows)
    sums = _GradientSums(tensors, product_dtype, needs, into, is_single=rows >= len(tensors.targets))
    return _PassMemory(buffer, sums)


def _numbers_saved_by_one_chunk(
    weight: Tensor, product_dtype: torch.dtype, needs: tuple[bool, ...], into: Tensor | None
) -> int:
    """Return the fp32 numbers that only a pass of several chunks allocates for the table's gradient."""
    has_sum = needs[1] and into is None and _result_type(weight, product_dtype) != torch.float32
    return weight.numel() if has_sum else 0


def _padded_width(vocab: int) -> int:
    """Return the numbers of a row of the buffer."""
    return -(-vocab // ALIGNED) * ALIGNED


def _result_type(x: Tensor, product_dtype: torch.dtype) -> torch.dtype:
    """Return the type of the gradient of `x`.

    fp32 sums are rounded once for bf16. fp16 could overflow.
    """
    is_narrow = x.dtype == product_dtype == torch.bfloat16
    return torch.bfloat16 if is_narrow else torch.float32


@dataclass(frozen=True, eq=False)
class _ChunkBuffer:
    """Memory for the fp32 products of one chunk, which its slopes overwrite."""

    memory: Tensor  # [rows, V and the padding of a row]
    vocab: int

    @classmethod
    def allocate(cls, features: Tensor, vocab: int, rows: int) -> _ChunkBuffer:
        """Allocate the memory of a chunk of so many rows."""
        return cls(features.new_empty(rows, _padded_width(vocab), dtype=torch.float32), vocab)

    @property
    def rows(self) -> int:
        """Return the tokens of a full chunk."""
        return len(self.memory)

    def parts(self, n: int) -> Iterator[slice]:
        """Yield the positions of each chunk among `n` tokens."""
        for start in range(0, n, max(1, self.rows)):
            yield slice(start, start + self.rows)

    def products(self, n: int) -> Tensor:
        """Return memory for the products [n, V] of `n` tokens."""
        return self.memory[:n, : self.vocab]

    def slopes(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return the same memory for slopes [n, V].

        Narrow ones take the first half of each row.
        """
        return self.memory.view(dtype)[:n, : self.vocab]


class ProgramSize(NamedTuple):
    """Size of the programs of a kernel, each of which processes one row."""

    columns: int  # processed at a time, a power of two
    warps: int  # groups of 32 threads


def program_size(width: int) -> ProgramSize:
    """Return the size of programs for rows of `width` numbers."""
    power_of_two = 1 << (width - 1).bit_length()
    columns = min(BLOCK, max(LEAST_BLOCK, power_of_two))
    return ProgramSize(columns, max(1, columns // COLUMNS_OF_A_WARP))


class _RowKernel:
    """Kernel of one pass, with the arguments that all its chunks share."""

    def __init__(
        self, options: LossOptions, bias: Tensor | None, row_weight: Tensor | None, like: Tensor, *, needs_slopes: bool
    ) -> None:
        """Convert the options to the kernel's arguments.

        `like` is an fp32 tensor on the device.
        """
        unread = like.new_empty(1)  # the kernel takes tensors only, and does not read this one
        self.options = options
        self.token_weight = like.new_ones(()) if row_weight is None else row_weight.float().contiguous()
        self.bias = unread if bias is None else bias.float().contiguous()
        self.class_weight, self.mean_weight = unread, like.new_ones(())
        if options.class_weight is not None:
            self.class_weight = options.class_weight.float().contiguous()
            self.mean_weight = self.class_weight.mean()
        self.flags = {
            "NEEDS_SLOPES": needs_slopes,
            "HAS_BIAS": bias is not None,
            "HAS_SOFTCAP": options.softcap is not None,
            "HAS_CLASS_WEIGHT": options.class_weight is not None,
            "HAS_SMOOTHING": options.label_smoothing != 0,
        }

    def run(self, products: Tensor, slopes: Tensor, losses: Tensor, targets: Tensor, part: slice) -> None:
        """Write the losses [n] and the slopes [n, V] of one chunk, whose products are overwritten."""
        options, is_by_token = self.options, bool(self.token_weight.dim())
        program = program_size(products.stride(0))
        _kernels().loss_rows[(len(losses),)](
            products,
            slopes,
            losses,
            targets,
            self.token_weight[part] if is_by_token else self.token_weight,
            self.bias,
            self.class_weight,
            self.mean_weight,
            products.shape[1],
            products.stride(0),
            slopes.stride(0),
            int(is_by_token),
            options.ignore_index,
            float(options.scale),
            float(options.softcap or 1.0),
            float(options.label_smoothing),
            float(options.z_loss),
            **self.flags,
            BLOCK=program.columns,
            num_warps=program.warps,
        )


class _GradientSums:
    """Gradients of one pass, summed over its chunks."""

    def __init__(
        self,
        tensors: LossTensors,
        product_dtype: torch.dtype,
        needs: tuple[bool, ...],
        into: Tensor | None,
        *,
        is_single: bool,
    ) -> None:
        """Allocate memory for what `needs` requests.

        `is_single` is true if the pass has one chunk.
        """
        features, weight, bias, _ = tensors
        self.by_features: Tensor | None = None
        self.by_weight: Tensor | None = None
        self.by_bias: Tensor | None = None
        self.into, self.product_dtype, self.weight_dtype = into, product_dtype, _result_type(weight, product_dtype)
        self.is_empty = into is None  # whether the first chunk overwrites the table's gradient
        if needs[0]:
            self.by_features = features.new_empty(features.shape, dtype=_result_type(features, product_dtype))
        if needs[1]:
            sum_dtype = self.weight_dtype if is_single else torch.float32
            self.by_weight = into if into is not None else weight.new_empty(weight.shape, dtype=sum_dtype)
        if needs[2]:
            assert bias is not None, "the gradient of a missing bias is never needed"
            self.by_bias = bias.new_zeros(bias.shape, dtype=torch.float32)

    def add(self, part: slice, slopes: Tensor, h: Tensor, table: Tensor, scale: float) -> None:
        """Add the gradients from the slopes [n, V] of one chunk with features `h` [n, E]."""
        if self.by_features is not None:
            devices.add_product(self.by_features[part], slopes, table, beta=0, alpha=scale)
        if self.by_weight is not None:
            devices.add_product(self.by_weight, slopes.T, h, beta=int(not self.is_empty), alpha=scale)
            self.is_empty = False
        if self.by_bias is not None:
            self.by_bias += slopes.sum(0, dtype=torch.float32)

    def results(self) -> Gradients:
        """Return the gradients of features, weight and bias; None if not needed."""
        by_weight = self.by_weight
        if by_weight is not None and self.into is None:
            if self.is_empty:  # there was no chunk
                by_weight.zero_()
            by_weight = by_weight.to(self.weight_dtype)
        return [self.by_features, by_weight, self.by_bias]


def can_scale(gradient: Tensor) -> bool:
    """Return whether `scale_gradient` runs.

    This pass has then loaded its kernels, so that triton works here.
    """
    has_run = _kernels.cache_info().currsize > 0
    return has_run and gradient.is_contiguous() and not devices.missing_triton(gradient)


def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a gradient by a number on the GPU.

    If the number is 1, this costs no memory traffic.
    """
    count = gradient.numel()
    if count:
        programs = -(-count // SCALED)
        with devices.on_device(gradient):
            _kernels().scale_unless_one[(programs,)](gradient, factor, count, BLOCK=SCALED, num_warps=SCALING_WARPS)


@cache
def _kernels() -> Any:
    """Import the kernels, which need triton."""
    return import_module("tiewise.boundary.ops.row_kernels")
