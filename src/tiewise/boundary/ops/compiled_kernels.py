"""Kernels for this CPU, compiled into the user's cache and loaded only from there.

`tiewise kernels build` compiles `kernels.cpp`, and no other call does, against the part of torch's C++ interface that
is stable between versions. The library is stored in the user's cache under a key of its inputs (source, options, torch,
processor) and the compiler. A library that is missing, damaged or for another machine is not used, and the portable
path computes the same results. A library is code that tiewise runs. It is loaded only from a file of the user (or root)
that no other user may write, in folders for which the same holds up to the root. ssh checks its keys in the same way.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tiewise.core.errors import RunError, UnsupportedError
from tiewise.core.files import atomic_replacement, cache_folder
from tiewise.core.writing_faults import writing_fault

SOURCE = Path(__file__).with_name("kernels.cpp")
# names of the bits of the library's `instruction_sets()`; only functions that use a set are compiled for it
INSTRUCTION_SETS = ("avx512", "avx512_vnni", "avx512_bf16", "amx_bf16")
# libtorch_cpu by name: Python loads torch without showing its symbols to libraries that come later
LINKED = ("-Wl,--no-as-needed", "-ltorch_cpu")
FAST = ("-O3", "-falign-loops=64", "-fno-math-errno")
OPTIONS = ("-std=c++20", *FAST, "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden")
STABLE = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # the interface of torch 2.10, which later versions keep
DIGEST = hashlib.sha256().digest_size  # bytes at the end of the file: the digest of all before them
SWITCH = "TIEWISE_KERNELS"
SWITCH_VALUES = ("auto", "off", "avx512")
ELSEWHERE = "name another cache by XDG_CACHE_HOME=…"
LOAD = "import sys, torch; torch.ops.load_library(sys.argv[1]); print(torch.ops.tiewise_kernels.instruction_sets())"


def kernels(needs: str = "avx512") -> Any | None:
    """Return the library's operators.

    It is None if there is no library, under TIEWISE_KERNELS=off, or if the processor lacks `needs`.
    """
    if switch() == "off":
        return None
    library = _load()
    if needs not in library.instruction_sets:
        return None
    return library.operators


def kernels_state(*, full: bool = True) -> str:
    """Return a sentence on whether kernels are used.

    With `full`, it has the file, or the reason why there is none; records of a run leave these out.
    """
    if switch() == "off":
        return f"off: {SWITCH}=off"
    library = _load()
    if library.path is None:
        return f"none: {library.missing}" if full else "none"
    file = library.path if full else library.path.stem
    return f"used: {file} ({', '.join(library.instruction_sets)})"


def switch() -> str:
    """Return the value of TIEWISE_KERNELS.

    `off` disables kernels; `avx512` lets the bf16 loss use AVX-512 on a processor with AMX, too.

    Raises:
        RunError: the variable has another value.
    """
    value = os.environ.get(SWITCH, "auto")
    if value not in SWITCH_VALUES:
        raise RunError(f"{SWITCH}={value}", "set it to auto, off or avx512")
    return value


# loading


@dataclass(frozen=True)
class _Library:
    """Loaded library, or the reason why there is none."""

    operators: Any | None = None
    instruction_sets: tuple[str, ...] = ()  # members of INSTRUCTION_SETS that this processor has
    path: Path | None = None
    missing: str = ""  # reason why there is no library


@cache
def _load() -> _Library:
    """Load the newest library that may be used, once in a process."""
    missing = _unsupported_reason()
    if missing:
        return _Library(missing=missing)
    try:
        folder = cache_folder() / "kernels"
        built = sorted(folder.glob(f"{_key()}-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    except (OSError, RuntimeError) as error:  # no home folder, or no permission to read it
        return _Library(missing=str(error))
    missing = f"not built for this machine, torch {torch.__version__} and this tiewise; run `tiewise kernels build`"
    for path in built:
        missing = _refusal_reason(path) or _load_failure(path)
        if not missing:
            operators = torch.ops.tiewise_kernels
            return _Library(operators, _names_of_bits(operators.instruction_sets()), path)
    return _Library(missing=missing)


def _names_of_bits(bits: int) -> tuple[str, ...]:
    """Return the names of instruction sets whose bits are set."""
    return tuple(name for bit, name in enumerate(INSTRUCTION_SETS) if bits >> bit & 1)


def _refusal_reason(path: Path) -> str:
    """Return why a library may not be loaded; empty if it may."""
    reason = _distrust_reason(path)
    if reason:
        return reason
    data = path.read_bytes()
    if hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:  # loading a truncated file would crash the process
        return f"{path} is damaged; run `tiewise kernels build`"
    return ""


def _load_failure(path: Path) -> str:
    """Load a library, and return why that failed; empty if its operators exist."""
    if hasattr(torch.ops.tiewise_kernels, "instruction_sets"):
        return ""  # loading a second library of these operators would end the process
    load_library: Callable[[str], None] = torch.ops.load_library
    try:
        load_library(str(path))
    except OSError as error:
        return f"{path} does not load ({' '.join(str(error).split())}); run `tiewise kernels build`"
    return ""


# building


def build() -> Path:
    """Compile the kernels into the user's cache, and check that they load.

    Two builds at the same time do not disturb each other.

    Returns:
        The library's path.

    Raises:
        UnsupportedError: this machine or torch cannot use the kernels.
        RunError: the kernels cannot be compiled, loaded or written.
    """
    reason = _unsupported_reason()
    if reason:
        fix = "the portable path is used, nothing is missing"
        raise UnsupportedError(f"no kernels for this machine: {reason}", fix)
    compiler = _find_compiler()
    folder = _prepare_folder()
    version = _run([compiler, "--version"], "the compiler does not run")
    path = folder / f"{_key()}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"
    try:
        with atomic_replacement(path) as unfinished:
            _compile(compiler, unfinished)
    except OSError as error:
        remedy = writing_fault(error).remedy(ELSEWHERE)
        raise RunError(f"the kernels could not be written: {error}", remedy) from None
    return path


def _find_compiler() -> str:
    """Return the path of the C++ compiler.

    Raises:
        RunError: there is no compiler.
    """
    name = os.environ.get("CXX") or "g++"
    compiler = shutil.which(name)
    if compiler is None:
        fix = "install g++ (apt install g++, dnf install gcc-c++) or name a compiler by CXX=…"
        raise RunError(f"no C++ compiler {name} was found", fix)
    return compiler


def _prepare_folder() -> Path:
    """Return the folder of libraries, created if missing.

    Raises:
        RunError: other users may write there, or it cannot be created.
    """
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise RunError(f"no place for the kernels: {error}", ELSEWHERE) from None
    reason = _distrust_reason(folder)
    if reason:
        raise RunError(reason, f"correct that, or {ELSEWHERE}")
    return folder


def _compile(compiler: str, path: Path) -> None:
    """Compile the library to `path`, load it in another process, and append its digest."""
    home = Path(torch.__file__).parent
    places = [f"-I{home / 'include'}", f"-L{home / 'lib'}"]
    command = [compiler, *OPTIONS, STABLE, *places, str(SOURCE), "-o", str(path), *LINKED]
    _run(command, "the kernels did not compile")
    _run([sys.executable, "-c", LOAD, str(path)], "the compiled kernels do not load")
    path.chmod(0o600)
    library = path.read_bytes()
    path.write_bytes(library + hashlib.sha256(library).digest())


def _unsupported_reason() -> str:
    """Return why kernels cannot be used on this machine; empty if they can."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        return f"they are written for Linux on x86_64, not for {system} on {machine}"
    if not processor() >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}:
        return "this processor has no AVX-512"
    major, minor, *_ = re.findall(r"\d+", torch.__version__)
    if (int(major), int(minor)) < (2, 10):
        return f"they need torch 2.10, not {torch.__version__}"
    return ""


@cache
def processor() -> frozenset[str]:
    """Return this processor's instruction sets, by Linux's names.

    Other flags, which a kernel update may change, are left out.
    """
    try:
        line = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return frozenset()
    if line is None:
        return frozenset()
    return frozenset(re.findall(r"\b(?:amx|avx|fma|f16c|bmi)\w*", line[1]))


def _key() -> str:
    """Return the key of a library's inputs.

    The compiler is not part of it: a machine that has the library may lack the compiler.
    """
    parts = "\0".join((*OPTIONS, STABLE, torch.__version__, *sorted(processor())))
    return hashlib.sha256(SOURCE.read_bytes() + b"\0" + parts.encode()).hexdigest()[:24]


def _distrust_reason(path: Path) -> str:
    """Return why code at `path` is not run: other users may write there. Empty if they may not."""
    path = path.resolve()
    for place in (path, *path.parents):
        status = place.stat()
        if status.st_uid not in (0, os.getuid()):
            return f"{place} belongs to another user, and code from there is not run"
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # above `path` a sticky folder is enough; in the folder of libraries itself other users could add a library
        is_guarded = place != path and _is_sticky(place, status)
        if is_open and not is_guarded:
            return f"{place} can be written by other users, and code from there is not run (chmod go-w)"
    return ""


def _is_sticky(place: Path, status: os.stat_result) -> bool:
    """Return whether only the owners of files may replace them in a folder, as in /tmp."""
    return place.is_dir() and bool(status.st_mode & stat.S_ISVTX)


def _run(command: list[str], what: str) -> str:
    """Return a command's standard output.

    Raises:
        RunError: the command failed; the message has the first line that names an error.
    """
    finished = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if finished.returncode:
        lines = [line for line in finished.stderr.splitlines() if line.strip()] or [f"exit {finished.returncode}"]
        worst = next((line for line in lines if "error:" in line.lower()), lines[-1])
        raise RunError(f"{what}: {worst.strip()}", "the portable path is used meanwhile; try another compiler by CXX=…")
    return finished.stdout
