"""The fused loss by a compiled kernel where that is faster, by `chunked` everywhere else; the same figures.

The kernel is given the tokens that count, and the row coefficients c, q of `chunked` with k = 2ζ, by which it adds
k_i lse_i to c_i once it knows lse_i. Without a soft-cap smoothing is linear in the logits and needs none of them:

    (1/V) Σ_j w_j z_ij = (scale h_i · Σ_j w_j W_j + Σ_j w_j b_j) / V

Sums are fp32. Where the processor has a dot product of bf16, the kernel multiplies in bf16; where it has none and torch
emulates it, the kernel takes what it is given, unrounded, in fp32. Products of fp32 are the kernel's where the trial of
`fast_products` found it no slower.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tiewise.core.backends import LossOptions, chunk_rows
from tiewise.ops import chunked
from tiewise.ops.fast_products import product_choice
from tiewise.ops.kernels import kernels, processor

LEAST = 2**27  # multiplications of one product, about a millisecond: below, neither the library nor the padding pays
TOKENS = 32  # of a panel of the kernel, to which fewer are padded


def sweep(
    options: LossOptions,
    tensors: Any,
    kind: torch.dtype,
    wanted: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Do what `chunked.sweep` does."""
    features, weight, bias, targets = tensors
    o, n = options, len(targets)
    valid = targets != o.ignore_index
    compute = kernel(o, tensors, kind, int(valid.sum()))
    if compute is None:
        return chunked.sweep(options, tensors, kind, wanted, row_weight, into)
    some = not bool(valid.all())
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        keep = valid.nonzero()[:, 0]
        h, t = (features[keep], targets[keep]) if some else (features, targets)
        on = h.new_ones(len(t), dtype=torch.float32)
        if row_weight is not None:
            on *= row_weight[keep] if row_weight.dim() else row_weight
        w = None if o.class_weight is None else o.class_weight.float()
        hit = (1 - o.label_smoothing) * (1.0 if w is None else w[t])
        smoothed = o.label_smoothing * (1.0 if w is None else w.mean())
        c, k = on * (hit + smoothed), on * 2 * o.z_loss if o.z_loss else None
        nll, lse, _, *found = compute(h, t, c, on * hit, k, wanted, into=into)
        if into is not None:
            found[1] = into
            torch.autograd.graph.increment_version(into)
        each, gradients = hit * nll, [x if want else None for x, want in zip(found, wanted, strict=False)]
        if o.z_loss:
            each += o.z_loss * lse.square()
        if o.label_smoothing:
            w, share = h.new_ones(len(weight), dtype=torch.float32) if w is None else w, o.label_smoothing / len(weight)
            words = max(1, chunked.WIDENED // weight.shape[1])  # that are fp32 at a time
            rows = sum(a @ x.float() for a, x in zip(w.split(words), weight.split(words), strict=True)) * o.scale
            linear = h.float() @ rows
            each += smoothed * lse - share * (linear if bias is None else linear + w @ bias.float())
            by_features, by_weight, by_bias = gradients
            if by_features is not None:
                by_features.addr_(on, rows, alpha=-share)
            if by_weight is not None:
                by_weight.addr_(w, on @ h.float(), alpha=-share * o.scale)
            if by_bias is not None:
                by_bias.sub_(w, alpha=float(on.sum()) * share)
        if some:
            each = each.new_zeros(n).index_copy_(0, keep, each)
            if gradients[0] is not None:
                gradients[0] = gradients[0].new_zeros(features.shape).index_copy_(0, keep, gradients[0])
    return each, gradients


def kernel(o: LossOptions, tensors: Any, kind: torch.dtype, count: int) -> Any:
    """Return the compiled operator for `count` tokens, where there is one, it has the options and types, and is faster.

    It takes h [n, E], targets [n], the coefficients c, q and k [n], which gradients are wanted, and `entropy`,
    `known` and `into` as `kernels.cpp` explains them; it returns nll, lse, entropy and three gradients, empty if not
    asked for.
    """
    features, weight, bias, _ = tensors
    multiplications = count * weight.numel()
    serves = (
        multiplications >= LEAST
        and count >= TOKENS
        and features.device.type == "cpu"
        and {features.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}
        and weight.is_contiguous()
        and not (o.label_smoothing and o.softcap is not None)
        and _faster(kind, multiplications)
    )
    library = kernels() if serves else None
    if library is None:
        return None
    _describe(library)
    bias = None if bias is None else bias.float().contiguous()
    narrow = {features.dtype, weight.dtype} == {torch.bfloat16} and not o.label_smoothing
    pairs = kind == torch.bfloat16 and "avx512_bf16" in processor()

    def compute(
        h: Tensor,
        t: Tensor,
        c: Tensor,
        q: Tensor,
        k: Any,
        wanted: Any,
        *,
        entropy: bool = False,
        known: Any = None,
        into: Any = None,
    ) -> Any:
        if o.softcap is not None and any(wanted):  # its slope at the target
            at = torch.linalg.vecdot(*(x.to(kind).float() for x in (h, weight[t]))) * o.scale
            q = q * (1 - ((at if bias is None else at + bias[t]) / o.softcap).tanh().square())
        rows = chunk_rows(len(t), len(weight) * 3 // 2, "cpu", o.chunk)  # as fast in two thirds of the memory
        how = (o.scale, o.softcap or 0.0, rows, pairs, narrow, entropy)
        return library.vocabulary_loss(h.contiguous(), weight, bias, t.long(), c, q, k, known, into, *how, *wanted[:3])

    return compute


def _faster(kind: torch.dtype, multiplications: int) -> bool:
    if kind == torch.float32:
        return product_choice("auto", multiplications).native
    return kind == torch.bfloat16 and "amx_bf16" not in processor()  # torch's own products use AMX


@cache
def _describe(library: Any) -> None:
    """Tell torch the shapes that the operator returns."""

    @torch.library.register_fake(f"{library.name}::vocabulary_loss")
    def _(features: Any, weight: Any, bias: Any, targets: Any, c: Any, q: Any, k: Any, *rest: Any) -> Any:
        (n, d), v, (narrow, entropy, by_features, by_weight, by_bias) = features.shape, len(weight), rest[6:]
        kind = torch.bfloat16 if narrow else torch.float32
        sizes: Any = ((n, d) if by_features else (0, d), (v, d) if by_weight and rest[1] is None else (0, d))
        found = [features.new_empty(size, dtype=kind) for size in sizes]
        vectors = [features.new_empty(size, dtype=torch.float32) for size in (n, n, n * entropy, v * by_bias)]
        return (*vectors[:3], *found, vectors[3])
