"""Low-rank differences between layers that share a matrix: y = x (W + B_l A_l)ᵀ + b, with W shared and A_l, B_l own.

Relaxed sharing of Bae et al. 2024 (arXiv:2410.20672, §2.3). A trained model is converted by the truncated SVD of what
its layers differ by, W_l − W ≈ U_r S_r V_rᵀ: B_l = U_r S_r, A_l = V_rᵀ. At full rank nothing is lost. Where W_l = W,
B_l is zero and A_l is not, so that gradients flow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tiewise.boundary.link import swapped
from tiewise.boundary.structure import Journal


class _Relaxed:
    """What a linear map does once it has a difference of its own."""

    delta_in: Tensor
    delta_out: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """Rows [..., in] → [..., out], through the shared matrix and the layer's own difference."""
        shared: Tensor = super().forward(hidden)  # type: ignore[misc]
        return shared + F.linear(F.linear(hidden, self.delta_in), self.delta_out)


class RelaxedLinear(_Relaxed, nn.Linear):
    """A linear map with weight [out, in]."""


class RelaxedConv1D(_Relaxed, Conv1D):
    """GPT-2's linear map, with weight [in, out]."""


def relax(module: Any, rank: int, difference: Tensor | None, journal: Journal) -> None:
    """Give a linear map its own difference, of rank at most `rank`.

    Args:
        module: nn.Linear or transformers' Conv1D.
        rank: r; a matrix gets no more than its smaller side.
        difference: what its own weight was more than the shared one, in the weight's orientation; None while a
            checkpoint is being loaded, which brings the values.
        journal: of every change.
    """
    turned = isinstance(module, Conv1D)
    weight = module.weight.T if turned else module.weight
    rank = min(rank, *weight.shape)
    delta_in, delta_out = weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(weight.shape[0], rank)
    if difference is not None:
        wide = difference.to(torch.promote_types(difference.dtype, torch.float32))
        left, size, right = torch.linalg.svd(wide.T if turned else wide, full_matrices=False)
        delta_in.copy_(right[:rank])
        delta_out.copy_(left[:, :rank] * size[:rank])
    elif not weight.is_meta:
        nn.init.normal_(delta_in, std=weight.shape[1] ** -0.5)
    for name, value in (("delta_in", delta_in), ("delta_out", delta_out)):
        journal.set(module, name, nn.Parameter(value, requires_grad=module.weight.requires_grad))
    journal.set(module, "__class__", swapped(type(module), RelaxedConv1D if turned else RelaxedLinear))


def is_relaxed(module: nn.Module) -> bool:
    """Whether a module has a difference of its own."""
    return isinstance(module, _Relaxed)


def whole(module: Any) -> Tensor:
    """Weight that a relaxed map applies, shared part and difference together, in the weight's orientation."""
    difference = module.delta_out.detach() @ module.delta_in.detach()
    weight: Tensor = module.weight.detach() + (difference.T if isinstance(module, Conv1D) else difference)
    return weight


def tighten(module: Any) -> None:
    """Take the difference away and give the module its plain class back."""
    del module.delta_in, module.delta_out
    module.__class__ = module.plain_class
