"""`linear_cross_entropy`: the loss of an output head without its logits, and an fp64 reference.

    z      = softcap(scale · features @ weightᵀ + bias)            softcap(z) = c · tanh(z / c)
    lse    = log Σ_j exp z_j
    loss_i = (1 − ε) w_t (lse − z_t) + (ε / V) Σ_j w_j (lse − z_j) + ζ lse²        t = target of token i

ε is the label smoothing, w are the class weights (1 without any), and ζ is the z-loss coefficient. A token whose target
is `ignore_index` adds nothing to the loss. `mean` divides the sum by Σ_i w_t, as `torch.nn.functional.cross_entropy`
does. If every token is ignored, it returns 0 with zero gradients instead of nan.

Sources: label smoothing, Szegedy et al. 2016 §7; z-loss, PaLM (Chowdhery et al. 2022) §5; soft-cap, Gemma 2 §2.

The forward pass of a scalar loss also computes the gradients: three matrix products in all. The upstream gradient of
per-token losses is unknown until the backward pass. That pass computes each chunk again, which makes four products.
Under `torch.compile` the loss is an opaque operator, for two reasons: Dynamo cannot trace the eager function, which
asks the running backward pass whether its graph survives, and Dynamo must not unroll the chunk loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import chunked, own_pass, row_loss, row_shard
from tiewise.boundary.ops.broken_device import VARIABLE
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.exactness import BackendPass
from tiewise.boundary.ops.fused_loss import Needs, fused_loss, reduce_losses
from tiewise.boundary.ops.gpu_kernels import INSTEAD, TRITON, backend_loss_pass
from tiewise.boundary.ops.problem import (
    LossTensors,
    accumulator,
    check_problem,
    check_range,
    compute_dtype,
    flat_rows,
)
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.core.backends import PACKAGE_BACKENDS, LossOptions
from tiewise.core.errors import UnsupportedError

_DEFAULT = LossOptions()


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    *,
    into: Tensor | None = None,
    upstream: float = 1.0,
    shard: VocabularyShard | None = None,
    **overrides: Any,
) -> Tensor:
    """Return the cross-entropy of `features @ weightᵀ` against `targets` without the [N, V] logits.

    The loss is computed in chunks of tokens. bf16 and fp16 inputs multiply in their type and accumulate in fp32. The
    function works under autocast, `torch.compile` and gradient checkpointing. If the features or the weight are frozen,
    their gradient is not computed. The module's header has the formula and its sources.

    >>> import torch
    >>> features, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    >>> linear_cross_entropy(features, weight, torch.tensor([1, 5]))  # ln 8
    tensor(2.0794)

    Args:
        features: [..., E], any floating type.
        weight: [V, E].
        targets: [...] class indices, or `ignore_index`.
        bias: [V] or None.
        options: see `LossOptions`.
        into: [V, E], fp32 (fp64 for fp64 inputs), contiguous; `weight.grad` is allowed. If gradients are on, this call
            adds the gradient of `weight` to it, and autograd returns none for `weight`. This avoids a second table and
            sums the gradient of a narrow `weight` over batches in fp32. Hooks of `weight` and DDP do not see this
            gradient. It is for scalar losses that are followed by exactly one backward pass.
        upstream: factor by which that backward pass multiplies, which `into` needs in advance: 1 / 4 for `(loss /
            4).backward()`.
        shard: if given, `weight` and `bias` are this rank's rows [V_r, E] and [V_r] of a table over several ranks. All
            ranks make this call with the same features, targets and options. Each rank gets the loss and the features'
            gradient over the full vocabulary, and the gradient of its local rows. A class weight has the full shape
            [V]. If the shard has `own_tokens`, each rank gets the loss of its local tokens. The gradient of its rows
            then sums all ranks' losses, each multiplied by its rank's upstream gradient: for a mean over all tokens,
            divide the table's gradient by the number of ranks.
        **overrides: single options by name, e.g. `softcap=30.0, reduction="sum"`.

    Returns:
        fp32 scalar (fp64 for fp64 inputs), or a tensor shaped like `targets` for `reduction="none"`. A target whose
        logit is −inf has the loss inf and a finite gradient.

    Raises:
        TypeError: features, weight or targets are not tensors (a module instead of its weight, for example); an option
            is not a number.
        ValueError: the shapes do not fit together, the table has no rows, the tensors are on several devices, an option
            is out of range, `into` has the wrong shape or type, or the rows are not those of the shard.
        IndexError: a target is outside [0, V). This is checked on a CPU only; on a GPU it would cost a synchronisation.
        UnsupportedError: features or a weight are integers or complex, targets are probabilities or bools, an option is
            a tensor, the call is inside a `torch.func` transform, a second derivative is taken, or the backend is
            missing, lacks a requested option or has an untested version. With `into` also: checkpointing,
            `torch.compile`, fp16, and a backward pass by another factor than `upstream` (on a GPU it makes `into` nan,
            since reading the factor would wait). With a shard also:
            `torch.compile`, and every backend but tiewise's: `tiewise`, `chunked`, `triton`.
        RunError: the environment variable TIEWISE_LOSS names no backend.
    """
    options = replace(options, **overrides) if overrides else options
    check_problem(features, weight, targets, bias, options, shard)
    if not -math.inf < upstream < math.inf:
        raise ValueError(f"upstream must be finite, not {upstream}")
    tensors = LossTensors(flat_rows(features), weight, bias, targets.reshape(-1).long())
    product_dtype = compute_dtype(tensors.features, weight)
    if into is not None:
        _check_into(into, weight, product_dtype, options)
    if torch.compiler.is_compiling():
        loss = _compiled_loss(tensors, product_dtype, options)
    else:
        _check_values(tensors, product_dtype, options, shard)
        loss_pass = _CrossEntropyPass(options, into, shard)
        factor = None if into is None else upstream
        loss = fused_loss("linear_cross_entropy", loss_pass, options, *tensors, upstream=factor, shard=shard, into=into)
    if options.reduction == "none":
        return loss.view(targets.shape)
    return loss


def _check_values(
    tensors: LossTensors, product_dtype: torch.dtype, options: LossOptions, shard: VocabularyShard | None
) -> None:
    """Refuse targets outside the vocabulary, and fp16 if ranks have separate tokens."""
    if shard is None:
        check_range(tensors.targets, tensors.weight.shape[0], options.ignore_index)
    # a shard's pass checks the targets of all ranks, so that all of them raise
    elif shard.own_tokens and product_dtype == torch.float16:  # fp16 gradients are divided after they are summed
        raise UnsupportedError("tokens of a rank's own in fp16", "compute in bfloat16")


def oracle(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    **overrides: Any,
) -> Tensor:
    """Return the same loss by its formula, in fp64, with all logits.

    It is the reference with which the tests compare. Arguments are those of `linear_cross_entropy`.

    >>> import torch
    >>> oracle(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([1, 5]))  # ln 8
    tensor(2.0794, dtype=torch.float64)
    """
    options = replace(options, **overrides) if overrides else options
    z = _oracle_logits(features, weight, bias, options)
    t = targets.reshape(-1)
    valid = t != options.ignore_index
    at = t.where(valid, 0)
    w = z.new_ones(z.shape[1])
    if options.class_weight is not None:
        w = options.class_weight.double()
    lse = z.logsumexp(1)
    hit = w[at] * (lse - z.gather(1, at[:, None])[:, 0])
    losses = (1 - options.label_smoothing) * hit + options.z_loss * lse.square()
    if options.label_smoothing:  # a logit may be −inf, and 0 · inf is nan
        losses = losses + options.label_smoothing * (w * (lse[:, None] - z)).mean(1)
    losses = losses.where(valid, 0)
    if options.reduction == "none":
        return losses.view(targets.shape)
    if options.reduction == "sum":
        return losses.sum()
    weight_sum = (w[at] * valid).sum()
    return losses.sum() / weight_sum.where(weight_sum > 0, 1)


def _oracle_logits(features: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions) -> Tensor:
    """Return all logits [N, V] in fp64."""
    z = options.scale * (features.double().reshape(-1, features.shape[-1]) @ weight.double().T)
    if bias is not None:
        z = z + bias.double()
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    return z


def _check_into(into: Any, weight: Tensor, product_dtype: torch.dtype, options: LossOptions) -> None:
    """Refuse an `into` of the wrong form, and calls that would add to it wrongly."""
    if not _is_buffer_for(into, weight, accumulator(product_dtype)):
        what = f"a contiguous {accumulator(product_dtype)} tensor of shape {tuple(weight.shape)} without gradient"
        raise ValueError(f"into must be {what}")
    if options.reduction == "none":
        raise ValueError("into is for scalar losses: the gradient of losses by token is not known beforehand")
    lacks = {
        "under torch.compile": torch.compiler.is_compiling(),
        "in a backward pass, as a checkpoint runs its forward once more,": torch._C._current_graph_task_id() != -1,
        "in fp16": product_dtype == torch.float16,
        f"by backend={options.backend!r}": options.backend in PACKAGE_BACKENDS,
    }
    for where, is_so in lacks.items():
        if is_so:
            fix = "leave into out, and autograd has the gradient"
            raise UnsupportedError(f"linear_cross_entropy(into=…) {where}", fix)


def _is_buffer_for(into: Any, weight: Tensor, wide: torch.dtype) -> bool:
    """Return whether the gradient of `weight` in type `wide` can be added to `into`."""
    if not isinstance(into, Tensor):
        return False
    is_alike = (into.shape, into.dtype, into.device) == (weight.shape, wide, weight.device)
    return is_alike and into.is_contiguous() and not into.requires_grad


# losses and gradients of one problem


@dataclass(frozen=True, eq=False)
class _CrossEntropyPass:
    """Function that computes the losses and gradients of one call, as `chunked.loss_pass` does."""

    options: LossOptions
    into: Tensor | None = None
    shard: VocabularyShard | None = None

    def __call__(
        self, tensors: Sequence[Any], product_dtype: torch.dtype, needs: Needs, row_weight: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Compute losses and gradients on this rank, or together with the other ranks of a shard."""
        if self.shard is None:
            return self._on_this_rank(LossTensors(*tensors), product_dtype, needs, row_weight)
        return self._over_ranks(self.shard, LossTensors(*tensors), product_dtype, needs, row_weight)

    def _on_this_rank(
        self, tensors: LossTensors, product_dtype: torch.dtype, needs: Needs, row_weight: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Compute losses and gradients by the backend that the options or the environment choose."""
        options = self.options
        backend = options.backend or os.environ.get(VARIABLE) or "tiewise"
        loss_pass: BackendPass = own_pass.row_kernel_or_native_pass
        if backend != "tiewise":
            with_into = self.into is not None
            chosen = backend_loss_pass(backend, options, tensors, product_dtype, loss_pass, with_into=with_into)
            loss_pass = chosen or loss_pass
        if self.into is None:
            return loss_pass(options, tensors, product_dtype, needs, row_weight)
        return loss_pass(options, tensors, product_dtype, needs, row_weight, self.into)

    def _over_ranks(
        self,
        shard: VocabularyShard,
        tensors: LossTensors,
        product_dtype: torch.dtype,
        needs: Needs,
        row_weight: Tensor | None,
    ) -> tuple[Tensor, Gradients]:
        """Compute the losses of all ranks' tokens with the local rows; return this rank's part."""
        options, n = self.options, len(tensors.targets)
        max_tokens = shard.max_tokens(tensors.targets)
        targets = shard.gather_tokens(tensors.targets, max_tokens, options.ignore_index)
        check_range(targets, shard.total, options.ignore_index)
        if max_tokens is not None and row_weight is not None:
            row_weight = _gather_row_weight(row_weight, shard, max_tokens)
        all_tensors = tensors._replace(features=shard.gather_tokens(tensors.features, max_tokens), targets=targets)
        loss_pass = row_shard.loss_pass if self._uses_row_kernels(all_tensors, product_dtype) else chunked.loss_pass
        losses, gradients = loss_pass(options, all_tensors, product_dtype, needs, row_weight, self.into, shard)
        if gradients[0] is not None:
            gradients[0] = shard.sum_tokens(gradients[0], max_tokens, n)
        return shard.local_part(losses, max_tokens, n), gradients

    def _uses_row_kernels(self, tensors: LossTensors, product_dtype: torch.dtype) -> bool:
        """Return whether the options or the environment request Triton's kernels for a shard."""
        backend = self.options.backend or os.environ.get(VARIABLE)
        if backend != TRITON or not len(tensors.targets):
            return False
        missing = row_loss.missing_support(tensors, product_dtype)
        if missing and self.options.backend is not None:
            raise UnsupportedError(f"backend={backend!r} {missing}", INSTEAD)
        return not missing


def _gather_row_weight(row_weight: Tensor, shard: VocabularyShard, max_tokens: int) -> Tensor:
    """Return the factors [W · max_tokens] on all ranks' losses.

    `row_weight` has one factor for each rank, or one for each token of this rank.
    """
    if row_weight.dim():
        return shard.gather_tokens(row_weight, max_tokens)
    return shard.gather(row_weight).repeat_interleave(max_tokens)


# The same loss under torch.compile: one operator, whose arguments are tensors and numbers only.

_TENSORS = "Tensor features, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? upstream"
_OPTION_SCHEMA = (
    "str reduction, int? chunk, float scale, float? softcap, int ignore_index, float label_smoothing, float z_loss,"
    " str? logits, str? backend"
)
_FIELDS = [argument.split()[1] for argument in _OPTION_SCHEMA.split(", ")]  # fields of `LossOptions`
_SCHEMA = f"({_TENSORS}, ScalarType kind, bool[] wanted, {_OPTION_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)"


class _Arguments(NamedTuple):
    """Arguments of the operator, in the order of `_SCHEMA`."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weight: Tensor | None
    upstream: Tensor | None  # gradient of per-token losses; None: compute only the losses
    product_dtype: torch.dtype
    needs: Sequence[bool]
    reduction: str
    chunk: int | None
    scale: float
    softcap: float | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    logits: str | None
    backend: str | None

    def options(self) -> LossOptions:
        """Return the options of the loss."""
        return LossOptions(class_weight=self.class_weight, **{name: getattr(self, name) for name in _FIELDS})


def _compiled_loss(tensors: LossTensors, product_dtype: torch.dtype, options: LossOptions) -> Tensor:
    """Return the loss by the operator, with arguments that are fixed while Dynamo traces.

    At run time the operator cannot see the autocast region of its caller.
    """
    inputs = (tensors.features, tensors.weight, tensors.bias)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    option_values = [getattr(options, name) for name in _FIELDS]
    loss: Tensor
    loss, *_ = _operator(*inputs, tensors.targets, options.class_weight, None, product_dtype, needs, *option_values)
    return loss


@torch.library.custom_op("tiewise::linear_cross_entropy", mutates_args=(), schema=_SCHEMA)
def _operator(*arguments: Any) -> Any:
    """Compute the loss and its gradients; a gradient that is not needed is an empty tensor.

    An operator can return nothing but tensors.
    """
    a = _Arguments(*arguments)
    options = a.options()
    tensors = LossTensors(a.features, a.weight, a.bias, a.targets)
    loss, gradients = reduce_losses(
        _CrossEntropyPass(options), options, tensors, a.product_dtype, tuple(a.needs), a.upstream
    )
    results = [loss]
    for x, gradient in zip((a.features, a.weight, a.bias), gradients, strict=True):
        if x is None or gradient is None:
            results.append(loss.new_empty(0))
        else:
            results.append(gradient.to(_saved_dtype(x, a.product_dtype)))
    return tuple(results)


def _saved_dtype(x: Tensor, product_dtype: torch.dtype) -> torch.dtype:
    """Return the type of a gradient between forward and backward pass.

    It is that of the sums; on a GPU it is that of bf16 `x`.
    """
    if x.device.type == "cuda" and x.dtype == product_dtype == torch.bfloat16:
        return torch.bfloat16
    return accumulator(product_dtype)


@_operator.register_fake
def _(*arguments: Any) -> Any:
    a = _Arguments(*arguments)
    is_per_token = a.reduction == "none"
    has_gradients = not is_per_token or a.upstream is not None
    wide = accumulator(a.product_dtype)
    results = [a.targets.new_empty(a.targets.shape if is_per_token else (), dtype=wide)]
    for x, is_needed in zip((a.features, a.weight, a.bias), a.needs, strict=True):
        if is_needed and has_gradients:
            assert x is not None, "the gradient of a missing bias is never needed"
            results.append(x.new_empty(x.shape, dtype=_saved_dtype(x, a.product_dtype)))
        else:
            results.append(a.targets.new_empty((0,), dtype=wide))
    return tuple(results)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the gradients of a reduced loss, or the inputs of a per-token one."""
    a = _Arguments(*inputs)
    ctx.option_values = inputs[6:]  # the arguments after `upstream`: `product_dtype`, `needs` and the options
    ctx.is_per_token = a.reduction == "none"
    ctx.needs = a.needs
    ctx.dtypes = [None if x is None else x.dtype for x in (a.features, a.weight, a.bias)]
    counts = a.targets != a.ignore_index
    if ctx.is_per_token:
        ctx.save_for_backward(*inputs[:5], counts)
    else:
        ctx.save_for_backward(*output[1:], counts.any())


def _backward(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    """Return the gradients of all arguments; None for arguments that are not inputs of the loss."""
    *saved, counts = ctx.saved_tensors
    upstream = upstream.where(counts, 0)  # ignored tokens have no gradient, as in `fused_loss`
    if ctx.is_per_token:
        gradients = _operator(*saved, upstream, *ctx.option_values)[1:]
    else:  # an operator may not return its saved results
        gradients = [x * upstream for x in saved]
    results = []
    for x, dtype, is_needed in zip(gradients, ctx.dtypes, ctx.needs, strict=True):
        results.append(x.to(dtype) if is_needed else None)
    others = 3 + len(ctx.option_values)  # targets, class_weight, upstream, and `option_values`
    return (*results, *[None] * others)


_operator.register_autograd(_backward, setup_context=_save_for_backward)
