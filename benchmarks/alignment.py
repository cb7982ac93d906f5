"""Alignment of two 152,000 × 2,560 bf16 tables: seconds by stage, and resident memory.

python -m benchmarks.alignment [ROWS WIDTH]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.measure import peak_megabytes
from tiewise.checkpoint.stored import read_header
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.tables.align_tables import Alignment, align
from tiewise.inspection.tables.model_tables import one_vocabulary
from tiewise.inspection.tables.table_maps import AlignSettings

SETTINGS = AlignSettings(maps=("identity", "orthogonal"), permutations=1, sampled=20_000)


def write_tables(path: Path, rows: int, width: int) -> None:
    """Write two independent Gaussian tables, in pieces."""
    size = rows * width * 2
    header = {
        name: {"dtype": "BF16", "shape": [rows, width], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate("ab")
    }
    text = json.dumps(header).encode()
    draw = np.random.default_rng(0)
    with path.open("wb") as made:
        made.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, 2 * rows, 2000):
            piece = draw.standard_normal((min(2000, 2 * rows - start), width), dtype=np.float32)
            made.write(piece.astype(ml_dtypes.bfloat16).tobytes())


class Stages:
    """Seconds between one report of progress and the next, by what was reported."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self.last
        self.last = now


def main(rows: int = 152_000, width: int = 2560) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "tables.safetensors"
        write_tables(path, rows, width)
        a, b = read_header(path).tensors.values()
        stages, found, started, busy = Stages(), [], time.perf_counter(), time.process_time()

        def work() -> None:
            with listen_to_progress(stages):
                found.append(align(a, b, one_vocabulary(rows, rows), SETTINGS))

        peak = peak_megabytes(work)
        total, busy = time.perf_counter() - started, time.process_time() - busy
    result: Alignment = found[0]
    print(f"{rows:,} × {width:,}, {result.precision}, error {result.error:.1e}")
    print(f"{total:.0f} s ({busy:.0f} s of processor time), {peak:,.0f} MB beyond what was resident before\n")
    print("| stage | s |\n|---|---|")
    stages("the rest", 0, 0)
    for name, seconds in stages.seconds.items():
        print(f"| {name} | {seconds:.1f} |")
    print("\n| map | rows | mean cosine | chance | permuted |\n|---|---|---|---|---|")
    for s in (score for score in result.scores if score.rows):
        null = s.null[0] if s.null else float("nan")
        print(f"| {s.measure}, {s.view} | {s.rows} | {s.estimate.value:.4f} | {s.chance:.4f} | {null:.4f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
