"""Emulation of a GPU's code path with CPU tensors, for tests and for `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from tiewise.boundary.ops import devices


@contextmanager
def gpu_branch(*, wide_products: bool = True) -> Iterator[None]:
    """Let CPU tensors take the code path of a GPU.

    With `wide_products`, products of bf16 and fp16 tensors return their fp32 sums.
    """
    with patch.multiple(
        devices,
        is_cpu=lambda x: False,
        add_product=_add_product,
        has_wide_products=lambda x: wide_products,
        wide_product=_wide_product,
        _add_wide_product=_add_wide_product,
    ):
        yield


_ADD_PRODUCT = devices.add_product


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, beta: int, alpha: float = 1.0) -> None:
    """Do what `devices.add_product` does, without padding after rows of odd length.

    On a CPU with AMX, torch 2.13 multiplies the bf16 number after such a row by 0, and returns nan where it is nan.
    """
    if a.shape[1] % 2 and a.stride(1) == 1:
        a = a.contiguous()
    _ADD_PRODUCT(out, a, b, beta=beta, alpha=alpha)


def _wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the result of a GPU's `torch.mm(a, b, out_dtype=…, out=…)`."""
    torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_wide_product(out: Tensor, a: Tensor, b: Tensor, beta: int, alpha: float) -> None:
    """Write the result of a GPU's `torch.addmm(out, a, b, out_dtype=…, out=out)`."""
    torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, alpha=alpha, out=out)
