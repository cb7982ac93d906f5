"""Time and memory of the loss and its peers on a GPU, relative to three products.

The three products are the matrix products that any loss with its gradients needs.

It is a phase of `benchmarks.gpu`. Every row computes the loss and the gradients of features [N, E] and table [V, E].
Rows alternate within one run, in reversed order every other round. A ratio is a median over rounds: the row's time
divided by that of the three products of the same type in the same round. Times come from CUDA events. The error next to
a time is the relative distance of the table's gradient from fp64 for the same, rounded inputs, on the first 512 tokens.
Ours is wrong if its error is more than twice that of the plain computation.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_bars import list_time_bars
from benchmarks.gpu_branch import gpu_branch
from benchmarks.gpu_checks import Setup
from benchmarks.gpu_record import PhaseResult, describe_card, read_record, write_record
from benchmarks.measure import Candidate, alternate, median_ratio, time_call
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.core.errors import UnsupportedError

SHAPES = ((8192, 32_000, 2048), (16_384, 50_304, 768), (8192, 128_256, 4096))
PRODUCTS = "three products"
ROUNDS = 7
FP32_SLACK = 1e-6  # an error that fp32 sums in another order explain
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """Time, memory and error of one implementation of the loss."""

    name: str
    ratio: float  # its time / time of the three products
    milliseconds: float
    megabytes: float  # peak minus memory allocated before; gradients count
    error: float  # relative, of the table's gradient on 512 tokens


@dataclass(frozen=True)
class Case:
    """A shape (N, V, E) and a type."""

    shape: tuple[int, int, int]
    dtype: torch.dtype

    def is_of(self, measurement: dict[str, Any]) -> bool:
        """Return whether a measurement is of this case."""
        return (measurement["shape"], measurement["dtype"]) == (list(self.shape), str(self.dtype)[6:])


@dataclass(frozen=True)
class Problem:
    """Features [N, E], table [V, E] and targets [N] on the GPU."""

    features: Tensor
    table: Tensor
    targets: Tensor

    @classmethod
    def random(cls, tokens: int, vocab: int, width: int, dtype: torch.dtype, device: str = "cuda") -> Problem:
        """Draw a problem whose logits have a standard deviation near 1."""
        generator = torch.Generator(device).manual_seed(0)
        features = torch.randn(tokens, width, device=device, generator=generator).to(dtype)
        table = (torch.randn(vocab, width, device=device, generator=generator) * width**-0.5).to(dtype)
        targets = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
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
        """Compute the three products of any loss: logits, gradients of features and table."""
        logits = self.features @ self.table.T
        logits @ self.table
        logits.T @ self.features


def plain_loss(features: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss from all logits, in fp32 as models do."""
    return F.cross_entropy((features @ table.T).float(), targets)


def list_losses(device: str) -> dict[str, Loss]:
    """Return all implementations of the loss; a missing library fails at the first call."""
    compiler = "inductor" if device == "cuda" else "eager"
    implementations: dict[str, Loss] = {
        "tiewise": lambda h, w, t: linear_cross_entropy(h, w, t, backend="tiewise"),
        "tiewise, chunked": lambda h, w, t: linear_cross_entropy(h, w, t, backend="chunked"),
        "tiewise, auto": lambda h, w, t: linear_cross_entropy(h, w, t, backend="auto"),
        "liger": lambda h, w, t: linear_cross_entropy(h, w, t, backend="liger"),
        "cce": lambda h, w, t: linear_cross_entropy(h, w, t, backend="cce"),
        "plain": plain_loss,
        "torch.compile(plain)": torch.compile(plain_loss, backend=compiler),
    }
    if device == "cuda":
        implementations["tiewise, compile"] = lambda h, w, t: linear_cross_entropy(h, w, t, backend="compile")
    built_in = getattr(F, "linear_cross_entropy", None)
    if built_in is not None:
        implementations["F.linear_cross_entropy"] = lambda h, w, t: built_in(h, w, t)
    return implementations


def select_usable(losses: dict[str, Loss], problem: Problem) -> tuple[dict[str, Loss], dict[str, str]]:
    """Return the implementations that run here, and the errors of the others."""
    usable_losses, reasons = {}, {}
    for name, loss in losses.items():
        try:
            for _ in range(2):
                problem.gradients(loss)
            float(problem.features[0, 0])  # waits for the GPU
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            usable_losses[name] = loss
        if problem.features.is_cuda:
            torch.cuda.empty_cache()
    return usable_losses, reasons


def time_on_gpu(call: Candidate) -> float:
    """Return the seconds of one call on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def measure_peak_megabytes(call: Candidate) -> float:
    """Return the GPU's peak memory during a call minus the memory allocated before, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def compute_reference_gradient(problem: Problem) -> Tensor:
    """Return the gradient of the table in fp64."""
    problem_fp64 = Problem(problem.features.double(), problem.table.double(), problem.targets)
    return problem_fp64.gradients(lambda h, w, t: F.cross_entropy(h @ w.T, t))[1]


def compute_table_error(problem: Problem, loss: Loss, reference: Tensor) -> float:
    """Return the relative distance of the table's gradient from the reference."""
    gradient = problem.gradients(loss)[1].double()
    return float((gradient - reference).norm() / reference.norm())


def measure_shape(case: Case, device: str, rounds: int) -> dict[str, Any]:
    """Measure all rows of one shape and type."""
    problem = Problem.random(*case.shape, case.dtype, device)
    implementations, reasons = select_usable(list_losses(device), problem)
    candidates: dict[str, Candidate] = {PRODUCTS: problem.products}
    for name, loss in implementations.items():
        candidates[name] = lambda loss=loss: problem.gradients(loss)
    times = alternate(candidates, rounds, timed=time_on_gpu if device == "cuda" else time_call)
    reference = compute_reference_gradient(problem.first(512))
    rows = []
    for name, loss in implementations.items():
        memory = measure_peak_megabytes(candidates[name]) if device == "cuda" else 0.0
        error = compute_table_error(problem.first(512), loss, reference)
        rows.append(Row(name, median_ratio(times, name, PRODUCTS), 1e3 * statistics.median(times[name]), memory, error))
    return {
        "shape": list(case.shape),
        "dtype": str(case.dtype).removeprefix("torch."),
        "products_ms": 1e3 * statistics.median(times[PRODUCTS]),
        "rows": [asdict(row) for row in rows],
        "not_run": reasons,
    }


def list_cases(setup: Setup) -> list[Case]:
    """Return the shapes and types to measure; on a CPU a small one."""
    if not setup.on_gpu:
        return [Case((setup.n, setup.v, setup.e), torch.float32)]
    return [Case(shape, torch.bfloat16) for shape in SHAPES] + [Case(shape, torch.float32) for shape in SHAPES[:2]]


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Measure the shapes that the file lacks, or has with a row that did not run, until the deadline."""
    record = read_record(path, describe_card(setup.device))
    measured = record.setdefault("measurements", [])
    result = PhaseResult()
    for case in list_cases(setup):
        measurement = next((one for one in measured if case.is_of(one)), None)
        is_done = measurement is not None and not find_absent_rows(measurement)
        if not is_done and time.monotonic() > deadline:
            result.missing += 1
            continue
        if not is_done:
            with contextlib.nullcontext() if setup.on_gpu else gpu_branch():
                measurement = measure_shape(case, setup.device, ROUNDS)
            record["measurements"] = measured = [one for one in measured if not case.is_of(one)] + [measurement]
            write_record(path, record)
            print(format_measurement(measurement), flush=True)
            if setup.on_gpu:
                torch.cuda.empty_cache()
        inexact = find_inexact_rows(measurement)
        result.right += len(measurement["rows"]) - len(inexact)
        result.wrong += inexact + find_failed_rows(measurement)
        result.not_run += find_absent_rows(measurement)
        print("".join(f"  {bar}\n" for bar in list_time_bars(measurement)), end="", flush=True)
    return result


def find_inexact_rows(measurement: dict[str, Any]) -> list[str]:
    """Return our rows whose table gradient has more than twice the error of the plain computation."""
    errors = {row["name"]: row["error"] for row in measurement["rows"]}
    limit = 2 * errors["plain"]
    if measurement["dtype"] == "float32":
        limit += FP32_SLACK
    ours = [name for name in errors if name.startswith("tiewise")]
    inexact = [name for name in ours if not errors[name] <= limit]
    return [f"{_case_name(measurement)}, {name}: error {errors[name]:.1e}, limit {limit:.1e}" for name in inexact]


def find_failed_rows(measurement: dict[str, Any]) -> list[str]:
    """Return our rows that raised an error other than a refusal with its reason (`UnsupportedError`)."""
    return _describe_not_run(measurement, lambda is_ours, is_refused: is_ours and not is_refused)


def find_absent_rows(measurement: dict[str, Any]) -> list[str]:
    """Return our rows that were refused, and the peers' that failed: a peer may refuse."""
    return _describe_not_run(measurement, lambda is_ours, is_refused: is_ours == is_refused)


def _describe_not_run(measurement: dict[str, Any], is_selected: Callable[[bool, bool], bool]) -> list[str]:
    """Return the rows that did not run and are selected by (is ours, is refused), each with the reason."""
    return [
        f"{_case_name(measurement)}, {name}: {reason}"
        for name, reason in measurement["not_run"].items()
        if is_selected(name.startswith("tiewise"), reason.startswith(UnsupportedError.__name__))
    ]


def _case_name(measurement: dict[str, Any]) -> str:
    """Return type and shape of a measurement as text."""
    return f"{measurement['dtype']} {' x '.join(map(str, measurement['shape']))}"


def format_measurement(measurement: dict[str, Any]) -> str:
    """Return the rows of one shape and type as lines of text."""
    shape = " x ".join(map(str, measurement["shape"]))
    lines = [f"{shape} {measurement['dtype']} products {measurement['products_ms']:.1f} ms"]
    for row in measurement["rows"]:
        described = f"  {row['name']:24} {row['ratio']:6.2f}  {row['milliseconds']:8.1f} ms"
        lines.append(f"{described}  {row['megabytes']:8.0f} MB  error {row['error']:.1e}")
    lines += [f"  {name:24} not run: {reason}" for name, reason in measurement["not_run"].items()]
    return "\n".join(lines)
