"""The fused loss on a GPU with the steps between its products compiled by `torch.compile`.

It is the plain computation, in the chunks of `gpu_chunks`: logits have the type of the products, and all that follows
is fp32. With the letters of `row_kernels`, row i of the logits x has

    z_j = softcap(scale · x_j + b_j)        m = max_j z_j        S = Σ_j exp(z_j − m)
    loss_i = (1−ε) w_t nll + ζ lse² + ε mean(w) lse − (ε / V) Σ_j w_j z_j        nll = log S − (z_t − m)
    slope_j = (c exp(z_j − m) / S − r ε w_j / V − q [j = t]) · softcap'(z_j)

Inductor makes two kernels of it: one reads a row for its loss, the other writes the slopes over the logits. So bf16
logits take half the memory of `row_loss`'s fp32 products, and half its traffic.

Each set of options and width of the vocabulary is compiled once in a process, for every number of tokens and all
values of the options. Inductor keeps its kernels on disk. A line of the log announces the first compilation.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.gpu_chunks import TYPES, PassInputs, run_chunks
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions

log = logging.getLogger(__name__)

LACKS = {"logits": "rounds logits, and logits='fp32' asks for exact ones"}  # option → what a refusal says
COMPILER = "inductor"
ANNOUNCED = (
    "the loss compiles the steps between its products: seconds, once for each set of options;"
    " TIEWISE_LOSS=tiewise compiles nothing"
)


@dataclass(frozen=True)
class RowSettings:
    """Constants of a compiled step."""

    ignore_index: int
    needs_slopes: bool


class RowOptions(NamedTuple):
    """Options of a loss as fp32 tensors on the device; None if not used.

    A compiled step has no value of them: a scale that changes in training is not compiled again.
    """

    scale: Tensor | None  # []
    softcap: Tensor | None  # []
    label_smoothing: Tensor | None  # []
    z_loss: Tensor | None  # []
    bias: Tensor | None  # [V]
    class_weight: Tensor | None  # [V]

    @classmethod
    def of(cls, options: LossOptions, bias: Tensor | None, like: Tensor) -> RowOptions:
        """Return the options of a loss; `like` is an fp32 tensor on the device."""
        return cls(
            scale=_to_scalar(options.scale, 1.0, like),
            softcap=_to_scalar(options.softcap, None, like),
            label_smoothing=_to_scalar(options.label_smoothing, 0.0, like),
            z_loss=_to_scalar(options.z_loss, 0.0, like),
            bias=_to_fp32(bias),
            class_weight=_to_fp32(options.class_weight),
        )


def _to_scalar(value: Any, unused: float | None, like: Tensor) -> Tensor | None:
    """Return a number as a tensor [], or None if it is `unused`. Nothing waits for the device."""
    return None if value == unused else like.new_full((), float(value))


def _to_fp32(x: Tensor | None) -> Tensor | None:
    """Return a tensor in fp32; None stays None."""
    return None if x is None else x.float()


# (logits, targets, factors on the losses, options) → losses, with the slopes in place of the logits
CompiledRows = Callable[[Tensor, Tensor, Tensor, RowOptions], Tensor]


def missing_support(tensors: LossTensors, product_dtype: torch.dtype) -> str:
    """Return what this pass lacks for such tensors, as the rest of a sentence.

    It is empty if the pass runs.
    """
    features, weight, _, _ = tensors
    if product_dtype not in TYPES:
        return f"has no products in {product_dtype}".replace("torch.", "")
    refusal = devices.refuse_subclass(features) or devices.refuse_subclass(weight)
    if refusal:
        return refusal
    if features.is_cuda and not devices.has_triton():
        return "needs triton; pip install triton"
    if product_dtype != torch.float32 and not devices.has_wide_products(features):
        return "needs fp32 sums of narrow products: torch 2.8 or later on CUDA"
    return ""


def loss_pass(
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    needs: tuple[bool, ...],
    row_weight: Tensor | None,
    into: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Compute the results of `chunked.loss_pass` on one rank.

    It runs where `missing_support` is empty. Gradients of bf16 inputs are bf16, other gradients are fp32.
    """
    tensors = LossTensors(*tensors)
    inputs = PassInputs(options, tensors, product_dtype, needs, row_weight, into)
    settings = RowSettings(int(options.ignore_index), needs_slopes=any(needs))
    return run_chunks(inputs, lambda losses: _CompiledStep(inputs, settings, losses), buffer_dtype=product_dtype)


class _CompiledStep:
    """Compiled step of one pass, with the arguments that all its chunks share."""

    def __init__(self, inputs: PassInputs, settings: RowSettings, like: Tensor) -> None:
        """Convert the arguments to fp32; `like` is an fp32 tensor on the device."""
        self.row_weight = like.new_ones(()) if inputs.row_weight is None else inputs.row_weight.float()
        self.options = RowOptions.of(inputs.options, inputs.tensors.bias, like)
        self.compute = compiled_rows(settings, len(inputs.tensors.weight), inputs.product_dtype)

    def run(self, products: Tensor, slopes: Tensor, losses: Tensor, targets: Tensor, part: slice) -> None:
        """Write the losses [n] and the slopes [n, V] of one chunk, whose products are overwritten."""
        row_weight = self.row_weight[part] if self.row_weight.dim() else self.row_weight
        for by_token in (products, targets, row_weight):
            if by_token.dim():
                torch._dynamo.maybe_mark_dynamic(by_token, 0)
        losses.copy_(self.compute(products, targets, row_weight, self.options))


@cache
def compiled_rows(settings: RowSettings, vocab: int, product_dtype: torch.dtype) -> CompiledRows:
    """Return the compiled step of a loss, of which each process has one by its arguments.

    Torch counts and keeps compilations by code object, so each step has its own. Two steps of one code would make
    `vocab` a variable of the kernels.
    """
    _announce()
    code = compute_rows.__code__.replace(co_name=f"compute_rows_of_{vocab}")
    function = types.FunctionType(code, compute_rows.__globals__)
    compiled: Any = torch.compile(function, fullgraph=True, backend=COMPILER)

    def step(*tensors: Any) -> Tensor:
        """Bind the settings."""
        losses: Tensor = compiled(settings, *tensors)
        return losses

    return step


@cache
def _announce() -> None:
    """Log once that a compilation takes seconds."""
    log.warning(ANNOUNCED)


def compute_rows(
    settings: RowSettings,
    logits: Tensor,
    targets: Tensor,
    row_weight: Tensor,
    options: RowOptions,
) -> Tensor:
    """Return the losses [n] of logits [n, V], and write slopes over the logits.

    They are the slopes of row_weight ∘ losses.
    """
    vocab = logits.shape[1]
    is_counted = targets != settings.ignore_index
    has_target = (targets >= 0) & (targets < vocab)
    rows = _read_rows(logits, targets.where(has_target, 0), options)
    losses = _row_losses(rows, options)
    losses = losses.where(has_target, torch.nan)  # a target outside the vocabulary must not pass unseen
    if settings.needs_slopes:
        is_target = torch.arange(vocab, device=targets.device) == targets[:, None]
        slopes = _row_slopes(rows, row_weight, is_target, options)
        logits.copy_(slopes.where(is_counted[:, None], 0))
    return losses.where(is_counted, 0)


class _Rows(NamedTuple):
    """Logits of a chunk and the parts of its losses, by the letters of the header."""

    z: Tensor
    exponentials: Tensor  # [n, V] exp(z − m)
    total: Tensor  # [n] S
    lse: Tensor  # [n]
    nll: Tensor  # [n]
    hit: Tensor | float  # (1 − ε) w_t, of each token or of all
    spread: Tensor | float  # ε mean(w)


def _read_rows(logits: Tensor, place: Tensor, options: RowOptions) -> _Rows:
    """Return the parts of the losses whose targets are `place` [n]."""
    z = logits.float()
    if options.scale is not None:
        z = z * options.scale
    if options.bias is not None:
        z = z + options.bias
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    top = z.amax(1, keepdim=True)
    exponentials = (z - top).exp()
    total = exponentials.sum(1)
    log_total = total.log()
    nll = log_total - (z.gather(1, place[:, None]) - top)[:, 0]
    hit: Tensor | float = 1.0
    spread: Tensor | float = 0.0
    if options.label_smoothing is not None:
        hit, spread = 1 - options.label_smoothing, options.label_smoothing
    if options.class_weight is not None:
        hit = hit * options.class_weight[place]
        spread = spread * options.class_weight.mean()
    return _Rows(z, exponentials, total, top[:, 0] + log_total, nll, hit, spread)


def _row_losses(rows: _Rows, options: RowOptions) -> Tensor:
    """Return the losses [n]."""
    losses = rows.hit * rows.nll
    if options.z_loss is not None:
        losses = losses + options.z_loss * rows.lse.square()
    if options.label_smoothing is not None:
        weighted = rows.z if options.class_weight is None else rows.z * options.class_weight
        share = options.label_smoothing / rows.z.shape[1]
        losses = losses + rows.spread * rows.lse - share * weighted.sum(1)
    return losses


def _row_slopes(rows: _Rows, row_weight: Tensor, is_target: Tensor, options: RowOptions) -> Tensor:
    """Return the slopes [n, V] of row_weight ∘ losses."""
    by_probability = rows.hit + rows.spread
    if options.z_loss is not None:
        by_probability = by_probability + 2 * options.z_loss * rows.lse
    c = row_weight * by_probability / rows.total
    slopes = c[:, None] * rows.exponentials
    if options.label_smoothing is not None:
        flat = (options.label_smoothing / is_target.shape[1] * row_weight)[..., None]
        slopes = slopes - (flat if options.class_weight is None else flat * options.class_weight)
    q = (row_weight * rows.hit)[..., None]
    slopes = torch.where(is_target, slopes - q, slopes)
    if options.softcap is not None:
        slopes = slopes * (1 - (rows.z / options.softcap).square())
    return slopes
