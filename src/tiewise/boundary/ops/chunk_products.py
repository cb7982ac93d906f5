"""Matrix products of one chunk of tokens: its logits, and gradients from their slopes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.core.backends import LossOptions

CACHED = 131_072  # logits of a thread's rows that are worked on at a time: half a megabyte
BLOCKS = 8  # of a GPU's chunk, worked on one after the other
UNDIVIDED = 2_000_000  # logits that a GPU takes at once in any case: 8 MB
WIDENED = 4_000_000  # numbers of a narrow table that are fp32 at a time: 16 MB

Gradients = list[Tensor | None]  # of features, weight and bias; None for those that are not needed


def chunk_logits(h: Tensor, weight: Tensor, bias: Tensor | None, o: LossOptions, z: Tensor) -> Tensor:
    """Write the logits [n, V] of features `h` [n, E] into `z`, and return it."""
    # logits="fp32" multiplies by the scale afterwards, which would round the features of a narrow type
    if o.scale != 1.0 and not o.logits:
        h = h * o.scale
    _multiply(h, weight, z, keeps_fp32=bool(o.logits))
    if o.scale != 1.0 and o.logits:
        z.mul_(o.scale)
    if bias is not None:
        z.add_(bias)
    if o.softcap is not None:
        z.div_(o.softcap).tanh_().mul_(o.softcap)
    return z


def _multiply(h: Tensor, weight: Tensor, z: Tensor, *, keeps_fp32: bool) -> None:
    """Write h Wᵀ into `z`, in the type of the sums; `keeps_fp32` forbids rounding it before."""
    if h.dtype == z.dtype:
        torch.mm(h, weight.T, out=z)
    elif devices.has_wide_products(h):
        devices.wide_product(h, weight.T, z)
    elif keeps_fp32:
        _multiply_widened(h.to(z.dtype), weight, z)
    else:
        z.copy_(torch.mm(h, weight.T))


def _multiply_widened(h: Tensor, weight: Tensor, z: Tensor) -> None:
    """Write h Wᵀ into `z`, for which blocks of a narrow table are widened."""
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
    """Return memory like each of `inputs` that needs a gradient.

    The first chunk of `into_gradients` overwrites it.
    """
    features = inputs[0]
    assert features is not None, "a sweep has features"
    allocate = Tensor.new_empty if len(features) else Tensor.new_zeros  # without a token there is no chunk
    buffers: Gradients = []
    for x, is_needed in zip(inputs, needs, strict=True):
        if x is None or not is_needed:
            buffers.append(None)
        else:
            buffers.append(allocate(x, x.shape, dtype=dtype))
    return buffers


def into_gradients(
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

    `part` says which tokens these are. Gradients are of features, weight and bias, None where not needed. The first
    chunk overwrites them, except the weight's if `onto`. `p` and `c` [n] are in the accumulator's type, `h` [n, E] and
    `weight` in that of the products.
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


def cached_rows(z: Tensor) -> Iterator[slice]:
    """Yield the rows of the logits `z` [n, V] to work on at a time.

    There is memory for a few copies of them. On a CPU they stay in the cores' caches. A GPU takes one part in BLOCKS of
    a chunk, or few words at once.
    """
    n, v = z.shape
    if devices.is_cpu(z):
        most = torch.get_num_threads() * max(1, CACHED // max(1, v))
    else:
        most = max(1, -(-n // BLOCKS), UNDIVIDED // max(1, v))
    for start in range(0, n, most):
        yield slice(start, start + most)
