"""The right matrix product per machine: fp32 products on oneDNN, where they are exact there and measured to be faster.

`torch.mm` in fp32 goes to MKL, which is slow on some processors. `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`
sends the same products to oneDNN and lets it round them to bf16. With AMX it does; without, it has no such kernel and
computes in fp32. Without AVX-512 torch does not ask oneDNN at all, and both are one product. So

    auto = onednn     where  the processor has no AMX,  a probe keeps fp32 accuracy,  a trial takes a tenth less time
           default    elsewhere: the flag stays as it was found
    native = a loss by our compiled kernel, where the same trial finds it as fast as the faster of the two, or nearly

    probe and trial are the products of a small loss:  h Wᵀ,  P W,  Pᵀ h     h [n, 256], W [2048, 256], P [n, 2048]

and in the trial the softmax that stands between them. Of a trial its times are kept, in `products.json` in the user's
cache, by what the processor is and can do, torch, the type and the threads. Accuracy is asked of every process anew;
within one, the answer stays.

The flag is the whole process's. `_held` lists the choices of those who are within `fast_products()`, of all threads:
the last to come rules, and when the last has gone the flag is what it was before the first.
"""

from __future__ import annotations

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
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from tiewise.core.errors import RunError, TiewiseWarning, UnsupportedError
from tiewise.core.files import cache_folder, write_whole
from tiewise.ops.kernels import kernels

PRODUCTS = ("auto", "default", "onednn")
VARIABLE = "TIEWISE_PRODUCTS"
LARGE = 2**28  # multiplications N·V·D of a loss that may begin a trial: 16 ms at 100 GFlop/s, repaid within a few steps
FASTER = 0.9  # of the default's time, the most that oneDNN may take: a noisy machine's fastest rounds differ by less
# logits of a trial stay in the cache, a real loss's do not: our .99 to 1.05 of a trial were .86 to .95 of real ones
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
        where = f"{self.processor}, {self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{self.product} products on {where}: {self.reason}"


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
    global _found
    choice = product_choice(product)
    with _lock:
        if not _held:
            _found = _flag()
        _held.append(choice)
        _follow()
    try:
        yield choice
    finally:
        with _lock:
            del _held[-1 - _held[::-1].index(choice)]  # not always the last: threads come and go
            _follow()


@contextmanager
def own_products(features: Tensor, weight: Tensor, kind: torch.dtype) -> Iterator[None]:
    """Within this context a sweep of ours multiplies in `kind`, without autocast and gradients.

    It takes `fast_products()` where features [N, E] and a weight [V, E] are large enough to gain by it.
    """
    device, fast = features.device.type, ExitStack()
    with torch.autocast(device, enabled=False), torch.no_grad(), fast:
        if kind == torch.float32 and device == "cpu":
            choice = product_choice("auto", len(features) * weight.numel())
            if choice.product != "default":
                fast.enter_context(fast_products(choice))
        yield


def product_choice(product: str | ProductChoice = "auto", multiplications: float = math.inf) -> ProductChoice:
    """Return what `fast_products(product)` would take for a problem of so many multiplications; raises as it does."""
    if isinstance(product, ProductChoice):
        return product
    with _lock:  # one thread probes and tries; the others wait, see nothing of that, and have its answer
        if product == "auto" and _held:
            return _held[-1]
        asked = (os.environ.get(VARIABLE) or "auto") if product == "auto" else product
        if asked not in PRODUCTS:
            raise RunError(f"no products are called {asked!r}", f"choose {', '.join(PRODUCTS)}, also in {VARIABLE}")
        if asked == "default":
            return _chosen("default", "asked for")
        if asked == "auto" and multiplications < LARGE:
            return _chosen("default", "no large fp32 products on a CPU")
        if asked == "auto" and _flag() == "bf16":
            return _chosen("default", "torch is told already to use oneDNN", not _rounding())
        if asked == "auto":
            return _decided(torch.get_num_threads())
        if _flag() is None:
            fix = f"leave {VARIABLE} and the argument at auto, or install torch 2.9 or newer, with oneDNN"
            raise UnsupportedError("this torch cannot send fp32 products to oneDNN", fix)
        if rounding := _rounding():
            warnings.warn(f"fp32 products on oneDNN, as asked for: {rounding}", TiewiseWarning, stacklevel=2)
        return _chosen("onednn", f"asked for{'; ' * bool(rounding)}{rounding}", not rounding)


def same_here(choice: ProductChoice) -> bool:
    """Whether a choice made elsewhere means the same products here: such as round, or such as do not."""
    with _lock:
        return choice.product == "default" or (_flag() is not None and choice.exact == (not _rounding()))


# the flag

_lock = threading.RLock()
_held: list[ProductChoice] = []
_found: str | None = None  # the flag before the first of them


# from torch 2.9 on, where it was built with oneDNN
_matmul: Any = getattr(torch.backends.mkldnn, "matmul", None) if torch.backends.mkldnn.is_available() else None


def _flag() -> str | None:
    """Return torch's flag; None where it has none."""
    return getattr(_matmul, "fp32_precision", None)


def _follow() -> None:
    """Set the flag as the last choice that is held has it."""
    wanted = "bf16" if _held and _held[-1].product == "onednn" else _found
    if wanted != _flag():
        _matmul.fp32_precision = wanted


# the decision


def _chosen(product: str, reason: str, exact: bool = True, **trial: Any) -> ProductChoice:
    processor = _traits().get("cpu_name") or platform.machine()
    return ProductChoice(product, reason, exact, processor, torch.get_num_threads(), **trial)


@cache
def _traits() -> dict[str, Any]:
    """What the processor is and can do; nothing where this torch does not say it."""
    return dict(torch.cpu.get_capabilities()) if hasattr(torch.cpu, "get_capabilities") else {}


def _three(rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return the factors of a small loss's three products: positive numbers, whose sums lose nothing."""
    draw = torch.Generator().manual_seed(0)
    h, w, p = (
        torch.rand(n, d, generator=draw, dtype=torch.float32) for n, d in ((rows, 256), (2048, 256), (rows, 2048))
    )
    return [(h, w.T), (p, w), (p.T, h)]


@cache
def _rounding() -> str:
    """Say why fp32 products on oneDNN may be rounded to bf16 here; "" where they are not."""
    if "amx_tile" not in _traits():
        return "this torch does not say whether the processor has AMX, with which oneDNN rounds to bf16"
    if any(has for trait, has in _traits().items() if trait.startswith("amx")):
        return "the processor has AMX, with which oneDNN rounds to bf16"
    with fast_products(_chosen("onednn", "probe")), torch.autocast("cpu", enabled=False):
        for a, b in _three(128):
            exact = a[:8].double() @ b.double()
            if not ((a @ b)[:8] / exact - 1).abs().max() < ROUNDED:
                return "a probe on oneDNN was rounded to bf16"
    return ""


@cache
def _decided(threads: int) -> ProductChoice:
    deadline = time.perf_counter() + SECONDS
    if _flag() is None:
        return _chosen("default", "this torch has no other")
    if rounding := _rounding():
        return _chosen("default", rounding)
    what = {"processor": _traits().get("cpu_name"), "torch": torch.__version__, "type": "float32", "threads": threads}
    native = kernels() is not None
    names = ("default_ms", "onednn_ms", *["native_ms"] * native)
    times = remembered("products.json", what, names, lambda: trial(threads, deadline), _traits(), native)
    default, onednn, own = (times.get(name, math.inf) for name in ("default_ms", "onednn_ms", "native_ms"))
    reason = f"a trial on oneDNN took {onednn / default:.2f} of the time"
    if native:
        reason += f", a loss by our own kernel {own / default:.2f}"
    product = "onednn" if onednn <= FASTER * default else "default"
    return _chosen(product, reason, True, **times, native=own <= SPILLED * min(default, onednn))


def remembered(
    file: str, what: dict[str, Any], names: tuple[str, ...], trial: Callable[[], dict[str, float]], *more: Any
) -> dict[str, float]:
    """Return the milliseconds, `names` among them, that a trial of `what` has found here, or will have found now.

    They are kept in a file of the user's cache, by `what` and by `more` that need not be read there.
    """
    key = sha256(json.dumps([what, *more], sort_keys=True).encode()).hexdigest()[:16]
    kept: Any = {}
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: nobody's home
        kept = json.loads((cache_folder() / file).read_text(encoding="utf-8"))
    try:
        times = {name: float(value) for name, value in kept[key].items() if name.endswith("_ms")}
        known = set(names) <= set(times) and all(0 < took < math.inf for took in times.values())
    except (AttributeError, LookupError, TypeError, ValueError):
        known = False
    if not known:
        times = trial()
        with suppress(OSError, RuntimeError):  # then the next process tries again
            cache_folder().mkdir(parents=True, exist_ok=True)
            found = {**(kept if isinstance(kept, dict) else {}), key: what | times}
            write_whole(cache_folder() / file, json.dumps(found, indent=1) + "\n")
    return times


def trial(threads: int, deadline: float) -> dict[str, float]:
    """Return the milliseconds of a small loss's products by each way, the least of alternated rounds."""
    three = [(a, b, a.new_empty(len(a), b.shape[1])) for a, b in _three(max(128, 64 * threads))]
    (h, w, z), targets, c = three[0], torch.zeros(len(three[0][0]), dtype=torch.long), torch.ones(len(three[0][0]))
    w = w.T

    def products(way: ProductChoice) -> None:
        with fast_products(way):
            for a, b, out in three:
                torch.mm(a, b, out=out)
                if out is z:
                    torch.softmax(z, 1, out=z)

    ways: dict[str, Any] = {f"{way}_ms": partial(products, _chosen(way, "trial")) for way in ("default", "onednn")}
    if library := kernels():
        loss = (h, w, None, targets, c, c, None, None, None, 1.0, 0.0, len(h), False, False, False, True, True, False)
        ways["native_ms"] = partial(library.vocabulary_loss, *loss)
    best, rounds, took = dict.fromkeys(ways, math.inf), 0, 0.0
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        while rounds < 3 or time.perf_counter() + took < deadline:
            begin = time.perf_counter()
            for name in list(ways)[:: 1 if rounds % 2 else -1]:
                start = time.perf_counter()
                ways[name]()
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
            rounds, took = rounds + 1, time.perf_counter() - begin
    return best
