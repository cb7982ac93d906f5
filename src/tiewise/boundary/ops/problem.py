"""Checks of a loss's tensors and options, and the types of its products and sums."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.core.backends import LossOptions, check_loss, check_words
from tiewise.core.errors import UnsupportedError

# Options that are numbers, and their type. Options in OPTIONAL may be None.
NUMBERS = {
    "scale": Real,
    "softcap": Real,
    "label_smoothing": Real,
    "z_loss": Real,
    "ignore_index": Integral,
    "chunk": Integral,
}
OPTIONAL = ("softcap", "chunk")


class LossTensors(NamedTuple):
    """Inputs of a loss: features [N, E], weight [V, E], bias [V] or None, targets [N]."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor


def check_problem(
    features: Any,
    weight: Any,
    targets: Any,
    bias: Tensor | None,
    options: LossOptions,
    shard: VocabularyShard | None = None,
) -> None:
    """Refuse shapes that do not fit together and options out of range.

    It raises as `linear_cross_entropy`.
    """
    require_tensors(features=features, weight=weight, targets=targets)
    _check_indices(targets)
    _check_devices(features, weight=weight, targets=targets, bias=bias, class_weight=options.class_weight)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        _check_numbers(options)
    if shard is not None:
        options = shard.local_options(weight, options)
    elif weight.dim() == 2:
        check_words(len(weight))
    check_loss(features, weight, targets, bias, options, torch.is_floating_point)
    if not is_compiling and torch._C._are_functorch_transforms_active():
        fix = "compute the logits there, or use tiewise.boundary.ops.cross_entropy.oracle"
        raise UnsupportedError("linear_cross_entropy inside a torch.func transform", fix)


def require_tensors(**arguments: Any) -> None:
    """Raise a TypeError for the first argument that is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not a {type(value).__name__}")


def _check_indices(targets: Tensor) -> None:
    """Refuse targets that are not class indices."""
    if torch.is_floating_point(targets):
        fix = "pass class indices, or compute the logits and use torch.nn.functional.cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)
    if targets.dtype == torch.bool or targets.is_complex():
        raise UnsupportedError(f"linear_cross_entropy of targets of type {targets.dtype}", "pass class indices")


def _check_devices(features: Tensor, **others: Any) -> None:
    """Refuse tensors that are on another device than the features."""
    for name, value in others.items():
        if isinstance(value, Tensor) and value.device != features.device:
            what = f"{name} is on {value.device} and features on {features.device}"
            raise ValueError(f"{what}; move them to one device")


def _check_numbers(options: LossOptions) -> None:
    """Refuse an option of the wrong type: a tensor as `scale`, for example."""
    for name, number_type in NUMBERS.items():
        value = getattr(options, name)
        if isinstance(value, Tensor):
            fix = "give a number; to learn it, multiply the features by it, or compute the logits"
            raise UnsupportedError(f"{name} as a tensor, which would get no gradient", fix)
        is_left_out = value is None and name in OPTIONAL
        if not is_left_out and not isinstance(value, number_type):
            what = "a whole number" if number_type is Integral else "a number"
            raise TypeError(f"{name} must be {what}, not a {type(value).__name__}")


def check_range(targets: Tensor, vocab: int, ignore_index: int) -> None:
    """Raise an IndexError for a target outside [0, vocab); targets on a CPU are checked."""
    if targets.device.type != "cpu" or not targets.numel():
        return
    low, high = targets.aminmax()
    if low >= 0 and high < vocab:  # the common case needs no masks
        return
    is_outside = (targets < 0) | (targets >= vocab)
    outside = targets[is_outside & (targets != ignore_index)]
    if outside.numel():
        raise IndexError(f"target {int(outside[0])} is outside the vocabulary of {vocab} (ignore_index={ignore_index})")


def flat_rows(features: Tensor) -> Tensor:
    """Return features [..., E] as [N, E], also if E is 0."""
    if features.dim() == 2:
        return features
    return features.reshape(math.prod(features.shape[:-1]), features.shape[-1])


def compute_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type of the matrix products.

    Under autocast it is autocast's type, except for fp64 inputs. Otherwise it is the wider of the two inputs' types.
    """
    product_dtype = torch.promote_types(features.dtype, weight.dtype)
    cast = devices.autocast_type(features)
    if cast is None or product_dtype == torch.float64:
        return product_dtype
    return cast


def accumulator(product_dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums: fp32, or fp64 for products in fp64."""
    return torch.float64 if product_dtype == torch.float64 else torch.float32
