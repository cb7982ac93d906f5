"""The loss on a GPU by the kernel that `backend` requests: tiewise's or another package's.

    tiewise   the row kernel where it runs and is exact, else the chunks (`own_pass`): the default
    triton    tiewise's chunks with kernels for rows    pip install triton (torch for CUDA brings it)
    chunked   tiewise's chunks in PyTorch
    compile   the plain computation in chunks, compiled by torch.compile (`compiled_rows`)
    torch     `torch.nn.functional.linear_cross_entropy` of torch 2.13, also on a CPU
    liger     Liger's fused linear cross-entropy        pip install liger-kernel
    liger-sm90  Liger's kernel for Hopper               pip install liger-kernel[cutedsl]
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
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import chunked, compiled_rows, devices, row_loss
from tiewise.boundary.ops.backend_table import DESCRIBED, KERNELS, Kernel
from tiewise.boundary.ops.broken_device import VARIABLE, BrokenDevice, name_broken_device, require_working
from tiewise.boundary.ops.exactness import (
    LARGEST_EXCESS,
    BackendPass,
    distance,
    draw_tokens,
    measure_excess,
    run_loss_pass,
    small_vocabulary,
    uneven_factors,
)
from tiewise.boundary.ops.fast_products import cached_record
from tiewise.boundary.ops.package_pass import PackagePass
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import BACKENDS, LossOptions
from tiewise.core.errors import RunError, UnsupportedError, one_line_message

TOKENS = 4096  # largest number of tokens in a trial
TRITON = "triton"  # tiewise's kernel; see `row_loss`
CHUNKED = "chunked"  # tiewise's chunks in PyTorch
NOT_INSTALLED = ""  # version of a package without metadata
INSTEAD = f"take backend='tiewise', or 'auto' (also in {VARIABLE})"
MILLISECONDS, REASON = "_ms", "_why"  # ends of the keys of a record in the cache
COMPILE = "compile"  # the plain computation, compiled; see `compiled_rows`
STEPS = {TRITON: row_loss, COMPILE: compiled_rows}  # our passes by the step between the products
LEAST_GAIN = 0.02  # share of tiewise's time that `auto` must save to use another backend
LONGEST_START = 60.0  # seconds that the first call of a backend may take in a trial: it compiles then
SKETCH = 16  # random directions in which a trial compares the gradients of the table
# relative distances from tiewise's loss and gradients that another order of the sums explains
AGREES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TF32 = 5e-3  # value of AGREES for fp32 if torch may round products to TF32


@dataclass
class TrialResult:
    """Milliseconds of each exact backend, and why each other one was left out."""

    milliseconds: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> TrialResult:
        """Return the result that a record of the cache has."""
        result = cls()
        for key, value in record.items():
            if key.endswith(MILLISECONDS):
                result.milliseconds[key.removesuffix(MILLISECONDS)] = float(value)
            if key.endswith(REASON):
                result.reasons[key.removesuffix(REASON)] = str(value)
        return result

    def to_record(self) -> dict[str, float | str]:
        """Return the result as the cache keeps it."""
        times = {f"{name}{MILLISECONDS}": value for name, value in self.milliseconds.items()}
        return times | {f"{name}{REASON}": reason for name, reason in self.reasons.items()}


@dataclass
class Trials:
    """Results of this process's trials; a new process starts without any."""

    results: dict[Any, TrialResult] = field(default_factory=dict)  # of each problem
    excesses: dict[Any, float] = field(default_factory=dict)  # `measure_excess` of a kernel, at first use
    versions: dict[str, str] = field(default_factory=dict)  # versions of installed packages


TRIALS = Trials()

Candidates = dict[str, BackendPass | None]  # backend → its pass; None: tiewise's


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

    For a mean or a sum, its losses [1] may be their sum. `tiewise_pass` is `own_pass.row_kernel_or_native_pass`. If
    `with_into`, the pass takes the argument `into` too, which other packages lack.

    Raises:
        RunError: TIEWISE_LOSS names no backend, or a kernel breaks the GPU's context.
        UnsupportedError: the kernel is not installed or not in a tested version; it lacks an option, the type or the
            device; or its errors exceed those of the plain computation.
    """
    tensors = LossTensors(*tensors)
    if name not in ("auto", CHUNKED, *STEPS, *KERNELS, *DESCRIBED):
        raise RunError(f"no loss is called {name!r}", f"choose {', '.join(BACKENDS)} in {VARIABLE}")
    if not len(tensors.targets):
        return None
    # the variable applies to GPUs only: a model may run its first batch before it is moved to one
    if options.backend is None and not _has_kernels(tensors.features.device):
        return None
    if name in DESCRIBED:
        raise UnsupportedError(f"backend={name!r} {_describe(name)}", INSTEAD)
    if name == CHUNKED:
        return chunked.loss_pass
    if name in KERNELS and with_into:
        return None
    if name == "auto":
        candidates = _list_candidates(options, tensors, product_dtype, with_into=with_into)
        return _choose_fastest(candidates, options, tensors, product_dtype, tiewise_pass)
    candidate = kernel_loss_pass(name, options, tensors, product_dtype)
    _require_comparison(name, options, tensors, product_dtype)
    require_exactness(name, candidate, options, tensors, product_dtype)
    return candidate


def reason_against(name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> str:
    """Return why a backend cannot compute a loss, as the rest of a sentence.

    It is empty if the backend can. No kernel runs.
    """
    if name in DESCRIBED:
        return _describe(name)
    if name not in (*STEPS, *KERNELS):
        return ""
    try:
        kernel_loss_pass(name, options, tensors, product_dtype)
    except UnsupportedError as error:
        return error.problem.removeprefix(f"backend={name!r} ")
    return ""


def find_trial(options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> TrialResult:
    """Return the result of this process's trial of a problem, or an empty one."""
    candidates = _list_candidates(options, tensors, product_dtype)
    problem = _describe_problem(options, tensors, product_dtype, candidates)
    return TRIALS.results.get(tuple(problem.values()), TrialResult())


def _require_comparison(name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> None:
    """Refuse a backend whose first use is in a CUDA graph, where nothing can be compared."""
    is_first = first_use(name, options, tensors, product_dtype) not in TRIALS.excesses
    if is_first and devices.is_capturing(tensors.features):
        what = f"backend={name!r} is compared with fp64 at its first use, which no CUDA graph can record"
        raise UnsupportedError(what, "compute the loss once before the graph is recorded")


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
    if len(candidates) == 1 or not _has_kernels(tensors.features.device):
        return None
    problem = _describe_problem(options, tensors, product_dtype, candidates)
    key = tuple(problem.values())
    if key not in TRIALS.results:
        if devices.is_capturing(tensors.features):
            return None
        problem["torch"] = torch.__version__
        problem["row kernel"] = _row_kernel_version(tensors, product_dtype)  # tiewise's time depends on it
        for name in candidates:
            if name in KERNELS:
                problem[_package(name)] = _installed_version(_package(name))
        record = cached_record(
            "losses.json",
            problem,
            (f"tiewise{MILLISECONDS}",),
            lambda: run_trial(candidates, options, tensors, product_dtype, tiewise_pass).to_record(),
        )
        TRIALS.results[key] = TrialResult.of_record(record)
    return candidates.get(fastest_backend(TRIALS.results[key].milliseconds))


def fastest_backend(milliseconds: dict[str, float]) -> str:
    """Return the fastest backend; tiewise if no other one saves LEAST_GAIN of its time."""
    longest = (1 - LEAST_GAIN) * milliseconds.get("tiewise", math.inf)
    faster = {name: time for name, time in milliseconds.items() if time <= longest}
    return min(faster, key=faster.__getitem__, default="tiewise")


def _row_kernel_version(tensors: LossTensors, product_dtype: torch.dtype) -> str:
    """Return the version of triton if tiewise's row kernel runs on these tensors, else "none"."""
    missing = row_loss.missing_support(tensors, product_dtype)
    return "none" if missing else _installed_version(TRITON)


def _package(name: str) -> str:
    """Return pip's name of the package that a backend needs."""
    packages = {TRITON: "triton", COMPILE: "torch"}
    return packages.get(name) or KERNELS[name].package


def _describe_problem(
    options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype, candidates: Candidates
) -> dict[str, str]:
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
        "candidates": " ".join(candidates),
    }


# trials


@dataclass(frozen=True, eq=False)
class _Trial:
    """Problem like the caller's, on which candidates are timed and compared."""

    options: LossOptions
    problem: LossTensors
    product_dtype: torch.dtype
    row_weight: Tensor

    @classmethod
    def like(cls, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> _Trial:
        """Return a trial with random tokens, at most TOKENS, and the caller's table and bias."""
        features, weight, bias, targets = tensors
        h, t = draw_tokens(min(TOKENS, len(targets)), weight.shape, features, options)
        factors = uneven_factors(options, len(t), features)
        return cls(options, LossTensors(h, weight, bias, t), product_dtype, factors)

    def run(self, candidate: BackendPass) -> tuple[float, list[Tensor]]:
        """Return the milliseconds and the results of one candidate."""
        start = time.perf_counter()
        results = run_loss_pass(candidate, self.options, self.problem, self.product_dtype, self.row_weight)
        results[0].sum().item()  # waits until a GPU has finished
        milliseconds = 1e3 * (time.perf_counter() - start)
        return milliseconds, _sketch_table(results)

    def time(self, candidate: BackendPass, truth: list[Tensor]) -> float:
        """Return the least milliseconds of three runs, after one that may compile.

        Raises:
            UnsupportedError: the first run takes more than LONGEST_START seconds, or its results differ from `truth`.
        """
        first, results = self.run(candidate)
        if first > 1e3 * LONGEST_START:
            raise UnsupportedError(
                f"its first run took {first / 1e3:.0f} s, and {LONGEST_START:g} s is the limit", INSTEAD
            )
        difference, limit = distance(results, truth), _tolerance(self.product_dtype)
        if not difference <= limit:  # also if it is nan
            what = f"its results differ from tiewise's by {difference:.0e} of them, and {limit:.0e} is the limit"
            raise UnsupportedError(what, INSTEAD)
        del results
        return min(self.run(candidate)[0] for _ in range(3))


@torch.inference_mode(mode=False)  # the caller may evaluate, and gradients are computed too
def run_trial(
    candidates: Candidates,
    options: LossOptions,
    tensors: LossTensors,
    product_dtype: torch.dtype,
    tiewise_pass: BackendPass,
) -> TrialResult:
    """Return the milliseconds of each exact candidate, and the reasons against the others.

    Each is compared with fp64 on a small problem, and with `tiewise_pass` on one like the caller's. Each time is the
    minimum of three, after a call that may compile for LONGEST_START seconds. Tokens are random, at most TOKENS of
    them; table and bias are the caller's. Only one gradient of the table exists at a time: a step needs as much memory.
    """
    tensors = LossTensors(*tensors)
    device = tensors.features.device
    require_working(device)
    with name_broken_device("tiewise", CHUNKED, device):
        problem = _Trial.like(options, tensors, product_dtype)
        _, truth = problem.run(tiewise_pass)
    result = TrialResult()
    for name, candidate in candidates.items():
        try:
            with name_broken_device(name, _remedy(name), device):
                if candidate is not None:
                    require_exactness(name, candidate, options, tensors, product_dtype)
                result.milliseconds[name] = problem.time(candidate or tiewise_pass, truth)
        except BrokenDevice:
            raise
        except Exception as error:  # another package's kernel may fail to compile or to allocate
            result.reasons[name] = _describe_failure(error)
    return result


def _describe_failure(error: Exception) -> str:
    """Return why a candidate was left out of a trial."""
    if isinstance(error, UnsupportedError):
        return error.problem
    return f"{type(error).__name__}: {one_line_message(error)}"


def _remedy(name: str) -> str:
    """Return the backend to take instead of one that broke the device."""
    return CHUNKED if name in ("tiewise", TRITON) else "tiewise"


def first_use(name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> Hashable:
    """Return the properties of a call by which its first use is recognised."""
    features, weight, bias, _ = tensors
    used = tuple(_used_options(options, bias, product_dtype))
    is_by_token, is_scaled = options.reduction == "none", options.scale != 1.0
    sizes = small_vocabulary(len(weight)), weight.shape[1]
    return (name, features.device, product_dtype, used, is_by_token, is_scaled, sizes)


def require_exactness(
    name: str, candidate: BackendPass, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype
) -> None:
    """Refuse a kernel whose errors exceed those of the plain computation.

    They are measured at its first use with this type and these options.
    """
    key = first_use(name, options, tensors, product_dtype)
    if key not in TRIALS.excesses:
        require_working(tensors.features.device)
        with name_broken_device(name, _remedy(name), tensors.features.device):
            TRIALS.excesses[key] = measure_excess(candidate, options, tensors, product_dtype)
    excess = TRIALS.excesses[key]
    if excess <= LARGEST_EXCESS:
        return
    package = f"{_package(name)} {_installed_version(_package(name))}"
    what = f"backend={name!r} with {package} has {excess:.0f} times the error of all logits"
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


def kernel_loss_pass(name: str, options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype) -> BackendPass:
    """Return the pass of a kernel by its name, without comparing its results.

    Raises:
        UnsupportedError: it lacks the device, an option, the type of the products, or a tested version.
    """
    tensors = LossTensors(*tensors)
    used = _used_options(options, tensors.bias, product_dtype)
    if name in STEPS:
        missing = _missing_for_step(name, used, tensors, product_dtype)
    else:
        missing = _missing_for_kernel(KERNELS[name], used, options, tensors, product_dtype)
    if missing:
        raise UnsupportedError(f"backend={name!r} {missing}", INSTEAD)
    if name in STEPS:
        step_pass: BackendPass = STEPS[name].loss_pass
        return step_pass
    return PackagePass(_import_kernel(KERNELS[name], name), KERNELS[name])


def _missing_for_kernel(
    kernel: Kernel, used: list[str], options: LossOptions, tensors: LossTensors, product_dtype: torch.dtype
) -> str:
    """Return what another package's kernel lacks for a call, as the rest of a sentence.

    It is empty if the kernel lacks nothing.
    """
    if not (kernel.on_cpu or _has_kernels(tensors.features.device)):
        return f"runs on a GPU, and the features are on a {tensors.features.device.type}"
    lacks = [option for option in used if option not in kernel.has]
    if product_dtype not in kernel.types:
        lacks.append(f"products in {product_dtype}".replace("torch.", ""))
    if options.reduction not in kernel.reductions:
        lacks.append(f"reduction={options.reduction!r}")
    if lacks:
        return f"has no {', no '.join(lacks)}"
    return _unfit_card_or_shape(kernel, tensors.features, tensors.weight, product_dtype)


def _unfit_card_or_shape(kernel: Kernel, features: Tensor, weight: Tensor, product_dtype: torch.dtype) -> str:
    """Return why a kernel does not take these tensors on this card, or nothing."""
    if kernel.capability is not None and kernel.capability != devices.compute_capability(features):
        needed = ".".join(map(str, kernel.capability))
        return f"needs an Nvidia GPU of compute capability {needed}"
    if len(weight) % kernel.vocab_multiple:
        return f"needs a vocabulary that {kernel.vocab_multiple} divides, and this one has {len(weight):,} words"
    if kernel.stores_logits:
        return _excess_of_logits(features, weight, product_dtype)
    return ""


def _excess_of_logits(features: Tensor, weight: Tensor, product_dtype: torch.dtype) -> str:
    """Return that all logits need more memory than a chunk of ours, or nothing."""
    numbers = math.ceil(len(weight) * product_dtype.itemsize / torch.float32.itemsize)
    if devices.large_chunk_size(len(features), numbers, features, None) >= len(features):
        return ""
    gigabytes = len(features) * len(weight) * product_dtype.itemsize / 1e9
    return f"stores all logits, here {gigabytes:.1f} GB, more than a chunk of the loss may take"


def _describe(name: str) -> str:
    """Return why a recognised backend is not used, as the rest of a sentence."""
    kernel = DESCRIBED[name]
    has = _installed_version(kernel.package)
    state = "is not installed" if has == NOT_INSTALLED else f"{has} is installed"
    return f"is not used: its kernels for {kernel.cards} have never run with tiewise ({kernel.package} {state})"


def _missing_for_step(name: str, used: list[str], tensors: LossTensors, product_dtype: torch.dtype) -> str:
    """Return what a pass of ours lacks for a call, as the rest of a sentence.

    `used` are the options of the call; the result is empty if it lacks nothing.
    """
    device = tensors.features.device
    if name == COMPILE and not _has_kernels(device):
        return f"runs on a GPU, and the features are on a {device.type}"
    for option, refusal in STEPS[name].LACKS.items():
        if option in used:
            return str(refusal)
    missing: str = STEPS[name].missing_support(tensors, product_dtype)
    return missing


def _import_kernel(kernel: Kernel, name: str) -> Callable[..., Tensor]:
    """Return the loss function of an installed package, in a version that the tests run."""
    module, function_name = kernel.entry_point.split(":")
    install = f"pip install {kernel.requirement(kernel.versions[-1])}"
    try:
        function: Callable[..., Tensor] = getattr(import_module(module), function_name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"backend={name!r} cannot be imported ({error})", install) from error
    has = _installed_version(kernel.package)
    if has.partition("+")[0] not in kernel.versions:  # torch's wheels add the device, as in 2.13.0+cu130
        tested = " and ".join(kernel.versions)
        has = has or "a copy without a version"
        raise UnsupportedError(f"backend={name!r} is tested with {kernel.package} {tested}, not {has}", install)
    return function


def _installed_version(package: str) -> str:
    """Return the version of an installed package, looked up once."""
    if package not in TRIALS.versions:
        try:
            TRIALS.versions[package] = version(package)
        except PackageNotFoundError:
            TRIALS.versions[package] = NOT_INSTALLED
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
