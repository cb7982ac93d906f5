"""Process that one reader is fuzzed in. `tools/fuzz.py` starts it.

    python child.py READER STATE FAILURES [options of libFuzzer] CORPUS

It counts in the file STATE, which `tools/fuzz.py` reads however this process ends. An exception of the reader does not
end it: the input and its traceback are saved in the folder FAILURES, once for each place in the code.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType

import atheris
from atheris.instrument_bytecode import patch_code

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzzing.readers import READERS, outcome

COUNTS = struct.Struct("<QQQd")  # inputs, inputs that were read, failures, CPU seconds of the slowest input
RAW_SHARE = 0.15  # of the mutations: libFuzzer's own, of single bytes
FRESH_SHARE = 0.3  # of the others: of a valid file instead of the input, which after some mutations is refused early


@dataclass
class Counts:
    """Numbers of a run, as STATE has them."""

    inputs: int = 0
    read: int = 0
    failures: int = 0
    slowest: float = 0.0

    @classmethod
    def of(cls, state: bytes) -> Counts:
        """Return the numbers in the content of STATE."""
        return cls(*COUNTS.unpack(state[: COUNTS.size]))

    def write(self, state: mmap.mmap) -> None:
        """Write the numbers to STATE."""
        COUNTS.pack_into(state, 0, self.inputs, self.read, self.failures, self.slowest)


def save_failure(folder: Path, data: bytes, error: Exception) -> None:
    """Save an input and the traceback of its error, unless an input that failed at the same place is saved."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} {last.filename} {last.lineno} {last.name}"
    path = folder / hashlib.sha256(place.encode()).hexdigest()[:12]
    if not path.exists():
        path.write_bytes(data)
        text = "".join(traceback.format_exception(error))
        path.with_suffix(".txt").write_text(text, encoding="utf-8", errors="backslashreplace")


def functions_of(holder: ModuleType | type, module: str) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines."""
    for value in list(vars(holder).values()):
        if isinstance(value, type) and value.__module__ == module:
            yield from functions_of(value, module)
        for attribute in ("fget", "func", "__func__"):  # of a property, a cached property, a class method
            value = getattr(value, attribute, None) or value
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield value


def instrument(module: ModuleType) -> None:
    """Make libFuzzer count the branches of a module.

    atheris instruments whole packages, which takes seconds and slows everything; and it records comparisons, which the
    words of a reader make superfluous.
    """
    for function in functions_of(module, module.__name__):
        function.__code__ = patch_code(function.__code__, trace_dataflow=False)


def fuzz(name: str, state_path: Path, failures: Path, arguments: list[str]) -> None:
    """Fuzz a reader with libFuzzer, which ends this process."""
    reader, counts, rng = READERS[name], Counts(), Random(os.urandom(8))
    seeds = reader.seeds()
    for module in reader.guided:
        instrument(import_module(f"tiewise.{module}"))
    with open(state_path, "r+b") as file:
        state = mmap.mmap(file.fileno(), COUNTS.size)

    def read_one(data: bytes) -> None:
        """Read one input and count it."""
        counts.inputs += 1
        start = time.process_time()
        try:
            if outcome(reader, data) is None:
                counts.read += 1
        except Exception as error:
            counts.failures += 1
            save_failure(failures, data, error)
        counts.slowest = max(counts.slowest, time.process_time() - start)
        counts.write(state)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        """Return a changed input of at most `most` bytes."""
        if rng.random() > RAW_SHARE:
            start = rng.choice(seeds) if rng.random() < FRESH_SHARE else bytes(data)
            changed = reader.mutate(start, rng, reader.words)
            if changed is not None and len(changed) <= most:
                return changed
        raw: bytes = atheris.Mutate(data, most)
        return raw

    setup: Callable[..., object] = atheris.Setup
    setup(["fuzz", *arguments], read_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ["TIEWISE_NO_BUILD"] = "1"  # `plan` would start a process with transformers for every config
    fuzz(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
