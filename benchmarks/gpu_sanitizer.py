"""One call of each operation under NVIDIA's compute-sanitizer: a phase of `benchmarks.gpu`.

Each call runs in a separate process, under the tool `memcheck`, without torch's cache of memory, so that an access
outside a tensor is outside its allocation too. On a CPU the same calls run without the sanitizer. A figure counts the
reported errors; a call that fails raises.

    python -m benchmarks.gpu_sanitizer loss cuda      # the call of one process
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_branch import gpu_branch
from benchmarks.gpu_checks import Figure, NotRun, Setup, draw_problem, run_checks
from benchmarks.gpu_record import PhaseResult
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.log_prob import linear_log_prob
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, path_norms, tied_lookup
from tiewise.boundary.ops.soft_targets import linear_divergence

SANITIZER = "compute-sanitizer"
FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/extras/compute-sanitizer")
SECONDS = 120  # after which a call is an error; the sanitizer slows kernels down by a factor of ten and more
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
FINISHED = "call finished"


def call_loss(setup: Setup) -> None:
    """Compute a loss with all options, by both passes, in bf16 and fp32."""
    backends = ("tiewise", "chunked")
    for dtype in (torch.float32, torch.bfloat16):
        (h, w, b), t = draw_problem(setup, dtype)
        h, w, b = (x.to(setup.device).requires_grad_() for x in (h, w, b))
        for backend in backends:
            options = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}
            linear_cross_entropy(h, w, t.to(setup.device), b, backend=backend, chunk=17, **options).backward()


def call_tied_step(setup: Setup) -> None:
    """Compute a tied step that records both paths, and their norms."""
    (_, w, _), t = draw_problem(setup, torch.float32)
    table, record, targets = w.to(setup.device).requires_grad_(), PathRecord(), t.to(setup.device)
    for part in targets.split(-(-setup.n // 10)):  # so many micro-batches that the record merges its pieces
        rows, handed = tied_lookup(table, part.clamp(min=0), LookupOptions(record=record))
        linear_cross_entropy(torch.tanh(rows), handed, part).backward()
    path_norms(table.grad, record)


def call_statistics(setup: Setup) -> None:
    """Compute log-probabilities with entropies, and a divergence."""
    (h, w, b), t = draw_problem(setup, torch.bfloat16)
    h, w, b = (x.to(setup.device).requires_grad_() for x in (h, w, b))
    targets = t.to(setup.device)
    log_p, entropy = linear_log_prob(h, w, targets, b, entropy=True)
    (log_p.sum() + entropy.sum()).backward()
    linear_divergence(h, w, h.detach(), w.detach(), targets, beta=0.5).backward()


CALLS: dict[str, Callable[[Setup], None]] = {
    "loss": call_loss,
    "tied_step": call_tied_step,
    "statistics": call_statistics,
}


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, from PATH or CUDA's usual folders."""
    search = os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
    return shutil.which(SANITIZER, path=search)


def run_call(setup: Setup, name: str) -> list[Figure]:
    """Run one call in a process, under the sanitizer on a GPU, and count the errors."""
    command = [sys.executable, "-m", "benchmarks.gpu_sanitizer", name, setup.device]
    if setup.on_gpu:
        sanitizer = find_sanitizer()
        if sanitizer is None:
            raise NotRun(f"needs {SANITIZER}, which is part of the CUDA toolkit")
        command = [sanitizer, "--tool", "memcheck", "--target-processes", "all", *command]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    output = process.stdout + process.stderr
    if process.returncode or FINISHED not in output:
        last_line = (output.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"exit code {process.returncode}: {last_line}")
    return [Figure("errors", count_errors(output, is_sanitized=setup.on_gpu), 0)]


def count_errors(output: str, *, is_sanitized: bool) -> float:
    """Return the number of errors that the sanitizer reports; nan if it reports none of its counts."""
    counts = [int(count) for count in SUMMARY.findall(output)]
    if is_sanitized and not counts:
        return float("nan")
    return float(sum(counts))


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Run the calls that the file does not have as right, until the deadline."""
    return run_checks({name: partial(run_call, name=name) for name in CALLS}, setup, path, deadline)


def main() -> None:
    """Run the call that the command line names, on the device that it names."""
    name, device = sys.argv[1:]
    setup = Setup(device, 40, 61, 8)
    with nullcontext() if setup.on_gpu else gpu_branch():
        CALLS[name](setup)
    if setup.on_gpu:
        torch.cuda.synchronize()
    print(FINISHED)


if __name__ == "__main__":
    main()
