"""Time and memory of the loss and its peers on a GPU, relative to the products alone.

These are the three matrix products of a loss with its gradients.

python -m benchmarks.gpu_times [--out gpu_times.json] [--rounds 7]

Every row computes the loss and the gradients of features [N, E] and table [V, E]. Rows alternate within one run and
reverse their order every other round; a ratio is the median over rounds of the row's time divided by that of the three
products of the same type in the same round. Times come from CUDA events. The error next to a time is the relative
distance of the table's gradient from fp64 of the same, rounded inputs, on the first 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Candidate, alternate, ratio
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy

SHAPES = ((8192, 32_000, 2048), (16_384, 50_304, 768), (8192, 128_256, 4096))
PRODUCTS = "three products"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """Time, memory and error of one way to compute the loss."""

    name: str
    ratio: float  # of its time to that of the three products
    milliseconds: float
    megabytes: float  # peak above what was allocated before, gradients included
    error: float  # of the table's gradient, on 512 tokens


@dataclass(frozen=True)
class Problem:
    """Features [N, E], table [V, E] and targets [N] on the GPU."""

    features: Tensor
    table: Tensor
    targets: Tensor

    @classmethod
    def drawn(cls, tokens: int, words: int, width: int, kind: torch.dtype) -> Problem:
        """Draw a problem whose logits have a standard deviation near 1."""
        draw = torch.Generator("cuda").manual_seed(0)
        features = torch.randn(tokens, width, device="cuda", generator=draw).to(kind)
        table = (torch.randn(words, width, device="cuda", generator=draw) * width**-0.5).to(kind)
        targets = torch.randint(0, words, (tokens,), device="cuda", generator=draw)
        return cls(features, table, targets)

    def first(self, tokens: int) -> Problem:
        """Return the same problem with the first tokens only."""
        return Problem(self.features[:tokens], self.table, self.targets[:tokens])

    def gradients(self, loss: Loss) -> tuple[Tensor, ...]:
        """Compute the loss and return the gradients of features and table."""
        features = self.features.detach().requires_grad_()
        table = self.table.detach().requires_grad_()
        return torch.autograd.grad(loss(features, table, self.targets), (features, table))

    def products(self) -> None:
        """Multiply what every loss multiplies: logits, and the gradients of features and table."""
        logits = self.features @ self.table.T
        logits @ self.table
        logits.T @ self.features


def plain(features: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss from all logits, in fp32 as models do."""
    return F.cross_entropy((features @ table.T).float(), targets)


def losses() -> dict[str, Loss]:
    """Every way to compute the loss; one that is missing here fails when it is first called."""
    ways: dict[str, Loss] = {
        "tiewise": lambda h, w, t: linear_cross_entropy(h, w, t, backend="tiewise"),
        "tiewise, auto": lambda h, w, t: linear_cross_entropy(h, w, t, backend="auto"),
        "liger": lambda h, w, t: linear_cross_entropy(h, w, t, backend="liger"),
        "cce": lambda h, w, t: linear_cross_entropy(h, w, t, backend="cce"),
        "plain": plain,
        "torch.compile(plain)": torch.compile(plain),
    }
    built_in = getattr(F, "linear_cross_entropy", None)
    if built_in is not None:
        ways["F.linear_cross_entropy"] = lambda h, w, t: built_in(h, w, t)
    return ways


def usable(ways: dict[str, Loss], problem: Problem) -> tuple[dict[str, Loss], dict[str, str]]:
    """Split the ways into those that run here and the reasons of those that do not."""
    kept, reasons = {}, {}
    for name, loss in ways.items():
        try:
            for _ in range(2):
                problem.gradients(loss)
            torch.cuda.synchronize()
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            kept[name] = loss
        torch.cuda.empty_cache()
    return kept, reasons


def gpu_seconds(work: Candidate) -> float:
    """Seconds of one call on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_megabytes(work: Candidate) -> float:
    """Peak of the GPU's memory during a call, above what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def reference_gradient(problem: Problem) -> Tensor:
    """Gradient of the table in fp64."""
    wide = Problem(problem.features.double(), problem.table.double(), problem.targets)
    return wide.gradients(lambda h, w, t: F.cross_entropy(h @ w.T, t))[1]


def table_error(problem: Problem, loss: Loss, reference: Tensor) -> float:
    """Relative distance of the table's gradient from the reference."""
    found = problem.gradients(loss)[1].double()
    return float((found - reference).norm() / reference.norm())


def measured(shape: tuple[int, int, int], kind: torch.dtype, rounds: int) -> dict[str, Any]:
    """Measure all rows of one shape and type."""
    problem = Problem.drawn(*shape, kind)
    ways, reasons = usable(losses(), problem)
    candidates: dict[str, Candidate] = {PRODUCTS: problem.products}
    for name, loss in ways.items():
        candidates[name] = lambda loss=loss: problem.gradients(loss)
    times = alternate(candidates, rounds, timed=gpu_seconds)
    reference = reference_gradient(problem.first(512))
    rows = []
    for name, loss in ways.items():
        memory = peak_megabytes(candidates[name])
        error = table_error(problem.first(512), loss, reference)
        rows.append(Row(name, ratio(times, name, PRODUCTS), 1e3 * statistics.median(times[name]), memory, error))
    return {
        "shape": list(shape),
        "dtype": str(kind).removeprefix("torch."),
        "products_ms": 1e3 * statistics.median(times[PRODUCTS]),
        "rows": [asdict(row) for row in rows],
        "not_run": reasons,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure all shapes; write the file after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_times", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_times.json"))
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.gpu_times: torch sees no GPU", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "measurements": [],
    }
    cases = [(shape, torch.bfloat16) for shape in SHAPES] + [(shape, torch.float32) for shape in SHAPES[:2]]
    for shape, kind in cases:
        found = measured(shape, kind, asked.rounds)
        record["measurements"].append(found)
        asked.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(" x ".join(map(str, shape)), found["dtype"], f"products {found['products_ms']:.1f} ms", flush=True)
        for row in found["rows"]:
            print(
                f"  {row['name']:24} {row['ratio']:6.2f}  {row['milliseconds']:8.1f} ms  {row['megabytes']:8.0f} MB"
                f"  error {row['error']:.1e}",
                flush=True,
            )
        for name, reason in found["not_run"].items():
            print(f"  {name:24} not run: {reason}", flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
