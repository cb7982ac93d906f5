"""What multiplies on this CPU: torch's products, oneDNN's, where they are exact and faster, or kernels compiled for it.

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

`kernels.cpp` is compiled by `tiewise kernels build`, never in a call, against the part of torch's C++ interface that is
stable between versions. The library lies in the user's cache under a key of what it was made from and for (source,
options, torch, processor) and the compiler. What is not there, or not as it was written, or not for this machine, is
left alone, and the portable path computes the same. It is code that we run: it is loaded only from a file of the user's
own (or root's) that nobody else may write, in folders of which the same holds up to the root, as ssh asks of its keys.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.core.errors import RunError, TiewiseWarning, UnsupportedError
from tiewise.core.files import cache_folder, write_whole, written_whole

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
    """Within this context a sweep multiplies in `kind`, without autocast and gradients, as is fastest for its size."""
    fast = ExitStack()
    with devices.without_autocast(features), torch.no_grad(), fast:
        if kind == torch.float32 and devices.is_cpu(features):
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
        torch.rand(n, d, generator=draw, dtype=torch.float32, device="cpu")
        for n, d in ((rows, 256), (2048, 256), (rows, 2048))
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
            if not ((a @ b)[:8] / (a[:8].double() @ b.double()) - 1).abs().max() < ROUNDED:
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
    """Milliseconds, `names` among them, that a trial found here or finds now; cached by `what` and `more`."""
    key = hashlib.sha256(json.dumps([what, *more], sort_keys=True).encode()).hexdigest()[:16]
    kept: Any = {}
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: nobody's home
        kept = json.loads((cache_folder() / file).read_text(encoding="utf-8"))
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        times = {name: float(value) for name, value in kept[key].items() if name.endswith("_ms")}
        if set(names) <= set(times) and all(0 < took < math.inf for took in times.values()):
            return times
    times = trial()
    with suppress(OSError, RuntimeError):  # then the next process tries again
        cache_folder().mkdir(parents=True, exist_ok=True)
        found = {**(kept if isinstance(kept, dict) else {}), key: what | times}
        write_whole(cache_folder() / file, json.dumps(found, indent=1) + "\n")
    return times


def trial(threads: int, deadline: float) -> dict[str, float]:
    """Return the milliseconds of a small loss's products by each way, the least of alternated rounds."""
    three = [(a, b, a.new_empty(len(a), b.shape[1])) for a, b in _three(max(128, 64 * threads))]
    (h, w, z), (rows, _) = three[0], three[0][0].shape
    targets, c = torch.zeros(rows, dtype=torch.long, device="cpu"), torch.ones(rows, device="cpu")
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


# kernels compiled on this machine

SOURCE = Path(__file__).with_name("kernels.cpp")
# of the library's `instruction_sets()`, bit by bit; its functions are compiled for what they use and nothing else is
INSTRUCTION_SETS = ("avx512", "avx512_vnni", "avx512_bf16")
# libtorch_cpu by name: Python loads torch without showing its symbols to libraries that come later
LINKED = ("-Wl,--no-as-needed", "-ltorch_cpu")
FAST = ("-O3", "-falign-loops=64", "-fno-math-errno")
OPTIONS = ("-std=c++20", *FAST, "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden")
STABLE = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # the interface of torch 2.10, which later ones keep
DIGEST = hashlib.sha256().digest_size  # bytes at the end of the file, after the library: what stands before them
SWITCH = "TIEWISE_KERNELS"
LOAD = "import sys, torch; torch.ops.load_library(sys.argv[1]); print(torch.ops.tiewise_kernels.instruction_sets())"


def kernels(needs: str = "avx512") -> Any | None:
    """The library's operators; None without one, under TIEWISE_KERNELS=off, or where the processor lacks `needs`."""
    found, has, _ = (None, 0, "") if _off() else _load()
    return found if has >> INSTRUCTION_SETS.index(needs) & 1 else None


def kernels_state(*, full: bool = True) -> str:
    """Say whether kernels are used here; if `full`, which file, or why not, which no record of a run names."""
    if _off():
        return f"off: {SWITCH}=off"
    _, has, said = _load()
    if isinstance(said, str):
        return f"none: {said}" if full else "none"
    names = [name for bit, name in enumerate(INSTRUCTION_SETS) if has >> bit & 1]
    return f"used: {said if full else said.stem} ({', '.join(names)})"


def _off() -> bool:
    said = os.environ.get(SWITCH, "auto")
    if said not in ("auto", "off"):
        raise RunError(f"{SWITCH}={said}", "set it to auto or off")
    return said == "off"


@cache
def _load() -> tuple[Any, int, Path | str]:
    """The operators, this processor's instruction sets as bits, and the library, or why none; once in a process."""
    why = _unsuited()
    if why:
        return None, 0, why
    try:
        folder = cache_folder() / "kernels"
        built = sorted(folder.glob(f"{_key()}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    except (OSError, RuntimeError) as error:  # no home, no right to look
        return None, 0, str(error)
    why = f"not built for this machine, torch {torch.__version__} and this tiewise; run `tiewise kernels build`"
    for path in built:
        if why := _untrusted(path):
            continue
        data = path.read_bytes()
        if hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:  # of a truncated one the process would die
            why = f"{path} is damaged; run `tiewise kernels build`"
            continue
        found = torch.ops.tiewise_kernels
        try:
            if not hasattr(found, "instruction_sets"):  # a second library of these operators would end the process
                torch.ops.load_library(str(path))
        except OSError as error:
            why = f"{path} does not load ({' '.join(str(error).split())}); run `tiewise kernels build`"
            continue
        return found, found.instruction_sets(), path
    return None, 0, why


def build() -> Path:
    """Compile the kernels into the user's cache and see that they load; two builds at once do not disturb each other.

    An UnsupportedError where this machine or torch has no use for them, a RunError where it cannot be done.
    """
    why = _unsuited()
    if why:
        raise UnsupportedError(f"no kernels for this machine: {why}", "the portable path is used, nothing is missing")
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        fix = "install g++ (apt install g++, dnf install gcc-c++) or name a compiler by CXX=…"
        raise RunError(f"no C++ compiler {os.environ.get('CXX') or 'g++'} was found", fix)
    elsewhere = "name another cache by XDG_CACHE_HOME=…"
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise RunError(f"no place for the kernels: {error}", elsewhere) from None
    if why := _untrusted(folder):
        raise RunError(why, f"correct that, or {elsewhere}")
    version = hashlib.sha256(_run([compiler, "--version"], "the compiler does not run").encode()).hexdigest()[:8]
    home = Path(torch.__file__).parent
    places = [f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    path = folder / f"{_key()}-{version}.so"
    try:
        with written_whole(path) as made:
            command = [compiler, *OPTIONS, STABLE, *places, str(SOURCE), "-o", str(made), *LINKED]
            _run(command, "the kernels did not compile")
            _run([sys.executable, "-c", LOAD, str(made)], "the compiled kernels do not load")
            made.chmod(0o600)
            library = made.read_bytes()
            made.write_bytes(library + hashlib.sha256(library).digest())
    except OSError as error:
        raise RunError(f"the kernels could not be written: {error}", elsewhere) from None
    return path


def _unsuited() -> str:
    """Why kernels are of no use here; empty where they are."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return f"they are written for Linux on x86_64, not for {system} on {machine}"
    if not processor() >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "this processor has no AVX-512"
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
        return f"they need torch 2.10, not {torch.__version__}"
    return ""


@cache
def processor() -> frozenset[str]:
    """Return this processor's instruction sets as Linux names them; no other flags, which an update may change."""
    try:
        line = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(re.findall(r"\b(?:amx|avx|fma|f16c|bmi)\w*", line[1] if line else ""))


def _key() -> str:
    """What a library is made from and for, but for the compiler, which a machine may lack that has the library."""
    parts = "\0".join((*OPTIONS, STABLE, torch.__version__, *sorted(processor())))
    return hashlib.sha256(SOURCE.read_bytes() + b"\0" + parts.encode()).hexdigest()[:24]


def _untrusted(path: Path) -> str:
    """Who but the user might have written what lies at `path`; empty where nobody."""
    for place in (path := path.resolve(), *path.parents):
        about = place.stat()
        others = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        sticky = place.is_dir() and about.st_mode & stat.S_ISVTX  # as /tmp: others write there, but not over ours
        if about.st_uid not in (0, os.getuid()):
            return f"{place} belongs to another user, and code from there is not run"
        if others and not (sticky and place != path):
            return f"{place} can be written by other users, and code from there is not run (chmod go-w)"
    return ""


def _run(command: list[str], what: str) -> str:
    """Standard output of a command; raises RunError with the first line that it complains in."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"]
        worst = next((line for line in lines if "error:" in line.lower()), lines[-1])
        raise RunError(f"{what}: {worst.strip()}", "the portable path is used meanwhile; try another compiler by CXX=…")
    return done.stdout
