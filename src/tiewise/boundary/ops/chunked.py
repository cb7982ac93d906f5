"""The fused loss in chunks of tokens: gradients beside the loss, one [V, E] buffer.

For a chunk of n tokens with features h [n, E], P = softmax(z) [n, V]:

    ∂loss_i/∂z_j = c_i P_ij − q_i [j = t_i] − v_i u_j        c_i = (1−ε)w_t + ε mean(w) + 2ζ lse_i     (0 where ignored)
                                                             q_i = (1−ε)w_t,  u_j = ε w_j / V,  v_i = 1 or 0
    R = P − (q / c at column t)
    dfeatures = c ∘ (R W) − v ⊗ uW                           dweight = Rᵀ(c ∘ h) − u ⊗ Σ v h

so the row coefficients act on [n, E] factors, and [n, V] is passed over twice: by the product and by its softmax.
With a soft-cap the elementwise derivative 1 − tanh² stands between, and P is multiplied out.

`fastest_sweep` gives the same figures by a compiled kernel where that is faster. It has the tokens that count, and the
row coefficients c, q with k = 2ζ, by which it adds k_i lse_i to c_i once it knows lse_i. Without a soft-cap smoothing
is linear in the logits and needs none of them:

    (1/V) Σ_j w_j z_ij = (scale h_i · Σ_j w_j W_j + Σ_j w_j b_j) / V

Sums are fp32. Where the processor has a dot product of bf16, the kernel multiplies in bf16; where it has none and torch
emulates it, the kernel takes what it is given, unrounded, in fp32. Products of fp32 are the kernel's where the trial of
`fast_products` found it no slower.

Of a table over several ranks each does so with the columns that it has (`vocabulary_shard`): V and w are the whole
vocabulary's, only the rank that has t subtracts q, and the ranks' dfeatures are still to be summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.fast_products import kernels, own_products, processor, product_choice
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.core.backends import LossOptions, check_loss, check_words, chunk_rows
from tiewise.core.errors import UnsupportedError

CACHED = 131_072  # logits of a thread's rows that are worked on at a time: half a megabyte
BLOCKS = 8  # of a GPU's chunk, worked on one after the other
UNDIVIDED = 2_000_000  # logits that a GPU takes at once in any case: 8 MB
WIDENED = 4_000_000  # numbers of a narrow table that are fp32 at a time: 16 MB
LEAST = 2**27  # multiplications of a product, about a millisecond: below, neither the kernel nor its padding pays
TOKENS = 32  # of a panel of the kernel, to which fewer are padded
SMALLEST = 1e-30  # a probability whose fp32 logarithm is still good; fp32 ends near 1e-38


def check_problem(
    features: Any, weight: Any, targets: Any, bias: Tensor | None, o: LossOptions, shard: VocabularyShard | None = None
) -> None:
    """Refuse shapes that do not meet and options out of range; raises as `linear_cross_entropy`."""
    for name, given in (("features", features), ("weight", weight), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not a {type(given).__name__}")
    if torch.is_floating_point(targets):
        fix = "pass class indices, or compute the logits and use torch.nn.functional.cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)
    if targets.dtype == torch.bool or targets.is_complex():
        raise UnsupportedError(f"linear_cross_entropy of targets of type {targets.dtype}", "pass class indices")
    for name, given in (("weight", weight), ("targets", targets), ("bias", bias), ("class_weight", o.class_weight)):
        if isinstance(given, Tensor) and given.device != features.device:
            raise ValueError(f"{name} is on {given.device} and features on {features.device}; move them to one device")
    if not torch.compiler.is_compiling():
        _check_numbers(o)
    if shard is not None:
        o = shard.own_options(weight, o)
    elif weight.dim() == 2:
        check_words(len(weight))
    check_loss(features, weight, targets, bias, o, torch.is_floating_point)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        fix = "compute the logits there, or use tiewise.boundary.ops.cross_entropy.oracle"
        raise UnsupportedError("linear_cross_entropy inside a torch.func transform", fix)


def _check_numbers(o: LossOptions) -> None:
    """Refuse options of another type than they are: a tensor as `scale`, say."""
    kinds = {"scale": Real, "softcap": Real, "label_smoothing": Real, "z_loss": Real}
    kinds |= {"ignore_index": Integral, "chunk": Integral}
    for name, kind in kinds.items():
        value = getattr(o, name)
        if isinstance(value, Tensor):
            fix = "give a number; to learn it, multiply the features by it, or compute the logits"
            raise UnsupportedError(f"{name} as a tensor, which would get no gradient", fix)
        absent = value is None and name in ("softcap", "chunk")
        if not absent and not isinstance(value, kind):
            what = "a whole number" if kind is Integral else "a number"
            raise TypeError(f"{name} must be {what}, not a {type(value).__name__}")


def flat_rows(features: Tensor) -> Tensor:
    """Features [..., E] as [N, E], also where E is 0."""
    return features.reshape(math.prod(features.shape[:-1]), features.shape[-1])


def check_range(targets: Tensor, vocab: int, ignore_index: int) -> None:
    """Refuse targets outside [0, vocab) with an IndexError; looked at on a CPU only."""
    if targets.device.type != "cpu" or not targets.numel():
        return
    low, high = targets.aminmax()
    if low >= 0 and high < vocab:  # which spares what follows
        return
    outside = targets[((targets < 0) | (targets >= vocab)) & (targets != ignore_index)]
    if outside.numel():
        raise IndexError(f"target {int(outside[0])} is outside the vocabulary of {vocab} (ignore_index={ignore_index})")


def compute_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """Type of the matrix products: autocast's where it is on, which leaves fp64 alone, else the wider input."""
    kind = torch.promote_types(features.dtype, weight.dtype)
    cast = devices.autocast_type(features)
    return kind if cast is None or kind == torch.float64 else cast


def accumulator(kind: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for products in fp64."""
    return torch.float64 if kind == torch.float64 else torch.float32


def sweep(
    options: LossOptions,
    tensors: Any,
    kind: torch.dtype,
    wanted: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Run over all chunks of `tensors`: features [N, E], weight [V, E], bias [V] or None, targets [N].

    The gradient of weight, where it is wanted, is added to `into` if that is given. With a `shard` weight, bias and
    their gradients are its rows.

    Returns:
        the loss of each token [N], and the gradients `wanted` (of features, weight, bias; None elsewhere) of
        Σ row_weight_i · loss_i (row_weight [] or [N]; None: all 1), multiplied in `kind` and accumulated in
        `accumulator(kind)`.
    """
    features, weight, bias, targets = tensors
    o, wide, (n, v) = options, accumulator(kind), (len(targets), len(weight))
    vocab, own = (v, slice(None)) if shard is None else (shard.total, slice(shard.start, shard.stop))
    each = features.new_empty(n, dtype=wide)
    found = gradient_buffers(tensors[:3], (wanted[0], wanted[1] and into is None, wanted[2]), wide)
    found[1] = into if wanted[1] and into is not None else found[1]
    with own_products(features, weight, kind):
        weight = weight.to(kind)
        bias = None if bias is None else bias.to(wide)
        w = None if o.class_weight is None else o.class_weight.to(wide)
        spread_weight = o.label_smoothing * (1.0 if w is None else w.mean())  # ε mean(w)
        ones = each.new_ones(v) if w is None else w[own]
        smoothed = ones * (o.label_smoothing / vocab) if o.label_smoothing else None  # u
        in_place = shard is not None or devices.is_cpu(features)  # whether P overwrites the logits
        bends = o.softcap is not None and any(wanted)
        if shard is None:
            buffers = 2 if bends or not in_place else 1
            rows = devices.rows_at_once(n, devices.numbers_held(v, buffers, kind), features, o.chunk)
        else:  # as many chunks on every rank, whatever is wanted there and however large its GPU is
            buffers = 1 if o.softcap is None else 2
            numbers = devices.numbers_held(shard.rows, buffers, kind)
            rows = chunk_rows(n, numbers, features.device.type, o.chunk)
        buffer = each.new_empty(min(rows, n), v)
        spare = each.new_empty(buffer.shape) if buffers == 2 else buffer[:0]
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            h, t = features[part].to(kind), targets[part]
            valid = t != o.ignore_index
            at = t.where(valid, 0)
            z = chunk_logits(h, weight, bias, o, buffer[: len(t)])
            # before z becomes its softmax: the soft-cap's derivative [n, V], and (1/V) Σ_j w_j z_j [n]
            slope = softcap_slope(z, o.softcap, spare[: len(t)]) if bends and in_place else None
            spread = (z.sum(1) if w is None else z @ w[own]) / vocab if o.label_smoothing else None

            # the nll of the targets [n] (inf where a logit is −inf), lse [n], and the softmax, in place of z on a CPU
            column, here = (at[:, None], None) if shard is None else shard.columns(t)
            if shard is not None:
                p, nll, lse, spread = shard.softmax(z, t, spread)
            elif in_place:  # where the softmax is one pass over memory and its logarithm a second
                target_logit = z.gather(1, column)[:, 0]
                p = torch.softmax(z, 1, out=z)
                at_target = p.gather(1, column)[:, 0]
                nll = at_target.log().neg_()
                lse = target_logit + nll
                lost = (at_target < SMALLEST).nonzero()[:, 0]
                if len(lost):
                    lse[lost] = chunk_logits(h[lost], weight, bias, o, p.new_empty(len(lost), v)).logsumexp(1)
                    nll[lost] = lse[lost] - target_logit[lost]
            else:  # the largest probability is 1 / Σ_j exp(z_j − top), whose logarithm loses nothing
                p, top = torch.softmax(z, 1, out=spare[: len(t)]), z.amax(1)
                rest = p.amax(1).log_().neg_()
                lse = top + rest
                nll = rest - (z.gather(1, column)[:, 0] - top)
                slope = softcap_slope(z, o.softcap, z) if bends else None
            hit = (1 - o.label_smoothing) * (1.0 if w is None else w[at])
            loss = hit * nll
            if o.z_loss:
                loss += o.z_loss * lse.square()
            if spread is not None:
                loss += spread_weight * lse - o.label_smoothing * spread
            each[part] = loss.masked_fill_(~valid, 0)
            if not any(wanted):
                continue

            # P becomes R, in place
            on = valid.to(wide)
            if row_weight is not None:
                on = valid * (row_weight[part] if row_weight.dim() else row_weight)
            c, q, u = on * (hit + spread_weight + (2 * o.z_loss * lse if o.z_loss else 0.0)), on * hit, smoothed
            if here is not None:
                q = q * here
            if slope is None and not o.z_loss:
                p.scatter_add_(1, column, -(q / c.where(c != 0, 1))[:, None])
            else:  # c may vanish, or the soft-cap's slope stands between P and the product: multiply out
                p.mul_(c[:, None]).scatter_add_(1, column, -q[:, None])
                c = torch.ones_like(c)
            if slope is not None:
                if u is not None:
                    p.addr_(on, u, alpha=-1)
                p.mul_(slope)
                u = None
            into_gradients(found, part, p, c, h, weight, o.scale, onto=into is not None)
            if u is not None:
                by_features, by_weight, by_bias = found
                if by_bias is not None:
                    by_bias.sub_(on.sum() * u)
                if by_features is not None:
                    by_features[part].addr_(on, (u.to(kind) @ weight).to(wide), alpha=-o.scale)
                if by_weight is not None:
                    by_weight.addr_(u, on @ (h.to(wide) * o.scale), alpha=-1)
    return each, found


def softcap_slope(z: Tensor, softcap: Any, out: Tensor) -> Tensor:
    """Write the derivative 1 − tanh² of the soft-cap that made the logits `z` into `out`, which may be `z`."""
    return torch.div(z, softcap, out=out).square_().neg_().add_(1)


def gradient_buffers(inputs: Any, wanted: Any, dtype: torch.dtype) -> list[Tensor | None]:
    """Where `into_gradients` sums: like each of `inputs` that is wanted, which its first chunk overwrites."""
    made = Tensor.new_empty if len(inputs[0]) else Tensor.new_zeros  # without a token there is no chunk
    return [made(x, x.shape, dtype=dtype) if want else None for x, want in zip(inputs, wanted, strict=True)]


def into_gradients(
    found: Any, part: slice, p: Tensor, c: Tensor, h: Tensor, weight: Tensor, scale: float, *, onto: bool = False
) -> None:
    """Bring the slopes c ∘ p [n, V] by the logits of tokens `part` into `found`, gradients of features, weight, bias.

    The first chunk overwrites what it finds, but weight's where `onto`. `p` and `c` [n] are in the accumulator's type,
    `h` [n, E] and `weight` in that of the products.
    """
    by_features, by_weight, by_bias = found
    narrow, first = p.to(h.dtype), part.start == 0
    if by_bias is not None:
        by_bias.addmv_(p.T, c, beta=int(not first))
    if by_features is not None:
        by_features[part] = (narrow @ weight).to(p.dtype).mul_(c[:, None] * scale)
    if by_weight is not None:
        weighted = (h.to(p.dtype) * scale * c[:, None]).to(h.dtype)
        if h.dtype == p.dtype:
            by_weight.addmm_(narrow.T, weighted, beta=int(onto or not first))
        else:
            (by_weight.copy_ if first and not onto else by_weight.add_)(narrow.T @ weighted)


def chunk_logits(h: Tensor, weight: Tensor, bias: Tensor | None, o: LossOptions, z: Tensor) -> Tensor:
    """Logits [n, V] of features [n, E], written into `z`."""
    h = h if o.scale == 1.0 or o.logits else h * o.scale
    if h.dtype == z.dtype:
        torch.mm(h, weight.T, out=z)
    elif devices.has_wide_products(h):
        devices.wide_product(h, weight.T, z)
    elif o.logits:  # no product here takes narrow types and keeps its sums: the table is widened, a block at a time
        h, words = h.to(z.dtype), max(1, WIDENED // max(1, weight.shape[1]))
        wide = h.new_empty(min(words, len(weight)), weight.shape[1])
        for some, rows in zip(z.split(words, 1), weight.split(words), strict=True):
            torch.mm(h, wide[: len(rows)].copy_(rows).T, out=some)
    else:
        z.copy_(torch.mm(h, weight.T))
    if o.logits and o.scale != 1.0:  # which would round the features of a narrow type
        z.mul_(o.scale)
    if bias is not None:
        z.add_(bias)
    if o.softcap is not None:
        z.div_(o.softcap).tanh_().mul_(o.softcap)
    return z


def cached_rows(z: Tensor) -> Iterator[slice]:
    """Which rows of the logits `z` [n, V] to work on at a time, with memory for a few copies of them.

    On a CPU they stay in the cores' caches. A GPU takes one part in BLOCKS of a chunk, or few words at once.
    """
    n, v = z.shape
    if devices.is_cpu(z):
        most = torch.get_num_threads() * max(1, CACHED // max(1, v))
    else:
        most = max(1, -(-n // BLOCKS), UNDIVIDED // max(1, v))
    return (slice(start, start + most) for start in range(0, n, most))


# by a compiled kernel


def fastest_sweep(
    o: LossOptions, tensors: Any, kind: torch.dtype, wanted: tuple[bool, ...], row_weight: Any, into: Any = None
) -> tuple[Tensor, Any]:
    """Do what `sweep` does on one rank, by the compiled kernel where that is faster."""
    features, weight, bias, targets = tensors
    if not _may_serve(o, tensors):  # which counts no tokens: a GPU would have to synchronise
        return sweep(o, tensors, kind, wanted, row_weight, into)
    n, valid = len(targets), targets != o.ignore_index
    compute = kernel(o, tensors, kind, int(valid.sum()))
    if compute is None:
        return sweep(o, tensors, kind, wanted, row_weight, into)
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
            words = max(1, WIDENED // weight.shape[1])  # that are fp32 at a time
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
    large = multiplications >= LEAST and count >= TOKENS
    library = kernels() if large and _may_serve(o, tensors) and _faster(kind, multiplications) else None
    if library is None:
        return None
    _describe(library)
    bias = None if bias is None else bias.float().contiguous()
    narrow = {features.dtype, weight.dtype} == {torch.bfloat16} and not o.label_smoothing
    pairs = kind == torch.bfloat16 and "avx512_bf16" in processor()

    def compute(
        h: Any, t: Any, c: Any, q: Any, k: Any, wanted: Any, entropy: bool = False, known: Any = None, into: Any = None
    ) -> Any:
        if o.softcap is not None and any(wanted):  # its slope at the target
            at = torch.linalg.vecdot(*(x.to(kind).float() for x in (h, weight[t]))) * o.scale
            q = q * (1 - ((at if bias is None else at + bias[t]) / o.softcap).tanh().square())
        rows = chunk_rows(len(t), len(weight) * 3 // 2, "cpu", o.chunk)  # as fast in two thirds of the memory
        how = (o.scale, o.softcap or 0.0, rows, pairs, narrow, entropy)
        return library.vocabulary_loss(h.contiguous(), weight, bias, t, c, q, k, known, into, *how, *wanted[:3])

    return compute


def _may_serve(o: LossOptions, tensors: Any) -> bool:
    """Whether the compiled operator takes these options, types and device, for as many tokens as it is worth."""
    features, weight, *_ = tensors
    return (
        devices.is_cpu(features)
        and {features.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}
        and weight.is_contiguous()
        and not (o.label_smoothing and o.softcap is not None)
    )


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
