"""The fused loss by a compiled kernel (`kernels.cpp`), where that is faster than `chunked`.

The kernel gets the tokens that are not ignored, and the row coefficients c, q (see `chunked`) and k = 2ζ; it adds k_i
lse_i to c_i after computing lse_i. Without a soft-cap, smoothing is linear in the logits and needs none of them:

    (1/V) Σ_j w_j z_ij = (scale h_i · Σ_j w_j W_j + Σ_j w_j b_j) / V

If the processor has a dot product of bf16, the kernel multiplies in bf16. If it has none and torch emulates it, the
kernel multiplies its inputs in fp32 without rounding them. On a processor with AMX it multiplies in tiles, and for few
tokens a trial of `few_tokens` chooses the products. With TIEWISE_KERNELS=avx512 it leaves AMX alone. The kernel
computes products of fp32 if the trial of `fast_products` measured it to be no slower.

`docs/dev/performance.md` has times of each method on processors with AMX.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import chunked, devices, few_tokens
from tiewise.boundary.ops.chunk_products import WIDENED, Gradients
from tiewise.boundary.ops.compiled_kernels import kernels, processor, switch
from tiewise.boundary.ops.fast_products import choose_products
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import CHUNK_ELEMENTS, LossOptions, chunk_rows
from tiewise.core.errors import TiewiseWarning

LEAST = 2**27  # multiplications of a product, about a millisecond; in smaller ones the kernel saves no time
TOKENS = 32  # tokens of a panel of the kernel; fewer are padded to it


class KernelProducts(IntEnum):
    """How the operator multiplies: the values of its argument `products`."""

    FP32 = 0
    PAIRS = 1  # bf16 with AVX-512
    TILES = 2  # bf16 with AMX
    EMULATED_TILES = 3  # an emulation of AMX, for tests


class KernelResult(NamedTuple):
    """Losses [n] of the compiled operator, and its gradients; empty if not needed."""

    nll: Tensor
    lse: Tensor
    entropy: Tensor
    by_features: Tensor
    by_weight: Tensor
    by_bias: Tensor


class NativeKernel:
    """Compiled operator for one table and its options; each call provides the tokens."""

    def __init__(
        self,
        library: Any,
        options: LossOptions,
        tensors: LossTensors,
        product_dtype: torch.dtype,
        products: KernelProducts,
    ) -> None:
        """Choose the type in which the operator returns gradients."""
        features, weight, bias, _ = tensors
        self.library, self.options, self.product_dtype, self.weight = library, options, product_dtype, weight
        self.products = products
        self.bias = None if bias is None else bias.float().contiguous()
        are_narrow = {features.dtype, weight.dtype} == {torch.bfloat16}
        self.gradients_are_narrow = are_narrow and not options.label_smoothing

    def __call__(
        self,
        h: Tensor,
        targets: Tensor,
        c: Tensor,
        q: Tensor,
        k: Tensor | None,
        needs: Sequence[bool],
        *,
        entropy: bool = False,
        lse: Tensor | None = None,
        into: Tensor | None = None,
    ) -> KernelResult:
        """Run the operator on features h [n, E], targets [n] and coefficients c, q, k [n].

        `needs` selects the gradients. `lse` [n] is the result of an earlier pass, which need not be repeated. With
        `entropy` and without `lse`, entropies are computed too. `into` is as in `linear_cross_entropy`.
        """
        options = self.options
        if options.softcap is not None and any(needs):
            q = q * self._softcap_slope(h, targets, options.softcap)
        sums_narrow_table = all((self.gradients_are_narrow, needs[1], into is None))
        inputs = (h.contiguous(), self.weight, self.bias, targets)
        coefficients = (c, q, k, lse, into)
        settings = (
            options.scale,
            options.softcap or 0.0,
            self._rows(len(targets), sums_narrow_table=sums_narrow_table),
            self.products,
            self.gradients_are_narrow,
            entropy,
        )
        return KernelResult(*self.library.vocabulary_loss(*inputs, *coefficients, *settings, *needs[:3]))

    def _rows(self, count: int, *, sums_narrow_table: bool) -> int:
        """Return how many of `count` tokens the operator computes at a time.

        With `sums_narrow_table`, several chunks need a second table for sums that are not rounded yet.
        """
        words, numbers = self.weight.shape[0], self.weight.numel()
        if self.products < KernelProducts.TILES:
            return chunk_rows(count, words * 3 // 2, "cpu", self.options.chunk)  # two thirds of the memory is as fast
        # E is bf16; each further chunk reads and writes the table's gradient, so half of its numbers are allowed
        elements = max(2 * CHUNK_ELEMENTS["cpu"], numbers // 2)
        second_table = numbers * sums_narrow_table
        if count * words <= elements + second_table * 3 // 2:
            elements = count * words  # one chunk: at most a third more memory, and less time
        return chunk_rows(count, 1, "cpu", self.options.chunk, most=elements // words)

    def _softcap_slope(self, h: Tensor, targets: Tensor, softcap: float) -> Tensor:
        """Return the soft-cap's derivative [n] at the targets' logits."""
        features = h.to(self.product_dtype).float()
        rows = self.weight[targets].to(self.product_dtype).float()
        logits: Tensor = torch.linalg.vecdot(features, rows) * self.options.scale
        if self.bias is not None:
            logits = logits + self.bias[targets]
        return 1 - (logits / softcap).tanh().square()


def find_kernel(
    options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype, count: int
) -> NativeKernel | None:
    """Return the compiled operator for `count` tokens.

    It is None if there is no operator, if it lacks the options or types, or if it is not faster.
    """
    multiplications = count * tensors.weight.numel()
    if multiplications < LEAST or count < TOKENS:
        return None
    if not _supports(options, tensors) or not _is_faster(product_dtype, multiplications):
        return None
    library = kernels()
    if library is None:
        return None
    _register_shapes(library)
    make_kernel = partial(NativeKernel, library, options, tensors, product_dtype)
    products = KernelProducts.FP32
    if product_dtype == torch.bfloat16:
        products = bf16_products() or KernelProducts.FP32
    if products >= KernelProducts.TILES and count < few_tokens.FEW_TOKENS:
        return _fastest_for_few_tokens(options, tensors, count, make_kernel, products)
    return make_kernel(products)


def _fastest_for_few_tokens(
    options: LossOptions,
    tensors: LossTensors,
    count: int,
    make_kernel: Callable[[KernelProducts], NativeKernel],
    tiles: KernelProducts,
) -> NativeKernel | None:
    """Return the operator with the products that a trial measured as fastest.

    It is None if those are the products of torch.
    """
    candidates = {"tiles": make_kernel(tiles), "torch": None}
    if "avx512_bf16" in processor():
        candidates["pairs"] = make_kernel(KernelProducts.PAIRS)
    make_losses = partial(_trial_losses, candidates, tensors.weight, count, options.logits)
    return candidates[few_tokens.choose_fastest(count, tensors.weight, options.logits, make_losses)]


def _trial_losses(
    candidates: dict[str, NativeKernel | None], weight: Tensor, count: int, logits: str | None
) -> dict[str, Callable[[], object]]:
    """Return a loss of random tokens, with its gradients, by each candidate.

    The table is the caller's. The candidate None is torch.
    """
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(count, weight.shape[1], generator=draw, device="cpu").to(weight.dtype)
    targets = torch.randint(0, len(weight), (count,), generator=draw, device="cpu")
    options, tensors = LossOptions(logits=logits), LossTensors(features, weight, None, targets)
    needs = (True, True, False)

    def run(kernel: NativeKernel | None) -> None:
        """Compute the loss and its gradients."""
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            if kernel is None:
                chunked.loss_pass(options, tensors, torch.bfloat16, needs, None, None)
            else:
                _NativeLoss(options, tensors, None).compute(kernel, needs, None)

    return {name: partial(run, kernel) for name, kernel in candidates.items()}


def _supports(options: LossOptions, tensors: LossTensors) -> bool:
    """Return whether the compiled operator supports these options, types and device."""
    features, weight = tensors.features, tensors.weight
    if not devices.is_cpu(features) or not weight.is_contiguous():
        return False
    if not {features.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}:
        return False
    # smoothing is linear in the logits only without a soft-cap
    return options.softcap is None or not options.label_smoothing


def _is_faster(product_dtype: torch.dtype, multiplications: int) -> bool:
    """Return whether the operator is faster than torch's products of this type and size."""
    if product_dtype == torch.float32:
        return choose_products("auto", multiplications).native
    return product_dtype == torch.bfloat16 and bf16_products() is not None


def bf16_products() -> KernelProducts | None:
    """Return how the operator multiplies in bf16; None if torch multiplies, which uses AMX.

    Without a dot product of bf16 the operator multiplies in fp32.
    """
    if "amx_bf16" in processor() and switch() != "avx512":
        library = kernels("amx_bf16")
        return KernelProducts.TILES if library is not None and _tiles_are_right(library) else None
    return KernelProducts.PAIRS if "avx512_bf16" in processor() else KernelProducts.FP32


@cache
def _tiles_are_right(library: Any) -> bool:
    """Return whether a small loss with AMX equals that with its emulation; warn if not.

    The kernel ran on few such processors, so each process checks it once, in milliseconds.
    """
    tiles = _compute_small_loss(library, KernelProducts.TILES)
    emulated = _compute_small_loss(library, KernelProducts.EMULATED_TILES)
    for name, limit in (("nll", 1e-5), ("by_features", 1e-2), ("by_weight", 1e-2)):
        expected = getattr(emulated, name).float()
        distance = (getattr(tiles, name).float() - expected).norm() / expected.norm()
        if not distance <= limit:  # also if it is nan
            reason = f"the kernel for AMX differs from its emulation by {distance:.1e} of the result on this processor"
            warnings.warn(f"{reason}; torch multiplies in bf16 instead", TiewiseWarning, stacklevel=2)
            return False
    return True


def _compute_small_loss(library: Any, products: KernelProducts) -> KernelResult:
    """Return the losses and gradients of 70 random tokens, in two chunks."""
    draw = torch.Generator().manual_seed(0)
    features, weight = (torch.randn(rows, 70, generator=draw, device="cpu").bfloat16() for rows in (70, 150))
    targets, ones = torch.arange(70, device="cpu"), torch.ones(70, device="cpu")
    inputs = (features, weight, None, targets, ones, ones, None, None, None)
    return KernelResult(*library.vocabulary_loss(*inputs, 0.3, 0.0, 40, products, True, False, True, True, False))


@cache
def _register_shapes(library: Any) -> None:
    """Register the shapes of the operator's results, which torch needs to trace it."""
    torch.library.register_fake(f"{library.name}::vocabulary_loss", _fake_results)


def _fake_results(
    features: Tensor, weight: Tensor, bias: Any, targets: Any, c: Any, q: Any, k: Any, *rest: Any
) -> tuple[Tensor, ...]:
    """Return empty tensors of the shapes and types that the operator returns."""
    into, (narrow, entropy, by_features, by_weight, by_bias) = rest[1], rest[6:]
    (n, d), v = features.shape, len(weight)
    product_dtype = torch.bfloat16 if narrow else torch.float32
    has_table = by_weight and into is None

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an empty tensor on the device of the features."""
        return features.new_empty(shape, dtype=dtype)

    # n · 0: a result that is not computed is an empty tensor
    nll, lse, entropies = empty(n), empty(n), empty(n * entropy)
    feature_gradient = empty(n * by_features, d, dtype=product_dtype)
    weight_gradient = empty(v * has_table, d, dtype=product_dtype)
    return nll, lse, entropies, feature_gradient, weight_gradient, empty(v * by_bias)


# the loss


def native_or_chunked_pass(
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    needs: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Return the results of `chunked.loss_pass` on one rank, by the compiled kernel if that is faster."""
    tensors = LossTensors(*tensors)
    if not _supports(options, tensors):  # checked first, because counting tokens would synchronise a GPU
        return chunked.loss_pass(options, tensors, product_dtype, needs, row_weight, into)
    valid = tensors.targets != options.ignore_index
    count = int(valid.sum())
    compute = find_kernel(options, tensors, product_dtype, count)
    if compute is None:
        return chunked.loss_pass(options, tensors, product_dtype, needs, row_weight, into)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        if count == len(valid):
            return _NativeLoss(options, tensors, row_weight).compute(compute, needs, into)
        keep = valid.nonzero()[:, 0]
        counting = tensors._replace(features=tensors.features[keep], targets=tensors.targets[keep])
        if row_weight is not None and row_weight.dim():
            row_weight = row_weight[keep]
        losses, gradients = _NativeLoss(options, counting, row_weight).compute(compute, needs, into)
        losses = losses.new_zeros(len(valid)).index_copy_(0, keep, losses)
        by_features = gradients[0]
        if by_features is not None:
            gradients[0] = by_features.new_zeros(tensors.features.shape).index_copy_(0, keep, by_features)
    return losses, gradients


class _NativeLoss:
    """Loss of tokens that are not ignored, and its gradients, with one call of the kernel."""

    def __init__(self, options: LossOptions, tensors: LossTensors, row_weight: Tensor | None) -> None:
        """Compute the row coefficients; `row_weight` is as in `chunked.loss_pass`."""
        self.options, self.tensors = options, tensors
        targets = tensors.targets
        self.row_weights = tensors.features.new_ones(len(targets), dtype=torch.float32)
        if row_weight is not None:
            self.row_weights *= row_weight
        self.hit: Tensor | float = 1 - options.label_smoothing  # (1 − ε) w_t
        self.smoothed: Tensor | float = options.label_smoothing  # ε mean(w)
        self.class_weight: Tensor | None = None
        if options.class_weight is not None:
            self.class_weight = options.class_weight.float()
            self.hit = self.hit * self.class_weight[targets]
            self.smoothed = self.smoothed * self.class_weight.mean()

    def compute(self, compute: NativeKernel, needs: tuple[bool, ...], into: Tensor | None) -> tuple[Tensor, Gradients]:
        """Return losses [n] and gradients; that of weight is added to `into` if given."""
        options, (features, _, _, targets) = self.options, self.tensors
        c = self.row_weights * (self.hit + self.smoothed)
        k = self.row_weights * 2 * options.z_loss if options.z_loss else None
        result = compute(features, targets, c, self.row_weights * self.hit, k, needs, into=into)
        by_weight = result.by_weight
        if into is not None:
            by_weight = into
            torch.autograd.graph.increment_version(into)
        results = (result.by_features, by_weight, result.by_bias)
        gradients: Gradients = [x if is_needed else None for x, is_needed in zip(results, needs, strict=False)]
        losses = self.hit * result.nll
        if options.z_loss:
            losses += options.z_loss * result.lse.square()
        if options.label_smoothing:
            self._smooth(losses, gradients, result.lse)
        return losses, gradients

    def _smooth(self, losses: Tensor, gradients: Gradients, lse: Tensor) -> None:
        """Add label smoothing, which is linear in the logits, to the losses and gradients."""
        h, weight, bias, _ = self.tensors
        w = self.class_weight
        if w is None:
            w = h.new_ones(len(weight), dtype=torch.float32)
        share = self.options.label_smoothing / len(weight)
        row = self._sum_weighted_rows(w)
        linear = h.float() @ row
        if bias is not None:
            linear = linear + w @ bias.float()
        losses += self.smoothed * lse - share * linear
        by_features, by_weight, by_bias = gradients
        if by_features is not None:
            by_features.addr_(self.row_weights, row, alpha=-share)
        if by_weight is not None:
            by_weight.addr_(w, self.row_weights @ h.float(), alpha=-share * self.options.scale)
        if by_bias is not None:
            by_bias.sub_(w, alpha=float(self.row_weights.sum()) * share)

    def _sum_weighted_rows(self, w: Tensor) -> Tensor:
        """Return scale · Σ_j w_j W_j [E] in fp32, converting a narrow table block by block."""
        weight = self.tensors.weight
        words = max(1, WIDENED // weight.shape[1])
        total = w.new_zeros(weight.shape[1])
        for part, rows in zip(torch.split(w, words), torch.split(weight, words), strict=True):
            total = total + part @ rows.float()
        return total * self.options.scale
