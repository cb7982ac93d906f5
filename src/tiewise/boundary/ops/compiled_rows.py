"""The fused loss on a GPU with the steps between its products compiled by `torch.compile`.

It is the plain computation, in the chunks of `gpu_chunks`: logits have the type of the products, and all that follows
is fp32. With the letters of `row_kernels`, row i of the logits x has

    z_j = softcap(scale · x_j + b_j)        m = max_j z_j        S = Σ_j exp(z_j − m)
    loss_i = (1−ε) w_t nll + ζ lse² + ε mean(w) lse − (ε / V) Σ_j w_j z_j        nll = log S − (z_t − m)
    slope_j = (c exp(z_j − m) / S − r ε w_j / V − q [j = t]) · softcap'(z_j)

Inductor makes two kernels of it: one reads a row for its loss, the other writes the slopes over the logits. So bf16
logits take half the memory of `row_loss`'s fp32 products, and half its traffic.

Each set of options and width of the vocabulary is compiled once in a process, for every number of tokens. Inductor
keeps its kernels on disk. A line of the log announces the first compilation.
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

# (logits, targets, factors on the losses, bias, class weights) → losses, with the slopes in place of the logits
CompiledRows = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class RowSettings:
    """Numbers and flags that are constants of a compiled step."""

    scale: float
    softcap: float | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    needs_slopes: bool

    @classmethod
    def of(cls, options: LossOptions, *, needs_slopes: bool) -> RowSettings:
        """Return the settings of a loss."""
        softcap = None if options.softcap is None else float(options.softcap)
        numbers = float(options.scale), softcap, int(options.ignore_index)
        return cls(*numbers, float(options.label_smoothing), float(options.z_loss), needs_slopes)


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
    settings = RowSettings.of(options, needs_slopes=any(needs))
    return run_chunks(inputs, lambda losses: _CompiledStep(inputs, settings, losses), buffer_dtype=product_dtype)


class _CompiledStep:
    """Compiled step of one pass, with the arguments that all its chunks share."""

    def __init__(self, inputs: PassInputs, settings: RowSettings, like: Tensor) -> None:
        """Convert the arguments to fp32; `like` is an fp32 tensor on the device."""
        bias, class_weight, row_weight = inputs.tensors.bias, inputs.options.class_weight, inputs.row_weight
        self.row_weight = like.new_ones(()) if row_weight is None else row_weight.float()
        self.bias = None if bias is None else bias.float()
        self.class_weight = None if class_weight is None else class_weight.float()
        self.compute = compiled_rows(settings, len(inputs.tensors.weight), inputs.product_dtype)

    def run(self, products: Tensor, slopes: Tensor, losses: Tensor, targets: Tensor, part: slice) -> None:
        """Write the losses [n] and the slopes [n, V] of one chunk, whose products are overwritten."""
        row_weight = self.row_weight[part] if self.row_weight.dim() else self.row_weight
        for by_token in (products, targets, row_weight):
            if by_token.dim():
                torch._dynamo.maybe_mark_dynamic(by_token, 0)
        losses.copy_(self.compute(products, targets, row_weight, self.bias, self.class_weight))


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
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> Tensor:
    """Return the losses [n] of logits [n, V], and write slopes over the logits.

    They are the slopes of row_weight ∘ losses.
    """
    vocab = logits.shape[1]
    is_counted = targets != settings.ignore_index
    has_target = (targets >= 0) & (targets < vocab)
    rows = _read_rows(settings, logits, targets.where(has_target, 0), bias, class_weight)
    losses = _row_losses(settings, rows, class_weight)
    losses = losses.where(has_target, torch.nan)  # a target outside the vocabulary must not pass unseen
    if settings.needs_slopes:
        is_target = torch.arange(vocab, device=targets.device) == targets[:, None]
        slopes = _row_slopes(settings, rows, row_weight, is_target, class_weight)
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


def _read_rows(
    settings: RowSettings, logits: Tensor, place: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> _Rows:
    """Return the parts of the losses whose targets are `place` [n]."""
    z = logits.float() * settings.scale
    if bias is not None:
        z = z + bias
    if settings.softcap is not None:
        z = settings.softcap * torch.tanh(z / settings.softcap)
    top = z.amax(1, keepdim=True)
    exponentials = (z - top).exp()
    total = exponentials.sum(1)
    log_total = total.log()
    nll = log_total - (z.gather(1, place[:, None]) - top)[:, 0]
    hit: Tensor | float = 1 - settings.label_smoothing
    spread: Tensor | float = settings.label_smoothing
    if class_weight is not None:
        hit = hit * class_weight[place]
        spread = spread * class_weight.mean()
    return _Rows(z, exponentials, total, top[:, 0] + log_total, nll, hit, spread)


def _row_losses(settings: RowSettings, rows: _Rows, class_weight: Tensor | None) -> Tensor:
    """Return the losses [n]."""
    losses = rows.hit * rows.nll
    if settings.z_loss:
        losses = losses + settings.z_loss * rows.lse.square()
    if settings.label_smoothing:
        weighted = rows.z if class_weight is None else rows.z * class_weight
        share = settings.label_smoothing / rows.z.shape[1]
        losses = losses + rows.spread * rows.lse - share * weighted.sum(1)
    return losses


def _row_slopes(
    settings: RowSettings, rows: _Rows, row_weight: Tensor, is_target: Tensor, class_weight: Tensor | None
) -> Tensor:
    """Return the slopes [n, V] of row_weight ∘ losses."""
    c = row_weight * (rows.hit + rows.spread + 2 * settings.z_loss * rows.lse) / rows.total
    slopes = c[:, None] * rows.exponentials
    if settings.label_smoothing:
        flat = (settings.label_smoothing / is_target.shape[1] * row_weight)[..., None]
        slopes = slopes - (flat if class_weight is None else flat * class_weight)
    q = (row_weight * rows.hit)[..., None]
    slopes = torch.where(is_target, slopes - q, slopes)
    if settings.softcap is not None:
        slopes = slopes * (1 - (rows.z / settings.softcap).square())
    return slopes
