"""Properties of a tensor's device: its branch of a pass over chunks, products, autocast and memory.

Each pass over chunks has two branches: one for a CPU, and one for every other device (a GPU; `meta`, which has shapes
only). Every choice between the branches goes through this module by its name, so that a test can run a GPU's branch on
CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from tiewise.core.backends import chunk_rows

CHUNKS_IN_MEMORY = 64  # a chunk takes at most 1/64 of a GPU's memory
WITHOUT_AUTOCAST = ("meta",)  # devices that can be compiled for and lack autocast


def is_cpu(x: Tensor) -> bool:
    """Return whether a pass over `x` takes a CPU's branch."""
    return x.device.type == "cpu"


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type in which autocast would multiply `x`.

    It is None if autocast is off, or if the device has none.
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
    """Return whether `torch.mm` can return fp32 sums of narrow products.

    CUDA can from torch 2.8 on. On ROCm the results were wrong in several releases (PyTorch's issue 162600 and later
    ones).
    """
    overloads: Callable[[], list[str]] = torch.ops.aten.mm.overloads
    return torch.version.hip is None and "dtype_out" in overloads()


def has_wide_products(x: Tensor) -> bool:
    """Return whether products of narrow tensors like `x` can be written as fp32 sums."""
    return x.device.type == "cuda" and _mm_takes_out_dtype()


def wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the fp32 sums of the product of narrow `a` and `b` into `out`.

    It requires `has_wide_products`.
    """
    torch.mm(a, b, out_dtype=out.dtype, out=out)


def numbers_per_token(v: int, buffers: float, product_dtype: torch.dtype) -> int:
    """Return the memory that one token takes in a chunk, in fp32 numbers.

    It counts `buffers` rows of V sums, and a row in a narrower product type.
    """
    wide = torch.promote_types(product_dtype, torch.float32)
    bytes_per_word = buffers * wide.itemsize
    if product_dtype != wide:
        bytes_per_word += product_dtype.itemsize
    return math.ceil(v * bytes_per_word / torch.float32.itemsize)


def chunk_size(n: int, numbers: int, like: Tensor, chunk: int | None) -> int:
    """Return how many of `n` tokens a chunk takes.

    Each token takes `numbers` fp32 numbers.

    The memory is that of the device of `like`; `chunk` overrides the result.
    """
    budget = "cpu" if is_cpu(like) else "cuda"
    most = None
    if like.device.type == "cuda":
        most = _total_memory(like.device) // (4 * CHUNKS_IN_MEMORY)
    return chunk_rows(n, numbers, budget, chunk, most)


@cache
def _total_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory.

    Free memory would make chunks, and so rounding, differ between runs.
    """
    return int(torch.cuda.get_device_properties(device).total_memory)
