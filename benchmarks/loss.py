"""Times, memory and errors of the loss and the tied step, compared with their peers.

python -m benchmarks.loss [N V D] [--kinds fp32 bf16] [--rows NAME …] [--rounds 7] [--only times|memory]

Without a shape it measures all of `EVERYWHERE`, each in a separate process; peers and memory at the first three only.
Rows (`loss_rows.py`) alternate with the bare three matrix products, with a big square product and with a read of
memory, so a row can be measured again alone (`--rows 'tied step*'`). Rows are stored in
`benchmarks/results/loss/INSTRUCTIONS-NxVxD.json`, and `docs/dev/performance.md` is rewritten from all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import performance
from benchmarks.loss_rows import ENTROPY, EVERYWHERE, KINDS, PEERS, ROWS, Problem
from benchmarks.measure import alternate, measure_peak_megabytes, run_in_fresh_process
from benchmarks.performance import PRODUCTS, READ, SQUARE
from tiewise.training.compare import environment

ROUNDS = 7, 4  # at shapes with peers; at shapes without
SAMPLED_TOKENS, SAMPLED_WORDS = 256, 4096  # sampled rows of the gradients of features and table

# True results: fp64 for the same, rounded inputs.


@dataclass(frozen=True)
class Truth:
    """Losses by token [N], and sampled rows of both gradients."""

    token_losses: Tensor
    dh: Tensor
    dw: Tensor


def sample_rows(rows: int, most: int) -> Tensor:
    """Return the indices of about `most` evenly spaced rows, where gradients are compared."""
    return torch.arange(0, rows, max(1, rows // most))


def compute_token_losses(problem: Problem, name: str, z: Tensor, part: Tensor) -> Tensor:
    """Return the losses [n] of the tokens `part` from their logits z [n, V].

    `name` is a truth of `ROWS`; the losses of `policy` contain the entropy.
    """
    log_q = z.log_softmax(1)
    if name in ("kl", "jsd"):
        h, w = (x.double() for x in problem.teacher)
        log_p = (h[part] @ w.T).log_softmax(1)
        m = torch.logaddexp(log_p, log_q) - math.log(2)
        pairs = [(log_p, log_q)] if name == "kl" else [(log_p, m), (log_q, m)]
        return sum(a.exp().mul(a - b).sum(1) for a, b in pairs) / len(pairs)  # type: ignore[return-value]
    nll = -log_q.gather(1, problem.t[part, None])[:, 0]
    return nll + ENTROPY * (log_q.exp() * log_q).sum(1) if name == "policy" else nll


def compute_truth(problem: Problem, name: str) -> Truth:
    """Compute true losses and gradients with autograd in fp64.

    For `tied`, the gradient of the table is the sum of both paths.
    """
    n, v, _ = problem.shape
    w = problem.w.double()
    h = w[problem.ids] if name == "tied" else problem.h.double()
    rows, words = sample_rows(n, SAMPLED_TOKENS), sample_rows(v, SAMPLED_WORDS)
    all_losses, dh, dw = h.new_empty(n), torch.zeros_like(h), h.new_zeros(len(words), h.shape[1])
    for part in torch.arange(n).split(256):
        z = (h[part] @ w.T).requires_grad_()
        token_losses = compute_token_losses(problem, name, z, part)
        all_losses[part] = token_losses.detach()
        (dz,) = torch.autograd.grad(token_losses.sum() / n, z)
        dw += dz[:, words].T @ h[part]
        is_needed = torch.ones_like(part, dtype=torch.bool) if name == "tied" else torch.isin(part, rows)
        dh[part[is_needed]] = dz[is_needed] @ w
    if name == "tied":
        dw += torch.zeros_like(w).index_add_(0, problem.ids, dh)[words]
    return Truth(all_losses, dh[rows], dw)


def compute_errors(result: tuple[Any, Any, Any], truth: Truth) -> dict[str, float]:
    """Return relative errors of loss and gradients, and the worst token's error in nats."""
    loss, dh, dw = (None if x is None else torch.from_dlpack(x).double() for x in result)
    mean = truth.token_losses.mean()
    errors = {"loss": float(abs(loss.mean() - mean) / mean)}
    if loss.dim():
        errors["worst token"] = float((loss - truth.token_losses).abs().max())
    for name, value, expected, most in (
        ("features", dh, truth.dh, SAMPLED_TOKENS),
        ("table", dw, truth.dw, SAMPLED_WORDS),
    ):
        if value is not None:
            errors[name] = float((value[sample_rows(len(value), most)] - expected).norm() / expected.norm())
    return {name: float(f"{value:.2g}") for name, value in errors.items()}


# Measuring


def detect_instruction_set() -> str:
    """Return the widest instruction set of this CPU that speeds up matrix products."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text(encoding="utf-8").split() if cpu.exists() else []
    names = {"amx_bf16": "amx", "avx512_bf16": "avx512_bf16", "avx512f": "avx512", "avx2": "avx2"}
    return next((name for flag, name in names.items() if flag in flags), platform.machine())


def measure(shape: list[int], kind: str, names: list[str], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Measure rows in alternated rounds, and their errors in a first round that is not timed.

    If its rounds would take the sum beyond `seconds`, a row runs once; `names` are therefore in order of importance.
    """
    problem, truths, results, steps, planned_seconds = Problem(*shape, KINDS[kind]), {}, {}, {}, 0.0
    for name in dict.fromkeys([SQUARE, READ, PRODUCTS, *names]):
        row = ROWS[name]
        if row.make is None:
            results[name] = {"missing": "not installed"}
            continue
        step = row.make(problem)
        start = time.perf_counter()
        result = step()
        step_seconds = time.perf_counter() - start
        if row.truth:
            truths[row.truth] = truths.get(row.truth) or compute_truth(problem, row.truth)
            results[name] = {"error": compute_errors(result, truths[row.truth])}
        del result
        if planned_seconds + (rounds + 1) * step_seconds > seconds:  # the first call may include compilation
            start = time.perf_counter()
            step()
            step_seconds = time.perf_counter() - start
        if row.truth and planned_seconds + (rounds + 1) * step_seconds > seconds:
            results[name]["missing"] = f"{step_seconds:.1f} s, once"
            continue
        steps[name], planned_seconds = step, planned_seconds + (rounds + 1) * step_seconds
    env, times = environment(), alternate(steps, rounds, uncounted=0)
    common = {
        "products": _rounded(times[PRODUCTS]),
        "run": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": f"{env['processor']}, {env['threads']} threads, torch {env['torch']}",
    }
    for name, values in times.items():
        results[name] = results.get(name, {}) | {"seconds": _rounded(values)} | common
    return results


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def measure_peak(shape: list[int], kind: str, name: str) -> float:
    """Return the peak megabytes of one row; call it in a fresh process.

    A small step first loads libraries and kernels and chooses products, so they do not count.
    """
    ROWS[name].make(Problem(512, 2048, 256, KINDS[kind]))()  # large enough to load kernels and to choose products
    return measure_peak_megabytes(ROWS[name].make(Problem(*shape, KINDS[kind])))


def store_results(shape: list[int], kind: str, results: dict[str, dict[str, Any]]) -> None:
    """Merge results into the file of this shape and instruction set."""
    path = performance.RESULTS / f"{detect_instruction_set()}-{'x'.join(map(str, shape))}.json"
    rows = (
        {(row["kind"], row["name"]): row for row in json.loads(path.read_text(encoding="utf-8"))}
        if path.exists()
        else {}
    )
    for name, row in results.items():
        old = rows.get((kind, name), {"kind": kind, "name": name})
        if "missing" in row:
            rows[kind, name] = row | old
        else:
            rows[kind, name] = {key: value for key, value in old.items() if key != "missing"} | row
    order = [(kind, name) for kind in KINDS for name in ROWS if (kind, name) in rows]
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(rows[key], ensure_ascii=False) for key in order]  # one row, one line
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main() -> None:
    """Measure the requested shapes and rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=int, nargs="*", help="N V D; without it every shape of the page")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="rows by name or pattern; else those of the shape")
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS[0]}; {ROUNDS[1]} at the shapes without peers")
    parser.add_argument("--seconds", type=float, default=300.0, help="most that the rounds of one type may take")
    parser.add_argument("--only", choices=("times", "memory"))
    args = parser.parse_args()
    if not args.shape:
        for shape in EVERYWHERE:
            run_in_fresh_process("benchmarks.loss", *map(str, shape), *sys.argv[1:])
        return
    shape = tuple(args.shape)
    with_peers = shape in PEERS or shape not in EVERYWHERE
    for kind in args.kinds:
        names = [
            name
            for name, row in ROWS.items()
            if kind in row.kinds
            and (
                any(fnmatchcase(name, pattern) for pattern in args.rows)
                if args.rows
                else shape in row.shapes or shape not in EVERYWHERE
            )
        ]
        if args.only != "memory":
            rounds = args.rounds or ROUNDS[not with_peers]
            store_results(args.shape, kind, measure(args.shape, kind, names, rounds, args.seconds))
        if args.only == "memory" or (with_peers and not args.only):
            context = multiprocessing.get_context("forkserver")  # its server process has computed nothing
            context.set_forkserver_preload(["benchmarks.loss_rows", "tiewise.training.compare"])
            for name in (name for name in names if ROWS[name].make and ROWS[name].truth):
                with context.Pool(1) as pool:
                    store_results(
                        args.shape, kind, {name: {"megabytes": pool.apply(measure_peak, (args.shape, kind, name))}}
                    )
    performance.write_page()


if __name__ == "__main__":
    main()
