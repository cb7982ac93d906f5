"""What a tensor's device can do: which branch a sweep takes, its products, autocast, and memory for a chunk.

The sweeps have two branches: a CPU's, and that of every other device (a GPU; `meta`, where only shapes exist). Every
choice between them asks this module by its name, so that a test can run a GPU's branch on CPU tensors.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tiewise.core.backends import chunk_rows

CARD = 64  # a chunk takes at most one part in so many of a GPU's memory


def is_cpu(x: Tensor) -> bool:
    """Whether sweeps over `x` take a CPU's branch."""
    return x.device.type == "cpu"


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Type in which autocast would multiply `x`; None where it is off, or the device has none."""
    device = x.device.type
    has = torch.amp.is_autocast_available(device)
    return torch.get_autocast_dtype(device) if has and torch.is_autocast_enabled(device) else None


def without_autocast(x: Tensor) -> Any:
    """Return a context in which autocast leaves tensors of this device alone."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


@cache
def _mm_takes_out_dtype() -> bool:
    """Whether `torch.mm` can keep the fp32 sums of narrow products: on CUDA, from torch 2.8 on.

    On ROCm its results were wrong in several releases (PyTorch's issue 162600 and later ones).
    """
    return torch.version.hip is None and "dtype_out" in torch.ops.aten.mm.overloads()


def has_wide_products(x: Tensor) -> bool:
    """Whether products of narrow tensors like `x` can be written as the fp32 sums that they are."""
    return x.device.type == "cuda" and _mm_takes_out_dtype()


def wide_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write the fp32 sums of the product of narrow `a` and `b` into `out`; only where there are `has_wide_products`."""
    torch.mm(a, b, out_dtype=out.dtype, out=out)


def numbers_held(v: int, buffers: float, kind: torch.dtype) -> int:
    """Memory per token in fp32 numbers: `buffers` rows of V sums, and a copy in `kind` where that is narrower."""
    wide = torch.promote_types(kind, torch.float32)
    narrow = 0 if kind == wide else kind.itemsize
    return math.ceil(v * (buffers * wide.itemsize + narrow) / torch.float32.itemsize)


def rows_at_once(n: int, numbers: int, like: Tensor, asked: int | None) -> int:
    """Rows of a chunk of `n` tokens that hold `numbers` each, on the device of `like`; `asked` overrides."""
    on_card = like.device.type == "cuda"
    most = _memory(like.device) // (4 * CARD) if on_card else None
    return chunk_rows(n, numbers, "cpu" if is_cpu(like) else "cuda", asked, most)


@cache
def _memory(device: torch.device) -> int:
    """Bytes of a GPU. With what is free at the moment, chunks and so rounding would differ between runs."""
    return int(torch.cuda.get_device_properties(device).total_memory)
