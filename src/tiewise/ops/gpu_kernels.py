"""The loss on a GPU by a kernel that others maintain, where `backend` asks for one; by ours everywhere else.

    tiewise   our chunks: the default
    liger     Liger's fused linear cross-entropy        pip install liger-kernel
    cce       Cut Cross-Entropy, with nothing filtered  pip install cut-cross-entropy
    auto      on a GPU the fastest of those that are installed, have the options asked, and agree with ours

A kernel computes one sweep: losses and gradients. Reductions, upstream gradients, `torch.compile` and refusals are
around it, the same for all. It takes its bias and gives its gradients in the type of the products, as autograd does;
Liger's logits are of that type too.

Liger has been run under triton's interpreter, on a CPU; neither kernel has been run by us on a GPU.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from tiewise.core.backends import BACKENDS, LossOptions
from tiewise.core.errors import RunError, UnsupportedError
from tiewise.ops.fast_products import remembered

VARIABLE = "TIEWISE_LOSS"
TOKENS = 4096  # of a trial, at most
# relative distance of loss and gradients from ours that is but another order of the same sums
AGREES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Kernel:
    """A loss of (features [N, E], weight [V, E], targets [N]) that another package maintains."""

    package: str  # pip's name
    place: str  # module:function
    types: tuple[torch.dtype, ...]  # of the products
    has: tuple[str, ...]  # options, besides scale, ignore_index and reduction
    keywords: Callable[[LossOptions, Tensor | None], dict[str, Any]]  # from options and bias


KERNELS = {
    "liger": Kernel(
        "liger-kernel",
        "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
        (torch.float32, torch.float16, torch.bfloat16),
        ("bias", "softcap", "label_smoothing", "z_loss", "class_weight"),
        lambda o, bias: {
            "bias": bias,
            "ce_weight": None if o.class_weight is None else o.class_weight.float(),
            "lse_square_scale": o.z_loss,
            "label_smoothing": o.label_smoothing,
            "softcap": o.softcap,
            "accum_dtype": torch.float32,
        },
    ),
    "cce": Kernel(
        "cut-cross-entropy",
        "cut_cross_entropy:linear_cross_entropy",
        (torch.float16, torch.bfloat16),
        ("softcap", "logits"),
        lambda o, bias: {"softcap": o.softcap, "filter_eps": None, "impl": "cce"},
    ),
}


_tried: dict[Any, dict[str, float]] = {}  # milliseconds


def maintained(name: str, o: LossOptions, tensors: Any, kind: torch.dtype, ours: Any) -> Any:
    """Return what does as our own sweep, `ours`, by the backend of this name; None where that is ours.

    Of a mean or a sum, its losses [1] are their sum. A RunError where TIEWISE_LOSS names no backend, an
    UnsupportedError for a kernel that is not installed, or lacks an option, the type or the device.
    """
    features, weight, bias, targets = tensors
    if name not in BACKENDS:
        raise RunError(f"no loss is called {name!r}", f"choose {', '.join(BACKENDS)} in {VARIABLE}")
    # the variable is for GPUs: a model may see its first batch before it is moved to one
    if not len(targets) or (o.backend is None and not _has_kernels(features.device)):
        return None
    if name != "auto":
        return _by_kernel(name, o, tensors, kind)
    ways: dict[str, Any] = {"tiewise": None}
    for name in KERNELS:
        with suppress(UnsupportedError):
            ways[name] = _by_kernel(name, o, tensors, kind)
    if len(ways) == 1:
        return None
    what = {
        "device": torch.cuda.get_device_name(features.device) if features.is_cuda else features.device.type,
        "type": str(kind),
        "options": " ".join(_options_used(o, bias, kind)),
        "shape": " ".join(str(2 ** round(math.log2(n))) for n in (min(len(targets), TOKENS), *weight.shape)),
    }
    key = (*what.values(), *ways)
    if key not in _tried:
        packages = {KERNELS[name].package: version(KERNELS[name].package) for name in ways if name in KERNELS}
        what |= {"torch": torch.__version__, **packages}
        found = remembered("losses.json", what, ("tiewise_ms",), lambda: trial(ways, o, tensors, kind, ours))
        _tried[key] = {name: found.get(f"{name}_ms", math.inf) for name in ways}
    return ways[min(ways, key=_tried[key].__getitem__)]


def trial(ways: dict[str, Any], o: LossOptions, tensors: Any, kind: torch.dtype, ours: Any) -> dict[str, float]:
    """Return the milliseconds of those of `ways` that run and agree with `ours`, each the least of three."""
    features, weight, bias, targets = tensors
    few = targets[:TOKENS]
    problem = (features[:TOKENS], weight, bias, few.where(few != o.ignore_index, 0))  # a prompt's would all be ignored
    o = replace(o, reduction="sum", ignore_index=-100)

    def run(way: Any) -> tuple[float, list[Tensor]]:
        start = time.perf_counter()
        each, gradients = (way or ours)(o, problem, kind, (True, True, bias is not None), None)
        found = [each.sum(), *(x for x in gradients if x is not None)]
        found[0].item()  # a GPU has then done all of it
        return 1e3 * (time.perf_counter() - start), found

    times, truth = {}, run(None)[1]
    for name, way in ways.items():
        with suppress(Exception):  # another's kernel may not compile here, or find no memory
            if all((x - y).norm() <= AGREES[kind] * y.norm() for x, y in zip(run(way)[1], truth, strict=True)):
                times[f"{name}_ms"] = min(run(way)[0] for _ in range(3))
    return times


def _by_kernel(name: str, o: LossOptions, tensors: Any, kind: torch.dtype) -> Any:
    """Return the sweep of a kernel that can compute this; raises as `maintained`."""
    kernel, (features, _, bias, _) = KERNELS[name], tensors
    lacks = [option for option in _options_used(o, bias, kind) if option not in kernel.has]
    if kind not in kernel.types:
        lacks.append(f"products in {kind}".replace("torch.", ""))
    fix = f"take backend='tiewise', or 'auto' (also in {VARIABLE})"
    if not _has_kernels(features.device):
        raise UnsupportedError(f"backend={name!r} runs on a GPU, and the features are on a {features.device.type}", fix)
    if lacks:
        raise UnsupportedError(f"backend={name!r} has no {', no '.join(lacks)}", fix)
    place, function = kernel.place.split(":")
    try:
        return partial(_swept, name, getattr(import_module(place), function))
    except (ImportError, AttributeError) as error:
        what = f"backend={name!r} cannot be imported ({error})"
        raise UnsupportedError(what, f"pip install {kernel.package}") from error


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _options_used(o: LossOptions, bias: Tensor | None, kind: torch.dtype) -> list[str]:
    """Name what a kernel has to have."""
    kept = o.logits is not None and kind != torch.float32
    asked = {
        "bias": bias is not None,
        "softcap": o.softcap is not None,
        "label_smoothing": o.label_smoothing,
        "z_loss": o.z_loss,
        "class_weight": o.class_weight is not None,
        "chunk": o.chunk is not None,
        "logits": kept,
        "scale beside logits": kept and o.scale != 1.0,  # the features would be rounded
    }
    return [option for option, yes in asked.items() if yes]


def _swept(
    name: str, function: Any, o: LossOptions, tensors: Any, kind: torch.dtype, wanted: Any, row_weight: Any
) -> tuple[Tensor, list[Tensor | None]]:
    *inputs, targets = tensors
    # Liger finds a gradient of the table only where the features have one
    needed = (any(wanted), *wanted[1:3])
    with torch.autocast(targets.device.type, enabled=False), torch.enable_grad():
        factors: Any = [None if x is None else x.detach().to(kind) for x in inputs]
        if o.scale != 1.0:
            factors[0] = factors[0] * o.scale
        leaves = [x.requires_grad_() for x, need in zip(factors, needed, strict=True) if need]
        h, weight, bias = factors
        each = function(
            *(h, weight, targets),
            ignore_index=o.ignore_index,
            reduction="none" if o.reduction == "none" else "sum",
            **KERNELS[name].keywords(o, bias),
        )
        upstream = torch.ones_like(each) if row_weight is None else row_weight.to(each.dtype).expand_as(each)
        found = iter(torch.autograd.grad(each, leaves, upstream) if leaves else ())
    gradients: Any = [next(found).float() if need else None for need in needed]
    if not wanted[0]:
        gradients[0] = None
    elif o.scale != 1.0:
        gradients[0].mul_(o.scale)
    return each.detach().reshape(-1), gradients
