"""All checks and measurements of the loss on a GPU, in phases of decreasing value.

python -m benchmarks.gpu --out FOLDER [--minutes 8] [--phases checks,times] [--device cuda|cpu]

    checks     losses, gradients, memory, synchronisations and installed models against fp64 (`gpu_checks`)
    install    twelve families of models, installed and plain, over 20 steps (`gpu_install`)
    times      time, memory and error of the loss and its peers (`gpu_times`)
    memory     peak memory of a training step, against that of `plan` (`gpu_memory`)
    compare    three arms with three seeds at 30 million parameters, and short runs against the CPU (`gpu_compare`)
    nccl       collectives at world size 1: DDP, FSDP2, divided tables, saves (`gpu_ranks`)
    sanitizer  one call of each operation under compute-sanitizer (`gpu_sanitizer`)
    rows       times of the parts of one step (`gpu_rows`)

It needs torch, triton and transformers, but no network, and first prints the versions of all packages; Liger and Cut
Cross-Entropy are optional (`gpu_wheels.txt`). PYTHONPATH=src imports tiewise from a checkout. Each phase writes
FOLDER/PHASE.json after each of its results. A later call with the same folder continues; a phase starts anew if card,
versions or sources differ.
After `--minutes` no further result is started. `--device cpu` runs every phase on small problems, with the code path of
a GPU emulated (`gpu_branch`); times mean nothing then. To publish the figures, copy the files to
`benchmarks/results/gpu` as PHASE-CARD.json, and run `python -m benchmarks.performance`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import gpu_checks  # first: it names missing packages

import torch  # isort: skip

from benchmarks import (
    gpu_compare,
    gpu_install,
    gpu_memory,
    gpu_packages,
    gpu_ranks,
    gpu_rows,
    gpu_sanitizer,
    gpu_times,
)
from benchmarks.gpu_checks import Setup
from benchmarks.gpu_record import PhaseResult

Phase = Callable[[Setup, Path, float], PhaseResult]
PHASES: dict[str, Phase] = {
    "checks": gpu_checks.run_phase,
    "install": gpu_install.run_phase,
    "times": gpu_times.run_phase,
    "memory": gpu_memory.run_phase,
    "compare": gpu_compare.run_phase,
    "nccl": gpu_ranks.run_phase,
    "sanitizer": gpu_sanitizer.run_phase,
    "rows": gpu_rows.run_phase,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the phases and return the exit code.

    0: all figures are right; 1: a figure is wrong; 2: torch sees no GPU, or a package is missing; 3: none is wrong, and
    the time was too short or a GPU did not run everything.
    """
    options = parse_arguments(arguments)
    refusal = check_machine(options.device)
    if refusal:
        print(f"benchmarks.gpu: {refusal}", file=sys.stderr)
        return 2
    if options.device == "cuda":
        torch.set_float32_matmul_precision("highest")  # it sets oneDNN's flag too, so not on a CPU
    setup = Setup("cuda", 777, 5003, 96) if options.device == "cuda" else Setup("cpu", 40, 61, 8)
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    results = []
    for name in options.phases:
        result = PHASES[name](setup, options.out / f"{name}.json", deadline)
        print(f"{name}: {result}", flush=True)
        results.append(result)
        if gpu_checks.is_context_dead(setup):
            print(f"the GPU's context is dead after {name}: call again to continue", file=sys.stderr)
            return 1
    return decide_exit_code(results, setup)


def check_machine(device: str) -> str:
    """Print the versions of the packages, and return why the phases cannot run here, or nothing."""
    on_gpu = device == "cuda"
    print(gpu_packages.format_table(gpu_packages.list_packages(on_gpu=on_gpu)), flush=True)
    if on_gpu and not torch.cuda.is_available():
        return "torch sees no GPU; --device cpu runs the phases small on the CPU"
    unfit = gpu_packages.find_unfit(on_gpu=on_gpu)
    return f"{', '.join(unfit)}: pip install them" if unfit else ""


def decide_exit_code(results: list[PhaseResult], setup: Setup) -> int:
    """Print how much was not run, and return the exit code; a CPU cannot run everything."""
    total = PhaseResult()
    for result in results:
        total.merge(result)
    print(f"in all: {len(total.wrong)} wrong, {len(total.not_run)} not run, {total.missing} not reached", flush=True)
    if total.wrong:
        return 1
    is_incomplete = total.missing > 0 or (setup.on_gpu and len(total.not_run) > 0)
    return 3 if is_incomplete else 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="after them, no further result is started")
    parser.add_argument("--phases", type=read_phases, default=list(PHASES), help="names, separated by commas")
    return parser.parse_args(arguments)


def read_phases(text: str) -> list[str]:
    """Return the names of phases in their order.

    Raises:
        argparse.ArgumentTypeError: an unknown name.
    """
    names = text.split(",")
    for name in names:
        if name not in PHASES:
            raise argparse.ArgumentTypeError(f"unknown phase {name!r}; choose from {', '.join(PHASES)}")
    return [name for name in PHASES if name in names]


if __name__ == "__main__":
    raise SystemExit(main())
