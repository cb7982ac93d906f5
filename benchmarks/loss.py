"""The loss operator and the tied step beside their peers: one run, alternated rounds, the error beside the time.

python -m benchmarks.loss [N V D]            times and errors
python -m benchmarks.loss memory NAME N V D  peak memory of one candidate, in a process of its own
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from benchmarks.measure import alternate, in_fresh_process, peak_megabytes, ratio, spread
from tiewise.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.ops.path_gradient import LookupOptions, PathRecord, path_norms, tied_lookup

SHAPE = (2048, 50304, 768)
CHUNKS = (256, 512, 1024)


def plain(features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy as most code computes it, in the dtype given."""
    return F.cross_entropy(F.linear(features, weight), targets)


class Problem:
    """Inputs, and every candidate as a function that leaves gradients behind."""

    def __init__(self, n: int, v: int, d: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.h = (torch.randn(n, d, generator=g)).requires_grad_()
        self.w = (torch.randn(v, d, generator=g) * 0.02).requires_grad_()
        ranks = torch.arange(1, v + 1, dtype=torch.float64)
        self.ids = torch.multinomial(1 / ranks, n, replacement=True, generator=g)  # Zipf, as tokens are
        self.t = torch.randint(0, v, (n,), generator=g)
        self.compiled = torch.compile(plain)
        self.record = PathRecord()
        self.buffers = (torch.empty(n, v), torch.empty(n, d), torch.empty(v, d))

    def _fresh(self) -> None:
        self.h.grad = self.w.grad = None

    def floor(self) -> None:
        z, dh, dw = self.buffers
        with torch.no_grad():
            torch.mm(self.h, self.w.T, out=z)
            torch.mm(z, self.w, out=dh)
            torch.mm(z.T, self.h, out=dw)

    def tiewise(self) -> torch.Tensor:
        self._fresh()
        loss = linear_cross_entropy(self.h, self.w, self.t)
        loss.backward()
        return loss.detach()

    def eager(self) -> torch.Tensor:
        self._fresh()
        loss = plain(self.h, self.w, self.t)
        loss.backward()
        return loss.detach()

    def compile(self) -> torch.Tensor:
        self._fresh()
        loss = self.compiled(self.h, self.w, self.t)
        loss.backward()
        return loss.detach()

    def native(self, chunk: int) -> torch.Tensor:
        self._fresh()
        options = torch.nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=chunk)
        loss = F.linear_cross_entropy(self.h, self.w, self.t, options=options)
        loss.backward()
        return loss.detach()

    def tied_eager(self) -> torch.Tensor:
        self._fresh()
        loss = plain(F.embedding(self.ids, self.w), self.w, self.t)
        loss.backward()
        return loss.detach()

    def tied(self, track: bool = False) -> torch.Tensor:
        self._fresh()
        rows, after = tied_lookup(self.w, self.ids, LookupOptions(record=self.record if track else None))
        loss = linear_cross_entropy(rows, after, self.t)
        loss.backward()
        if track:
            path_norms(self.w.grad, self.record)  # type: ignore[arg-type]
            self.record.clear()
        return loss.detach()


def candidates(p: Problem) -> dict[str, object]:
    """Name -> function; `floor` is the three bare products of any exact method."""
    native = {f"F.linear_cross_entropy, {c} rows": (lambda c=c: p.native(c)) for c in CHUNKS}
    loss = {"three bare products": p.floor, "tiewise": p.tiewise, "plain": p.eager, "torch.compile(plain)": p.compile}
    step = {"tied step, plain": p.tied_eager, "tied step, tiewise": p.tied, "tied step, tracked": lambda: p.tied(True)}
    return {**loss, **native, **step}


def errors(p: Problem) -> dict[str, tuple[float, float]]:
    """Relative error of (loss, weight gradient) against fp64, of the losses that are exact by design."""
    h, w = (x.detach().double().requires_grad_() for x in (p.h, p.w))
    truth = oracle(h, w, p.t)
    truth.backward()
    found = {}
    for name, run in (("tiewise", p.tiewise), ("plain", p.eager), ("torch.compile(plain)", p.compile)):
        loss = run()
        gradient = (p.w.grad.double() - w.grad).norm() / w.grad.norm()  # type: ignore[union-attr]
        found[name] = (abs(loss.item() - truth.item()) / truth.item(), gradient.item())
    loss = p.native(512)
    gradient = (p.w.grad.double() - w.grad).norm() / w.grad.norm()  # type: ignore[union-attr]
    found["F.linear_cross_entropy, 512 rows"] = (abs(loss.item() - truth.item()) / truth.item(), gradient.item())
    return found


def table(n: int, v: int, d: int, rounds: int) -> str:
    """Return the Markdown table of one shape."""
    p = Problem(n, v, d)
    wrong = errors(p)
    times = alternate(candidates(p), rounds)  # type: ignore[arg-type]
    lines = [
        f"N = {n}, V = {v}, D = {d}, fp32, {torch.get_num_threads()} threads, {rounds} alternated rounds",
        "",
        "| | ms, median (range) | × three bare products | loss error | gradient error | extra memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in times.items():
        loss_error, gradient_error = (f"{e:.1e}" for e in wrong[name]) if name in wrong else ("", "")
        memory = in_fresh_process("benchmarks.loss", "memory", name, str(n), str(v), str(d))
        lines.append(
            f"| {name} | {spread(values)} | {ratio(times, name, 'three bare products'):.2f} "
            f"| {loss_error} | {gradient_error} | {memory} |"
        )
    speedup = ratio(times, "tied step, plain", "tied step, tiewise")
    tracking = ratio(times, "tied step, tracked", "tied step, tiewise")
    best = min((f"F.linear_cross_entropy, {c} rows" for c in CHUNKS), key=lambda name: ratio(times, name, "tiewise"))
    lines += [
        "",
        f"- tied step, plain / tiewise: {speedup:.2f}",
        f"- tracking both paths: {100 * (tracking - 1):+.1f} % of the tied step",
        f"- tiewise / torch.compile(plain): {ratio(times, 'tiewise', 'torch.compile(plain)'):.2f}",
        f"- tiewise / {best}: {ratio(times, 'tiewise', best):.2f}",
    ]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["memory"]:
        name, *shape = sys.argv[2:]
        p = Problem(*map(int, shape))
        if name == "three bare products":
            print("")
            return
        p.buffers = ()  # type: ignore[assignment]
        small = Problem(8, 64, 8)
        candidates(small)[name]()  # type: ignore[operator]  # libraries and kernels are loaded before memory is counted
        print(f"{peak_megabytes(candidates(p)[name]):.0f}")  # type: ignore[arg-type]
        return
    shape = tuple(map(int, sys.argv[1:4])) or SHAPE
    print(table(*shape, rounds=5))  # type: ignore[misc]


if __name__ == "__main__":
    main()
