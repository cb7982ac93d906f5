"""The fused loss on a GPU with one Triton kernel between the products of each chunk.

The products are fp32 sums [n, V], so logits are never rounded. `gpu_chunks` has the chunks and the products,
`row_kernels` the kernel.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.gpu_chunks import TYPES, PassInputs, run_chunks
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions

LACKS: dict[str, str] = {}  # options that the kernel lacks
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
    tensors = LossTensors(*tensors)
    inputs = PassInputs(options, tensors, product_dtype, needs, row_weight, into)
    return run_chunks(
        inputs, lambda losses: _RowKernel(options, tensors.bias, row_weight, losses, needs_slopes=any(needs))
    )


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
        load_kernels().loss_rows[(len(losses),)](
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


def can_scale(gradient: Tensor) -> bool:
    """Return whether `scale_gradient` runs.

    This pass has then loaded its kernels, so that triton works here.
    """
    has_run = load_kernels.cache_info().currsize > 0
    return has_run and gradient.is_contiguous() and not devices.missing_triton(gradient)


def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a gradient by a number on the GPU.

    If the number is 1, this costs no memory traffic.
    """
    count = gradient.numel()
    if count:
        programs = -(-count // SCALED)
        with devices.on_device(gradient):
            load_kernels().scale_unless_one[(programs,)](gradient, factor, count, BLOCK=SCALED, num_warps=SCALING_WARPS)


@cache
def load_kernels() -> Any:
    """Import the kernels, which need triton."""
    return import_module("tiewise.boundary.ops.row_kernels")
