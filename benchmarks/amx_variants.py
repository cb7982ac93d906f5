"""Variants of the compiled kernels with other constants, for `benchmarks.amx`.

A variant is a library with operators under another name, so that several run in one process.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiewise.boundary.ops import compiled_kernels


@dataclass(frozen=True)
class Variant:
    """A name, and the constants that it changes: their definition in `kernels.cpp` and the new one."""

    name: str
    changes: tuple[tuple[str, str], ...]


VARIANTS = (
    Variant("lot_100k", (("LOT = 200'000", "LOT = 100'000"),)),
    Variant("lot_400k", (("LOT = 200'000", "LOT = 400'000"),)),
    Variant("block_500k", (("BLOCK = 1'500'000", "BLOCK = 500'000"),)),
    Variant("step_256", (("STEP_WORDS = 512", "STEP_WORDS = 256"),)),
    Variant("e_512_kb", (("E_IN_CACHE = 1 << 20", "E_IN_CACHE = 1 << 19"),)),
    Variant("e_2_mb", (("E_IN_CACHE = 1 << 20", "E_IN_CACHE = 1 << 21"),)),
    Variant("shares_of_words", (("if (!tiles() || !by_features) return 1;", "return 1;"),)),
)


def write_source(variant: Variant, folder: Path) -> Path:
    """Write the source of a variant, and return its path.

    Raises:
        ValueError: the source lacks a definition that the variant changes.
    """
    source = compiled_kernels.SOURCE.read_text(encoding="utf-8")
    renaming = ("(tiewise_kernels,", f"(tiewise_{variant.name},")
    for old, new in (*variant.changes, renaming):
        if old not in source:
            raise ValueError(f"{compiled_kernels.SOURCE.name} lacks {old!r}; correct the variant {variant.name}")
        source = source.replace(old, new)
    path = folder / f"{variant.name}.cpp"
    path.write_text(source, encoding="utf-8")
    return path


def build_variants(variants: tuple[Variant, ...], folder: Path) -> None:
    """Compile the variants into a folder, all at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(torch.__file__).parent
    compiler = shutil.which("g++")
    if compiler is None:
        print("no g++: no variants", file=sys.stderr)
        return
    jobs = []
    for variant in variants:
        library = folder / f"{variant.name}.so"
        if not library.exists():
            places = [f"-I{home / 'include'}", f"-L{home / 'lib'}"]
            options = [*compiled_kernels.OPTIONS, compiled_kernels.STABLE, *places]
            source = str(write_source(variant, folder))
            jobs.append(subprocess.Popen([compiler, *options, source, "-o", str(library), *compiled_kernels.LINKED]))
    for job in jobs:
        job.wait()


def load_variants(folder: Path) -> dict[str, Any]:
    """Return the operators of each variant in a folder, by name."""
    operators = {}
    for path in sorted(folder.glob("*.so")):
        torch.ops.load_library(str(path))
        operators[path.stem] = getattr(torch.ops, f"tiewise_{path.stem}")
    return operators
