"""The loss and the tied step beside their peers: one process per shape, alternated rounds, errors beside times.

python -m benchmarks.loss [N V D] [--kinds fp32 bf16] [--rows NAME …] [--rounds 7] [--only times|memory]

Without a shape all of `EVERYWHERE`, each in a process of its own: peers and memory at the first three. Every row
(`loss_rows.py`) has the bare three matrix products measured in the same rounds, and a big square product and a read of
memory beside them, so that a row can be measured again by itself (`--rows 'tied step*'`). Rows are kept in
`benchmarks/results/loss/INSTRUCTIONS-NxVxD.json`, and `docs/performance.md` is written anew from all of them.
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
from benchmarks.measure import alternate, in_fresh_process, peak_megabytes
from benchmarks.performance import PRODUCTS, READ, SQUARE
from tiewise.training.compare import environment

ROUNDS = 7, 4  # with peers, without
ROWS_SEEN, WORDS_SEEN = 256, 4096  # of the gradients of features and table, evenly spread, whose errors are measured

# What each must equal, in fp64 of the rounded inputs.


@dataclass(frozen=True)
class Truth:
    """A mean loss, those of the tokens [N], and some rows of both gradients."""

    each: Tensor
    dh: Tensor
    dw: Tensor


def some(rows: int, most: int) -> Tensor:
    """Every k-th of `rows` rows: the errors of gradients are measured at these."""
    return torch.arange(0, rows, max(1, rows // most))


def losses(p: Problem, name: str, z: Tensor, part: Tensor) -> Tensor:
    """Losses [n] of the tokens `part` from their logits [n, V]; a `policy` has its entropy in them."""
    log_q = z.log_softmax(1)
    if name in ("kl", "jsd"):
        h, w = (x.double() for x in p.teacher)
        log_p = (h[part] @ w.T).log_softmax(1)
        m = torch.logaddexp(log_p, log_q) - math.log(2)
        pairs = [(log_p, log_q)] if name == "kl" else [(log_p, m), (log_q, m)]
        return sum(a.exp().mul(a - b).sum(1) for a, b in pairs) / len(pairs)  # type: ignore[return-value]
    nll = -log_q.gather(1, p.t[part, None])[:, 0]
    return nll + ENTROPY * (log_q.exp() * log_q).sum(1) if name == "policy" else nll


def truth(p: Problem, name: str) -> Truth:
    """What `losses` and autograd make of it; of a `tied` table the gradient has both paths."""
    n, v, _ = p.shape
    w = p.w.double()
    h = w[p.ids] if name == "tied" else p.h.double()
    rows, words = some(n, ROWS_SEEN), some(v, WORDS_SEEN)
    each, dh, dw = h.new_empty(n), torch.zeros_like(h), h.new_zeros(len(words), h.shape[1])
    for part in torch.arange(n).split(256):
        z = (h[part] @ w.T).requires_grad_()
        found = losses(p, name, z, part)
        each[part] = found.detach()
        (of_logits,) = torch.autograd.grad(found.sum() / n, z)
        dw += of_logits[:, words].T @ h[part]
        wanted = torch.ones_like(part, dtype=torch.bool) if name == "tied" else torch.isin(part, rows)
        dh[part[wanted]] = of_logits[wanted] @ w
    if name == "tied":
        dw += torch.zeros_like(w).index_add_(0, p.ids, dh)[words]
    return Truth(each, dh[rows], dw)


def errors(found: tuple[Any, Any, Any], truth: Truth) -> dict[str, float]:
    """Relative errors of loss and gradients; of losses by token also the worst, in nats."""
    loss, dh, dw = (None if x is None else torch.from_dlpack(x).double() for x in found)
    mean = truth.each.mean()
    wrong = {"loss": float(abs(loss.mean() - mean) / mean)}
    if loss.dim():
        wrong["worst token"] = float((loss - truth.each).abs().max())
    for name, got, wanted, most in (("features", dh, truth.dh, ROWS_SEEN), ("table", dw, truth.dw, WORDS_SEEN)):
        if got is not None:
            wrong[name] = float((got[some(len(got), most)] - wanted).norm() / wanted.norm())
    return {name: float(f"{value:.2g}") for name, value in wrong.items()}


# Measuring


def instructions() -> str:
    """The instruction set that the figures are kept under: the widest that matters for the products."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text(encoding="utf-8").split() if cpu.exists() else []
    known = {"amx_bf16": "amx", "avx512_bf16": "avx512_bf16", "avx512f": "avx512", "avx2": "avx2"}
    return next((name for flag, name in known.items() if flag in flags), platform.machine())


def measure(shape: list[int], kind: str, names: list[str], rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Times of some rows in alternated rounds, with the machine's own, and the errors of an uncounted first round.

    A row whose rounds would take the whole beyond `seconds` is run once: `names` begin with what matters most.
    """
    p, truths, found, steps, planned = Problem(*shape, KINDS[kind]), {}, {}, {}, 0.0
    for name in dict.fromkeys([SQUARE, READ, PRODUCTS, *names]):
        row = ROWS[name]
        if row.make is None:
            found[name] = {"missing": "not installed"}
            continue
        step = row.make(p)
        start = time.perf_counter()
        result = step()
        each = time.perf_counter() - start
        if row.truth:
            truths[row.truth] = truths.get(row.truth) or truth(p, row.truth)
            found[name] = {"error": errors(result, truths[row.truth])}
        del result
        if planned + (rounds + 1) * each > seconds:  # which may be for the time that compiling took
            start = time.perf_counter()
            step()
            each = time.perf_counter() - start
        if row.truth and planned + (rounds + 1) * each > seconds:
            found[name]["missing"] = f"{each:.1f} s, once"
            continue
        steps[name], planned = step, planned + (rounds + 1) * each
    env, times = environment(), alternate(steps, rounds, uncounted=0)
    common = {
        "products": _rounded(times[PRODUCTS]),
        "run": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "machine": f"{env['processor']}, {env['threads']} threads, torch {env['torch']}",
    }
    for name, values in times.items():
        found[name] = found.get(name, {}) | {"seconds": _rounded(values)} | common
    return found


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def peak(shape: list[int], kind: str, name: str) -> float:
    """Megabytes of one row, in a process of its own; libraries and kernels are loaded, and products chosen, before."""
    ROWS[name].make(Problem(512, 2048, 256, KINDS[kind]))()  # large enough for both
    return peak_megabytes(ROWS[name].make(Problem(*shape, KINDS[kind])))


def keep(shape: list[int], kind: str, found: dict[str, dict[str, Any]]) -> None:
    """Write what was found into the file of this shape and instruction set, beside what other runs left there."""
    path = performance.RESULTS / f"{instructions()}-{'x'.join(map(str, shape))}.json"
    rows = (
        {(row["kind"], row["name"]): row for row in json.loads(path.read_text(encoding="utf-8"))}
        if path.exists()
        else {}
    )
    for name, row in found.items():
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
            in_fresh_process("benchmarks.loss", *map(str, shape), *sys.argv[1:])
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
            keep(args.shape, kind, measure(args.shape, kind, names, rounds, args.seconds))
        if args.only == "memory" or (with_peers and not args.only):
            forks = multiprocessing.get_context("forkserver")  # from a process that has imported and computed nothing
            forks.set_forkserver_preload(["benchmarks.loss_rows", "tiewise.training.compare"])
            for name in (name for name in names if ROWS[name].make and ROWS[name].truth):
                with forks.Pool(1) as pool:
                    keep(args.shape, kind, {name: {"megabytes": pool.apply(peak, (args.shape, kind, name))}})
    performance.write()


if __name__ == "__main__":
    main()
