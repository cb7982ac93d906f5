"""Abilities of a tensor's device: the branch that a sweep takes, its products, autocast, and memory for a chunk.

The sweeps have two branches: a CPU's, and that of every other device (a GPU; `meta`, where only shapes exist). Every
choice between them asks this module by its name, so that a test can run a GPU's branch on CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from tiewise.core.backends import chunk_rows

CARD = 64  # a chunk takes at most one part in so many of a GPU's memory
WITHOUT_AUTOCAST = ("meta",)  # of the devices whose tensors can be compiled


def is_cpu(x: Tensor) -> bool:
    """Return whether sweeps over `x` take a CPU's branch."""
    return x.device.type == "cpu"


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type in which autocast would multiply `x`.

    It is None where autocast is off, or the device has none.
    """
    device = x.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which autocast leaves tensors of this device alone."""
    device = x.device.type
    if _has_autocast(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def _has_autocast(device: str) -> bool:
    """Return whether torch has autocast for this type of device."""
    # Dynamo cannot trace `is_autocast_available` in every release: not in torch 2.11.
    if torch.compiler.is_compiling():
        return device not in WITHOUT_AUTOCAST
    return torch.amp.is_autocast_available(device)


@cache
def _mm_takes_out_dtype() -> bool:
    """Return whether `torch.mm` can keep the fp32 sums of narrow products: on CUDA, from torch 2.8 on.

    On ROCm its results were wrong in several releases (PyTorch's issue 162600 and later ones).
    """
    overloads: Callable[[], list[str]] = torch.ops.aten.mm.overloads
    return torch.version.hip is None and "dtype_out" in overloads()


def has_wide_products(x: Tensor) -> bool:
    """Return whether products of narrow tensors like `x` can be written as the fp32 sums that they are."""
    return x.device.type == "cuda" and _mm_takes_out_dtype()


def wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the fp32 sums of the product of narrow `a` and `b` into `out`.

    It works only where `has_wide_products`.
    """
    torch.mm(a, b, out_dtype=out.dtype, out=out)


def numbers_held(v: int, buffers: float, kind: torch.dtype) -> int:
    """Return the memory of a token in fp32 numbers.

    It holds `buffers` rows of V sums, and a copy in a narrower `kind`.
    """
    wide = torch.promote_types(kind, torch.float32)
    bytes_per_word = buffers * wide.itemsize
    if kind != wide:
        bytes_per_word += kind.itemsize
    return math.ceil(v * bytes_per_word / torch.float32.itemsize)


def rows_at_once(n: int, numbers: int, like: Tensor, chunk: int | None) -> int:
    """Return the rows of a chunk of `n` tokens with `numbers` each.

    They are for the device of `like`; `chunk` overrides.
    """
    budget = "cpu" if is_cpu(like) else "cuda"
    most = None
    if like.device.type == "cuda":
        most = _memory(like.device) // (4 * CARD)
    return chunk_rows(n, numbers, budget, chunk, most)


@cache
def _memory(device: torch.device) -> int:
    """Return the bytes of a GPU. With what is free at the moment, chunks and so rounding would differ between runs."""
    return int(torch.cuda.get_device_properties(device).total_memory)
