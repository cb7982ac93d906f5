"""The two operators of `log_prob`: statistics of a head's distributions, and their gradients.

They are operators both eagerly and compiled, because Dynamo must not unroll the chunks. `log_prob` has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import devices, row_statistics
from tiewise.boundary.ops.chunk_products import (
    BLOCKS,
    Gradients,
    accumulate_gradients,
    chunk_logits,
    gradient_buffers,
    row_blocks,
    softcap_slope,
)
from tiewise.boundary.ops.fast_products import pass_products
from tiewise.boundary.ops.gpu_chunks import PassInputs, run_chunks
from tiewise.boundary.ops.native_loss import NativeKernel, find_kernel
from tiewise.boundary.ops.problem import LossTensors, accumulator, compute_dtype
from tiewise.boundary.ops.row_statistics import ColumnSums, ReadingStep, RowCoefficients, RowKernels, WritingStep
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

_LOWEST = -1e4  # least log-probability: exp of it is 0 even in fp64, and −inf would give 0 · −inf

_OPTION_SCHEMA = "ScalarType kind, float scale, float? softcap, int ignore_index, int? chunk, str? logits"
_FIELDS = [argument.split()[1] for argument in _OPTION_SCHEMA.split(", ")[1:]]  # fields of `LossOptions`
_INPUTS = "Tensor features, Tensor weight, Tensor? bias, Tensor? targets"
_UPSTREAM = "Tensor? by_log_prob, Tensor? by_lse, Tensor? by_entropy"


def token_statistics(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor | None, entropy: bool, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, log-sum-exps and entropies, each [N] and differentiable.

    The first is empty without targets, the last without `entropy`.
    """
    option_values = (compute_dtype(features, weight), *(getattr(options, name) for name in _FIELDS))
    log_prob, lse, entropies, *_ = _statistics(features, weight, bias, targets, entropy, *option_values)
    return log_prob, lse, entropies


def _to_options(option_values: Sequence[Any]) -> LossOptions:
    """Return the options in `option_values`, which follow the type of the products."""
    return LossOptions(**dict(zip(_FIELDS, option_values[1:], strict=True)))


# logits, by chunks and blocks


class _LogitChunk(NamedTuple):
    """Logits of some of the tokens."""

    part: slice  # positions among all tokens
    h: Tensor  # [n, E] features in the type of the products
    z: Tensor  # [n, V] logits


class _Block(NamedTuple):
    """A few rows of a chunk's logits, and working memory."""

    rows: slice  # positions among all tokens
    z: Tensor  # [m, V] logits
    work: Tensor  # [m, V]
    more_work: Tensor  # [m, V]


class _Head:
    """Output head that computes its logits chunk by chunk."""

    def __init__(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions, product_dtype: torch.dtype
    ) -> None:
        """Convert the tensors to the types of the products and sums."""
        self.features, self.options, self.product_dtype, self.wide = (
            features,
            options,
            product_dtype,
            accumulator(product_dtype),
        )
        self.weight = weight.to(product_dtype)
        self.bias = None if bias is None else bias.to(self.wide)
        self._work: Tensor | None = None

    def chunks(self) -> Iterator[_LogitChunk]:
        """Yield the chunks in order; each overwrites the logits of the previous one."""
        n, v = len(self.features), len(self.weight)
        blocks = 0 if devices.is_cpu(self.features) else 2 / BLOCKS  # a CPU's blocks are negligible
        numbers = devices.numbers_per_token(v, 1 + blocks, self.product_dtype)
        rows = devices.chunk_size(n, numbers, self.features, self.options.chunk)
        buffer = self.features.new_empty(min(rows, n), v, dtype=self.wide)
        for start in range(0, n, rows):
            h = self.features[start : start + rows].to(self.product_dtype)
            z = chunk_logits(h, self.weight, self.bias, self.options, buffer[: len(h)])
            yield _LogitChunk(slice(start, start + len(h)), h, z)

    def blocks(self, chunk: _LogitChunk) -> Iterator[_Block]:
        """Yield the rows of a chunk, as many at a time as fit in the cache."""
        for rows in row_blocks(chunk.z):
            z = chunk.z[rows]
            if self._work is None:  # the first block is as large as any
                self._work = z.new_empty(2, *z.shape)
            start = chunk.part.start + rows.start
            work, more_work = self._work[:, : len(z)]
            yield _Block(slice(start, start + len(z)), z, work, more_work)


# statistics


@dataclass
class _TokenStatistics:
    """Statistics of each token, all of shape [N]."""

    log_prob: Tensor
    lse: Tensor
    entropy: Tensor
    top: Tensor  # the largest logit
    rest: Tensor  # log Σ exp(z − top); lse = top + rest


@torch.library.custom_op(
    "tiewise::vocabulary_statistics",
    mutates_args=(),
    schema=f"({_INPUTS}, bool entropy, {_OPTION_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _statistics(features: Tensor, weight: Tensor, bias: Any, targets: Any, entropy: bool, *option_values: Any) -> Any:
    """Return log-probability, lse, entropy, the largest logit, and lse minus it.

    Each is [N]; the first is empty without targets, the third without `entropy`.
    """
    options, product_dtype, n = _to_options(option_values), option_values[0], len(features)
    result = _TokenStatistics(*(features.new_zeros(n, dtype=accumulator(product_dtype)) for _ in range(5)))
    at = None if targets is None else targets.where(targets != options.ignore_index, 0)
    compute = find_kernel(options, LossTensors(features, weight, bias, targets), product_dtype, n)
    inputs = LossTensors(features, weight, bias, torch.zeros_like(result.top, dtype=torch.long))
    with pass_products(features, weight, product_dtype):
        if row_statistics.is_requested(inputs, product_dtype):
            inputs = inputs if targets is None else inputs._replace(targets=targets)
            _compute_row_statistics(
                result, PassInputs(options, inputs, product_dtype, (False,) * 3, None, None), entropy
            )
        elif compute is None:
            _compute_statistics(result, _Head(features, weight, bias, options, product_dtype), at, entropy)
        else:
            _compute_native_statistics(result, compute, features, at, entropy)
    if targets is not None:
        for x in (result.log_prob, result.lse, result.entropy):
            x.masked_fill_(targets == options.ignore_index, 0)
    return (
        result.lse.new_empty(0) if targets is None else result.log_prob,
        result.lse,
        result.entropy if entropy else result.lse.new_empty(0),
        result.top,
        result.rest,
    )


def _compute_statistics(result: _TokenStatistics, head: _Head, at: Tensor | None, entropy: bool) -> None:
    """Set the statistics; `at` [N] are the targets, 0 for ignored ones."""
    top, rest = result.top, result.rest
    for chunk in head.chunks():
        for rows, z, below, p in head.blocks(chunk):
            torch.amax(z, 1, out=top[rows])
            torch.sub(z, top[rows, None], out=below)  # not into z, whose cache lines would then be written to memory
            total = torch.exp(below, out=p).sum(1)
            torch.log(total, out=rest[rows])
            if at is not None:
                result.log_prob[rows] = below.gather(1, at[rows, None])[:, 0] - rest[rows]
            if entropy:  # rest − Σ p (z − top): both terms are ≥ 0, so that nothing cancels
                result.entropy[rows] = rest[rows] - below.clamp_(min=_LOWEST).mul_(p).sum(1) / total
    torch.add(top, rest, out=result.lse)


def _compute_row_statistics(result: _TokenStatistics, inputs: PassInputs, entropy: bool) -> None:
    """Set the statistics by the Triton kernel."""
    sums = ColumnSums.allocate(len(result.top), result.top)
    kernels = RowKernels(inputs.options, inputs.tensors.bias, result.top)
    step = ReadingStep(kernels, sums, inputs.options.ignore_index, with_tilt=entropy)
    run_chunks(inputs, lambda losses: step)
    result.top.copy_(sums.top)
    torch.log(sums.total, out=result.rest)
    torch.add(result.top, result.rest, out=result.lse)
    torch.sub(sums.below_top, result.rest, out=result.log_prob)
    torch.sub(result.rest, sums.tilt / sums.total, out=result.entropy)


def _compute_native_statistics(
    result: _TokenStatistics, compute: NativeKernel, features: Tensor, at: Tensor | None, entropy: bool
) -> None:
    """Set the statistics by the compiled kernel.

    `top` gets all of lse, and `rest` stays 0.
    """
    if at is None:
        at = torch.zeros_like(result.top, dtype=torch.long)
    no_slope = torch.zeros_like(result.top)
    computed = compute(features, at, no_slope, no_slope, None, [False] * 3, entropy=entropy)
    result.log_prob.sub_(computed.nll)
    result.lse = computed.lse
    if entropy:
        result.entropy = computed.entropy
    result.top = computed.lse.clone()  # results of an operator must not share memory


@_statistics.register_fake
def _(
    features: Tensor, weight: Tensor, bias: Any, targets: Any, entropy: bool, product_dtype: torch.dtype, *_: Any
) -> Any:
    is_computed = (targets is not None, True, entropy, True, True)
    return tuple(
        features.new_empty(len(features) if yes else 0, dtype=accumulator(product_dtype)) for yes in is_computed
    )


# gradients


class _SlopeArguments(NamedTuple):
    """Arguments of the operator that computes gradients; options follow them."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor | None
    entropy: Tensor  # [N], empty if not computed; top and rest as in `_TokenStatistics`
    top: Tensor
    rest: Tensor
    by_log_prob: Tensor | None  # upstream gradients [N]: None if unused, empty if not computed
    by_lse: Tensor | None
    by_entropy: Tensor | None
    needs: Sequence[bool]


class _Upstream(NamedTuple):
    """Upstream gradients [N] of each statistic, 0 for ignored tokens."""

    a: Tensor  # upstream gradient of the log-probability
    b: Tensor  # upstream gradient of lse
    c: Tensor  # upstream gradient of the entropy
    with_entropy: bool  # False if the entropy has no upstream gradient, so that c is 0


@torch.library.custom_op(
    "tiewise::vocabulary_statistics_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor entropy, Tensor top, Tensor rest, {_UPSTREAM}, bool[] wanted, {_OPTION_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
)
def _gradients(*arguments: Any) -> Any:
    """Return the gradients of features, weight and bias, empty if not needed."""
    count = len(_SlopeArguments._fields)
    args, option_values = _SlopeArguments(*arguments[:count]), arguments[count:]
    options, product_dtype, features, weight = _to_options(option_values), option_values[0], args.features, args.weight
    inputs = (features, weight, args.bias)
    at, valid = _targets_or_first(args, options)
    upstream = _collect_upstream(args, valid)
    compute = find_kernel(options, LossTensors(*inputs, at), product_dtype, len(features))
    problem = LossTensors(features, weight, args.bias, at)
    with pass_products(features, weight, product_dtype):
        if row_statistics.is_requested(problem, product_dtype):
            slopes = _LogitSlopes(args, upstream, at, options.softcap)
            step = WritingStep(RowKernels(options, args.bias, args.top), slopes.coefficients(args.rest))
            pass_inputs = PassInputs(options, problem, product_dtype, tuple(args.needs), None, None)
            _, gradients = run_chunks(pass_inputs, lambda losses: step)
        elif compute is None:
            gradients = gradient_buffers(inputs, args.needs, accumulator(product_dtype))
            head = _Head(features, weight, args.bias, options, product_dtype)
            _LogitSlopes(args, upstream, at, options.softcap).compute_gradients(gradients, head)
        else:
            gradients = _native_gradients(args, upstream, at, compute)
    results = []
    for x, gradient in zip(inputs, gradients, strict=True):
        if x is None or gradient is None:
            results.append(features.new_empty(0))
        else:
            results.append(gradient.to(x.dtype))
    return tuple(results)


def _targets_or_first(args: _SlopeArguments, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return each token's target [N] or 0, and whether each token counts."""
    if args.targets is None:
        first = torch.zeros_like(args.top, dtype=torch.long)
        return first, torch.ones_like(first, dtype=torch.bool)
    valid = args.targets != options.ignore_index
    return args.targets.where(valid, 0), valid


def _collect_upstream(args: _SlopeArguments, valid: Tensor) -> _Upstream:
    """Return the upstream gradients, 0 for a statistic that was not used or not computed."""
    n, slopes = len(args.features), list[Tensor]()
    for x in (args.by_log_prob, args.by_lse, args.by_entropy):
        if x is None or len(x) != n:
            slopes.append(torch.zeros_like(args.top))
        else:
            slopes.append(x.where(valid, 0))
    with_entropy = args.by_entropy is not None and len(args.entropy) == n
    a, b, c = slopes
    return _Upstream(a, b, c, with_entropy)


def _native_gradients(args: _SlopeArguments, upstream: _Upstream, at: Tensor, compute: NativeKernel) -> Gradients:
    """Return the gradients by the compiled kernel, None if not needed."""
    a, b, c, with_entropy = upstream
    level, tilt = b - a, None
    if with_entropy:
        level, tilt = level - c * args.entropy, -c
    result = compute(args.features, at, level, -a, tilt, args.needs, lse=args.top + args.rest)
    gradients = (result.by_features, result.by_weight, result.by_bias)
    return [x if is_needed else None for x, is_needed in zip(gradients, args.needs, strict=True)]


class _LogitSlopes:
    """Slopes by the logits of all tokens.

    They are r (a [j = t] + p_j (b − a − c (log p_j + H))). `size` is r = |a| + |b| + |c|, by which a, b and c are
    divided. With an entropy, `level` and `tilt` are multiplied by 1 / exp rest, so that they apply to exp(z − top)
    instead of p.
    """

    def __init__(self, args: _SlopeArguments, upstream: _Upstream, at: Tensor, softcap: float | None) -> None:
        """Compute the row coefficients."""
        self.top, self.column, self.softcap = args.top, at[:, None], softcap
        a, b, c, self.with_entropy = upstream
        self.size = a.abs() + b.abs() + c.abs()
        self.a, b, self.tilt = (x / self.size.where(self.size > 0, 1) for x in (a, b, c))
        self.level = b - self.a
        if self.with_entropy:
            share = (-args.rest).exp_()
            self.level = (self.level + self.tilt * (args.rest - args.entropy)) * share
            self.tilt = self.tilt * share

    def coefficients(self, rest: Tensor) -> RowCoefficients:
        """Return the coefficients of the Triton kernel, multiplied by `size`."""
        level = self.level if self.with_entropy else self.level * (-rest).exp()
        tilt = self.size * self.tilt if self.with_entropy else None
        return RowCoefficients(self.top, self.size * level, tilt, self.size * self.a, None)

    def compute_gradients(self, gradients: Gradients, head: _Head) -> None:
        """Overwrite `gradients` with those of all chunks."""
        for chunk in head.chunks():
            for block in head.blocks(chunk):
                self._write(block)
            c = self.size[chunk.part]
            accumulate_gradients(gradients, chunk.part, chunk.z, c, chunk.h, head.weight, head.options.scale)

    def _write(self, block: _Block) -> None:
        """Overwrite the logits of a block with the slopes by them, divided by `size`."""
        rows, z, p, slope = block
        if self.softcap is not None:
            softcap_slope(z, self.softcap, slope)
        if self.with_entropy:  # z − top = log p + rest, whose exp is p / share
            torch.exp(z.sub_(self.top[rows, None]), out=p)
            z.clamp_(min=_LOWEST).mul_(-self.tilt[rows, None]).add_(self.level[rows, None]).mul_(p)
        else:
            torch.mul(torch.softmax(z, 1, out=p), self.level[rows, None], out=z)
        z.scatter_add_(1, self.column[rows], self.a[rows, None])
        if self.softcap is not None:
            z.mul_(slope)


@_gradients.register_fake
def _(*arguments: Any) -> Any:
    args = _SlopeArguments(*arguments[: len(_SlopeArguments._fields)])
    results = []
    for x, is_needed in zip((args.features, args.weight, args.bias), args.needs, strict=True):
        if x is not None and is_needed:
            results.append(x.new_empty(x.shape))
        else:
            results.append(args.features.new_empty(0))
    return tuple(results)


# autograd


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the inputs, the entropy and the parts of lse."""
    ctx.set_materialize_grads(False)
    ctx.option_values = inputs[5:]
    ctx.save_for_backward(*inputs[:4], *output[2:])


def _backward(ctx: Any, *upstream: Any) -> Any:
    """Return the gradients of all arguments; None for arguments without one."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        fix = "compute the logits and their log_softmax where create_graph=True is needed"
        raise UnsupportedError("log-probabilities and entropies have no second derivative", fix)
    needs = ctx.needs_input_grad[:3]
    gradients = _gradients(*ctx.saved_tensors, *upstream[:3], needs, *ctx.option_values)
    results = [x if is_needed else None for x, is_needed in zip(gradients, needs, strict=True)]
    others = 2 + len(ctx.option_values)  # targets, `entropy` and the option values
    return (*results, *[None] * others)


_statistics.register_autograd(_backward, setup_context=_save_for_backward)
