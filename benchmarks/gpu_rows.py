"""Times of the parts of `backend="triton"` on a GPU: products, row kernels of several sizes, and steps by chunks.

It is a phase of `benchmarks.gpu`. The file is written after each time. Times are medians of CUDA events in
milliseconds. A part that raises an error is wrong; one that needs more memory than the card has is not.

A step that starts on an idle GPU also takes the time in which the host prepares its first kernel. In training, the host
is ahead of the GPU. So the products and a step are also timed behind other work, which leaves the host that time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.gpu_branch import gpu_branch
from benchmarks.gpu_checks import Setup
from benchmarks.gpu_record import PhaseResult, Record, describe_card, read_record, write_record
from benchmarks.gpu_times import SHAPES, Problem, time_on_gpu
from benchmarks.measure import time_call
from tiewise.boundary.ops import devices, gpu_chunks, row_loss
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.problem import LossTensors
from tiewise.core.backends import LossOptions

ROUNDS = 7
ROWS = 8192  # tokens whose products are timed alone
SIZES = ((2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32))  # columns and warps of a program
CHUNKS = (1, 2, 4, 8, 16)
BUSY_CYCLES = 30_000_000  # 15 ms or more of a GPU, far more than the host needs for a step
Call = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """A named part of a step."""

    name: str
    call: Call
    is_queued: bool = False  # timed behind other work of the GPU


def list_parts(problem: Problem, rows: int = ROWS) -> Iterator[Part]:
    """Yield the parts of one step, and steps in several numbers of chunks."""
    yield Part("three products", problem.products)
    for chunks in CHUNKS:
        size = -(-len(problem.targets) // chunks)
        yield Part(f"step in {chunks} chunks", lambda size=size: problem.gradients(make_loss(size)))
    yield Part("three products, queued", problem.products, is_queued=True)
    one_chunk = make_loss(len(problem.targets))
    yield Part("step in 1 chunks, queued", lambda: problem.gradients(one_chunk), is_queued=True)
    features, table = problem.features[:rows], problem.table
    buffer = gpu_chunks.ChunkBuffer.allocate(features, len(table), len(features))
    products, slopes = buffer.products(len(features)), buffer.slopes(len(features), table.dtype)
    losses = features.new_empty(len(features), dtype=torch.float32)
    kernel = row_loss._RowKernel(LossOptions(), None, None, losses, needs_slopes=True)
    targets, every_row = problem.targets[:rows], slice(0, rows)
    yield Part("logits", lambda: devices.add_product(products, features, table.T, beta=0))
    yield Part("logits in the type of the inputs", lambda: features @ table.T)
    for block, warps in SIZES:

        def run(block: int = block, warps: int = warps) -> None:
            """Run the row kernel with programs of this size."""
            size = row_loss.ProgramSize(block, warps)
            with patch.object(row_loss, "program_size", lambda width: size):
                kernel.run(products, slopes, losses, targets, every_row)

        yield Part(f"rows, {block} columns, {warps} warps", run)
    by_features, by_table = torch.empty_like(features), torch.empty_like(table)
    sums = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    yield Part("gradient of the features", lambda: devices.add_product(by_features, slopes, table, beta=0))
    yield Part("gradient of the table", lambda: devices.add_product(by_table, slopes.T, features, beta=0))
    yield Part("gradient added in fp32", lambda: devices.add_product(sums, slopes.T, features, beta=1))


def make_loss(chunk: int) -> Callable[..., torch.Tensor]:
    """Return the loss in chunks of so many tokens."""
    return lambda h, w, t: linear_cross_entropy(h, w, t, backend="triton", chunk=chunk)


def measure_queued(call: Call) -> float:
    """Return the median time of a call that the host queues while the GPU works."""
    return measure_milliseconds(call, time_behind_work)


def time_behind_work(call: Call) -> float:
    """Return the seconds of one call that starts when the GPU has finished other work."""
    torch.cuda._sleep(BUSY_CYCLES)
    return time_on_gpu(call)


def measure_milliseconds(call: Call, on_gpu: Callable[[Call], float] = time_on_gpu) -> float:
    """Return the median time of a call after two that do not count."""
    timed = on_gpu if torch.cuda.is_available() else time_call
    times = [1e3 * timed(call) for _ in range(ROUNDS + 2)]
    return statistics.median(times[2:])


def measure_parts(problem: Problem, label: str, record: Record, path: Path, deadline: float) -> PhaseResult:
    """Measure the parts that the record lacks until the deadline, and write the file after each."""
    result, times = PhaseResult(), record["times"]
    for part in list_parts(problem):
        name = f"{label}: {part.name}"
        if name not in times and time.monotonic() > deadline:
            result.missing += 1
            continue
        if name not in times:
            measure = measure_queued if part.is_queued else measure_milliseconds
            try:
                times[name] = measure(part.call)
            except torch.OutOfMemoryError as error:
                times[name] = str(error).splitlines()[0]
            except Exception as error:
                result.wrong.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            write_record(path, record)
            print(f"{name:64} {times[name]}", flush=True)
        result.right += 1
    return result


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Measure all parts of all shapes, in the order of `SHAPES`; nothing without triton."""
    total = PhaseResult()
    shapes = SHAPES if setup.on_gpu else ((setup.n, setup.v, setup.e),)
    record = read_record(path, describe_card(setup.device))
    record.setdefault("times", {})
    for shape in shapes:
        with contextlib.nullcontext() if setup.on_gpu else gpu_branch():
            problem = Problem.random(*shape, torch.bfloat16, setup.device)
            missing = row_loss.missing_support(LossTensors(problem.features, problem.table, None, None), torch.bfloat16)
            if missing:
                total.not_run.append(f"the kernel {missing}")
                break
            result = measure_parts(problem, " x ".join(map(str, shape)), record, path, deadline)
        total.merge(result)
        del problem
        if setup.on_gpu:
            torch.cuda.empty_cache()
    return total
