"""Matrix products of one chunk of tokens: its logits, and the gradients from their slopes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.core.backends import LossOptions

CACHED = 131_072  # logits that one thread processes at a time: half a megabyte
BLOCKS = 8  # parts of a GPU's chunk, processed one after the other
UNDIVIDED = 2_000_000  # logits that a GPU always processes at once: 8 MB
WIDENED = 4_000_000  # numbers of a narrow table that are converted to fp32 at a time: 16 MB

Gradients = list[Tensor | None]  # gradients of features, weight and bias; None if not needed


def chunk_logits(h: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions, z: Tensor) -> Tensor:
    """Write the logits [n, V] of features `h` [n, E] into `z`, and return `z`."""
    # logits="fp32" multiplies the logits by the scale: multiplying narrow features would round them
    if options.scale != 1.0 and not options.logits:
        h = h * options.scale
    _multiply(h, weight, z, keeps_fp32=bool(options.logits))
    if options.scale != 1.0 and options.logits:
        z.mul_(options.scale)
    if bias is not None:
        z.add_(bias)
    if options.softcap is not None:
        z.div_(options.softcap).tanh_().mul_(options.softcap)
    return z


def _multiply(h: Tensor, weight: Tensor, z: Tensor, *, keeps_fp32: bool) -> None:
    """Write h Wᵀ into `z`, in the type of the sums; `keeps_fp32` forbids earlier rounding."""
    if h.dtype == z.dtype:
        torch.mm(h, weight.T, out=z)
    elif devices.has_wide_products(h):
        devices.wide_product(h, weight.T, z)
    elif keeps_fp32:
        _multiply_widened(h.to(z.dtype), weight, z)
    else:
        z.copy_(torch.mm(h, weight.T))


def _multiply_widened(h: Tensor, weight: Tensor, z: Tensor) -> None:
    """Write h Wᵀ into `z`, converting a narrow table to fp32 block by block."""
    width = weight.shape[1]
    words = max(1, WIDENED // max(1, width))
    wide = h.new_empty(min(words, len(weight)), width)
    for columns, rows in zip(torch.split(z, words, 1), torch.split(weight, words), strict=True):
        torch.mm(h, wide[: len(rows)].copy_(rows).T, out=columns)


def softcap_slope(z: Tensor, softcap: float, out: Tensor) -> Tensor:
    """Write the derivative 1 − tanh² of the soft-cap at its logits `z` into `out`.

    `out` may be `z`.
    """
    return torch.div(z, softcap, out=out).square_().neg_().add_(1)


def gradient_buffers(inputs: Sequence[Tensor | None], needs: Sequence[bool], dtype: torch.dtype) -> Gradients:
    """Return uninitialised memory for the gradient of each of `inputs` that needs one.

    The first chunk of `accumulate_gradients` overwrites it.
    """
    features = inputs[0]
    assert features is not None, "a pass has features"
    allocate = Tensor.new_empty if len(features) else Tensor.new_zeros  # without tokens no chunk overwrites them
    buffers: Gradients = []
    for x, is_needed in zip(inputs, needs, strict=True):
        if x is None or not is_needed:
            buffers.append(None)
        else:
            buffers.append(allocate(x, x.shape, dtype=dtype))
    return buffers


def accumulate_gradients(
    gradients: Sequence[Tensor | None],
    part: slice,
    p: Tensor,
    c: Tensor,
    h: Tensor,
    weight: Tensor,
    scale: float,
    *,
    onto: bool = False,
) -> None:
    """Add to `gradients` those from the slopes c ∘ p [n, V] by the logits.

    `part` selects the tokens. `gradients` are of features, weight and bias, None if not needed. The first chunk
    overwrites them, except the weight's if `onto`. `p` and `c` [n] have the accumulator's type, `h` [n, E] and `weight`
    that of the products.
    """
    by_features, by_weight, by_bias = gradients
    narrow, is_first = p.to(h.dtype), part.start == 0
    if by_bias is not None:
        by_bias.addmv_(p.T, c, beta=int(not is_first))
    if by_features is not None:
        by_features[part] = (narrow @ weight).to(p.dtype).mul_(c[:, None] * scale)
    if by_weight is None:
        return
    weighted = (h.to(p.dtype) * scale * c[:, None]).to(h.dtype)
    overwrites = is_first and not onto
    if h.dtype == p.dtype:
        by_weight.addmm_(narrow.T, weighted, beta=int(not overwrites))
    elif overwrites:
        by_weight.copy_(narrow.T @ weighted)
    else:
        by_weight.add_(narrow.T @ weighted)


def row_blocks(z: Tensor) -> Iterator[slice]:
    """Yield slices of the logits `z` [n, V] to process one at a time.

    The caller has memory for a few copies of a slice. On a CPU a slice fits in the cores' caches. On a GPU it is one of
    BLOCKS parts of a chunk, or UNDIVIDED logits if that is more.
    """
    n, v = z.shape
    if devices.is_cpu(z):
        most = torch.get_num_threads() * max(1, CACHED // max(1, v))
    else:
        most = max(1, -(-n // BLOCKS), UNDIVIDED // max(1, v))
    for start in range(0, n, most):
        yield slice(start, start + most)
