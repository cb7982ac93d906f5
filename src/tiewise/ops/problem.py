"""What a fused loss is asked for, as the sweep, its autograd wrapper and its traced operators pass it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# (features [N, E], weight [V, E], bias [V] | None, targets [N], class_weight [V] | None)
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]


class Head(NamedTuple):
    """Scale and soft-cap between the product and the softmax."""

    scale: float
    softcap: float | None


class TokenLoss(NamedTuple):
    """Numbers of the per-token loss, and tokens per chunk (None: chosen by the vocabulary)."""

    ignore_index: int
    smoothing: float
    z_loss: float
    chunk: int | None


class Wanted(NamedTuple):
    """Which gradients are needed."""

    features: bool
    weight: bool
    bias: bool


@dataclass
class Gradients:
    """Accumulators in fp32 (fp64 for fp64 inputs); None where not wanted."""

    features: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def compute_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """Type of the matrix products: autocast's where it is on, which leaves fp64 alone, else the wider input."""
    device, kind = features.device.type, torch.promote_types(features.dtype, weight.dtype)
    return torch.get_autocast_dtype(device) if kind != torch.float64 and torch.is_autocast_enabled(device) else kind


def accumulator(kind: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for products in fp64."""
    return torch.float64 if kind == torch.float64 else torch.float32
