"""Pass of `backend="tiewise"`: the row kernel, a compiled kernel, or the chunks.

    GPU    `row_loss`, if its kernel runs there and was exact at its first use; else `chunked`
    CPU    `native_loss`: a compiled kernel where that is faster, else `chunked`

A process compares each use of the row kernel (device, type, options, width) once with fp64, as it does for the kernels
of other packages. A use that raises an error, or is inexact, takes `chunked` from then on, with a warning. For example,
triton needs a C compiler. Nothing can be compared while a CUDA graph is recorded, so a use that was not compared
before takes `chunked` there.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable

import torch
from torch import Tensor

from tiewise.boundary.ops import devices, row_loss
from tiewise.boundary.ops.broken_device import VARIABLE, BrokenDevice
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.exactness import BackendPass
from tiewise.boundary.ops.gpu_kernels import TRITON, first_use, require_exactness
from tiewise.boundary.ops.native_loss import native_or_chunked_pass
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions
from tiewise.core.errors import TiewiseWarning, one_line_message

_compared: dict[Hashable, bool] = {}  # first uses of the row kernel in this process → whether it is used


def row_kernel_or_native_pass(
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    needs: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Return the results of `chunked.loss_pass` on one rank.

    They are those of the row kernel where it runs and is exact, else those of `native_or_chunked_pass`.
    """
    tensors = LossTensors(*tensors)
    compute: BackendPass = native_or_chunked_pass
    if _uses_row_kernel(options, tensors, product_dtype):
        compute = row_loss.loss_pass
    return compute(options, tensors, product_dtype, needs, row_weight, into)


def _uses_row_kernel(options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> bool:
    """Return whether the row kernel runs on these tensors and is exact."""
    if not len(tensors.targets) or row_loss.missing_support(tensors, product_dtype):
        return False
    use = first_use(TRITON, options, tensors, product_dtype)
    if use not in _compared:
        if devices.is_capturing(tensors.features):
            return False
        _compared[use] = _is_exact(options, tensors, product_dtype)
    return _compared[use]


def _is_exact(options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> bool:
    """Return whether the row kernel is exact; warn if not.

    Raises:
        BrokenDevice: the kernel broke the GPU's context.
    """
    try:
        require_exactness(TRITON, row_loss.loss_pass, options, tensors, product_dtype)
    except BrokenDevice:
        raise
    except Exception as error:  # triton may fail to compile, to load or to allocate
        reason = f"the loss cannot use its kernel for GPUs ({one_line_message(error)})"
        fix = f"it takes more time without; {VARIABLE}=chunked avoids this warning"
        warnings.warn(f"{reason}; {fix}", TiewiseWarning, stacklevel=2)
        return False
    return True
