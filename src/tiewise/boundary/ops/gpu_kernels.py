"""The loss on a GPU by the kernel that `backend` requests: tiewise's or another package's.

    tiewise   the row kernel where it runs and is exact, else the chunks (`own_pass`): the default
    triton    tiewise's chunks with a kernel for rows   pip install triton (torch for CUDA brings it)
    chunked   tiewise's chunks in PyTorch
    compile   the plain computation in chunks, compiled by torch.compile (`compiled_rows`)
    liger     Liger's fused linear cross-entropy        pip install liger-kernel
    cce       Cut Cross-Entropy, with nothing filtered  pip install cut-cross-entropy
    auto      on a GPU, the fastest that is installed, has the requested options and is exact

A kernel computes one pass: losses and gradients. Reductions, upstream gradients, `torch.compile` and refusals are the
same for all kernels and are outside of it. A kernel takes its bias and returns its gradients in the type of the
products, as autograd does; Liger's logits have that type too.

A kernel of another package is used only in the versions that the tests run (`Kernel.versions`). Before the first use of
a kernel in a process, for a type, a set of options and a reduction, its error against fp64 is measured on a small
problem. It may be at most twice that of the plain computation in the same type (`exactness`). `auto` then times the
exact kernels on the caller's shape.

Liger's tests run under triton's interpreter, on a CPU. Both kernels ran on an H100 and an H200 (`benchmarks.gpu`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import chunked, compiled_rows, devices, row_loss
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.exactness import (
    LARGEST_EXCESS,
    BackendPass,
    Needs,
    distance,
    draw_tokens,
    measure_excess,
    run_loss_pass,
    uneven_factors,
)
from tiewise.boundary.ops.fast_products import cached_or_measured
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import BACKENDS, LossOptions
from tiewise.core.errors import RunError, UnsupportedError, one_line_message

VARIABLE = "TIEWISE_LOSS"
TOKENS = 4096  # largest number of tokens in a trial
TRITON = "triton"  # tiewise's kernel; see `row_loss`
CHUNKED = "chunked"  # tiewise's chunks in PyTorch
COMPILE = "compile"  # the plain computation, compiled; see `compiled_rows`
STEPS = {TRITON: row_loss, COMPILE: compiled_rows}  # our passes by the step between the products
LEAST_GAIN = 0.02  # share of tiewise's time that `auto` must save to use another backend
LONGEST_START = 60.0  # seconds that the first call of a backend may take in a trial: it compiles then
SKETCH = 16  # random directions in which a trial compares the gradients of the table
# relative distances from tiewise's loss and gradients that another order of the sums explains
AGREES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
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
    excesses: dict[Any, float] = field(default_factory=dict)  # `measure_excess` of a kernel, at first use
    versions: dict[str, str] = field(default_factory=dict)  # versions of installed packages


TRIALS = Trials()

Candidates = dict[str, BackendPass | None]  # backend → its pass; None: tiewise's


class BrokenDevice(RunError):
    """Error of a kernel that left the GPU unusable for this process."""


def backend_loss_pass(
    name: str,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
    *,
    with_into: bool = False,
) -> BackendPass | None:
    """Return the pass of the named backend; None if it is `tiewise_pass`.

    For a mean or a sum, its losses [1] may be their sum. `tiewise_pass` is `own_pass.loss_pass`. If `with_into`, the
    pass takes the argument `into` too, which other packages lack.

    Raises:
        RunError: TIEWISE_LOSS names no backend, or a kernel breaks the GPU's context.
        UnsupportedError: the kernel is not installed or not in a tested version; it lacks an option, the type or the
            device; or its errors exceed those of the plain computation.
    """
    tensors = LossTensors(*tensors)
    if name not in ("auto", CHUNKED, *STEPS, *KERNELS):
        raise RunError(f"no loss is called {name!r}", f"choose {', '.join(BACKENDS)} in {VARIABLE}")
    if not len(tensors.targets):
        return None
    # the variable applies to GPUs only: a model may run its first batch before it is moved to one
    if options.backend is None and not _has_kernels(tensors.features.device):
        return None
    if name == CHUNKED:
        return chunked.loss_pass
    if name in KERNELS and with_into:
        return None
    if name == "auto":
        candidates = _list_candidates(options, tensors, product_dtype, with_into=with_into)
        return _choose_fastest(candidates, options, tensors, product_dtype, tiewise_pass)
    candidate = kernel_loss_pass(name, options, tensors, product_dtype)
    require_exactness(name, candidate, options, tensors, product_dtype)
    return candidate


def _list_candidates(
    options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype, *, with_into: bool = False
) -> Candidates:
    """Return tiewise's pass and the others that support the call."""
    candidates: Candidates = {"tiewise": None}
    for name in (COMPILE,) if with_into else (COMPILE, *KERNELS):
        with suppress(UnsupportedError):
            candidates[name] = kernel_loss_pass(name, options, tensors, product_dtype)
    return candidates


def _choose_fastest(
    candidates: Candidates,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
) -> BackendPass | None:
    """Return the fastest of `candidates` by a trial of this process or an earlier one.

    It is tiewise's pass if no other one saves LEAST_GAIN of its time, or while a CUDA graph is recorded before a trial.
    """
    if len(candidates) == 1:
        return None
    problem = _describe_problem(options, tensors, product_dtype) | {"candidates": " ".join(candidates)}
    key = tuple(problem.values())
    if key not in TRIALS.times:
        if devices.is_capturing(tensors.features):
            return None
        problem["torch"] = torch.__version__
        problem["row kernel"] = _row_kernel_version(tensors, product_dtype)  # tiewise's time depends on it
        for name in candidates:
            if name in KERNELS:
                problem[_package(name)] = version(_package(name))
        times = cached_or_measured(
            "losses.json",
            problem,
            ("tiewise_ms",),
            lambda: run_trial(candidates, options, tensors, product_dtype, tiewise_pass),
        )
        TRIALS.times[key] = {name: times.get(f"{name}_ms", math.inf) for name in candidates}
    milliseconds = TRIALS.times[key]
    fastest = min(candidates, key=milliseconds.__getitem__)
    if milliseconds[fastest] > (1 - LEAST_GAIN) * milliseconds["tiewise"]:
        return None
    return candidates[fastest]


def _row_kernel_version(tensors: LossTensors, product_dtype: torch.dtype) -> str:
    """Return the version of triton if tiewise's row kernel runs on these tensors, else "none"."""
    missing = row_loss.missing_support(tensors, product_dtype)
    return "none" if missing else _installed_version(TRITON)


def _package(name: str) -> str:
    """Return pip's name of the package that a backend needs."""
    packages = {TRITON: "triton", COMPILE: "torch"}
    return packages.get(name) or KERNELS[name].package


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


# trials


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
        results = run_loss_pass(candidate, self.options, self.problem, self.product_dtype, self.row_weight)
        results[0].sum().item()  # waits until a GPU has finished
        milliseconds = 1e3 * (time.perf_counter() - start)
        return milliseconds, _sketch_table(results)


@torch.inference_mode(mode=False)  # the caller may evaluate, and gradients are computed too
def run_trial(
    candidates: Candidates,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
) -> dict[str, float]:
    """Return the milliseconds of each candidate that runs and is exact.

    It is compared with fp64 on a small problem, and with `tiewise_pass` on one like the caller's. Each time is the
    minimum of three, after a call that may compile for LONGEST_START seconds. Tokens are random, at most TOKENS of
    them; table and bias are the caller's. Only one gradient of the table exists at a time: a step needs as much memory.
    """
    features, weight, bias, targets = tensors
    h, t = draw_tokens(min(TOKENS, len(targets)), weight.shape, features, options)
    problem = _Trial(options, LossTensors(h, weight, bias, t), product_dtype, uneven_factors(options, len(t), features))
    times = {}
    _, truth = problem.run(tiewise_pass)
    for name, candidate in candidates.items():
        with _ignore_failure(name, features.device):
            if candidate is not None:
                require_exactness(name, candidate, options, tensors, product_dtype)
            first, results = problem.run(candidate or tiewise_pass)
            if first < 1e3 * LONGEST_START and distance(results, truth) <= _tolerance(product_dtype):
                times[f"{name}_ms"] = min(problem.run(candidate or tiewise_pass)[0] for _ in range(3))
    return times


def first_use(name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> Hashable:
    """Return the properties of a call by which its first use is recognised."""
    features, weight, bias, _ = tensors
    used = tuple(_used_options(options, bias, product_dtype))
    is_by_token, is_scaled = options.reduction == "none", options.scale != 1.0
    return (name, features.device, product_dtype, used, is_by_token, is_scaled, weight.shape[1])


def require_exactness(
    name: str, candidate: BackendPass, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype
) -> None:
    """Refuse a kernel whose errors exceed those of the plain computation.

    They are measured at its first use with this type and these options.
    """
    key = first_use(name, options, tensors, product_dtype)
    if key not in TRIALS.excesses:
        TRIALS.excesses[key] = measure_excess(candidate, options, tensors, product_dtype)
    excess = TRIALS.excesses[key]
    if excess <= LARGEST_EXCESS:
        return
    package = _package(name)
    what = f"backend={name!r} with {package} {version(package)} has {excess:.0f} times the error of all logits"
    used = _used_options(options, tensors.bias, product_dtype)
    listed = ", ".join((str(product_dtype).removeprefix("torch."), f"reduction={options.reduction!r}", *used))
    raise UnsupportedError(f"{what} on a small problem ({listed})", "take backend='tiewise'")


def _sketch_table(results: list[Tensor]) -> list[Tensor]:
    """Return the results with the table's gradient [V, E] multiplied by random directions.

    The directions [E, SKETCH] preserve distances approximately.
    """
    losses, by_features, by_weight, *by_bias = results
    draw = torch.Generator().manual_seed(3)
    directions = torch.randn(by_weight.shape[1], SKETCH, generator=draw, device="cpu").to(by_weight)
    return [losses, by_features, by_weight @ directions, *by_bias]


def _tolerance(product_dtype: torch.dtype) -> float:
    """Return the distance up to which a kernel agrees with `tiewise_pass`."""
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
        raise_if_broken(name, device, error)


def raise_if_broken(name: str, device: torch.device, error: Exception) -> None:
    """Raise BrokenDevice if nothing runs on the device after an error of the kernel `name`."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        what = f"the trial of backend={name!r} broke the context of {device} ({one_line_message(error)})"
        remedy = CHUNKED if name == TRITON else "tiewise"
        raise BrokenDevice(what, f"start anew with backend={remedy!r}, or {VARIABLE}={remedy}") from error


def kernel_loss_pass(name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> BackendPass:
    """Return the pass of a kernel by its name, without comparing its results.

    Raises:
        UnsupportedError: it lacks the device, an option, the type of the products, or a tested version.
    """
    features, _, bias, _ = tensors
    fix = f"take backend='tiewise', or 'auto' (also in {VARIABLE})"
    used = _used_options(options, bias, product_dtype)
    if name in STEPS:
        missing = _missing_for_step(name, used, tensors, product_dtype)
        if missing:
            raise UnsupportedError(f"backend={name!r} {missing}", fix)
        step_pass: BackendPass = STEPS[name].loss_pass
        return step_pass
    kernel = KERNELS[name]
    if not _has_kernels(features.device):
        raise UnsupportedError(f"backend={name!r} runs on a GPU, and the features are on a {features.device.type}", fix)
    lacks = [option for option in used if option not in kernel.has]
    if product_dtype not in kernel.types:
        lacks.append(f"products in {product_dtype}".replace("torch.", ""))
    if lacks:
        raise UnsupportedError(f"backend={name!r} has no {', no '.join(lacks)}", fix)
    return _KernelLossPass(_import_kernel(kernel, name), kernel.keywords)


def _missing_for_step(name: str, used: list[str], tensors: LossTensors, product_dtype: torch.dtype) -> str:
    """Return what a pass of ours lacks for a call, as the rest of a sentence.

    `used` are the options of the call; the result is empty if it lacks nothing.
    """
    device = tensors.features.device
    if name == COMPILE and not _has_kernels(device):
        return f"runs on a GPU, and the features are on a {device.type}"
    if name == COMPILE and "logits" in used:
        return "rounds logits, and logits='fp32' asks for exact ones"
    missing: str = STEPS[name].missing_support(tensors, product_dtype)
    return missing


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
