"""Error of a backend's loss and gradients, relative to that of the plain computation.

    excess = max over loss and gradients of    error of the backend / error of the plain computation

The plain computation forms all logits in the type of the products and continues in fp32, as models do. Errors are
relative distances from fp64 for the same, rounded inputs, on a small random problem with the caller's options. Two
roundings in another order explain an excess of 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tiewise.boundary.ops import chunked, devices
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions

SMALL = 64, 512  # largest numbers of tokens and words of the small problem
BLOCK = 256  # words that a kernel processes at a time, at most, or a power of two below
LARGEST_EXCESS = 2.0
ROUNDED = 4 * torch.finfo(torch.float32).eps  # error that fp32 sums in another order explain

Needs = tuple[bool, ...]  # whether each gradient is needed: of features, weight, bias
# function with the arguments and results of `chunked.loss_pass`
BackendPass = Callable[..., tuple[Tensor, Gradients]]


@torch.inference_mode(mode=False)  # the caller may evaluate, and gradients are compared too
def measure_excess(
    candidate: BackendPass, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype
) -> float:
    """Return the excess of `candidate` on a small problem like this one.

    It is nan or inf if a result is.
    """
    options, problem = _draw_problem(options, LossTensors(*tensors), product_dtype)
    row_weight = uneven_factors(options, len(problem.targets), problem.features)
    truth = _run_in_fp64(options, problem, row_weight)
    limits = _plain_errors(options, problem, product_dtype, row_weight, truth)
    results = run_loss_pass(candidate, options, problem, product_dtype, row_weight)
    excesses = [error / max(limit, ROUNDED) for error, limit in zip(_errors(results, truth), limits, strict=True)]
    return largest(excesses)


def largest(numbers: list[float]) -> float:
    """Return the largest number; nan if one is nan."""
    return max(numbers, key=lambda number: math.inf if math.isnan(number) else number)


def _errors(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Return the relative distance of each result."""
    errors = []
    for x, y in zip(results, truth, strict=True):
        difference, size = (x.double() - y.double()).norm(), y.double().norm()
        errors.append(float(difference / size.clamp(min=1e-30)))
    return errors


def distance(results: list[Tensor], truth: list[Tensor]) -> float:
    """Return the largest relative distance between two lists of tensors.

    It is nan or inf if one is.
    """
    return largest(_errors(results, truth))


def _run_in_fp64(options: LossOptions, problem: LossTensors, row_weight: Tensor) -> list[Tensor]:
    """Return losses and gradients in fp64."""
    features, weight, bias, targets = problem
    wide_bias = None if bias is None else bias.double()
    wide = LossTensors(features.double(), weight.double(), wide_bias, targets)
    return run_loss_pass(chunked.loss_pass, options, wide, torch.float64, row_weight.double())


def _plain_errors(
    options: LossOptions,
    problem: LossTensors,
    product_dtype: torch.dtype,
    row_weight: Tensor,
    truth: list[Tensor],
) -> list[float]:
    """Return the errors of the plain computation.

    That of a summed loss is the sum of the tokens' errors without signs, which may cancel by chance.
    """
    by_token = replace(options, reduction="none")
    losses, gradients = plain_loss_pass(by_token, problem, product_dtype, (True,) * 3, row_weight)
    exact = _run_in_fp64(by_token, problem, row_weight.expand(len(losses)))[0]
    of_gradients = _errors([x for x in gradients if x is not None], truth[1:])
    if options.reduction == "none":
        return [*_errors([losses], [exact]), *of_gradients]
    error = (losses.double() - exact).abs().sum() / truth[0].abs().clamp(min=1e-30)
    return [float(error), *of_gradients]


def plain_loss_pass(
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    needs: Needs,
    row_weight: Tensor | None,
) -> tuple[Tensor, Gradients]:
    """Compute the results of `chunked.loss_pass` from all logits, by autograd."""
    gradients: Gradients = [None, None, None]
    with devices.without_autocast(tensors.features), torch.enable_grad():
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors[:3]]
        losses = _losses_of_logits(_all_logits(leaves, product_dtype, options), tensors.targets, options)
        total = losses.sum() if row_weight is None else (losses * row_weight).sum()
        for place, x in enumerate(leaves):
            if x is not None and needs[place]:
                gradients[place] = torch.autograd.grad(total, x, retain_graph=True)[0]
    return losses.detach(), gradients


def _all_logits(inputs: Sequence[Tensor | None], product_dtype: torch.dtype, options: LossOptions) -> Tensor:
    """Return all logits [N, V], rounded to the type of the products and then in fp32."""
    features, weight, bias = inputs
    assert features is not None, "only the bias may be missing"
    assert weight is not None, "only the bias may be missing"
    z = (features.to(product_dtype) @ weight.to(product_dtype).T).float() * options.scale
    if bias is not None:
        z = z + bias.float()
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    return z


def _losses_of_logits(z: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    """Return the loss of each token [n] from its logits `z` [n, V]."""
    is_counted = targets != options.ignore_index
    at = targets.where(is_counted, 0)
    w = z.new_ones(z.shape[1]) if options.class_weight is None else options.class_weight.to(z.dtype)
    lse = z.logsumexp(1)
    losses = (1 - options.label_smoothing) * w[at] * (lse - z.gather(1, at[:, None])[:, 0])
    losses = losses + options.z_loss * lse.square()
    if options.label_smoothing:
        losses = losses + options.label_smoothing * (w * (lse[:, None] - z)).mean(1)
    return losses.where(is_counted, 0)


# the problem


def _draw_problem(
    options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype
) -> tuple[LossOptions, LossTensors]:
    """Return random tensors like these and options that fit them.

    They are rounded to the type of the products. There are fewer tokens and words.
    """
    features, weight, bias, targets = tensors
    n, v, width = min(SMALL[0], len(targets)), small_vocabulary(len(weight)), weight.shape[1]
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(v, width, generator=draw, device="cpu").mul_(max(1, width) ** -0.5).to(product_dtype)
    if bias is not None:
        bias = torch.randn(v, generator=draw, device="cpu").to(product_dtype).to(bias)
    if options.class_weight is not None:
        classes = torch.rand(v, generator=draw, device="cpu").add_(0.5).to(options.class_weight)
        options = replace(options, class_weight=classes)
    h, t = draw_tokens(n, (v, width), features, options)
    return options, LossTensors(h.to(product_dtype).to(features), table.to(weight), bias, t)


def small_vocabulary(words: int) -> int:
    """Return the number of words of the small problem.

    It leaves the same remainder as the caller's, so that a kernel's last block has as much padding.

    >>> small_vocabulary(50_257), small_vocabulary(50_304), small_vocabulary(100)
    (337, 384, 100)
    """
    blocks = max(0, math.ceil((words - SMALL[1]) / BLOCK))
    return words - blocks * BLOCK


def draw_tokens(n: int, table: Sequence[int], features: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return features [n, E] like the caller's, and targets [n] for a table of that shape.

    About every eighth target is ignored, if n allows it.
    """
    draw = torch.Generator().manual_seed(2)
    v, width = table
    h = torch.randn(n, width, generator=draw, device="cpu")
    t = torch.randint(0, v, (n,), generator=draw, device="cpu")
    t[7::8] = options.ignore_index
    return h.to(features), t.to(features.device)


def uneven_factors(options: LossOptions, n: int, features: Tensor) -> Tensor:
    """Return different factors on the losses.

    They have both signs [n] for losses by token; for a mean or a sum it is one number.
    """
    wide = torch.float32
    if options.reduction == "none":
        numbers = torch.linspace(-1, 2, n, dtype=wide, device="cpu")
    else:
        numbers = torch.tensor(0.37, dtype=wide, device="cpu")
    return numbers.to(features.device)


def run_loss_pass(
    loss_pass: BackendPass, options: LossOptions, problem: LossTensors, product_dtype: torch.dtype, row_weight: Tensor
) -> list[Tensor]:
    """Return the losses, and the gradients of features, table and bias.

    The losses of a mean or a sum are summed.
    """
    losses, gradients = loss_pass(options, problem, product_dtype, (True, True, problem.bias is not None), row_weight)
    if options.reduction != "none":
        losses = losses.sum()
    return [losses, *(x for x in gradients if x is not None)]
