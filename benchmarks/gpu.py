"""Correctness of losses and `install` on a GPU against fp64 on the CPU: one JSON file, exit 1 on a wrong figure.

python -m benchmarks.gpu [--device cuda|cpu] [--out gpu.json]

Needs torch and transformers, no network, and tiewise by PYTHONPATH=src from a checkout; on a GPU at most four minutes.
With `--device cpu` the same checks run small, with CPU tensors on a GPU's branch (`benchmarks.gpu_branch`) where that
can be emulated; what needs a GPU is then listed as not run.

Each check is a function that returns figures: what was measured, its limit, and whether it is within it. A check that
raises is a wrong figure. The references are formulas in fp64 that share no code with the sweeps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

NEEDED = ("torch", "transformers", "numpy", "safetensors", "yaml", "filelock", "tiewise")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if MISSING:
    print(f"benchmarks.gpu: missing {', '.join(MISSING)}: pip install them; tiewise by PYTHONPATH=src", file=sys.stderr)
    raise SystemExit(2)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import tiewise  # noqa: E402
from benchmarks.gpu_branch import gpu_branch  # noqa: E402
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle  # noqa: E402
from tiewise.boundary.ops.log_prob import linear_log_prob  # noqa: E402
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, path_norms, tied_lookup  # noqa: E402
from tiewise.boundary.ops.soft_targets import linear_divergence  # noqa: E402
from tiewise.core.backends import CHUNK_ELEMENTS  # noqa: E402

# relative distance of a loss or gradient from fp64 of the same, rounded inputs
NEAR = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"softcap": 2.0},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05},
    {"class_weight": True},
    {"softcap": 3.0, "label_smoothing": 0.1, "class_weight": True, "z_loss": 0.01, "scale": 1.7},
]
FAMILIES = ("llama", "gpt2", "t5")
SEEDED = """
import sys, torch, tiewise
from benchmarks.gpu import family
model = family("gpt2")
torch.manual_seed(42)
queue = getattr(torch.cuda, "_lazy_seed_tracker", None)  # seeds that CUDA takes when it starts
queued = getattr(queue, "manual_seed_all_cb", None)
tiewise.install(model)
changed = getattr(queue, "manual_seed_all_cb", None) is not queued
drawn = [torch.rand(3, device=sys.argv[1]), torch.rand(3)]
torch.manual_seed(42)
wanted = [torch.rand(3, device=sys.argv[1]), torch.rand(3)]
print(changed + sum(int((x != y).sum()) for x, y in zip(drawn, wanted)))
"""


@dataclass(frozen=True)
class Figure:
    """One number that was measured, and the limit that it must not exceed; nan is beyond every limit."""

    name: str
    value: float
    limit: float

    @property
    def right(self) -> bool:
        """Whether the number is within its limit."""
        return self.value <= self.limit


@dataclass
class Outcome:
    """What one check found; `why` says why it was not run, or how it failed."""

    check: str
    state: str  # right, wrong, not run
    figures: list[Figure] = field(default_factory=list)
    why: str = ""
    seconds: float = 0.0


class NotRun(Exception):
    """A check that this machine cannot run, with the reason."""


@dataclass(frozen=True)
class Place:
    """The device, and the sizes of the problems: N tokens, V words, tables [V, E]."""

    device: str
    n: int
    v: int
    e: int

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU, and not its emulation."""
        return self.device != "cpu"

    def require_gpu(self) -> None:
        """Leave the check out on a CPU."""
        if not self.on_gpu:
            raise NotRun("needs a GPU")


# problems and distances


def problem(place: Place, kind: torch.dtype, spread: float = 0.5) -> tuple[list[Tensor], Tensor]:
    """Features [N, E], weight [V, E] and bias [V] in `kind`, and targets [N] with some ignored, on the CPU."""
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(place.n, place.e, generator=draw, dtype=torch.float64) * spread
    w = torch.randn(place.v, place.e, generator=draw, dtype=torch.float64) * (12 / place.e) ** 0.5
    b = torch.randn(place.v, generator=draw, dtype=torch.float64)
    t = torch.randint(0, place.v, (place.n,), generator=draw)
    t[::5] = -100
    return [x.to(kind) for x in (h, w, b)], t


def distance(found: Tensor, truth: Tensor) -> float:
    """Relative distance of `found` from `truth`."""
    found, truth = found.detach().cpu().double(), truth.detach().cpu().double()
    return float((found - truth).norm() / truth.norm().clamp(min=1e-30))


def differentiated(loss: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor | None) -> list[Tensor]:
    """Loss and gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = loss(*leaves)
    grads = torch.autograd.grad(found, leaves, upstream)
    return [found.detach(), *grads]


def compared(name: str, found: list[Tensor], truth: list[Tensor], limit: float) -> list[Figure]:
    """Distances of a loss and of its gradients."""
    names = ("loss", "features", "table", "bias")
    pairs = zip(names, found, truth, strict=False)
    return [Figure(f"{name}: {part}", distance(x, y), limit) for part, x, y in pairs]


def options_of(chosen: dict[str, Any], v: int) -> dict[str, Any]:
    """The options with a class weight [V] in place of True."""
    if "class_weight" not in chosen:
        return chosen
    return chosen | {"class_weight": torch.rand(v, generator=torch.Generator().manual_seed(7)) + 0.1}


def moved(options: dict[str, Any], device: str) -> dict[str, Any]:
    """The options with their tensors on the device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}


# the losses


def cross_entropy(place: Place) -> list[Figure]:
    """Every option, reduction and type, in one chunk and in several."""
    figures = []
    for kind, chosen, reduction in product(NEAR, OPTIONS, ("mean", "sum", "none")):
        inputs, t = problem(place, kind)
        options = options_of(chosen, place.v) | {"reduction": reduction}
        up = torch.linspace(-1, 2, place.n) if reduction == "none" else torch.tensor(0.7)
        wide = torch.float64 if kind == torch.float64 else torch.float32
        truth = differentiated(
            lambda h, w, b, t=t, options=options: oracle(h, w, t, b, **options),
            [x.double() for x in inputs],
            up.double(),
        )
        there, at = [x.to(place.device) for x in inputs], t.to(place.device)
        for chunk in (None, max(1, place.n // 3)) if reduction == "mean" else (None,):
            more = moved(options, place.device) | {"chunk": chunk}
            found = differentiated(
                lambda h, w, b, at=at, more=more: linear_cross_entropy(h, w, at, b, **more),
                there,
                up.to(place.device, wide),
            )
            name = f"{str(kind)[6:]} {reduction} {' '.join(chosen) or 'plain'}{' chunks' * bool(chunk)}"
            figures += compared(name, found, truth, NEAR[kind])
    return figures


def minus_infinity_and_none(place: Place) -> list[Figure]:
    """A target whose logit is −inf costs inf, with finite gradients; a batch that is ignored costs 0."""
    (h, w, b), t = problem(place, torch.float64)
    t = t.where(t != 0, 1)
    b[0] = -torch.inf
    t[1] = 0
    there = [x.to(place.device) for x in (h, w, b)]
    at = t.to(place.device)
    figures = []
    for options in ({}, {"z_loss": 0.01}):
        each = linear_cross_entropy(*there[:2], at, there[2], reduction="none", **options)
        truth = oracle(h, w, t, b, reduction="none", **options)
        others = torch.arange(place.n) != 1
        figures.append(Figure(f"−inf {options}: inf", float(each[1].item() != math.inf), 0))
        figures.append(Figure(f"−inf {options}: others", distance(each.cpu()[others], truth[others]), 1e-11))
        grads = differentiated(
            lambda h, w, b, options=options: linear_cross_entropy(h, w, at, b, **options), there, None
        )[1:]
        figures.append(Figure(f"−inf {options}: gradients", float(not all(x.isfinite().all() for x in grads)), 0))
    for reduction in ("mean", "sum"):
        none = torch.full_like(at, -100)
        found = differentiated(
            lambda h, w, b, none=none, reduction=reduction: linear_cross_entropy(h, w, none, b, reduction=reduction),
            there,
            None,
        )
        figures.append(Figure(f"all ignored, {reduction}", max(x.abs().max().item() for x in found), 0))
    return figures


def fp32_logits(place: Place) -> list[Figure]:
    """N4: logits of bf16 and fp16 are summed and kept in fp32: no token is further than 0.001 nats from fp64."""
    figures = []
    for kind in (torch.bfloat16, torch.float16):
        (h, w, _), t = problem(place, kind, spread=2.0)
        truth = oracle(h, w, t, reduction="none")
        for logits in (None, "fp32"):
            got = linear_cross_entropy(
                h.to(place.device), w.to(place.device), t.to(place.device), reduction="none", logits=logits
            )
            worst = (got.cpu().double() - truth).abs().max().item()
            figures.append(Figure(f"{str(kind)[6:]} logits={logits}: worst token, nats", worst, 1e-3))
    return figures


def wide_products(place: Place) -> list[Figure]:
    """N4: `torch.mm` writes fp32 sums of narrow products into a part of a buffer."""
    place.require_gpu()
    figures = []
    for kind in (torch.bfloat16, torch.float16):
        (h, w, _), _ = problem(place, kind)
        h, w = h.to(place.device), w.to(place.device)
        buffer = torch.full((place.n + 3, place.v), 7.0, device=place.device)
        torch.mm(h, w.T, out_dtype=torch.float32, out=buffer[: place.n])
        figures.append(Figure(f"{str(kind)[6:]}", distance(buffer[: place.n], h.double() @ w.double().T), 1e-5))
        figures.append(Figure(f"{str(kind)[6:]}: rows behind it", float((buffer[place.n :] != 7).sum()), 0))
    return figures


def autocast(place: Place) -> list[Figure]:
    """Under autocast a loss of fp32 inputs multiplies in bf16, and gives fp32 gradients."""
    inputs, t = problem(place, torch.float32)
    truth = differentiated(lambda h, w, b: oracle(h, w, t, b), [x.double() for x in inputs], None)
    there, at = [x.to(place.device) for x in inputs], t.to(place.device)
    with torch.autocast(place.device, torch.bfloat16):
        found = differentiated(lambda h, w, b: linear_cross_entropy(h, w, at, b), there, None)
    figures = compared("autocast", found, truth, NEAR[torch.bfloat16])
    return [*figures, Figure("types that are not fp32", sum(x.dtype != torch.float32 for x in found), 0)]


def log_probabilities(place: Place) -> list[Figure]:
    """Log-probabilities and entropies, with temperature and soft-cap, and their gradients together."""
    figures = []
    for kind, softcap in product(NEAR, (None, 5.0)):
        inputs, t = problem(place, kind)
        t = t.clamp(min=0)

        def plain(h: Tensor, w: Tensor, b: Tensor, t: Tensor = t, softcap: float | None = softcap) -> Tensor:
            z = F.linear(h, w, b)
            z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.7
            log_p = z.log_softmax(-1)
            return (log_p.gather(1, t[:, None])[:, 0] * -(log_p.exp() * log_p).sum(-1)).sum()

        def ours(h: Tensor, w: Tensor, b: Tensor, t: Tensor = t, softcap: float | None = softcap) -> Tensor:
            log_p, entropy = linear_log_prob(
                h, w, t.to(place.device), b, temperature=0.7, entropy=True, softcap=softcap, logits="fp32"
            )
            return (log_p * entropy).sum()

        truth = differentiated(plain, [x.double() for x in inputs], None)
        found = differentiated(ours, [x.to(place.device) for x in inputs], None)
        figures += compared(f"{str(kind)[6:]} softcap={softcap}", found, truth, 10 * NEAR[kind])
    return figures


def divergences(place: Place) -> list[Figure]:
    """KL, reverse KL and Jensen–Shannon divergence from a teacher of another width."""
    figures = []
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(place.n, 5, generator=draw, dtype=torch.float64)
    u = torch.randn(place.v, 5, generator=draw, dtype=torch.float64)
    for kind, beta, softcap in product(NEAR, (0.0, 0.5, 1.0), (None, 4.0)):
        inputs, t = problem(place, kind)
        teacher = [x.to(kind), u.to(kind)]

        def plain(
            h: Tensor, w: Tensor, b: Tensor, teacher: Any = teacher, beta: float = beta, cap: Any = softcap, t: Any = t
        ) -> Tensor:
            def log_softmax(z: Tensor) -> Tensor:
                return ((z if cap is None else cap * torch.tanh(z / cap)) / 1.3).log_softmax(-1)

            q, p = log_softmax(F.linear(h, w, b)), log_softmax(teacher[0].double() @ teacher[1].double().T)
            kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
            m = torch.logaddexp(p + math.log(max(beta, 1e-300)), q + math.log(max(1 - beta, 1e-300)))
            each = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
            valid = t != -100
            return each.where(valid, 0).sum() / valid.sum()

        there = [y.to(place.device) for y in teacher]

        def ours(
            h: Tensor, w: Tensor, b: Tensor, there: Any = there, beta: float = beta, cap: Any = softcap, t: Any = t
        ) -> Tensor:
            return linear_divergence(
                h, w, *there, t.to(place.device), b, beta=beta, temperature=1.3, softcap=cap, logits="fp32"
            )

        truth = differentiated(plain, [y.double() for y in inputs], None)
        found = differentiated(ours, [y.to(place.device) for y in inputs], None)
        name = f"{str(kind)[6:]} beta={beta} softcap={softcap}"
        figures += compared(name, found, truth, 10 * NEAR[kind])
    return figures


def tied_steps(place: Place) -> list[Figure]:
    """Both gradients of a tied table in one buffer, their norms by path, and a gradient that stands (`into`)."""
    figures = []
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        (_, w, _), t = problem(place, kind)
        t = t.clamp(min=0)
        ids, body = t.roll(1), torch.linspace(-1, 1, place.e * place.e, dtype=torch.float64).view(place.e, place.e)
        a, b = (w.double().clone().requires_grad_() for _ in "ab")
        F.cross_entropy(torch.tanh(F.embedding(ids, a) @ body.to(kind).double()) @ b.T, t).backward()
        total = a.grad + b.grad
        table, record = w.clone().to(place.device).requires_grad_(), PathRecord()
        body, near = body.to(place.device, kind), NEAR[kind]
        rows, after = tied_lookup(table, ids.to(place.device), LookupOptions(record=record))
        linear_cross_entropy(torch.tanh(rows @ body), after, t.to(place.device)).backward()
        figures.append(Figure(f"{str(kind)[6:]}: table", distance(table.grad, total), near))
        norms = path_norms(table.grad, record)
        figures.append(Figure(f"{str(kind)[6:]}: path A", abs(norms.a / a.grad.norm().item() - 1), near))
        figures.append(Figure(f"{str(kind)[6:]}: path B", abs(norms.b / b.grad.norm().item() - 1), near))
        elsewhere = PathRecord([tuple(x.cpu() for x in piece) for piece in record.pieces])
        apart = abs(path_norms(table.grad, elsewhere).b / norms.b - 1)
        figures.append(Figure(f"{str(kind)[6:]}: record on the CPU", apart, 1e-5))
        into = torch.zeros_like(table, dtype=torch.float64 if kind == torch.float64 else torch.float32)
        table.grad = None
        for part in torch.arange(place.n).split(-(-place.n // 2)):
            share = len(part) / place.n
            rows, after = tied_lookup(table, ids[part].to(place.device), LookupOptions(into=into))
            loss = linear_cross_entropy(
                torch.tanh(rows @ body), after, t[part].to(place.device), into=into, upstream=share
            )
            (loss * share).backward()
        figures.append(Figure(f"{str(kind)[6:]}: into", distance(into, total), near))
    return figures


# N3, N5, N6


def other_kernels(place: Place) -> list[Figure]:
    """N3: Liger and Cut Cross-Entropy, where they are installed in a tested version, by token and summed."""
    place.require_gpu()
    figures, reasons = [], []
    for name, kind, chosen in product(("liger", "cce"), (torch.float32, torch.bfloat16), ({}, {"softcap": 2.0})):
        (h, w, _), t = problem(place, kind)
        for reduction in ("mean", "none"):
            up = torch.linspace(-1, 2, place.n) if reduction == "none" else torch.tensor(0.7)
            options = chosen | {"reduction": reduction}
            truth = differentiated(
                lambda h, w, t=t, options=options: oracle(h, w, t, **options), [h.double(), w.double()], up.double()
            )
            try:
                found = differentiated(
                    lambda h, w, t=t, options=options, name=name: linear_cross_entropy(
                        h, w, t.to(place.device), backend=name, **options
                    ),
                    [h.to(place.device), w.to(place.device)],
                    up.to(place.device),
                )
            except tiewise.core.errors.UnsupportedError as error:
                reasons.append(str(error))
                continue
            figures += compared(f"{name} {str(kind)[6:]} {reduction} {chosen}", found, truth, NEAR[kind])
    if not figures:
        raise NotRun("; ".join(dict.fromkeys(reasons)))
    return figures


def memory(place: Place) -> list[Figure]:
    """N5: what a loss holds beside its inputs and gradients is within the budget of a chunk."""
    place.require_gpu()
    n, v, e = 8192, 32_000, 512
    figures = []
    for kind in (torch.float32, torch.bfloat16):
        h, x = (torch.randn(n, e, device=place.device, dtype=kind).mul_(0.1).requires_grad_() for _ in "ab")
        w, u = (torch.randn(v, e, device=place.device, dtype=kind).mul_(0.1).requires_grad_() for _ in "ab")
        t = torch.randint(0, v, (n,), device=place.device)
        losses: dict[str, Callable[[], Tensor]] = {
            "plain": lambda h=h, w=w, t=t: linear_cross_entropy(h, w, t),
            "softcap": lambda h=h, w=w, t=t: linear_cross_entropy(h, w, t, softcap=30.0, z_loss=1e-4),
            "log-probabilities": lambda h=h, w=w, t=t: sum(
                y.mean() for y in linear_log_prob(h, w, t, entropy=True, softcap=30.0)
            ),
            "divergence": lambda h=h, w=w, x=x, u=u: linear_divergence(h, w, x, u, softcap=30.0),
        }
        # both gradients in fp32 and once more in the type of the inputs; in a narrow type one product of table size
        kept = (n + v) * e * (4 + 2 * kind.itemsize)
        for name, loss in losses.items():
            for _ in range(2):
                h.grad = w.grad = None
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                loss().backward()
                torch.cuda.synchronize()
                held = torch.cuda.max_memory_allocated() - before
            budget = 4 * CHUNK_ELEMENTS["cuda"]
            figures.append(Figure(f"{str(kind)[6:]} {name}: MB", held / 1e6, (1.15 * budget + kept) / 1e6))
            figures.append(Figure(f"{str(kind)[6:]} {name}: of all logits", (held - kept) / (4 * n * v), 0.5))
    return figures


def steps_without_waiting(place: Place, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Losses and a tied step, forward and backward, that read no value from the device."""
    for kind in (torch.float32, torch.bfloat16):
        (h, w, b), t = problem(place, kind)
        h, w, b = (x.to(device).requires_grad_() for x in (h, w, b))
        t = t.to(device)
        weights = torch.ones(place.v, device=device)

        def tied(w: Tensor = w, t: Tensor = t) -> Tensor:
            rows, table = tied_lookup(w, t.clamp(min=0), LookupOptions(record=PathRecord()))
            return linear_cross_entropy(rows, table, t)

        losses: dict[str, Callable[[], Tensor]] = {
            "mean": lambda h=h, w=w, b=b, t=t: linear_cross_entropy(h, w, t, b),
            "none": lambda h=h, w=w, b=b, t=t: linear_cross_entropy(h, w, t, b, reduction="none").sum(),
            "options": lambda h=h, w=w, b=b, t=t, c=weights: linear_cross_entropy(
                h, w, t, b, softcap=3.0, z_loss=0.1, label_smoothing=0.1, class_weight=c
            ),
            "log-probabilities": lambda h=h, w=w, b=b, t=t: sum(
                x.sum() for x in linear_log_prob(h, w, t, b, entropy=True)
            ),
            "divergence": lambda h=h, w=w, t=t: linear_divergence(h, w, h.detach(), w.detach(), t),
            "tied step": tied,
        }
        for name, loss in losses.items():
            yield f"{str(kind)[6:]} {name}", lambda loss=loss: loss().backward()


def waits(step: Callable[[], None], on_gpu: bool) -> str:
    """Say where a step reads a value from the device; "" if it reads none."""
    if on_gpu:
        step()  # what is asked once
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def synchronisations(place: Place) -> list[Figure]:
    """N6: no loss waits for the GPU; on a CPU the same on meta tensors, of which no value can be read."""
    figures = []
    device = place.device if place.on_gpu else "meta"
    for name, step in steps_without_waiting(place, device):
        why = waits(step, place.on_gpu)
        figures.append(Figure(f"{name} {why}", float(bool(why)), 0))
    for name in FAMILIES:
        plain, installed = family(name).train(), family(name).train()
        tiewise.install(installed)
        both = [model.to(device) for model in (plain, installed)]
        given = batch(device)
        steps = [lambda model=model, given=given: model(**given).loss.backward() for model in both]
        if not waits(steps[0], place.on_gpu):  # GPT-2 reads a value by itself
            why = waits(steps[1], place.on_gpu)
            figures.append(Figure(f"installed {name} {why}", float(bool(why)), 0))
    return figures


def cuda_graph(place: Place) -> list[Figure]:
    """N6: a loss with its backward pass can be captured in a CUDA graph, and replayed with other numbers."""
    place.require_gpu()
    figures = []
    for kind in (torch.float32, torch.bfloat16):
        (h, w, _), t = problem(place, kind)
        h, w = (x.to(place.device).requires_grad_() for x in (h, w))
        t = t.to(place.device)

        def step(h: Tensor = h, w: Tensor = w, t: Tensor = t) -> list[Tensor]:
            loss = linear_cross_entropy(h, w, t, z_loss=1e-4)
            return [loss, *torch.autograd.grad(loss, (h, w))]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = step()
        with torch.no_grad():
            h.mul_(0.5)
            t.copy_(t.roll(3))
        graph.replay()
        replayed = [x.clone() for x in kept]
        figures += compared(f"{str(kind)[6:]} replay", replayed, step(), 1e-6)
    return figures


def compiled(place: Place) -> list[Figure]:
    """`torch.compile`, on a GPU with CUDA graphs (`reduce-overhead`): the same loss and gradients in one graph."""
    inputs, t = problem(place, torch.float32)
    inputs, t = [x.to(place.device) for x in inputs], t.to(place.device)

    def step(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(h * 2, w, t, b)

    how = {"mode": "reduce-overhead"} if place.on_gpu else {"backend": "aot_eager"}
    fast = torch.compile(step, fullgraph=True, **how)
    truth = differentiated(step, inputs, None)
    try:
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            found = differentiated(fast, inputs, None)
    except Exception as error:
        if "compiler" in str(error).lower() or "triton" in str(error).lower():
            raise NotRun(f"torch.compile does not work here: {str(error).splitlines()[0][:120]}") from None
        raise
    return compared("compiled", found, truth, NEAR[torch.float32])


# installed models


def family(name: str, **settings: Any) -> Any:
    """Build a small random model of a family, without dropout unless `settings` say otherwise."""
    import transformers as tr

    torch.manual_seed(1)
    sizes = {"vocab_size": 503, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "llama":
        config = tr.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            **sizes,
            **settings,
        )
        return tr.LlamaForCausalLM(config)
    if name == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = tr.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **sizes, **(none | settings))
        return tr.GPT2LMHeadModel(config)
    config = tr.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **(sizes | settings),
    )
    return tr.T5ForConditionalGeneration(config)


def batch(device: str) -> dict[str, Tensor]:
    """Token ids and labels, of which some are ignored."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 503, (4, 24), generator=draw)
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def trained(model: Any, device: str, steps: int = 3) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss and gradients of the first step, and the weights after some steps of SGD."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first, grads = math.nan, {}
    for step in range(steps):
        loss = model(**batch(device)).loss
        optimizer.zero_grad()
        loss.backward()
        if not step:
            first = loss.item()
            grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return first, grads, {name: p.detach() for name, p in model.named_parameters()}


def installed_families(place: Place) -> list[Figure]:
    """Three families installed against plain: loss, gradients and weights after three steps, in fp32 and bf16."""
    figures = []
    for name, kind in product(FAMILIES, (torch.float32, torch.bfloat16)):
        narrow = kind == torch.bfloat16
        truth = trained(family(name).to(kind).double(), "cpu")  # of the rounded weights
        runs = {}
        for way in ("plain", "installed"):
            model = family(name).to(kind).to(place.device)
            handle = tiewise.install(model) if way == "installed" else None
            runs[way] = trained(model, place.device)
            if handle is not None:
                figures.append(Figure(f"{name} {str(kind)[6:]}: fused losses missing", 3 - handle.counts.fused, 0))
        for what, at in (("gradient", 1), ("weights", 2)):
            errors = {}
            for way, run in runs.items():
                pairs = [(run[at][key], truth[at][key]) for key in truth[at]]
                errors[way] = max(distance(x, y) for x, y in pairs)
            limit = 1.5 * errors["plain"] + (1e-2 if narrow else 1e-5)
            figures.append(Figure(f"{name} {str(kind)[6:]}: {what}", errors["installed"], limit))
        losses = [abs(runs[way][0] / truth[0] - 1) for way in ("plain", "installed")]
        figures.append(Figure(f"{name} {str(kind)[6:]}: loss", losses[1], 1.5 * losses[0] + (2e-3 if narrow else 1e-5)))
    return figures


def outputs_by_config(place: Place) -> list[Figure]:
    """N1: a model whose config asks for hidden states returns as many, and the same, installed and after uninstall."""
    figures = []
    for name in FAMILIES:
        plain = family(name, output_hidden_states=True).to(place.device).eval()
        key = "decoder_hidden_states" if name == "t5" else "hidden_states"
        with torch.no_grad():
            wanted = plain(**batch(place.device))[key]
            handle = tiewise.install(plain)
            for when in ("installed", "uninstalled"):
                found = plain(**batch(place.device))[key]
                figures.append(Figure(f"{name}, {when}: hidden states", abs(len(found) - len(wanted)), 0))
                far = max(distance(x, y) for x, y in zip(found, wanted, strict=False))
                figures.append(Figure(f"{name}, {when}: numbers", far, 1e-5))
                if when == "installed":
                    handle.uninstall()
    return figures


def seeds(place: Place) -> list[Figure]:
    """N2: `install` before CUDA starts leaves the GPU's generator, and the CPU's, as they were seeded."""
    command = [sys.executable, "-c", SEEDED, place.device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return [Figure("seeds and numbers that differ after install", float(done.stdout.split()[-1]), 0)]


CHECKS: tuple[Callable[[Place], list[Figure]], ...] = (
    wide_products,
    fp32_logits,
    minus_infinity_and_none,
    cross_entropy,
    autocast,
    log_probabilities,
    divergences,
    tied_steps,
    synchronisations,
    memory,
    cuda_graph,
    installed_families,
    outputs_by_config,
    seeds,
    compiled,
    other_kernels,
)


def run(check: Callable[[Place], list[Figure]], place: Place) -> Outcome:
    """Run one check, on a CPU within a GPU's branch."""
    start = time.perf_counter()
    found = Outcome(check.__name__, "right")
    emulated = contextlib.nullcontext() if place.on_gpu or check is synchronisations else gpu_branch()
    try:
        with emulated:
            found.figures = check(place)
        if not found.figures or not all(one.right for one in found.figures):
            found.state = "wrong"
    except NotRun as reason:
        found.state, found.why = "not run", str(reason)
    except Exception as error:
        found.state, found.why = "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    found.seconds = round(time.perf_counter() - start, 2)
    return found


def context_is_dead(place: Place) -> bool:
    """Whether the GPU can run nothing more in this process."""
    if not place.on_gpu:
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def record_of(place: Place, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """What is written to the file."""
    import transformers

    checks = []
    for one in outcomes:
        figures = [asdict(figure) | {"right": figure.right} for figure in one.figures]
        checks.append(asdict(one) | {"figures": figures})
    return {
        "device": torch.cuda.get_device_name() if place.on_gpu else "cpu, a GPU's branch emulated",
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__},
        "seconds": round(seconds, 1),
        "checks": checks,
    }


def report(found: Outcome) -> str:
    """One line of a check, and one of each wrong figure."""
    wrong = [one for one in found.figures if not one.right]
    share = max((one.value / one.limit for one in found.figures if one.limit), default=0.0)
    figures = f"{len(found.figures)} figures, at most {share:.2f} of the limit" if found.figures else found.why
    lines = [f"{found.state:8} {found.check:24} {found.seconds:6.1f} s  {figures}"]
    lines += [f"           {one.name}: {one.value:.3g}, limit {one.limit:.3g}" for one in wrong[:12]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; 0 where every figure is right, 1 where one is wrong, 2 where the device is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="JSON file for all figures")
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: torch sees no GPU; --device cpu runs the checks small on the CPU", file=sys.stderr)
        return 2
    if asked.device == "cuda":
        torch.set_float32_matmul_precision("highest")  # also sets oneDNN's flag, which the CPU checks leave alone
    place = Place("cuda", 777, 5003, 96) if asked.device == "cuda" else Place("cpu", 40, 61, 8)
    start, outcomes = time.perf_counter(), []
    for check in CHECKS:
        outcomes.append(run(check, place))
        print(report(outcomes[-1]), flush=True)
        if context_is_dead(place):
            print(f"the GPU's context is dead after {check.__name__}: nothing more can run", file=sys.stderr)
            outcomes[-1].state = "wrong"
            break
    record = record_of(place, outcomes, time.perf_counter() - start)
    asked.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    states = [one.state for one in outcomes]
    counts = ", ".join(f"{states.count(name)} {name}" for name in ("right", "wrong", "not run") if name in states)
    print(f"{counts}; {record['seconds']} s on {record['device']}; {asked.out}")
    return int("wrong" in states)


if __name__ == "__main__":
    raise SystemExit(main())
