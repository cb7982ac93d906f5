"""Losses of torch and of other packages: one row for each kernel that `backend` names.

A row of KERNELS is called where everything that it needs is there. A row of DESCRIBED is only recognised: its kernels
need a card on which tiewise was never run with them, so `backend` refuses it with that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiewise.core.backends import REDUCTIONS, LossOptions

HOPPER = (9, 0)  # compute capability


@dataclass(frozen=True)
class Kernel:
    """Loss of (features [N, E], weight [V, E], targets [N]) in another package."""

    package: str  # pip's name
    entry_point: str  # entry point, module:function
    types: tuple[torch.dtype, ...]  # supported types of the products
    has: tuple[str, ...]  # supported options; all kernels support scale and ignore_index
    versions: tuple[str, ...]  # versions that are used
    keywords: Callable[[LossOptions, Tensor | None], dict[str, Any]]  # options and bias → keyword arguments
    extra: str = ""  # pip's extra that installs what the kernel needs
    reductions: tuple[str, ...] = REDUCTIONS
    capability: tuple[int, int] | None = None  # the one compute capability that it runs on; None: all
    token_multiple: int = 1  # numbers of tokens that it takes; others are padded with ignored tokens
    vocab_multiple: int = 1  # numbers of words that it takes
    stores_logits: bool = False  # it stores all logits [N, V] in the type of the products
    on_cpu: bool = False  # it runs on a CPU too, where `auto` does not try it

    def requirement(self, version: str) -> str:
        """Return the argument of `pip install` for this kernel."""
        if self.extra:
            return f"'{self.package}[{self.extra}]=={version}'"  # a shell would expand the brackets
        return f"{self.package}=={version}"


@dataclass(frozen=True)
class DescribedKernel:
    """Loss of another package that `backend` recognises and does not call."""

    package: str  # pip's name
    cards: str  # cards that its kernels are for


def _torch_keywords(options: LossOptions, bias: Tensor | None) -> dict[str, Any]:
    """Return the options as keyword arguments of torch's function, which computes in chunks."""
    chunking: dict[str, Any] = {}
    if options.chunk is not None:
        chunking = {"batch_chunk_size": int(options.chunk), "chunking_method": None}
    weight = None if options.class_weight is None else options.class_weight.float()
    settings = torch.nn.LinearCrossEntropyOptions(**chunking)
    return {"linear_bias": bias, "weight": weight, "options": settings}


def _liger_keywords(options: LossOptions, bias: Tensor | None) -> dict[str, Any]:
    """Return the options as keyword arguments of Liger's function."""
    return {
        "bias": bias,
        "ce_weight": None if options.class_weight is None else options.class_weight.float(),
        "lse_square_scale": options.z_loss,
        "label_smoothing": options.label_smoothing,
        "softcap": options.softcap,
        "accum_dtype": torch.float32,
    }


def _cce_keywords(options: LossOptions, bias: Tensor | None) -> dict[str, Any]:
    """Return the options as keyword arguments of Cut Cross-Entropy, with nothing filtered."""
    return {"softcap": options.softcap, "filter_eps": None, "impl": "cce"}


def _no_keywords(options: LossOptions, bias: Tensor | None) -> dict[str, Any]:
    """Return no keyword arguments, for a function without options."""
    return {}


KERNELS = {
    # It rounds bf16 losses to bf16, and multiplies narrow types less exactly: on a CPU 8 to 85 times the error of the
    # plain computation. With label smoothing it forms all logits.
    "torch": Kernel(
        "torch",
        "torch.nn.functional:linear_cross_entropy",
        (torch.float32,),
        ("bias", "class_weight", "chunk"),
        ("2.13.0",),
        _torch_keywords,
        on_cpu=True,
    ),
    "liger": Kernel(
        "liger-kernel",
        "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
        (torch.float32, torch.float16, torch.bfloat16),
        ("bias", "softcap", "label_smoothing", "z_loss", "class_weight"),
        # Before 0.8.2 `reduction="none"` multiplies all gradients by the first token's upstream.
        # Before 0.8.4, with a soft-cap, the padding after the last word enters the softmax.
        ("0.8.4", "0.8.5"),
        _liger_keywords,
    ),
    # Its docstring lists what it refuses. It has not run with tiewise yet: the comparison at its first use decides.
    "liger-sm90": Kernel(
        "liger-kernel",
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90:liger_fused_linear_cross_entropy_sm90",
        (torch.bfloat16,),
        (),
        ("0.8.5",),
        _no_keywords,
        extra="cutedsl",
        reductions=("mean", "sum"),
        capability=HOPPER,
        token_multiple=128,
        vocab_multiple=256,
        stores_logits=True,
    ),
    "cce": Kernel(
        "cut-cross-entropy",
        "cut_cross_entropy:linear_cross_entropy",
        (torch.float16, torch.bfloat16),
        ("softcap", "logits"),
        ("25.1.1",),
        _cce_keywords,
    ),
}

DESCRIBED = {
    "quack": DescribedKernel("quack-kernels", "Hopper and Blackwell"),
    "liger-sm100": DescribedKernel("liger-kernel", "Blackwell"),
}
