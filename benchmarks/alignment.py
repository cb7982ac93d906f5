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

from benchmarks.measure import measure_peak_megabytes
from tiewise.checkpoint.stored import read_header
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.tables.align_tables import Alignment, align
from tiewise.inspection.tables.model_tables import one_vocabulary
from tiewise.inspection.tables.table_maps import AlignSettings

SETTINGS = AlignSettings(maps=("identity", "orthogonal"), permutations=1, sampled=20_000)


def write_tables(path: Path, rows: int, width: int) -> None:
    """Write two independent Gaussian tables, 2,000 rows at a time."""
    size = rows * width * 2
    header = {
        name: {"dtype": "BF16", "shape": [rows, width], "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate("ab")
    }
    text = json.dumps(header).encode()
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, 2 * rows, 2000):
            piece = generator.standard_normal((min(2000, 2 * rows - start), width), dtype=np.float32)
            file.write(piece.astype(ml_dtypes.bfloat16).tobytes())


class Stages:
    """Seconds between progress reports, summed by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Add the seconds since the last report to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now


def main(rows: int = 152_000, width: int = 2560) -> None:
    """Align two tables and print the seconds by stage and the memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tables.safetensors"
        write_tables(path, rows, width)
        a, b = read_header(path).tensors.values()
        stages, results, started, processor_seconds = Stages(), [], time.perf_counter(), time.process_time()

        def align_once() -> None:
            """Align once and report progress to `stages`."""
            with listen_to_progress(stages):
                results.append(align(a, b, one_vocabulary(rows, rows), SETTINGS))

        peak = measure_peak_megabytes(align_once)
        total, processor_seconds = time.perf_counter() - started, time.process_time() - processor_seconds
    result: Alignment = results[0]
    print(f"{rows:,} × {width:,}, {result.precision}, error {result.error:.1e}")
    print(
        f"{total:.0f} s ({processor_seconds:.0f} s of processor time), {peak:,.0f} MB beyond what was resident before\n"
    )
    print("| stage | s |\n|---|---|")
    stages("the rest", 0, 0)
    for name, seconds in stages.seconds.items():
        print(f"| {name} | {seconds:.1f} |")
    print("\n| map | rows | mean cosine | chance | permuted |\n|---|---|---|---|---|")
    for score in (score for score in result.scores if score.rows):
        null = score.null[0] if score.null else float("nan")
        values = f"{score.estimate.value:.4f} | {score.chance:.4f} | {null:.4f}"
        print(f"| {score.measure}, {score.view} | {score.rows} | {values} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
