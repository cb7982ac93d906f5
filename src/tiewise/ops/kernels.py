"""Kernels compiled on this machine: built by `tiewise kernels build`, found in the user's cache, never built in a call.

`kernels.cpp` beside this file is compiled against the part of torch's C++ interface that is stable between versions.
The library lies in the cache under a key of what it was made from and for: source, options, torch, processor; and the
compiler. What is not there, or not as it was written, or not for this machine, is left alone, and the portable path
computes the same.

A library in a cache is code that we run. It is loaded only from a file of the user's own (or root's) that nobody else
may write, in folders of which the same holds up to the root, as ssh asks of its keys.
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
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tiewise.core.errors import RunError, UnsupportedError
from tiewise.core.files import cache_folder, written_whole

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
    """Return the library's operators, or None where there is none for this machine or `TIEWISE_KERNELS=off`.

    `needs` is one of `INSTRUCTION_SETS`, which this processor must have. A RunError for another TIEWISE_KERNELS.
    """
    found, has, _ = (None, 0, "") if _off() else _load()
    return found if has >> INSTRUCTION_SETS.index(needs) & 1 else None


def state(*, full: bool = True) -> str:
    """Say in one line whether compiled kernels are used in this process, and if `full` which file, or why not.

    A record of a run holds the other form, where no folder of the user's is named. Raises as `kernels`.
    """
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
