"""The loss on a GPU by a kernel that others maintain, where `backend` asks for one; by ours everywhere else.

    tiewise   our chunks: the default
    liger     Liger's fused linear cross-entropy        pip install liger-kernel
    cce       Cut Cross-Entropy, with nothing filtered  pip install cut-cross-entropy
    auto      on a GPU the fastest of those that are installed, have the options asked, and agree with ours

A kernel computes one sweep: losses and gradients. Reductions, upstream gradients, `torch.compile` and refusals are
around it, the same for all. It takes its bias and gives its gradients in the type of the products, as autograd does;
Liger's logits are of that type too.

A kernel is used in the versions that the tests run (`Kernel.versions`) and in no other. Its first use in a process, for
a type, a set of options and a reduction, first compares it with our loss on a small problem (`agreement`).

Liger's tests run under triton's interpreter, on a CPU. Both kernels ran on an H200 (`benchmarks.gpu`, `other_kernels`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops.fast_products import remembered
from tiewise.core.backends import BACKENDS, LossOptions
from tiewise.core.errors import RunError, UnsupportedError, one_line

VARIABLE = "TIEWISE_LOSS"
TOKENS = 4096  # of a trial, at most
SMALL = 64, 512  # tokens and words of the problem on which a kernel is compared at its first use, at most
SKETCH = 16  # directions in which a trial compares the gradients of two tables
# relative distance of loss and gradients from ours that is but another order of the same sums
AGREES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SLACK = 3  # times that distance, at a kernel's first use: few tokens average less of the rounding out
TF32 = 5e-3  # the same in fp32 where torch may round products to TF32


@dataclass(frozen=True)
class Kernel:
    """A loss of (features [N, E], weight [V, E], targets [N]) that another package maintains."""

    package: str  # pip's name
    place: str  # module:function
    types: tuple[torch.dtype, ...]  # of the products
    has: tuple[str, ...]  # options, besides scale, ignore_index and reduction
    versions: tuple[str, ...]  # that the tests run
    keywords: Callable[[LossOptions, Tensor | None], dict[str, Any]]  # from options and bias


KERNELS = {
    "liger": Kernel(
        "liger-kernel",
        "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
        (torch.float32, torch.float16, torch.bfloat16),
        ("bias", "softcap", "label_smoothing", "z_loss", "class_weight"),
        # Before 0.8.2 `reduction="none"` multiplies all gradients by the first token's upstream.
        # Before 0.8.4 the padding behind the last word enters the softmax where there is a soft-cap.
        ("0.8.4", "0.8.5"),
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
        ("25.1.1",),
        lambda o, bias: {"softcap": o.softcap, "filter_eps": None, "impl": "cce"},
    ),
}


@dataclass
class Trials:
    """What this process tried; a new process starts with none of it."""

    times: dict[Any, dict[str, float]] = field(default_factory=dict)  # milliseconds of each loss, by problem
    distances: dict[Any, float] = field(default_factory=dict)  # of a kernel from ours, at its first use
    versions: dict[str, str] = field(default_factory=dict)  # of installed packages


TRIALS = Trials()

# what does as `chunked.sweep`
Sweep = Callable[[LossOptions, Any, torch.dtype, Any, Tensor | None], tuple[Tensor, Any]]


class BrokenDevice(RunError):
    """A kernel left the GPU in a state in which nothing more can run there."""


def maintained(name: str, o: LossOptions, tensors: Any, kind: torch.dtype, ours: Any) -> Any:
    """Return what does as our own sweep, `ours`, by the backend of this name; None where that is ours.

    Of a mean or a sum, its losses [1] are their sum. A RunError where TIEWISE_LOSS names no backend, or a kernel breaks
    the GPU's context; an UnsupportedError for a kernel that is not installed, or in a version that the tests do not
    run, that lacks an option, the type or the device, or that disagrees with ours.
    """
    features, _, _, targets = tensors
    if name != "auto" and name not in KERNELS:
        raise RunError(f"no loss is called {name!r}", f"choose {', '.join(BACKENDS)} in {VARIABLE}")
    # the variable is for GPUs: a model may see its first batch before it is moved to one
    if not len(targets) or (o.backend is None and not _has_kernels(features.device)):
        return None
    if name != "auto":
        way = kernel_sweep(name, o, tensors, kind)
        _require_agreement(name, way, o, tensors, kind, ours)
        return way
    ways: dict[str, Any] = {"tiewise": None}
    for name in KERNELS:
        with suppress(UnsupportedError):
            ways[name] = kernel_sweep(name, o, tensors, kind)
    return None if len(ways) == 1 else _fastest(ways, o, tensors, kind, ours)


def _fastest(ways: dict[str, Any], o: LossOptions, tensors: Any, kind: torch.dtype, ours: Any) -> Any:
    """Return the fastest of `ways` by a trial, of this process or an earlier one."""
    features, weight, bias, targets = tensors
    what = {
        "device": torch.cuda.get_device_name(features.device) if features.is_cuda else features.device.type,
        "type": str(kind),
        "options": " ".join(_options_used(o, bias, kind)),
        "losses": "by token" if o.reduction == "none" else "summed",
        "shape": " ".join(str(2 ** round(math.log2(n))) for n in (min(len(targets), TOKENS), *weight.shape)),
    }
    key = (*what.values(), *ways)
    if key not in TRIALS.times:
        packages = {KERNELS[name].package: version(KERNELS[name].package) for name in ways if name in KERNELS}
        what |= {"torch": torch.__version__, **packages}
        found = remembered("losses.json", what, ("tiewise_ms",), lambda: trial(ways, o, tensors, kind, ours))
        TRIALS.times[key] = {name: found.get(f"{name}_ms", math.inf) for name in ways}
    return ways[min(ways, key=TRIALS.times[key].__getitem__)]


# how a kernel is compared with ours


def trial(ways: dict[str, Any], o: LossOptions, tensors: Any, kind: torch.dtype, ours: Any) -> dict[str, float]:
    """Return the milliseconds of those of `ways` that run and agree with `ours`, each the least of three.

    The tokens are drawn here, at most TOKENS of them; table and bias are the caller's. Only one gradient of the table
    exists at a time: a step holds as much.
    """
    features, weight, bias, targets = tensors
    drawn = _drawn_tokens(min(TOKENS, len(targets)), weight.shape, features, o)
    problem = (drawn[0], weight, bias, drawn[1])
    row_weight = _uneven(o, len(drawn[1]), features)

    def run(way: Any) -> tuple[float, list[Tensor]]:
        start = time.perf_counter()
        found = _once(way or ours, o, problem, kind, row_weight)
        found[0].sum().item()  # a GPU has then done all of it
        took = 1e3 * (time.perf_counter() - start)
        return took, _sketched(found)

    times, truth = {}, run(None)[1]
    for name, way in ways.items():
        with _recoverable(name, features.device):
            if _distance(run(way)[1], truth) <= _tolerance(kind):
                times[f"{name}_ms"] = min(run(way)[0] for _ in range(3))
    return times


def _require_agreement(name: str, way: Any, o: LossOptions, tensors: Any, kind: torch.dtype, ours: Any) -> None:
    """Refuse a kernel that, at its first use with this type and these options, disagrees with `ours`."""
    features, weight, bias, _ = tensors
    used = tuple(_options_used(o, bias, kind))
    key = (name, features.device, kind, used, o.reduction == "none", o.scale != 1.0, weight.shape[1])
    if key not in TRIALS.distances:
        TRIALS.distances[key] = agreement(way, o, tensors, kind, ours)
    distance = TRIALS.distances[key]
    if not distance <= SLACK * _tolerance(kind):
        package = KERNELS[name].package
        what = f"{package} {version(package)} differs from our loss by {distance:.1e} of it on a small problem"
        options = f", {', '.join(used)}" if used else ""
        raise UnsupportedError(f"{what} ({kind}, reduction={o.reduction!r}{options})", "take backend='tiewise'")


def agreement(way: Any, o: LossOptions, tensors: Any, kind: torch.dtype, ours: Any) -> float:
    """Return the largest relative distance of loss or gradients from `ours`, on a small problem like this one."""
    features, weight, bias, targets = tensors
    n, v = min(SMALL[0], len(targets)), min(SMALL[1], len(weight))
    draw = torch.Generator().manual_seed(1)
    width = weight.shape[1]
    table = torch.randn(v, width, generator=draw, device="cpu").mul_(max(1, width) ** -0.5).to(weight)
    shift = None if bias is None else torch.randn(v, generator=draw, device="cpu").to(bias)
    classes = (
        None if o.class_weight is None else torch.rand(v, generator=draw, device="cpu").add_(0.5).to(o.class_weight)
    )
    h, t = _drawn_tokens(n, (v, width), features, o)
    o = replace(o, class_weight=classes)
    runs = [_once(one, o, (h, table, shift, t), kind, _uneven(o, n, features)) for one in (way, ours)]
    return _distance(*runs)


def _drawn_tokens(n: int, table: Any, features: Tensor, o: LossOptions) -> tuple[Tensor, Tensor]:
    """Features [n, E] like the caller's, and targets [n] of which about every eighth is ignored, if n allows it."""
    draw = torch.Generator().manual_seed(2)
    v, width = table
    h = torch.randn(n, width, generator=draw, device="cpu")
    t = torch.randint(0, v, (n,), generator=draw, device="cpu")
    t[7::8] = o.ignore_index
    return h.to(features), t.to(features.device)


def _uneven(o: LossOptions, n: int, features: Tensor) -> Tensor:
    """By how much each token's loss is multiplied: numbers of both signs [n], or one number of a mean or a sum."""
    wide = torch.float32
    if o.reduction == "none":
        numbers = torch.linspace(-1, 2, n, dtype=wide, device="cpu")
    else:
        numbers = torch.tensor(0.37, dtype=wide, device="cpu")
    return numbers.to(features.device)


def _once(sweep: Sweep, o: LossOptions, problem: Any, kind: torch.dtype, row_weight: Tensor) -> list[Tensor]:
    """Losses (of a mean or a sum, their sum) and gradients of features, table and bias."""
    each, gradients = sweep(o, problem, kind, (True, True, problem[2] is not None), row_weight)
    losses = each if o.reduction == "none" else each.sum()
    return [losses, *(x for x in gradients if x is not None)]


def _sketched(found: list[Tensor]) -> list[Tensor]:
    """The same with the table's gradient [V, E] multiplied by random directions [E, SKETCH], which keeps distances."""
    losses, by_features, by_weight, *by_bias = found
    draw = torch.Generator().manual_seed(3)
    directions = torch.randn(by_weight.shape[1], SKETCH, generator=draw, device="cpu").to(by_weight)
    return [losses, by_features, by_weight @ directions, *by_bias]


def _distance(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative distance between two lists of tensors; nan or inf where one is."""
    pairs = zip(found, truth, strict=True)
    distances = [((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).item() for x, y in pairs]
    return max(distances, key=lambda one: math.inf if math.isnan(one) else one)


def _tolerance(kind: torch.dtype) -> float:
    return TF32 if kind == torch.float32 and _rounds_to_tf32() else AGREES[kind]


def _rounds_to_tf32() -> bool:
    with suppress(RuntimeError):  # which torch raises where its newer flags are set
        return torch.get_float32_matmul_precision() != "highest"
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextmanager
def _recoverable(name: str, device: torch.device) -> Iterator[None]:
    """Within this block the kernel `name` may fail; a BrokenDevice where nothing runs on the GPU afterwards."""
    try:
        yield
    except Exception as error:  # another's kernel may not compile here, or find no memory
        if device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            what = f"the trial of backend={name!r} broke the context of {device} ({one_line(error)})"
            raise BrokenDevice(what, f"start anew with backend='tiewise', or {VARIABLE}=tiewise") from error


def kernel_sweep(name: str, o: LossOptions, tensors: Any, kind: torch.dtype) -> Any:
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
    install = f"pip install {kernel.package}=={kernel.versions[-1]}"
    try:
        found = getattr(import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"backend={name!r} cannot be imported ({error})", install) from error
    has = _installed_version(kernel.package)
    if has not in kernel.versions:
        tested = " and ".join(kernel.versions)
        raise UnsupportedError(f"backend={name!r} is tested with {kernel.package} {tested}, not {has}", install)
    return partial(_swept, name, found)


def _installed_version(package: str) -> str:
    if package not in TRIALS.versions:
        try:
            TRIALS.versions[package] = version(package)
        except PackageNotFoundError:
            TRIALS.versions[package] = "a copy without a version"
    return TRIALS.versions[package]


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
