"""Matrix products on this CPU: torch's, or oneDNN's where they are exact and faster.

`torch.mm` in fp32 goes to MKL, which is slow on some processors. `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`
sends the same products to oneDNN and lets it round them to bf16. With AMX it does; without, it has no such kernel and
computes in fp32. Without AVX-512 torch does not ask oneDNN at all, and both are one product. So

    auto = onednn     where  the processor has no AMX,  a probe keeps fp32 accuracy,  a trial takes a tenth less time
           default    elsewhere: the flag stays as it was found
    native = a loss by our own kernel, where the same trial finds it as fast as the faster of the two, or nearly

    probe and trial are the products of a small loss:  h Wᵀ,  P W,  Pᵀ h     h [n, 256], W [2048, 256], P [n, 2048]

and in the trial the softmax between them. The times of a trial are cached in `products.json` in the user's cache, by
the processor and its abilities, torch, the type and the threads. Each process measures accuracy for itself, once. Our
own kernel is one of `compiled_kernels`.

The flag is the whole process's. `_active` lists the choices of all threads that are within `fast_products()`: the last
to come rules, and when the last has gone the flag is what it was before the first.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.compiled_kernels import kernels
from tiewise.core.errors import RunError, TiewiseWarning, UnsupportedError
from tiewise.core.files import cache_folder, write_atomically

PRODUCTS = ("auto", "default", "onednn")
VARIABLE = "TIEWISE_PRODUCTS"
LARGE = 2**28  # multiplications N·V·D of a loss that may begin a trial: 16 ms at 100 GFlop/s, repaid within a few steps
FASTER = 0.9  # of the default's time, the most that oneDNN may take: a noisy machine's fastest rounds differ by less
# of the faster of the two, the most that our own kernel may take in a trial. It may be a little slower there, because
# only a trial's logits fit into the processor's cache: .99 to 1.05 in trials were .86 to .95 in real losses
SPILLED = 1.1
SECONDS = 0.04  # of probe and trial
ROUNDED = 2e-6  # relative error of a sum of positive products that no fp32 makes; bf16 gives 1e-4


@dataclass(frozen=True, eq=False)
class ProductChoice:
    """Which products were chosen, and why; prints as a sentence."""

    product: str  # default or onednn
    reason: str
    exact: bool  # False: fp32 products are rounded to bf16
    processor: str
    threads: int
    default_ms: float | None = None  # of the trial, where there was one
    onednn_ms: float | None = None
    native_ms: float | None = None
    native: bool = False  # whether fp32 losses are computed by our own kernel

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.product} products on {self.processor}, {threads}: {self.reason}"


@contextmanager
def fast_products(product: str | ProductChoice = "auto") -> Iterator[ProductChoice]:
    """Within this context, or a function decorated with it, fp32 matrix products take the fastest exact way.

        with tiewise.fast_products() as choice:      # print(choice) says what was chosen, and why
            train()

    On a CPU only, and in all threads at once; put it around whole training steps. It is decided once per machine, in
    50 ms. Within another such context `auto` takes what that one took.

    Args:
        product: `auto`; `default`, torch's own way; or `onednn`, which rounds to bf16 on a processor with AMX, as a
            warning then says; or a choice that was made. The environment variable TIEWISE_PRODUCTS decides for `auto`.

    Raises:
        RunError: another value.
        UnsupportedError: `onednn`, which this torch has not.
    """
    global _original_flag
    choice = product_choice(product)
    with _lock:
        if not _active:
            _original_flag = _flag()
        _active.append(choice)
        _set_flag()
    try:
        yield choice
    finally:
        with _lock:
            del _active[-1 - _active[::-1].index(choice)]  # not always the last: threads come and go
            _set_flag()


@contextmanager
def sweep_products(features: Tensor, weight: Tensor, kind: torch.dtype) -> Iterator[None]:
    """Within this context a sweep multiplies in `kind`, without autocast and gradients, as is fastest for its size."""
    fast = ExitStack()
    with devices.without_autocast(features), torch.no_grad(), fast:
        if kind == torch.float32 and devices.is_cpu(features):
            choice = product_choice("auto", len(features) * weight.numel())
            if choice.product != "default":
                fast.enter_context(fast_products(choice))
        yield


def product_choice(product: str | ProductChoice = "auto", multiplications: float = math.inf) -> ProductChoice:
    """Return the choice of `fast_products(product)` for a problem of so many multiplications; raises as it does."""
    if isinstance(product, ProductChoice):
        return product
    with _lock:  # one thread probes and tries; the others wait, see nothing of that, and have its answer
        if product == "auto":
            if _active:
                return _active[-1]
            product = os.environ.get(VARIABLE) or "auto"
        if product not in PRODUCTS:
            raise RunError(f"no products are called {product!r}", f"choose {', '.join(PRODUCTS)}, also in {VARIABLE}")
        if product == "default":
            return _chosen("default", "asked for")
        if product == "onednn":
            return _onednn_as_requested()
        return _automatic_choice(multiplications)


def _onednn_as_requested() -> ProductChoice:
    """Return the choice of oneDNN, with a warning where its products are rounded."""
    if _flag() is None:
        fix = f"leave {VARIABLE} and the argument at auto, or install torch 2.9 or newer, with oneDNN"
        raise UnsupportedError("this torch cannot send fp32 products to oneDNN", fix)
    rounding = _why_rounded()
    if not rounding:
        return _chosen("onednn", "asked for")
    # the warning names the line that calls `product_choice`
    warnings.warn(f"fp32 products on oneDNN, as asked for: {rounding}", TiewiseWarning, stacklevel=3)
    return _chosen("onednn", f"asked for; {rounding}", exact=False)


def _automatic_choice(multiplications: float) -> ProductChoice:
    """Return the fastest exact products for a problem of so many multiplications."""
    if multiplications < LARGE:
        return _chosen("default", "no large fp32 products on a CPU")
    if _flag() == "bf16":
        return _chosen("default", "torch is told already to use oneDNN", not _why_rounded())
    return _fastest_exact(torch.get_num_threads())


def same_here(choice: ProductChoice) -> bool:
    """Return whether a choice made elsewhere means the same products here: both round, or neither."""
    with _lock:
        if choice.product == "default":
            return True
        return _flag() is not None and choice.exact == (not _why_rounded())


# the flag

_lock = threading.RLock()
_active: list[ProductChoice] = []  # of all threads, in the order in which they came
_original_flag: str | None = None  # the flag before the first of them


def _matmul_settings() -> Any:
    """Return torch's settings of oneDNN's products; None before torch 2.9, or without oneDNN."""
    is_available: Callable[[], bool] = torch.backends.mkldnn.is_available
    if not is_available():
        return None
    return getattr(torch.backends.mkldnn, "matmul", None)


_matmul: Any = _matmul_settings()


def _flag() -> str | None:
    """Return torch's flag; None where it has none."""
    return getattr(_matmul, "fp32_precision", None)


def _set_flag() -> None:
    """Set the flag as the last active choice needs it, or back to the original."""
    flag = _original_flag
    if _active and _active[-1].product == "onednn":
        flag = "bf16"
    if flag != _flag():
        _matmul.fp32_precision = flag


# the decision


def _chosen(product: str, reason: str, exact: bool = True, **trial: Any) -> ProductChoice:
    """Return a choice on this processor with this process's threads."""
    processor = _traits().get("cpu_name") or platform.machine()
    return ProductChoice(product, reason, exact, processor, torch.get_num_threads(), **trial)


@cache
def _traits() -> dict[str, Any]:
    """Return the processor's name and abilities; nothing where this torch does not report them."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return {}
    return dict(torch.cpu.get_capabilities())


def _product_factors(rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return the factors of a small loss's three products: positive numbers, whose sums lose nothing."""
    draw = torch.Generator().manual_seed(0)

    def positive(n: int, d: int) -> Tensor:
        """Return random numbers [n, d] between 0 and 1."""
        return torch.rand(n, d, generator=draw, dtype=torch.float32, device="cpu")

    h, w, p = positive(rows, 256), positive(2048, 256), positive(rows, 2048)
    return [(h, w.T), (p, w), (p.T, h)]


@cache
def _why_rounded() -> str:
    """Return why fp32 products on oneDNN may be rounded to bf16 here; "" where they are not."""
    traits = _traits()
    if "amx_tile" not in traits:
        return "this torch does not say whether the processor has AMX, with which oneDNN rounds to bf16"
    if any(has for trait, has in traits.items() if trait.startswith("amx")):
        return "the processor has AMX, with which oneDNN rounds to bf16"
    with fast_products(_chosen("onednn", "probe")), torch.autocast("cpu", enabled=False):
        for a, b in _product_factors(128):
            exact = a[:8].double() @ b.double()
            worst = ((a @ b)[:8] / exact - 1).abs().max()
            if not worst < ROUNDED:  # also where it is nan
                return "a probe on oneDNN was rounded to bf16"
    return ""


@cache
def _fastest_exact(threads: int) -> ProductChoice:
    """Return the fastest exact products for so many threads.

    They follow from a trial of this process or an earlier one.
    """
    deadline = time.perf_counter() + SECONDS  # from here, since SECONDS include the probe in `_why_rounded`
    if _flag() is None:
        return _chosen("default", "this torch has no other")
    rounding = _why_rounded()
    if rounding:
        return _chosen("default", rounding)
    problem = {
        "processor": _traits().get("cpu_name"),
        "torch": torch.__version__,
        "type": "float32",
        "threads": threads,
    }
    has_kernels = kernels() is not None
    names = ["default_ms", "onednn_ms"]
    if has_kernels:
        names.append("native_ms")
    run_trial = partial(trial, threads, deadline)
    times = remembered("products.json", problem, tuple(names), run_trial, _traits(), has_kernels)
    default, onednn = times.get("default_ms", math.inf), times.get("onednn_ms", math.inf)
    native = times.get("native_ms", math.inf)
    reason = f"a trial on oneDNN took {onednn / default:.2f} of the time"
    if has_kernels:
        reason += f", a loss by our own kernel {native / default:.2f}"
    product = "onednn" if onednn <= FASTER * default else "default"
    native_is_fast = native <= SPILLED * min(default, onednn)
    return _chosen(product, reason, exact=True, **times, native=native_is_fast)


# trials


def remembered(
    file: str, what: dict[str, Any], names: tuple[str, ...], trial: Callable[[], dict[str, float]], *more: Any
) -> dict[str, float]:
    """Return milliseconds of a cached trial that has all `names`, else of `trial` now.

    They are cached in `file` by `what` and `more`, if the file can be written.
    """
    key = hashlib.sha256(json.dumps([what, *more], sort_keys=True).encode()).hexdigest()[:16]
    trials = _cached_trials(file)
    times = _usable_times(trials.get(key), names)
    if times is not None:
        return times
    times = trial()
    with suppress(OSError, RuntimeError):  # then the next process tries again
        cache_folder().mkdir(parents=True, exist_ok=True)
        trials[key] = what | times
        write_atomically(cache_folder() / file, json.dumps(trials, indent=1) + "\n")
    return times


def _cached_trials(file: str) -> dict[str, Any]:
    """Return the trials in a file of the user's cache, by key.

    There are none where it cannot be read.
    """
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home
        trials = json.loads((cache_folder() / file).read_text(encoding="utf-8"))
        if isinstance(trials, dict):
            return trials
    return {}


def _usable_times(trial: Any, names: tuple[str, ...]) -> dict[str, float] | None:
    """Return the milliseconds of a cached trial.

    None where one of `names` is missing or a time is impossible.
    """
    if not isinstance(trial, dict):
        return None
    try:
        times = {name: float(value) for name, value in trial.items() if name.endswith("_ms")}
    except (TypeError, ValueError):
        return None
    if not times.keys() >= set(names):
        return None
    if not all(0 < milliseconds < math.inf for milliseconds in times.values()):
        return None
    return times


class _SmallLoss:
    """A small loss on random numbers, by each way."""

    def __init__(self, rows: int) -> None:
        """Draw its tensors, and allocate those of the results."""
        self.products = [(a, b, a.new_empty(len(a), b.shape[1])) for a, b in _product_factors(rows)]
        self.h, self.weight, self.logits = self.products[0]
        self.weight = self.weight.T
        self.targets = torch.zeros(rows, dtype=torch.long, device="cpu")
        self.coefficients = torch.ones(rows, device="cpu")

    def multiply(self, way: ProductChoice) -> None:
        """Compute the products by torch or oneDNN, and the softmax."""
        with fast_products(way):
            for a, b, out in self.products:
                torch.mm(a, b, out=out)
                if out is self.logits:
                    torch.softmax(out, 1, out=out)

    def by_kernel(self, library: Any) -> None:
        """Compute loss and gradients by the compiled kernel."""
        h, w, t, c = self.h, self.weight, self.targets, self.coefficients
        library.vocabulary_loss(
            *(h, w, None, t, c, c, None, None, None, 1.0, 0.0, len(h), False, False, False, True, True, False)
        )


def trial(threads: int, deadline: float) -> dict[str, float]:
    """Return the milliseconds of a small loss's products by each way, the least of alternated rounds."""
    loss = _SmallLoss(max(128, 64 * threads))
    ways = {
        "default_ms": partial(loss.multiply, _chosen("default", "trial")),
        "onednn_ms": partial(loss.multiply, _chosen("onednn", "trial")),
    }
    library = kernels()
    if library:
        ways["native_ms"] = partial(loss.by_kernel, library)
    best = dict.fromkeys(ways, math.inf)
    rounds, round_seconds = 0, 0.0
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        while rounds < 3 or time.perf_counter() + round_seconds < deadline:
            round_start = time.perf_counter()
            order = list(ways) if rounds % 2 else list(reversed(ways))
            for name in order:
                start = time.perf_counter()
                ways[name]()
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
            rounds, round_seconds = rounds + 1, time.perf_counter() - round_start
    return best
