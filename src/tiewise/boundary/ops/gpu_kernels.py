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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.fast_products import remembered
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import BACKENDS, LossOptions
from tiewise.core.errors import RunError, UnsupportedError, one_line_message

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


def _liger_keywords(o: LossOptions, bias: Tensor | None) -> dict[str, Any]:
    """Return the options as Liger's function takes them."""
    return {
        "bias": bias,
        "ce_weight": None if o.class_weight is None else o.class_weight.float(),
        "lse_square_scale": o.z_loss,
        "label_smoothing": o.label_smoothing,
        "softcap": o.softcap,
        "accum_dtype": torch.float32,
    }


def _cce_keywords(o: LossOptions, bias: Tensor | None) -> dict[str, Any]:
    """Return the options as Cut Cross-Entropy takes them, with nothing filtered."""
    return {"softcap": o.softcap, "filter_eps": None, "impl": "cce"}


KERNELS = {
    "liger": Kernel(
        "liger-kernel",
        "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
        (torch.float32, torch.float16, torch.bfloat16),
        ("bias", "softcap", "label_smoothing", "z_loss", "class_weight"),
        # Before 0.8.2 `reduction="none"` multiplies all gradients by the first token's upstream.
        # Before 0.8.4 the padding behind the last word enters the softmax where there is a soft-cap.
        ("0.8.4", "0.8.5"),
        _liger_keywords,
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


@dataclass
class Trials:
    """What this process tried; a new process starts with none of it."""

    times: dict[Any, dict[str, float]] = field(default_factory=dict)  # milliseconds of each loss, by problem
    distances: dict[Any, float] = field(default_factory=dict)  # of a kernel from ours, at its first use
    versions: dict[str, str] = field(default_factory=dict)  # of installed packages


TRIALS = Trials()

Needs = tuple[bool, ...]  # which gradients: of features, weight, bias
# a function with the arguments and results of `chunked.sweep`
Sweep = Callable[[LossOptions, LossTensors, torch.dtype, Needs, Tensor | None], tuple[Tensor, Gradients]]
Ways = dict[str, Sweep | None]  # by name of the backend; None: our own sweep


class BrokenDevice(RunError):
    """A kernel left the GPU in a state in which nothing more can run there."""


def maintained(name: str, o: LossOptions, tensors: LossTensors, kind: torch.dtype, ours: Sweep) -> Sweep | None:
    """Return the sweep of the backend of this name, which replaces `ours`; None where that is ours.

    Of a mean or a sum, its losses [1] are their sum. A RunError where TIEWISE_LOSS names no backend, or a kernel breaks
    the GPU's context; an UnsupportedError for a kernel that is not installed, or in a version that the tests do not
    run, that lacks an option, the type or the device, or that disagrees with ours.
    """
    tensors = LossTensors(*tensors)
    if name != "auto" and name not in KERNELS:
        raise RunError(f"no loss is called {name!r}", f"choose {', '.join(BACKENDS)} in {VARIABLE}")
    if not len(tensors.targets):
        return None
    # the variable is for GPUs: a model may see its first batch before it is moved to one
    if o.backend is None and not _has_kernels(tensors.features.device):
        return None
    if name != "auto":
        way = kernel_sweep(name, o, tensors, kind)
        _require_agreement(name, way, o, tensors, kind, ours)
        return way
    ways: Ways = {"tiewise": None}
    for name in KERNELS:
        with suppress(UnsupportedError):
            ways[name] = kernel_sweep(name, o, tensors, kind)
    if len(ways) == 1:
        return None
    return _fastest(ways, o, tensors, kind, ours)


def _fastest(ways: Ways, o: LossOptions, tensors: LossTensors, kind: torch.dtype, ours: Sweep) -> Sweep | None:
    """Return the fastest of `ways` by a trial, of this process or an earlier one."""
    problem = _description(o, tensors, kind)
    key = (*problem.values(), *ways)
    if key not in TRIALS.times:
        problem["torch"] = torch.__version__
        for name in ways:
            if name in KERNELS:
                package = KERNELS[name].package
                problem[package] = version(package)
        times = remembered("losses.json", problem, ("tiewise_ms",), lambda: trial(ways, o, tensors, kind, ours))
        TRIALS.times[key] = {name: times.get(f"{name}_ms", math.inf) for name in ways}
    fastest = min(ways, key=TRIALS.times[key].__getitem__)
    return ways[fastest]


def _description(o: LossOptions, tensors: LossTensors, kind: torch.dtype) -> dict[str, str]:
    """Return the properties of a problem on which the fastest way depends.

    Sizes are rounded to a power of two.
    """
    features, weight, bias, targets = tensors
    device = features.device.type
    if features.is_cuda:
        device = torch.cuda.get_device_name(features.device)
    sizes = (min(len(targets), TOKENS), *weight.shape)
    return {
        "device": device,
        "type": str(kind),
        "options": " ".join(_options_used(o, bias, kind)),
        "losses": "by token" if o.reduction == "none" else "summed",
        "shape": " ".join(str(2 ** round(math.log2(size))) for size in sizes),
    }


# how a kernel is compared with ours


@dataclass(frozen=True, eq=False)
class _Trial:
    """A problem like the caller's, by which ways are timed and compared."""

    options: LossOptions
    problem: LossTensors
    kind: torch.dtype
    row_weight: Tensor

    def run(self, way: Sweep) -> tuple[float, list[Tensor]]:
        """Return the milliseconds and the results of one way."""
        start = time.perf_counter()
        results = _once(way, self.options, self.problem, self.kind, self.row_weight)
        results[0].sum().item()  # a GPU has then done all of it
        milliseconds = 1e3 * (time.perf_counter() - start)
        return milliseconds, _sketched(results)


def trial(ways: Ways, o: LossOptions, tensors: LossTensors, kind: torch.dtype, ours: Sweep) -> dict[str, float]:
    """Return the milliseconds of those of `ways` that run and agree with `ours`, each the least of three.

    Tokens are random, at most TOKENS of them; table and bias are the caller's. Only one gradient of the table exists
    at a time: a step holds as much.
    """
    features, weight, bias, targets = tensors
    h, t = _random_tokens(min(TOKENS, len(targets)), weight.shape, features, o)
    problem = _Trial(o, LossTensors(h, weight, bias, t), kind, _uneven(o, len(t), features))
    times = {}
    _, truth = problem.run(ours)
    for name, way in ways.items():
        with _recoverable(name, features.device):
            _, results = problem.run(way or ours)
            if _distance(results, truth) <= _tolerance(kind):
                times[f"{name}_ms"] = min(problem.run(way or ours)[0] for _ in range(3))
    return times


def _require_agreement(
    name: str, way: Sweep, o: LossOptions, tensors: LossTensors, kind: torch.dtype, ours: Sweep
) -> None:
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


def agreement(way: Sweep, o: LossOptions, tensors: LossTensors, kind: torch.dtype, ours: Sweep) -> float:
    """Return the largest relative distance of loss or gradients from `ours`, on a small problem like this one."""
    tensors = LossTensors(*tensors)
    o, problem = _small_problem(o, tensors)
    row_weight = _uneven(o, len(problem.targets), tensors.features)
    results = [_once(sweep, o, problem, kind, row_weight) for sweep in (way, ours)]
    return _distance(*results)


def _small_problem(o: LossOptions, tensors: LossTensors) -> tuple[LossOptions, LossTensors]:
    """Return random tensors like these, of fewer tokens and words, and options that fit them."""
    features, weight, bias, targets = tensors
    n, v, width = min(SMALL[0], len(targets)), min(SMALL[1], len(weight)), weight.shape[1]
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(v, width, generator=draw, device="cpu").mul_(max(1, width) ** -0.5).to(weight)
    if bias is not None:
        bias = torch.randn(v, generator=draw, device="cpu").to(bias)
    if o.class_weight is not None:
        classes = torch.rand(v, generator=draw, device="cpu").add_(0.5).to(o.class_weight)
        o = replace(o, class_weight=classes)
    h, t = _random_tokens(n, (v, width), features, o)
    return o, LossTensors(h, table, bias, t)


def _random_tokens(n: int, table: Sequence[int], features: Tensor, o: LossOptions) -> tuple[Tensor, Tensor]:
    """Return features [n, E] like the caller's, and targets [n] for a table of that shape.

    About every eighth target is ignored, if n allows it.
    """
    draw = torch.Generator().manual_seed(2)
    v, width = table
    h = torch.randn(n, width, generator=draw, device="cpu")
    t = torch.randint(0, v, (n,), generator=draw, device="cpu")
    t[7::8] = o.ignore_index
    return h.to(features), t.to(features.device)


def _uneven(o: LossOptions, n: int, features: Tensor) -> Tensor:
    """Return factors on the losses.

    They are of both signs [n] for losses by token, and one number for a mean or a sum.
    """
    wide = torch.float32
    if o.reduction == "none":
        numbers = torch.linspace(-1, 2, n, dtype=wide, device="cpu")
    else:
        numbers = torch.tensor(0.37, dtype=wide, device="cpu")
    return numbers.to(features.device)


def _once(sweep: Sweep, o: LossOptions, problem: LossTensors, kind: torch.dtype, row_weight: Tensor) -> list[Tensor]:
    """Return losses (of a mean or a sum, their sum) and gradients of features, table and bias."""
    losses, gradients = sweep(o, problem, kind, (True, True, problem.bias is not None), row_weight)
    if o.reduction != "none":
        losses = losses.sum()
    return [losses, *(x for x in gradients if x is not None)]


def _sketched(results: list[Tensor]) -> list[Tensor]:
    """Return the same with the table's gradient [V, E] multiplied by random directions.

    These are [E, SKETCH], which keeps distances.
    """
    losses, by_features, by_weight, *by_bias = results
    draw = torch.Generator().manual_seed(3)
    directions = torch.randn(by_weight.shape[1], SKETCH, generator=draw, device="cpu").to(by_weight)
    return [losses, by_features, by_weight @ directions, *by_bias]


def _distance(results: list[Tensor], truth: list[Tensor]) -> float:
    """Return the largest relative distance between two lists of tensors; nan or inf where one is."""
    distances = []
    for x, y in zip(results, truth, strict=True):
        difference, size = (x.double() - y.double()).norm(), y.double().norm()
        distances.append(float(difference / size.clamp(min=1e-30)))
    return max(distances, key=lambda distance: math.inf if math.isnan(distance) else distance)


def _tolerance(kind: torch.dtype) -> float:
    """Return the distance from our results up to which a kernel agrees with them."""
    if kind == torch.float32 and _rounds_to_tf32():
        return TF32
    return AGREES[kind]


def _rounds_to_tf32() -> bool:
    """Return whether torch may round fp32 products to TF32."""
    with suppress(RuntimeError):  # which torch raises where its newer flags are set
        return torch.get_float32_matmul_precision() != "highest"
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


@contextmanager
def _recoverable(name: str, device: torch.device) -> Iterator[None]:
    """Let the kernel `name` fail in this block; a BrokenDevice where nothing runs afterwards."""
    try:
        yield
    except Exception as error:  # another's kernel may not compile here, or find no memory
        if device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            what = f"the trial of backend={name!r} broke the context of {device} ({one_line_message(error)})"
            raise BrokenDevice(what, f"start anew with backend='tiewise', or {VARIABLE}=tiewise") from error


def kernel_sweep(name: str, o: LossOptions, tensors: LossTensors, kind: torch.dtype) -> Sweep:
    """Return the sweep of a kernel by its name. Its results are not compared with ours here.

    Raises:
        UnsupportedError: it lacks the device, an option, the type of the products, or a version that was tested.
    """
    kernel = KERNELS[name]
    features, _, bias, _ = tensors
    fix = f"take backend='tiewise', or 'auto' (also in {VARIABLE})"
    if not _has_kernels(features.device):
        raise UnsupportedError(f"backend={name!r} runs on a GPU, and the features are on a {features.device.type}", fix)
    lacks = [option for option in _options_used(o, bias, kind) if option not in kernel.has]
    if kind not in kernel.types:
        lacks.append(f"products in {kind}".replace("torch.", ""))
    if lacks:
        raise UnsupportedError(f"backend={name!r} has no {', no '.join(lacks)}", fix)
    return _KernelSweep(_imported(kernel, name), kernel.keywords)


def _imported(kernel: Kernel, name: str) -> Callable[..., Tensor]:
    """Return the loss function of an installed package, in a version that the tests run."""
    place, function_name = kernel.place.split(":")
    install = f"pip install {kernel.package}=={kernel.versions[-1]}"
    try:
        function: Callable[..., Tensor] = getattr(import_module(place), function_name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"backend={name!r} cannot be imported ({error})", install) from error
    has = _installed_version(kernel.package)
    if has not in kernel.versions:
        tested = " and ".join(kernel.versions)
        raise UnsupportedError(f"backend={name!r} is tested with {kernel.package} {tested}, not {has}", install)
    return function


def _installed_version(package: str) -> str:
    """Return the version of an installed package, looked up once."""
    if package not in TRIALS.versions:
        try:
            TRIALS.versions[package] = version(package)
        except PackageNotFoundError:
            TRIALS.versions[package] = "a copy without a version"
    return TRIALS.versions[package]


def _has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on this device, or under triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _options_used(o: LossOptions, bias: Tensor | None, kind: torch.dtype) -> list[str]:
    """Return the names of the options that a kernel must have."""
    keeps_fp32 = o.logits is not None and kind != torch.float32
    used = {
        "bias": bias is not None,
        "softcap": o.softcap is not None,
        "label_smoothing": o.label_smoothing,
        "z_loss": o.z_loss,
        "class_weight": o.class_weight is not None,
        "chunk": o.chunk is not None,
        "logits": keeps_fp32,
        "scale beside logits": keeps_fp32 and o.scale != 1.0,  # the features would be rounded
    }
    return [option for option, is_used in used.items() if is_used]


@dataclass(frozen=True, eq=False)
class _KernelSweep:
    """A sweep by another package's loss function, which autograd differentiates."""

    function: Callable[..., Tensor]
    keywords: Callable[[LossOptions, Tensor | None], dict[str, Any]]

    def __call__(
        self, o: LossOptions, tensors: LossTensors, kind: torch.dtype, needs: Needs, row_weight: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Do what `chunked.sweep` does."""
        # Liger computes a gradient of the table only where the features have one
        computed = (any(needs), *needs[1:3])
        with torch.autocast(tensors[0].device.type, enabled=False), torch.enable_grad():
            converted = _detached(o, tensors, kind)
            leaves: list[Tensor] = []
            for x, is_computed in zip(converted[:3], computed, strict=True):
                if is_computed:
                    assert x is not None, "a missing bias needs no gradient"
                    leaves.append(x.requires_grad_())
            losses = self._losses(o, converted)
            results = iter(_gradients(losses, leaves, row_weight))
        gradients: Gradients = [next(results).float() if is_computed else None for is_computed in computed]
        if not needs[0]:
            gradients[0] = None
        elif gradients[0] is not None and o.scale != 1.0:
            gradients[0].mul_(o.scale)
        return losses.detach().reshape(-1), gradients

    def _losses(self, o: LossOptions, tensors: LossTensors) -> Tensor:
        """Return the losses [N], or the sum of a mean's or a sum's."""
        features, weight, bias, targets = tensors
        reduction = "none" if o.reduction == "none" else "sum"
        keywords = self.keywords(o, bias)
        return self.function(features, weight, targets, ignore_index=o.ignore_index, reduction=reduction, **keywords)


def _detached(o: LossOptions, tensors: LossTensors, kind: torch.dtype) -> LossTensors:
    """Return the tensors in the type of the products, outside the caller's graph.

    The features are scaled.
    """
    features, weight, bias, targets = tensors
    features = features.detach().to(kind)
    if o.scale != 1.0:
        features = features * o.scale
    if bias is not None:
        bias = bias.detach().to(kind)
    return LossTensors(features, weight.detach().to(kind), bias, targets)


def _gradients(losses: Tensor, leaves: Sequence[Tensor], row_weight: Tensor | None) -> Sequence[Tensor]:
    """Return the gradients of Σ row_weight_i · loss_i by the leaves."""
    if not leaves:
        return ()
    if row_weight is None:
        upstream = torch.ones_like(losses)
    else:
        upstream = row_weight.to(losses.dtype).expand_as(losses)
    return torch.autograd.grad(losses, leaves, upstream)
