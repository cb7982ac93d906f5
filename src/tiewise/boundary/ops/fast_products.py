"""Matrix products on this CPU: torch's, or oneDNN's where they are exact and faster.

`torch.mm` in fp32 uses MKL, which is slow on some processors. `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`
sends the same products to oneDNN and allows it to round them to bf16. With AMX it does. Without AMX, oneDNN has no such
kernel and computes in fp32. Without AVX-512, torch does not use oneDNN, and both are the same product. So

    auto = onednn     if     the processor has no AMX,  a test keeps fp32 accuracy,  a trial takes a tenth less time
           default    else:  the flag is not changed
    native = a loss by tiewise's kernel, if the same trial shows it as fast as the faster of the two, or nearly

    test and trial are the products of a small loss:  h Wᵀ,  P W,  Pᵀ h     h [n, 256], W [2048, 256], P [n, 2048]

The trial also computes the softmax between the products. The times of a trial are cached in `products.json` in the
user's cache, by the processor and its capabilities, torch, the type and the number of threads. Each process measures
accuracy once. `compiled_kernels` has tiewise's kernel.

The flag belongs to the whole process. `_active` lists the choices of all threads that are inside `fast_products()`: the
latest one applies. After the last exit the flag has the value from before the first entry.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.compiled_kernels import kernels
from tiewise.boundary.ops.kernel_version import kernel_version
from tiewise.core.errors import RunError, TiewiseWarning, UnsupportedError
from tiewise.core.files import cache_folder, write_atomically

PRODUCTS = ("auto", "default", "onednn")
VARIABLE = "TIEWISE_PRODUCTS"
LARGE = 2**28  # multiplications N·V·D of a loss that may start a trial: 16 ms at 100 GFlop/s, repaid within a few steps
FASTER = 0.9  # largest ratio of oneDNN's time to the default's: noise on the fastest rounds is smaller
# largest ratio of the kernel's time in a trial to the faster of the two. It may be a little slower there, because
# only a trial's logits fit into the processor's cache: .99 to 1.05 in trials were .86 to .95 in real losses
SPILLED = 1.1
SECONDS = 0.04  # duration of test and trial
ROUNDED = 2e-6  # relative error of a sum of positive products: above that of fp32, and below bf16's 1e-4


@dataclass(frozen=True, eq=False)
class ProductChoice:
    """Chosen products, and the reason; prints as a sentence.

    Attributes:
        product: `default` or `onednn`.
        reason: the reason of the choice.
        exact: False if fp32 products are rounded to bf16.
        processor: name of the processor.
        threads: number of threads.
        default_ms, onednn_ms, native_ms: times of the trial; None without one.
        native: whether fp32 losses are computed by tiewise's kernel.
    """

    product: str
    reason: str
    exact: bool
    processor: str
    threads: int
    default_ms: float | None = None
    onednn_ms: float | None = None
    native_ms: float | None = None
    native: bool = False

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.product} products on {self.processor}, {threads}: {self.reason}"


@contextmanager
def fast_products(product: str | ProductChoice = "auto") -> Iterator[ProductChoice]:
    """Run fp32 matrix products in the fastest exact way, as a context or a decorator.

        with tiewise.boundary.fast_products() as choice:      # print(choice) prints the choice and its reason
            train()

    It affects a CPU only, and all threads at once; use it around full training steps. The choice is made once per
    machine, in 50 ms. Inside another such context, `auto` uses the choice of that one.

    >>> with fast_products("default") as choice:
    ...     print(choice.product)
    default

    Args:
        product: `auto`; `default`, torch's usual products; `onednn`, which on a processor with AMX rounds to bf16 and
            then warns; or a `ProductChoice`. The environment variable TIEWISE_PRODUCTS replaces `auto`.

    Yields:
        The choice.

    Raises:
        RunError: `product` or the environment variable has another value.
        UnsupportedError: `onednn`, which this torch lacks.
    """
    global _original_flag
    choice = choose_products(product)
    with _lock:
        if not _active:
            _original_flag = _read_flag()
        _active.append(choice)
        _set_flag()
    try:
        yield choice
    finally:
        with _lock:
            del _active[-1 - _active[::-1].index(choice)]  # not always the last: other threads enter and exit
            _set_flag()


@contextmanager
def pass_products(features: Tensor, weight: Tensor, product_dtype: torch.dtype) -> Iterator[None]:
    """Run the products of a pass in the fastest way for their size.

    They have type `product_dtype`, and run without autocast and gradients.
    """
    fast = ExitStack()
    with devices.without_autocast(features), torch.no_grad(), fast:
        if product_dtype == torch.float32 and devices.is_cpu(features):
            choice = choose_products("auto", len(features) * weight.numel())
            if choice.product != "default":
                fast.enter_context(fast_products(choice))
        yield


def choose_products(product: str | ProductChoice = "auto", multiplications: float = math.inf) -> ProductChoice:
    """Return the choice of `fast_products(product)` for a problem of so many multiplications.

    It raises as `fast_products` does.
    """
    if isinstance(product, ProductChoice):
        return product
    with _lock:  # one thread tests and measures; the others wait for its choice
        if product == "auto":
            if _active:
                return _active[-1]
            product = os.environ.get(VARIABLE) or "auto"
        if product not in PRODUCTS:
            raise RunError(f"no products are called {product!r}", f"choose {', '.join(PRODUCTS)}, also in {VARIABLE}")
        if product == "default":
            return _make_choice("default", "asked for")
        if product == "onednn":
            return _choose_onednn()
        return _choose_automatically(multiplications)


def _choose_onednn() -> ProductChoice:
    """Return the choice of oneDNN; warn if its products are rounded."""
    if _read_flag() is None:
        fix = f"leave {VARIABLE} and the argument at auto, or install torch 2.9 or newer, with oneDNN"
        raise UnsupportedError("this torch cannot send fp32 products to oneDNN", fix)
    reason = _rounding_reason()
    if not reason:
        return _make_choice("onednn", "asked for")
    # the warning names the line that calls `choose_products`
    warnings.warn(f"fp32 products on oneDNN, as asked for: {reason}", TiewiseWarning, stacklevel=3)
    return _make_choice("onednn", f"asked for; {reason}", exact=False)


def _choose_automatically(multiplications: float) -> ProductChoice:
    """Return the fastest exact products for a problem of so many multiplications."""
    if multiplications < LARGE:
        return _make_choice("default", "no large fp32 products on a CPU")
    if _read_flag() == "bf16":
        return _make_choice("default", "torch is told already to use oneDNN", not _rounding_reason())
    return _find_fastest_exact(torch.get_num_threads())


def is_same_here(choice: ProductChoice) -> bool:
    """Return whether a choice from elsewhere means the same products here.

    Both must round, or neither.
    """
    with _lock:
        if choice.product == "default":
            return True
        return _read_flag() is not None and choice.exact == (not _rounding_reason())


# the flag

_lock = threading.RLock()
_active: list[ProductChoice] = []  # choices of all threads, in the order of entry
_original_flag: str | None = None  # the flag before the first entry


def _matmul_settings() -> Any:
    """Return torch's settings of oneDNN's products.

    It is None before torch 2.9, or without oneDNN.
    """
    is_available: Callable[[], bool] = torch.backends.mkldnn.is_available
    if not is_available():
        return None
    return getattr(torch.backends.mkldnn, "matmul", None)


_matmul: Any = _matmul_settings()


def _read_flag() -> str | None:
    """Return torch's flag; None if this torch has none."""
    return getattr(_matmul, "fp32_precision", None)


def _set_flag() -> None:
    """Set the flag as the latest active choice requires, or back to the original."""
    flag = _original_flag
    if _active and _active[-1].product == "onednn":
        flag = "bf16"
    if flag != _read_flag():
        _matmul.fp32_precision = flag


# the decision


def _make_choice(product: str, reason: str, exact: bool = True, **times: Any) -> ProductChoice:
    """Return a choice on this processor with this process's threads."""
    processor = _processor_traits().get("cpu_name") or platform.machine()
    return ProductChoice(product, reason, exact, processor, torch.get_num_threads(), **times)


@cache
def _processor_traits() -> dict[str, Any]:
    """Return the processor's name and capabilities; nothing if this torch does not report them."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return {}
    return dict(torch.cpu.get_capabilities())


def _product_factors(rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return the factors of a small loss's three products.

    They are positive, so that no sum cancels.
    """
    draw = torch.Generator().manual_seed(0)

    def positive(n: int, d: int) -> Tensor:
        """Return random numbers [n, d] between 0 and 1."""
        return torch.rand(n, d, generator=draw, dtype=torch.float32, device="cpu")

    h, w, p = positive(rows, 256), positive(2048, 256), positive(rows, 2048)
    return [(h, w.T), (p, w), (p.T, h)]


@cache
def _rounding_reason() -> str:
    """Return why fp32 products on oneDNN may be rounded to bf16; empty if not."""
    traits = _processor_traits()
    if "amx_tile" not in traits:
        return "this torch does not say whether the processor has AMX, with which oneDNN rounds to bf16"
    if any(has for trait, has in traits.items() if trait.startswith("amx")):
        return "the processor has AMX, with which oneDNN rounds to bf16"
    with fast_products(_make_choice("onednn", "probe")), torch.autocast("cpu", enabled=False):
        for a, b in _product_factors(128):
            exact = a[:8].double() @ b.double()
            worst = ((a @ b)[:8] / exact - 1).abs().max()
            if not worst < ROUNDED:  # also if it is nan
                return "a probe on oneDNN was rounded to bf16"
    return ""


@cache
def _find_fastest_exact(threads: int) -> ProductChoice:
    """Return the fastest exact products for so many threads, by a trial now or earlier."""
    deadline = time.perf_counter() + SECONDS  # SECONDS include the test in `_rounding_reason`
    if _read_flag() is None:
        return _make_choice("default", "this torch has no other")
    reason = _rounding_reason()
    if reason:
        return _make_choice("default", reason)
    problem = trial_conditions(threads) | {"type": "float32"}
    has_kernels = kernels() is not None
    names = ["default_ms", "onednn_ms"]
    if has_kernels:
        names.append("native_ms")
    measure = partial(run_trial, threads, deadline)
    times = cached_or_measured("products.json", problem, tuple(names), measure, _processor_traits(), has_kernels)
    default, onednn = times.get("default_ms", math.inf), times.get("onednn_ms", math.inf)
    native = times.get("native_ms", math.inf)
    reason = f"a trial on oneDNN took {onednn / default:.2f} of the time"
    if has_kernels:
        reason += f", a loss by our own kernel {native / default:.2f}"
    product = "onednn" if onednn <= FASTER * default else "default"
    native_is_fast = native <= SPILLED * min(default, onednn)
    return _make_choice(product, reason, exact=True, **times, native=native_is_fast)


# trials


def trial_conditions(threads: int) -> dict[str, Any]:
    """Return the conditions on which every trial depends: processor, torch and the number of threads."""
    return {"processor": _processor_traits().get("cpu_name"), "torch": torch.__version__, "threads": threads}


def cached_or_measured(
    file: str, what: dict[str, Any], names: tuple[str, ...], measure: Callable[[], dict[str, float]], *more: Any
) -> dict[str, float]:
    """Return the milliseconds of a cached trial that has all `names`, else of `measure` now.

    They are cached in `file` under `what` and `more`, if the file can be written.
    """
    record = cached_record(file, what, names, measure, *more)
    return {name: float(value) for name, value in record.items() if name.endswith("_ms")}


def cached_record(
    file: str, what: dict[str, Any], names: tuple[str, ...], measure: Callable[[], Mapping[str, Any]], *more: Any
) -> dict[str, Any]:
    """Return the cached record of a trial that has all `names`, else one of `measure` now.

    A record has `what`, the version of tiewise's losses and the results. A trial of another version does not count.
    """
    what = {**what, "tiewise": kernel_version()}
    key = hashlib.sha256(json.dumps([what, *more], sort_keys=True).encode()).hexdigest()[:16]
    trials = _read_trials(file)
    if _usable_times(trials.get(key), names) is not None:
        return dict(trials[key])
    trials[key] = {**what, **measure()}
    with suppress(OSError, RuntimeError):  # without a cache the next process measures again
        cache_folder().mkdir(parents=True, exist_ok=True)
        write_atomically(cache_folder() / file, json.dumps(trials, indent=1) + "\n")
    return dict(trials[key])


def _read_trials(file: str) -> dict[str, Any]:
    """Return the trials in a file of the user's cache, by key; none if unreadable."""
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: the user has no home
        trials = json.loads((cache_folder() / file).read_text(encoding="utf-8"))
        if isinstance(trials, dict):
            return trials
    return {}


def _usable_times(cached: Any, names: tuple[str, ...]) -> dict[str, float] | None:
    """Return the milliseconds of a cached trial.

    It is None if one of `names` is missing or a time is impossible.
    """
    if not isinstance(cached, dict):
        return None
    try:
        times = {name: float(value) for name, value in cached.items() if name.endswith("_ms")}
    except (TypeError, ValueError):
        return None
    if not times.keys() >= set(names):
        return None
    if not all(0 < milliseconds < math.inf for milliseconds in times.values()):
        return None
    return times


class _SmallLoss:
    """Small loss on random numbers, by torch, by oneDNN and by tiewise's kernel."""

    def __init__(self, rows: int) -> None:
        """Draw the tensors, and allocate the results."""
        self.products = [(a, b, a.new_empty(len(a), b.shape[1])) for a, b in _product_factors(rows)]
        self.h, self.weight, self.logits = self.products[0]
        self.weight = self.weight.T
        self.targets = torch.zeros(rows, dtype=torch.long, device="cpu")
        self.coefficients = torch.ones(rows, device="cpu")

    def multiply(self, choice: ProductChoice) -> None:
        """Compute the products by torch or oneDNN, and the softmax."""
        with fast_products(choice):
            for a, b, out in self.products:
                torch.mm(a, b, out=out)
                if out is self.logits:
                    torch.softmax(out, 1, out=out)

    def run_kernel(self, library: Any) -> None:
        """Compute loss and gradients by the compiled kernel."""
        h, w, t, c = self.h, self.weight, self.targets, self.coefficients
        library.vocabulary_loss(
            *(h, w, None, t, c, c, None, None, None, 1.0, 0.0, len(h), 0, False, False, True, True, False)
        )


def run_trial(threads: int, deadline: float) -> dict[str, float]:
    """Return the milliseconds of a small loss by each method: the minimum over alternating rounds."""
    loss = _SmallLoss(max(128, 64 * threads))
    methods = {
        "default_ms": partial(loss.multiply, _make_choice("default", "trial")),
        "onednn_ms": partial(loss.multiply, _make_choice("onednn", "trial")),
    }
    library = kernels()
    if library:
        methods["native_ms"] = partial(loss.run_kernel, library)
    best = dict.fromkeys(methods, math.inf)
    rounds, round_seconds = 0, 0.0
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        while rounds < 3 or time.perf_counter() + round_seconds < deadline:
            round_start = time.perf_counter()
            order = list(methods) if rounds % 2 else list(reversed(methods))
            for name in order:
                start = time.perf_counter()
                methods[name]()
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
            rounds, round_seconds = rounds + 1, time.perf_counter() - round_start
    return best
