"""The fused loss on a GPU in chunks: cuBLAS products with a row step between them.

For a chunk of n tokens with features h [n, E] and table W [V, E]:

    buffer = h Wᵀ                    products [n, V]
    losses, slopes = step(buffer)    slopes of r ∘ losses [n, V], in the type of the products, over the same buffer
    dfeatures = scale · slopes W     dweight += scale · slopesᵀ h     dbias += Σ slopes

So the buffer is the only matrix [n, V], and nothing waits for the GPU. `row_loss` and `compiled_rows` have the steps.

A chunk takes at most a 32nd of the card's memory. Every chunk reads and writes the whole fp32 gradient of the table, so
a few large chunks are faster than many small ones. A single chunk writes that gradient once, in the table's type; so it
may take the memory of the fp32 gradient too. On an H100, bf16 losses in one chunk took 0.91 (8192 tokens, 128,256
words, width 4096) and 0.94 (16,384, 50,304, 768) of the time in four chunks. The limit is a share of the card and not
of its free memory, because the number of chunks changes the rounding. If the memory does not suffice, the chunk is
halved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import MINIMUM_ROWS, ROW_MULTIPLE, LossOptions

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the products; steps compute in fp32


class RowStep(Protocol):
    """Computation of one pass between the products of each chunk."""

    def run(self, products: Tensor, slopes: Tensor, losses: Tensor, targets: Tensor, part: slice) -> None:
        """Write the losses [n] and the slopes [n, V] of one chunk, whose products are overwritten."""


@dataclass(frozen=True)
class PassInputs:
    """Arguments of `chunked.loss_pass` on one rank."""

    options: LossOptions
    tensors: LossTensors
    product_dtype: torch.dtype
    needs: tuple[bool, ...]
    row_weight: Tensor | None
    into: Tensor | None


def run_chunks(
    inputs: PassInputs, make_step: Callable[[Tensor], RowStep], buffer_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Gradients]:
    """Compute the results of `chunked.loss_pass` with a step between the products of each chunk.

    `make_step` gets the losses [N], an fp32 tensor on the device. `buffer_dtype` is the type of the logits that the
    step reads: fp32, or that of the products. Gradients of bf16 inputs are bf16, other gradients are fp32.
    """
    features, weight, _, targets = inputs.tensors
    targets = targets.contiguous()
    with devices.on_device(features), devices.without_autocast(features), torch.no_grad():
        losses = features.new_empty(len(targets), dtype=torch.float32)
        table = weight.to(inputs.product_dtype)
        buffer, sums = _allocate(inputs, buffer_dtype)
        step = make_step(losses)
        for part in buffer.parts(len(targets)):
            h = features[part].to(inputs.product_dtype)
            products, slopes = buffer.products(len(h)), buffer.slopes(len(h), inputs.product_dtype)
            devices.add_product(products, h, table.T, beta=0)
            step.run(products, slopes, losses[part], targets[part], part)
            sums.add(part, slopes, h, table, inputs.options.scale)
        return losses, sums.results()


class _PassMemory(NamedTuple):
    """Memory of one pass."""

    buffer: ChunkBuffer
    sums: GradientSums


def _allocate(inputs: PassInputs, buffer_dtype: torch.dtype) -> _PassMemory:
    """Allocate the memory of a pass.

    The chunk is the largest within the limit that the card has room for.
    """
    chunk = inputs.options.chunk
    rows = chunk_size(inputs, buffer_dtype)
    while True:
        try:
            return _allocate_chunk(inputs, rows, buffer_dtype)
        except torch.OutOfMemoryError:
            if chunk is not None or rows <= MINIMUM_ROWS:
                raise
            rows = max(MINIMUM_ROWS, -(-rows // 2))


def chunk_size(inputs: PassInputs, buffer_dtype: torch.dtype) -> int:
    """Return how many tokens a chunk takes, within the limit."""
    features, weight, _, _ = inputs.tensors
    numbers = math.ceil(_padded_width(len(weight)) * buffer_dtype.itemsize / torch.float32.itemsize)
    saved = _numbers_saved_by_one_chunk(inputs)
    return min(len(features), devices.large_chunk_size(len(features), numbers, features, inputs.options.chunk, saved))


def _allocate_chunk(inputs: PassInputs, rows: int, buffer_dtype: torch.dtype) -> _PassMemory:
    """Allocate the memory of a pass whose chunks have so many rows."""
    tensors = inputs.tensors
    buffer = ChunkBuffer.allocate(tensors.features, len(tensors.weight), rows, buffer_dtype)
    is_single = rows >= len(tensors.targets)
    sums = GradientSums(tensors, inputs.product_dtype, inputs.needs, inputs.into, is_single=is_single)
    return _PassMemory(buffer, sums)


def _numbers_saved_by_one_chunk(inputs: PassInputs) -> int:
    """Return the fp32 numbers that only a pass of several chunks allocates for the table's gradient."""
    weight = inputs.tensors.weight
    is_narrow = _result_type(weight, inputs.product_dtype) != torch.float32
    has_sum = inputs.needs[1] and inputs.into is None and is_narrow
    return weight.numel() if has_sum else 0


def _padded_width(vocab: int) -> int:
    """Return the numbers of a row of the buffer, padded for wide loads."""
    return -(-vocab // ROW_MULTIPLE) * ROW_MULTIPLE


def _result_type(x: Tensor, product_dtype: torch.dtype) -> torch.dtype:
    """Return the type of the gradient of `x`.

    fp32 sums are rounded once for bf16. fp16 could overflow.
    """
    is_narrow = x.dtype == product_dtype == torch.bfloat16
    return torch.bfloat16 if is_narrow else torch.float32


@dataclass(frozen=True, eq=False)
class ChunkBuffer:
    """Memory for the products of one chunk, which its slopes overwrite."""

    memory: Tensor  # [rows, V and the padding of a row]
    vocab: int

    @classmethod
    def allocate(cls, features: Tensor, vocab: int, rows: int, dtype: torch.dtype = torch.float32) -> ChunkBuffer:
        """Allocate the memory of a chunk of so many rows."""
        return cls(features.new_empty(rows, _padded_width(vocab), dtype=dtype), vocab)

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

        Slopes narrower than the products take the second half of each row.
        """
        numbers = self.memory.view(dtype)
        first = numbers.shape[1] - self.memory.shape[1]
        return numbers[:n, first : first + self.vocab]


class GradientSums:
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
