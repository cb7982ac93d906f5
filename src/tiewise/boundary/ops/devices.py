"""Properties of a tensor's device: its branch of a pass over chunks, products, autocast and memory.

Each pass over chunks has two branches: one for a CPU, and one for every other device (a GPU; `meta`, which has shapes
only). Every choice between the branches goes through this module by its name, so that a test can run a GPU's branch on
CPU tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from tiewise.core.backends import LARGE_CHUNKS_IN_MEMORY, chunk_rows

CHUNKS_IN_MEMORY = 64  # a chunk takes at most 1/64 of a GPU's memory
PLAIN = (Tensor, torch.nn.Parameter)  # classes of tensors that have memory of their own
OLDEST = (8, 0)  # compute capability of the oldest cards whose matrix units multiply bf16
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


def add_product(out: Tensor, a: Tensor, b: Tensor, *, beta: int, alpha: float = 1.0) -> None:
    """Write beta · out + alpha · a b into `out`.

    Sums have the type of `out`. With beta 0, `out` is overwritten. Narrow products into an fp32 `out` require
    `has_wide_products`.
    """
    if out.dtype == a.dtype:
        out.addmm_(a, b, beta=beta, alpha=alpha)
    else:
        _add_wide_product(out, a, b, beta, alpha)


def _add_wide_product(out: Tensor, a: Tensor, b: Tensor, beta: int, alpha: float) -> None:
    """Add the product of narrow `a` and `b` to the fp32 `out`, as `add_product`."""
    torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a context in which triton's kernels run on the GPU of `x`.

    Torch's operators choose the GPU of their tensors. Triton takes the current GPU.
    """
    if x.device.type == "cuda":
        return torch.cuda.device(x.device)
    return nullcontext()


def is_capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph records the operators on tensors like `x`."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished.

    It raises a RuntimeError if an operation failed there.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compute_capability(x: Tensor) -> tuple[int, int] | None:
    """Return the compute capability of the Nvidia GPU of `x`; None elsewhere."""
    if x.device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(x.device)


def missing_triton(x: Tensor) -> str:
    """Return why triton's kernels cannot run on tensors like `x`, as the rest of a sentence.

    It is empty if they can. They run on Nvidia's cards from Ampere on, and on a CPU that emulates a GPU under
    triton's interpreter.
    """
    if not has_triton():
        return "needs triton; pip install triton"
    device = x.device.type
    if device == "cuda" and not _has_new_card(x.device):
        return "needs an Nvidia GPU of compute capability 8.0 or higher"
    refusal = refuse_subclass(x)
    if refusal:
        return refusal
    is_emulated = device == "cpu" and not is_cpu(x) and os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda" or is_emulated:
        return ""
    return f"runs on a GPU, and the features are on a {device}"


def refuse_subclass(x: Tensor) -> str:
    """Return why a pass refuses the class of a tensor, as the rest of a sentence.

    It is empty for a class in PLAIN.
    """
    if type(x) in PLAIN:
        return ""
    return f"runs on plain tensors, not on a {type(x).__name__}"


@cache
def _has_new_card(device: torch.device) -> bool:
    """Return whether a CUDA device is an Nvidia GPU that triton's kernels support."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST


@cache
def has_triton() -> bool:
    """Return whether triton is installed."""
    return find_spec("triton") is not None


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


def large_chunk_size(n: int, numbers: int, like: Tensor, chunk: int | None, saved: int = 0) -> int:
    """Return how many of `n` tokens a chunk takes.

    It may use a larger share of a GPU's memory than those of `chunk_size`, which has the same arguments. A single chunk
    may also use `saved`, the fp32 numbers that only several chunks need.
    """
    if like.device.type != "cuda" or chunk is not None:
        return chunk_size(n, numbers, like, chunk)
    share = _total_memory(like.device) // (4 * LARGE_CHUNKS_IN_MEMORY)
    if n * numbers <= share + saved:
        return n
    return chunk_rows(n, numbers, "cuda", most=share, budget=share)


@cache
def _total_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory.

    Free memory would make chunks, and so rounding, differ between runs.
    """
    return int(torch.cuda.get_device_properties(device).total_memory)
