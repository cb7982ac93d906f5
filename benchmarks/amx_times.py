"""One measurement of `benchmarks.amx`: the loss and its peers at one shape, with some of the processor's cores.

python -m benchmarks.amx_times N V D --out FILE [--kind bf16] [--cores 2] [--seconds 10] [--every-row]

Rows alternate, in reversed order every other round. A ratio is a median over rounds: the row's time divided by that of
the three bare products of the same type in the same round, which allocate their results as a loss does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.amx_problem import KINDS, LossProblem, LossResult, Reference, plain_loss
from benchmarks.amx_variants import load_variants
from benchmarks.measure import Candidate, alternate, median_ratio, time_call
from tiewise.boundary.ops import few_tokens, native_loss
from tiewise.boundary.ops.compiled_kernels import SWITCH
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.fast_products import ProductChoice
from tiewise.boundary.ops.native_loss import KernelProducts, NativeKernel
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions

PRODUCTS, COMPILED, PLAIN = "three products", "torch.compile(plain)", "plain"
OURS, KEPT = "tiewise", "tiewise, gradient kept"
LEAST_ROUNDS = {"bf16": 9, "fp32": 15}
MOST_ROUNDS = 25


@dataclass(frozen=True)
class TimedRow:
    """Time and errors of one computation."""

    name: str
    ratio: float  # its time / time of the three products
    to_compiled: float | None  # its time / time of torch.compile; None without that row
    milliseconds: float
    errors: dict[str, float] | None  # of the loss and both gradients, relative to fp64
    seconds: list[float]


@dataclass(frozen=True)
class Settings:
    """Options of a measurement."""

    shape: tuple[int, int, int]
    kind: str = "bf16"
    cores: int = 0  # 0: all
    seconds: float = 10.0
    variants: Path | None = None
    has_every_row: bool = False
    emulate: bool = False

    def as_arguments(self) -> list[str]:
        """Return the options for another process."""
        arguments = [*map(str, self.shape), "--kind", self.kind, "--cores", str(self.cores)]
        arguments += ["--seconds", str(self.seconds)]
        if self.variants is not None:
            arguments += ["--variants", str(self.variants)]
        arguments += ["--every-row"] * self.has_every_row
        return arguments + ["--emulate"] * self.emulate


def main() -> None:
    """Measure one shape, and write the file."""
    options = vars(parse_arguments())
    path = options.pop("out")
    settings = Settings(**options | {"shape": tuple(options["shape"])})
    if settings.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.cores])
        torch.set_num_threads(settings.cores)
    os.environ[SWITCH] = "auto"
    measure_into(path, settings)


def measure_into(path: Path, settings: Settings) -> None:
    """Measure one shape, and write and print the results."""
    torch._dynamo.reset()  # it compiles a function for a few shapes only
    with emulated_tiles() if settings.emulate else nothing():
        record = measure(settings)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(format_record(record), flush=True)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.amx_times", description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=int, nargs=3, metavar=("N", "V", "D"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--cores", type=int, default=0, help="the process keeps to so many; without it, all")
    parser.add_argument("--seconds", type=float, default=10.0, help="about how long the rounds may take")
    parser.add_argument("--variants", type=Path, help="folder of variants to measure, too")
    parser.add_argument("--every-row", action="store_true", dest="has_every_row", help="slower computations, too")
    parser.add_argument("--emulate", action="store_true", help="emulate the tiles; times mean nothing then")
    return parser.parse_args()


@contextmanager
def nothing() -> Iterator[None]:
    """Change nothing."""
    yield


@contextmanager
def emulated_tiles() -> Iterator[None]:
    """Let every bf16 loss use the emulation of AMX."""
    with (
        patch.object(native_loss, "bf16_products", lambda: KernelProducts.EMULATED_TILES),
        patch.object(native_loss, "LEAST", 0),
        patch.object(few_tokens, "FEW_TOKENS", 0),
    ):
        yield


def measure(options: Settings) -> dict[str, Any]:
    """Measure all rows in alternated rounds, and their errors in a first call that is not timed."""
    problem = LossProblem.random(options.shape, KINDS[options.kind])
    reference, rows = Reference(problem), list_rows(problem, options)
    errors: dict[str, dict[str, float]] = {}
    for name, row in rows.items():
        result = row()
        if isinstance(result, LossResult):
            errors[name] = asdict(reference.errors(result))
    del result
    one_round = sum(time_call(row) for row in rows.values())
    rounds = min(MOST_ROUNDS, max(int(options.seconds / one_round), LEAST_ROUNDS[options.kind]))
    times = alternate(rows, 1 if options.emulate else rounds, uncounted=0)
    timed = []
    for name, seconds in times.items():
        to_compiled = median_ratio(times, name, COMPILED)
        ratio, milliseconds = median_ratio(times, name, PRODUCTS), 1e3 * statistics.median(seconds)
        timed.append(asdict(TimedRow(name, ratio, to_compiled, milliseconds, errors.get(name), seconds)))
    return {
        "shape": list(options.shape),
        "kind": options.kind,
        "cores": options.cores or len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "emulated": options.emulate,
        "rows": timed,
    }


def list_rows(problem: LossProblem, options: Settings) -> dict[str, Candidate]:
    """Return the computations of the problem's type."""
    compiled = torch.compile(plain_loss, dynamic=False, backend="eager" if options.emulate else "inductor")
    rows: dict[str, Candidate] = {
        PRODUCTS: make_products(problem, fresh=True),
        "three products, kept results": make_products(problem, fresh=False),
        OURS: partial(problem.run, linear_cross_entropy),
        PLAIN: partial(problem.run, plain_loss),
        COMPILED: partial(problem.run, compiled),
    }
    built_in = getattr(F, "linear_cross_entropy", None)
    if built_in is not None and options.kind == "fp32":  # in bf16 it takes up to 30 times as long as the products
        rows["F.linear_cross_entropy"] = partial(problem.run, built_in)
    if options.kind == "fp32":
        return rows | {"tiewise, kernel": partial(run_native_fp32, problem)}
    tiles = KernelProducts.EMULATED_TILES if options.emulate else KernelProducts.TILES
    rows[KEPT] = partial(problem.run_into, linear_cross_entropy, torch.zeros(problem.table.shape))
    has_few_tokens = len(problem.targets) <= few_tokens.FEW_TOKENS
    if has_few_tokens:  # otherwise this is what `tiewise` does
        rows["tiewise, AMX"] = partial(run_with_products, problem, tiles)
    if has_few_tokens or options.has_every_row:
        rows["tiewise, portable"] = partial(run_without_kernels, problem)
    if options.has_every_row:
        rows["tiewise, AVX-512"] = partial(run_with_products, problem, KernelProducts.PAIRS)
    if options.variants is not None:
        for name, operators in load_variants(options.variants).items():
            rows[f"variant {name}"] = partial(run_operator, problem, operators, tiles)
        operators = native_loss.kernels()
        assert operators is not None, "benchmarks.amx builds the kernels"
        rows["variant none"] = partial(run_operator, problem, operators, tiles)
        rows["variant chunks of 1,024"] = partial(run_operator, problem, operators, tiles, chunk=1024)
    return rows


def make_products(problem: LossProblem, *, fresh: bool) -> Callable[[], None]:
    """Return the three products of any loss; without `fresh` they write to the same memory in each call."""
    h, w = problem.features, problem.table
    logits = torch.randn(len(h), len(w)).to(h.dtype)
    kept = (None, None, None) if fresh else (torch.empty_like(logits), torch.empty_like(h), torch.empty_like(w))

    def multiply() -> None:
        """Run once."""
        torch.mm(h, w.T, out=kept[0])
        torch.mm(logits, w, out=kept[1])
        torch.mm(logits.T, h, out=kept[2])

    return multiply


def run_without_kernels(problem: LossProblem) -> LossResult:
    """Compute our loss with the products of torch."""
    with patch.dict(os.environ, {SWITCH: "off"}):
        return problem.run(linear_cross_entropy)


def run_with_products(problem: LossProblem, products: KernelProducts) -> LossResult:
    """Compute our loss by the kernel with these products, without a trial."""
    with (
        patch.object(native_loss, "bf16_products", lambda: products),
        patch.object(few_tokens, "FEW_TOKENS", 0),
    ):
        return problem.run(linear_cross_entropy)


def run_native_fp32(problem: LossProblem) -> LossResult:
    """Compute our loss in fp32 by the compiled kernel, whatever the trial chooses."""
    choice = ProductChoice("default", "measured here", True, "", torch.get_num_threads(), native=True)
    with patch.object(native_loss, "choose_products", lambda *_: choice):
        return problem.run(linear_cross_entropy)


def run_operator(problem: LossProblem, library: Any, products: KernelProducts, chunk: int | None = None) -> LossResult:
    """Call the operator of a variant as the library does; `chunk` replaces its number of tokens at a time."""
    h, w, t = problem.features, problem.table, problem.targets
    kernel = NativeKernel(library, LossOptions(chunk=chunk), LossTensors(h, w, None, t), h.dtype, products)
    c = torch.full((len(t),), 1 / len(t))
    result = kernel(h, t, c, c, None, (True, True, False))
    return LossResult(result.nll.mean(), result.by_features, result.by_weight)


def find_row(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a row of a measurement by its name."""
    row: dict[str, Any] = next(row for row in record["rows"] if row["name"] == name)
    return row


def format_record(record: dict[str, Any]) -> str:
    """Return a measurement as lines of text."""
    shape = " x ".join(map(str, record["shape"]))
    rounds = len(record["rows"][0]["seconds"])
    lines = [f"{record['kind']} {shape}, {record['threads']} threads, {rounds} rounds, load {record['load']:.1f}"]
    for row in record["rows"]:
        line = f"  {row['name']:30} {row['ratio']:6.2f} x products  {row['to_compiled']:6.2f} x compile"
        line += f"  {row['milliseconds']:9.1f} ms"
        if row["errors"]:
            line += "  errors " + ", ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
