"""The loss by a function of torch or of another package, which autograd differentiates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.ops.backend_table import Kernel
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.exactness import Needs
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions


@dataclass(frozen=True, eq=False)
class PackagePass:
    """Pass by a loss function of torch or of another package."""

    function: Callable[..., Tensor]
    kernel: Kernel

    def __call__(
        self,
        options: LossOptions,
        tensors: LossTensors,
        product_dtype: torch.dtype,
        needs: Needs,
        row_weight: Tensor | None,
    ) -> tuple[Tensor, Gradients]:
        """Return losses and gradients, as `chunked.loss_pass` does."""
        # Liger computes the table's gradient only if the features need one
        computed = (any(needs), *needs[1:3])
        # an operator runs its code without autograd's dispatch keys, which leaving inference mode restores
        with (
            torch.inference_mode(mode=False),
            torch.autocast(tensors[0].device.type, enabled=False),
            torch.enable_grad(),
        ):
            converted = _detach(options, tensors, product_dtype)
            leaves: list[Tensor] = []
            for x, is_computed in zip(converted[:3], computed, strict=True):
                if is_computed:
                    assert x is not None, "a missing bias needs no gradient"
                    leaves.append(x.requires_grad_())
            losses = self._losses(options, converted)
            results = iter(_gradients(losses, leaves, row_weight))
        gradients: Gradients = [next(results).float() if is_computed else None for is_computed in computed]
        if not needs[0]:
            gradients[0] = None
        elif gradients[0] is not None and options.scale != 1.0:
            gradients[0].mul_(options.scale)
        return losses.detach().reshape(-1), gradients

    def _losses(self, options: LossOptions, tensors: LossTensors) -> Tensor:
        """Return the losses [N]; for a mean or a sum, their sum."""
        features, weight, bias, targets = tensors
        reduction = "none" if options.reduction == "none" else "sum"
        keywords = self.kernel.keywords(options, bias)
        missing = -len(targets) % self.kernel.token_multiple
        if missing:
            features = F.pad(features, (0, 0, 0, missing))
            targets = F.pad(targets, (0, missing), value=options.ignore_index)
        return self.function(
            features, weight, targets, ignore_index=options.ignore_index, reduction=reduction, **keywords
        )


def _detach(options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> LossTensors:
    """Return the tensors in the type of the products, outside the caller's graph.

    The features are scaled.
    """
    features, weight, bias, targets = tensors
    features = features.detach().to(product_dtype)
    if options.scale != 1.0:
        features = features * options.scale
    if bias is not None:
        bias = bias.detach().to(product_dtype)
    return LossTensors(features, weight.detach().to(product_dtype), bias, targets)


def _gradients(losses: Tensor, leaves: Sequence[Tensor], row_weight: Tensor | None) -> Sequence[Tensor]:
    """Return the gradients of Σ row_weight_i · loss_i by the leaves."""
    if not leaves:
        return ()
    if row_weight is None:
        upstream = torch.ones_like(losses)
    else:
        upstream = row_weight.to(losses.dtype).expand_as(losses)
    return torch.autograd.grad(losses, leaves, upstream)
