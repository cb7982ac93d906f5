"""The loss on a GPU by a kernel of another package, if `backend` requests one.

    tiewise   tiewise's chunks: the default
    liger     Liger's fused linear cross-entropy        pip install liger-kernel
    cce       Cut Cross-Entropy, with nothing filtered  pip install cut-cross-entropy
    auto      on a GPU, the fastest that is installed, has the requested options and agrees with tiewise's

A kernel computes one pass: losses and gradients. Reductions, upstream gradients, `torch.compile` and refusals are the
same for all kernels and are outside of it. A kernel takes its bias and returns its gradients in the type of the
products, as autograd does; Liger's logits have that type too.

A kernel is used only in the versions that the tests run (`Kernel.versions`). Before its first use in a process, for a
type, a set of options and a reduction, it is compared with tiewise's loss on a small problem (`measure_distance`).

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
from tiewise.boundary.ops.fast_products import cached_or_measured
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import BACKENDS, LossOptions
from tiewise.core.errors import RunError, UnsupportedError, one_line_message

VARIABLE = "TIEWISE_LOSS"
TOKENS = 4096  # largest number of tokens in a trial
SMALL = 64, 512  # largest numbers of tokens and words of the problem on which a kernel is compared
SKETCH = 16  # random directions in which a trial compares the gradients of the table
# relative distances from tiewise's loss and gradients that another order of the sums explains
AGREES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SLACK = 3  # factor on AGREES at a kernel's first use: rounding averages out less over few tokens
TF32 = 5e-3  # value of AGREES for fp32 if torch may round products to TF32


@dataclass(frozen=True)
class Kernel:
    """Loss of (features [N, E], weight [V, E], targets [N]) in another package."""

    package: str  # pip's name
    entry_point: str  # entry point, module:function
    types: tuple[torch.dtype, ...]  # supported types of the products
    has: tuple[str, ...]  # supported options; all kernels support scale, ignore_index and reduction
    versions: tuple[str, ...]  # versions that the tests run
    keywords: Callable[[LossOptions, Tensor | None], dict[str, Any]]  # options and bias → keyword arguments


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


KERNELS = {
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
    """Results of this process's trials; a new process starts without any."""

    times: dict[Any, dict[str, float]] = field(default_factory=dict)  # milliseconds of each loss, by problem
    distances: dict[Any, float] = field(default_factory=dict)  # kernel's distance from tiewise's loss, at first use
    versions: dict[str, str] = field(default_factory=dict)  # versions of installed packages


TRIALS = Trials()

Needs = tuple[bool, ...]  # whether each gradient is needed: of features, weight, bias
# function with the arguments and results of `chunked.loss_pass`
BackendPass = Callable[[LossOptions, LossTensors, torch.dtype, Needs, Tensor | None], tuple[Tensor, Gradients]]
Candidates = dict[str, BackendPass | None]  # backend → its pass; None: tiewise's


class BrokenDevice(RunError):
    """Error of a kernel that left the GPU unusable for this process."""


def backend_loss_pass(
    name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype, tiewise_pass: BackendPass
) -> BackendPass | None:
    """Return the pass of the named backend; None if it is tiewise's.

    For a mean or a sum, its losses [1] are their sum. `tiewise_pass` is `chunked.loss_pass`.

    Raises:
        RunError: TIEWISE_LOSS names no backend, or a kernel breaks the GPU's context.
        UnsupportedError: the kernel is not installed or not in a tested version; it lacks an option, the type or the
            device; or its results differ from tiewise's.
    """
    tensors = LossTensors(*tensors)
    if name != "auto" and name not in KERNELS:
        raise RunError(f"no loss is called {name!r}", f"choose {', '.join(BACKENDS)} in {VARIABLE}")
    if not len(tensors.targets):
        return None
    # the variable applies to GPUs only: a model may run its first batch before it is moved to one
    if options.backend is None and not _has_kernels(tensors.features.device):
        return None
    if name != "auto":
        candidate = kernel_loss_pass(name, options, tensors, product_dtype)
        _require_agreement(name, candidate, options, tensors, product_dtype, tiewise_pass)
        return candidate
    candidates: Candidates = {"tiewise": None}
    for name in KERNELS:
        with suppress(UnsupportedError):
            candidates[name] = kernel_loss_pass(name, options, tensors, product_dtype)
    if len(candidates) == 1:
        return None
    return _choose_fastest(candidates, options, tensors, product_dtype, tiewise_pass)


def _choose_fastest(
    candidates: Candidates,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
) -> BackendPass | None:
    """Return the fastest of `candidates` by a trial of this process or an earlier one."""
    problem = _describe_problem(options, tensors, product_dtype)
    key = (*problem.values(), *candidates)
    if key not in TRIALS.times:
        problem["torch"] = torch.__version__
        for name in candidates:
            if name in KERNELS:
                package = KERNELS[name].package
                problem[package] = version(package)
        times = cached_or_measured(
            "losses.json",
            problem,
            ("tiewise_ms",),
            lambda: run_trial(candidates, options, tensors, product_dtype, tiewise_pass),
        )
        TRIALS.times[key] = {name: times.get(f"{name}_ms", math.inf) for name in candidates}
    fastest = min(candidates, key=TRIALS.times[key].__getitem__)
    return candidates[fastest]


def _describe_problem(options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> dict[str, str]:
    """Return the properties of a problem that determine the fastest candidate.

    Sizes are rounded to a power of two.
    """
    features, weight, bias, targets = tensors
    device = features.device.type
    if features.is_cuda:
        device = torch.cuda.get_device_name(features.device)
    sizes = (min(len(targets), TOKENS), *weight.shape)
    return {
        "device": device,
        "type": str(product_dtype),
        "options": " ".join(_used_options(options, bias, product_dtype)),
        "losses": "by token" if options.reduction == "none" else "summed",
        "shape": " ".join(str(2 ** round(math.log2(size))) for size in sizes),
    }


# comparison of a kernel with tiewise's pass


@dataclass(frozen=True, eq=False)
class _Trial:
    """Problem like the caller's, on which candidates are timed and compared."""

    options: LossOptions
    problem: LossTensors
    product_dtype: torch.dtype
    row_weight: Tensor

    def run(self, candidate: BackendPass) -> tuple[float, list[Tensor]]:
        """Return the milliseconds and the results of one candidate."""
        start = time.perf_counter()
        results = _run_loss_pass(candidate, self.options, self.problem, self.product_dtype, self.row_weight)
        results[0].sum().item()  # waits until a GPU has finished
        milliseconds = 1e3 * (time.perf_counter() - start)
        return milliseconds, _sketch_table(results)


def run_trial(
    candidates: Candidates,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
) -> dict[str, float]:
    """Return the milliseconds of each candidate that runs and agrees with `tiewise_pass`.

    Each time is the minimum of three. Tokens are random, at most TOKENS of them; table and bias are the caller's. Only
    one gradient of the table exists at a time: a step needs as much memory.
    """
    features, weight, bias, targets = tensors
    h, t = _draw_tokens(min(TOKENS, len(targets)), weight.shape, features, options)
    problem = _Trial(
        options, LossTensors(h, weight, bias, t), product_dtype, _uneven_factors(options, len(t), features)
    )
    times = {}
    _, truth = problem.run(tiewise_pass)
    for name, candidate in candidates.items():
        with _ignore_failure(name, features.device):
            _, results = problem.run(candidate or tiewise_pass)
            if _distance(results, truth) <= _tolerance(product_dtype):
                times[f"{name}_ms"] = min(problem.run(candidate or tiewise_pass)[0] for _ in range(3))
    return times


def _require_agreement(
    name: str,
    candidate: BackendPass,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
) -> None:
    """Refuse a kernel whose results differ from those of `tiewise_pass`.

    It is compared at its first use with this type and these options.
    """
    features, weight, bias, _ = tensors
    used = tuple(_used_options(options, bias, product_dtype))
    key = (
        name,
        features.device,
        product_dtype,
        used,
        options.reduction == "none",
        options.scale != 1.0,
        weight.shape[1],
    )
    if key not in TRIALS.distances:
        TRIALS.distances[key] = measure_distance(candidate, options, tensors, product_dtype, tiewise_pass)
    distance = TRIALS.distances[key]
    if not distance <= SLACK * _tolerance(product_dtype):
        package = KERNELS[name].package
        what = f"{package} {version(package)} differs from our loss by {distance:.1e} of it on a small problem"
        listed = f", {', '.join(used)}" if used else ""
        raise UnsupportedError(
            f"{what} ({product_dtype}, reduction={options.reduction!r}{listed})", "take backend='tiewise'"
        )


def measure_distance(
    candidate: BackendPass,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
) -> float:
    """Return the largest relative distance of loss or gradients from those of `tiewise_pass`.

    It is measured on a small problem like this one.
    """
    tensors = LossTensors(*tensors)
    options, problem = _draw_problem(options, tensors)
    row_weight = _uneven_factors(options, len(problem.targets), tensors.features)
    results = [
        _run_loss_pass(loss_pass, options, problem, product_dtype, row_weight)
        for loss_pass in (candidate, tiewise_pass)
    ]
    return _distance(*results)


def _draw_problem(options: LossOptions, tensors: LossTensors) -> tuple[LossOptions, LossTensors]:
    """Return random tensors like these, with fewer tokens and words, and options that fit them."""
    features, weight, bias, targets = tensors
    n, v, width = min(SMALL[0], len(targets)), min(SMALL[1], len(weight)), weight.shape[1]
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(v, width, generator=draw, device="cpu").mul_(max(1, width) ** -0.5).to(weight)
    if bias is not None:
        bias = torch.randn(v, generator=draw, device="cpu").to(bias)
    if options.class_weight is not None:
        classes = torch.rand(v, generator=draw, device="cpu").add_(0.5).to(options.class_weight)
        options = replace(options, class_weight=classes)
    h, t = _draw_tokens(n, (v, width), features, options)
    return options, LossTensors(h, table, bias, t)


def _draw_tokens(n: int, table: Sequence[int], features: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return features [n, E] like the caller's, and targets [n] for a table of that shape.

    About every eighth target is ignored, if n allows it.
    """
    draw = torch.Generator().manual_seed(2)
    v, width = table
    h = torch.randn(n, width, generator=draw, device="cpu")
    t = torch.randint(0, v, (n,), generator=draw, device="cpu")
    t[7::8] = options.ignore_index
    return h.to(features), t.to(features.device)


def _uneven_factors(options: LossOptions, n: int, features: Tensor) -> Tensor:
    """Return different factors on the losses.

    They have both signs [n] for losses by token; for a mean or a sum it is one number.
    """
    wide = torch.float32
    if options.reduction == "none":
        numbers = torch.linspace(-1, 2, n, dtype=wide, device="cpu")
    else:
        numbers = torch.tensor(0.37, dtype=wide, device="cpu")
    return numbers.to(features.device)


def _run_loss_pass(
    loss_pass: BackendPass, options: LossOptions, problem: LossTensors, product_dtype: torch.dtype, row_weight: Tensor
) -> list[Tensor]:
    """Return the losses, and the gradients of features, table and bias.

    The losses of a mean or a sum are summed.
    """
    losses, gradients = loss_pass(options, problem, product_dtype, (True, True, problem.bias is not None), row_weight)
    if options.reduction != "none":
        losses = losses.sum()
    return [losses, *(x for x in gradients if x is not None)]


def _sketch_table(results: list[Tensor]) -> list[Tensor]:
    """Return the results with the table's gradient [V, E] multiplied by random directions.

    The directions [E, SKETCH] preserve distances approximately.
    """
    losses, by_features, by_weight, *by_bias = results
    draw = torch.Generator().manual_seed(3)
    directions = torch.randn(by_weight.shape[1], SKETCH, generator=draw, device="cpu").to(by_weight)
    return [losses, by_features, by_weight @ directions, *by_bias]


def _distance(results: list[Tensor], truth: list[Tensor]) -> float:
    """Return the largest relative distance between two lists of tensors; nan or inf if one is."""
    distances = []
    for x, y in zip(results, truth, strict=True):
        difference, size = (x.double() - y.double()).norm(), y.double().norm()
        distances.append(float(difference / size.clamp(min=1e-30)))
    return max(distances, key=lambda distance: math.inf if math.isnan(distance) else distance)


def _tolerance(product_dtype: torch.dtype) -> float:
    """Return the distance up to which a kernel agrees with tiewise's results."""
    if product_dtype == torch.float32 and _rounds_to_tf32():
        return TF32
    return AGREES[product_dtype]


def _rounds_to_tf32() -> bool:
    """Return whether torch may round fp32 products to TF32."""
    with suppress(RuntimeError):  # torch raises it if its newer flags are set
        return torch.get_float32_matmul_precision() != "highest"
    precision: str = torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32"


@contextmanager
def _ignore_failure(name: str, device: torch.device) -> Iterator[None]:
    """Ignore an error of the kernel `name` in this block.

    Raises:
        BrokenDevice: after the error nothing runs on the device.
    """
    try:
        yield
    except Exception as error:  # another package's kernel may fail to compile or to allocate
        if device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            what = f"the trial of backend={name!r} broke the context of {device} ({one_line_message(error)})"
            raise BrokenDevice(what, f"start anew with backend='tiewise', or {VARIABLE}=tiewise") from error


def kernel_loss_pass(name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> BackendPass:
    """Return the pass of a kernel by its name, without comparing its results.

    Raises:
        UnsupportedError: it lacks the device, an option, the type of the products, or a tested version.
    """
    kernel = KERNELS[name]
    features, _, bias, _ = tensors
    fix = f"take backend='tiewise', or 'auto' (also in {VARIABLE})"
    if not _has_kernels(features.device):
        raise UnsupportedError(f"backend={name!r} runs on a GPU, and the features are on a {features.device.type}", fix)
    lacks = [option for option in _used_options(options, bias, product_dtype) if option not in kernel.has]
    if product_dtype not in kernel.types:
        lacks.append(f"products in {product_dtype}".replace("torch.", ""))
    if lacks:
        raise UnsupportedError(f"backend={name!r} has no {', no '.join(lacks)}", fix)
    return _KernelLossPass(_import_kernel(kernel, name), kernel.keywords)


def _import_kernel(kernel: Kernel, name: str) -> Callable[..., Tensor]:
    """Return the loss function of an installed package, in a version that the tests run."""
    module, function_name = kernel.entry_point.split(":")
    install = f"pip install {kernel.package}=={kernel.versions[-1]}"
    try:
        function: Callable[..., Tensor] = getattr(import_module(module), function_name)
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


def _used_options(options: LossOptions, bias: Tensor | None, product_dtype: torch.dtype) -> list[str]:
    """Return the names of the options that a kernel must support."""
    keeps_fp32 = options.logits is not None and product_dtype != torch.float32
    used = {
        "bias": bias is not None,
        "softcap": options.softcap is not None,
        "label_smoothing": options.label_smoothing,
        "z_loss": options.z_loss,
        "class_weight": options.class_weight is not None,
        "chunk": options.chunk is not None,
        "logits": keeps_fp32,
        "scale beside logits": keeps_fp32 and options.scale != 1.0,  # the features would be rounded
    }
    return [option for option, is_used in used.items() if is_used]


@dataclass(frozen=True, eq=False)
class _KernelLossPass:
    """Pass by another package's loss function, which autograd differentiates."""

    function: Callable[..., Tensor]
    keywords: Callable[[LossOptions, Tensor | None], dict[str, Any]]

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
        with torch.autocast(tensors[0].device.type, enabled=False), torch.enable_grad():
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
        keywords = self.keywords(options, bias)
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
