"""Times of the parts of `backend="triton"` on a GPU: products, row kernels of several sizes, and steps by chunks.

python -m benchmarks.gpu_rows [--out gpu_rows.json] [--minutes 2]

The file is written after each time. A run continues the times of an existing file of the same card and torch. It stops
after `--minutes`. Times are medians of CUDA events in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu_times import SHAPES, Problem, time_on_gpu
from tiewise.boundary.ops import devices, row_loss
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.core.backends import LossOptions

ROUNDS = 7
ROWS = 8192  # tokens whose products are timed alone
SIZES = ((2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32))  # columns and warps of a program
CHUNKS = (1, 2, 4, 8, 16)
Call = Callable[[], object]


@dataclass(frozen=True)
class Part:
    """A named part of a step."""

    name: str
    call: Call


def list_parts(problem: Problem, rows: int = ROWS) -> Iterator[Part]:
    """Yield the parts of one step, and steps in several numbers of chunks."""
    yield Part("three products", problem.products)
    for chunks in CHUNKS:
        size = -(-len(problem.targets) // chunks)
        yield Part(f"step in {chunks} chunks", lambda size=size: problem.gradients(make_loss(size)))
    features, table = problem.features[:rows], problem.table
    buffer = row_loss._ChunkBuffer.allocate(features, len(table), len(features))
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


def measure_milliseconds(call: Call, timed: Callable[[Call], float] = time_on_gpu) -> float:
    """Return the median time of a call after two that do not count."""
    times = [1e3 * timed(call) for _ in range(ROUNDS + 2)]
    return statistics.median(times[2:])


def read_record(path: Path, head: dict[str, str]) -> dict[str, Any]:
    """Return the record to continue: that of the file if it has the same card and torch, else an empty one."""
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {name: record.get(name) for name in head} == head:
            return record
    return {**head, "times": {}}


def measure_parts(problem: Problem, label: str, record: dict[str, Any], path: Path, deadline: float) -> None:
    """Measure the parts that the record lacks until the deadline, and write the file after each."""
    for part in list_parts(problem):
        name = f"{label}: {part.name}"
        if name in record["times"] or time.monotonic() > deadline:
            continue
        try:
            record["times"][name] = measure_milliseconds(part.call)
        except torch.OutOfMemoryError as error:
            record["times"][name] = str(error).splitlines()[0]
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{name:64} {record['times'][name]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure all parts of all shapes, in the order of `SHAPES`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_rows", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_rows.json"))
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.gpu_rows: torch sees no GPU", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    record = read_record(options.out, {"device": torch.cuda.get_device_name(), "torch": torch.__version__})
    deadline = time.monotonic() + 60 * options.minutes
    for shape in SHAPES:
        problem = Problem.random(*shape, torch.bfloat16)
        measure_parts(problem, " x ".join(map(str, shape)), record, options.out, deadline)
        del problem
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
