"""Checks of losses and `install` on a GPU against fp64 on the CPU: the first phase of `benchmarks.gpu`.

An H100 took 96 s. On a CPU the same checks run on small problems: CPU tensors take the code path of a GPU
(`benchmarks.gpu_branch`), and checks that cannot be emulated are listed as not run.

Each check is a function that returns figures: a measured number, its limit, and the test of the one against the other.
A check that raises counts as wrong. The references are formulas in fp64 that share no code with the fused losses.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import gpu_packages

if UNFIT := gpu_packages.find_unfit(on_gpu=False):
    print(f"benchmarks.gpu: {', '.join(UNFIT)}: pip install them; tiewise by PYTHONPATH=src", file=sys.stderr)
    raise SystemExit(2)

import torch
import torch.nn.functional as F
from torch import Tensor

import tiewise
from benchmarks.gpu_branch import gpu_branch
from benchmarks.gpu_record import PhaseResult, describe_card, read_record, write_record
from tiewise.boundary.ops import devices
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.log_prob import linear_log_prob
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, path_norms, path_sums, tied_lookup
from tiewise.boundary.ops.soft_targets import linear_divergence
from tiewise.core.backends import CHUNK_ELEMENTS
from tiewise.core.errors import TiewiseWarning

# largest relative distance of a loss or gradient from the fp64 result for the same, rounded inputs
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
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
OWN_KERNELS = ("triton", "compile")  # backends that every GPU must run
SEED_SCRIPT = """
import sys, torch, tiewise
from benchmarks.gpu_checks import build_family
model = build_family("gpt2")
torch.manual_seed(42)
queue = getattr(torch.cuda, "_lazy_seed_tracker", None)  # seeds that CUDA applies when it starts
queued = getattr(queue, "manual_seed_all_cb", None)
tiewise.install(model)
changed = getattr(queue, "manual_seed_all_cb", None) is not queued
after_install = [torch.rand(3, device=sys.argv[1]), torch.rand(3)]
torch.manual_seed(42)
reference = [torch.rand(3, device=sys.argv[1]), torch.rand(3)]
print(changed + sum(int((x != y).sum()) for x, y in zip(after_install, reference)))
"""


@dataclass(frozen=True)
class Figure:
    """A measured number and its upper limit; nan exceeds every limit."""

    name: str
    value: float
    limit: float

    @property
    def is_within_limit(self) -> bool:
        """True if the number is at most its limit."""
        return self.value <= self.limit


@dataclass
class Outcome:
    """Result of one check, as the JSON file stores it."""

    check: str
    state: str  # right, wrong, not run
    figures: list[Figure] = field(default_factory=list)
    why: str = ""  # reason of a check that was not run, or error of one that raised
    seconds: float = 0.0


class NotRun(Exception):
    """Error of a check that this machine cannot run, with the reason."""


@dataclass(frozen=True)
class Setup:
    """Device and problem sizes: N tokens, tables [V, E]."""

    device: str
    n: int
    v: int
    e: int

    @property
    def on_gpu(self) -> bool:
        """True on a GPU; False if the CPU emulates one."""
        return self.device != "cpu"

    def require_gpu(self) -> None:
        """Raise NotRun on a CPU."""
        if not self.on_gpu:
            raise NotRun("needs a GPU")


Check = Callable[[Setup], list[Figure]]

# problems and distances


def draw_problem(setup: Setup, dtype: torch.dtype, spread: float = 0.5) -> tuple[list[Tensor], Tensor]:
    """Draw the inputs of a loss on the CPU.

    Return features [N, E], weight [V, E] and bias [V] of type `dtype`, and targets [N] of which every fifth is ignored.
    """
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(setup.n, setup.e, generator=generator, dtype=torch.float64) * spread
    w = torch.randn(setup.v, setup.e, generator=generator, dtype=torch.float64) * (12 / setup.e) ** 0.5
    b = torch.randn(setup.v, generator=generator, dtype=torch.float64)
    t = torch.randint(0, setup.v, (setup.n,), generator=generator)
    t[::5] = -100
    return [x.to(dtype) for x in (h, w, b)], t


def relative_distance(result: Tensor, truth: Tensor) -> float:
    """Return the relative distance of `result` from `truth` in the Euclidean norm."""
    result, truth = result.detach().cpu().double(), truth.detach().cpu().double()
    return float((result - truth).norm() / truth.norm().clamp(min=1e-30))


def differentiate(loss: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor | None) -> list[Tensor]:
    """Return the loss and its gradients with respect to the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = loss(*leaves)
    grads = torch.autograd.grad(value, leaves, upstream)
    return [value.detach(), *grads]


def compare_results(name: str, results: list[Tensor], truth: list[Tensor], limit: float) -> list[Figure]:
    """Return the distances of a loss and its gradients from the true ones."""
    names = ("loss", "features", "table", "bias")
    pairs = zip(names, results, truth, strict=False)
    return [Figure(f"{name}: {part}", relative_distance(result, expected), limit) for part, result, expected in pairs]


def draw_class_weight(chosen: dict[str, Any], v: int) -> dict[str, Any]:
    """Return the options with a random class weight [V] instead of True."""
    if "class_weight" not in chosen:
        return chosen
    return chosen | {"class_weight": torch.rand(v, generator=torch.Generator().manual_seed(7)) + 0.1}


def move_options(options: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the options with their tensors on the device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}


# the losses


def cross_entropy(setup: Setup) -> list[Figure]:
    """Check every option, reduction and type, in one chunk and in several.

    A GPU checks the default, which has a row kernel, and the chunks without it.
    """
    backends = ("tiewise", "chunked") if setup.on_gpu else ("tiewise",)
    return [figure for backend in backends for figure in check_cross_entropy(setup, backend)]


def check_cross_entropy(setup: Setup, backend: str) -> list[Figure]:
    """Return the figures of every option, reduction and type of one backend."""
    figures = []
    for dtype, chosen, reduction in product(TOLERANCES, OPTIONS, ("mean", "sum", "none")):
        inputs, t = draw_problem(setup, dtype)
        options = draw_class_weight(chosen, setup.v) | {"reduction": reduction}
        upstream = torch.linspace(-1, 2, setup.n) if reduction == "none" else torch.tensor(0.7)
        loss_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        truth = differentiate(
            lambda h, w, b, t=t, options=options: oracle(h, w, t, b, **options),
            [x.double() for x in inputs],
            upstream.double(),
        )
        on_device, targets = [x.to(setup.device) for x in inputs], t.to(setup.device)
        for chunk in (None, max(1, setup.n // 3)) if reduction == "mean" else (None,):
            device_options = move_options(options, setup.device) | {"chunk": chunk, "backend": backend}
            results = differentiate(
                lambda h, w, b, targets=targets, device_options=device_options: linear_cross_entropy(
                    h, w, targets, b, **device_options
                ),
                on_device,
                upstream.to(setup.device, loss_dtype),
            )
            name = f"{backend} {str(dtype)[6:]} {reduction} {' '.join(chosen) or 'plain'}{' chunks' * bool(chunk)}"
            figures += compare_results(name, results, truth, TOLERANCES[dtype])
    return figures


def minus_infinity_and_none(setup: Setup) -> list[Figure]:
    """Check targets with logit −inf and batches without a target.

    The first cost inf and have finite gradients; the second cost 0.
    """
    (h, w, b), t = draw_problem(setup, torch.float64)
    t = t.where(t != 0, 1)
    b[0] = -torch.inf
    t[1] = 0
    on_device = [x.to(setup.device) for x in (h, w, b)]
    targets = t.to(setup.device)
    figures = []
    for options in ({}, {"z_loss": 0.01}):
        token_losses = linear_cross_entropy(*on_device[:2], targets, on_device[2], reduction="none", **options)
        truth = oracle(h, w, t, b, reduction="none", **options)
        others = torch.arange(setup.n) != 1
        figures.append(Figure(f"−inf {options}: inf", float(token_losses[1].item() != math.inf), 0))
        figures.append(
            Figure(f"−inf {options}: others", relative_distance(token_losses.cpu()[others], truth[others]), 1e-11)
        )
        grads = differentiate(
            lambda h, w, b, options=options: linear_cross_entropy(h, w, targets, b, **options), on_device, None
        )[1:]
        figures.append(Figure(f"−inf {options}: gradients", float(not all(x.isfinite().all() for x in grads)), 0))
    for reduction in ("mean", "sum"):
        ignored = torch.full_like(targets, -100)
        results = differentiate(
            lambda h, w, b, ignored=ignored, reduction=reduction: linear_cross_entropy(
                h, w, ignored, b, reduction=reduction
            ),
            on_device,
            None,
        )
        figures.append(Figure(f"all ignored, {reduction}", max(x.abs().max().item() for x in results), 0))
    return figures


def fp32_logits(setup: Setup) -> list[Figure]:
    """Check that logits of bf16 and fp16 inputs are summed and stored in fp32 (N4).

    No token's loss may differ from fp64 by more than 0.001 nats.
    """
    figures = []
    for dtype in (torch.bfloat16, torch.float16):
        (h, w, _), t = draw_problem(setup, dtype, spread=2.0)
        truth = oracle(h, w, t, reduction="none")
        for logits in (None, "fp32"):
            token_losses = linear_cross_entropy(
                h.to(setup.device), w.to(setup.device), t.to(setup.device), reduction="none", logits=logits
            )
            worst = (token_losses.cpu().double() - truth).abs().max().item()
            figures.append(Figure(f"{str(dtype)[6:]} logits={logits}: worst token, nats", worst, 1e-3))
    return figures


def wide_products(setup: Setup) -> list[Figure]:
    """Check that `torch.mm` writes fp32 sums of narrow products into a slice (N4)."""
    setup.require_gpu()
    figures = []
    for dtype in (torch.bfloat16, torch.float16):
        (h, w, _), _ = draw_problem(setup, dtype)
        h, w = h.to(setup.device), w.to(setup.device)
        buffer = torch.full((setup.n + 3, setup.v), 7.0, device=setup.device)
        torch.mm(h, w.T, out_dtype=torch.float32, out=buffer[: setup.n])
        figures.append(
            Figure(f"{str(dtype)[6:]}", relative_distance(buffer[: setup.n], h.double() @ w.double().T), 1e-5)
        )
        figures.append(Figure(f"{str(dtype)[6:]}: rows behind it", float((buffer[setup.n :] != 7).sum()), 0))
    return figures


def autocast(setup: Setup) -> list[Figure]:
    """Check that autocast multiplies fp32 inputs in bf16 and returns fp32 gradients."""
    inputs, t = draw_problem(setup, torch.float32)
    truth = differentiate(lambda h, w, b: oracle(h, w, t, b), [x.double() for x in inputs], None)
    on_device, targets = [x.to(setup.device) for x in inputs], t.to(setup.device)
    with torch.autocast(setup.device, torch.bfloat16):
        results = differentiate(lambda h, w, b: linear_cross_entropy(h, w, targets, b), on_device, None)
    figures = compare_results("autocast", results, truth, TOLERANCES[torch.bfloat16])
    return [*figures, Figure("types that are not fp32", sum(x.dtype != torch.float32 for x in results), 0)]


def log_probabilities(setup: Setup) -> list[Figure]:
    """Check log-probabilities and entropies with temperature and soft-cap, and their gradients."""
    figures = []
    for dtype, softcap in product(TOLERANCES, (None, 5.0)):
        inputs, t = draw_problem(setup, dtype)
        t = t.clamp(min=0)

        def plain(h: Tensor, w: Tensor, b: Tensor, t: Tensor = t, softcap: float | None = softcap) -> Tensor:
            """Return Σ log p · entropy from all logits."""
            z = F.linear(h, w, b)
            z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.7
            log_p = z.log_softmax(-1)
            return (log_p.gather(1, t[:, None])[:, 0] * -(log_p.exp() * log_p).sum(-1)).sum()

        def fused(h: Tensor, w: Tensor, b: Tensor, t: Tensor = t, softcap: float | None = softcap) -> Tensor:
            """Return the same sum from `linear_log_prob`."""
            log_p, entropy = linear_log_prob(
                h, w, t.to(setup.device), b, temperature=0.7, entropy=True, softcap=softcap, logits="fp32"
            )
            return (log_p * entropy).sum()

        truth = differentiate(plain, [x.double() for x in inputs], None)
        results = differentiate(fused, [x.to(setup.device) for x in inputs], None)
        figures += compare_results(f"{str(dtype)[6:]} softcap={softcap}", results, truth, 10 * TOLERANCES[dtype])
    return figures


def divergences(setup: Setup) -> list[Figure]:
    """Check KL, reverse KL and Jensen–Shannon divergence from a teacher of another width."""
    figures = []
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(setup.n, 5, generator=generator, dtype=torch.float64)
    u = torch.randn(setup.v, 5, generator=generator, dtype=torch.float64)
    for dtype, beta, softcap in product(TOLERANCES, (0.0, 0.5, 1.0), (None, 4.0)):
        inputs, t = draw_problem(setup, dtype)
        teacher = [x.to(dtype), u.to(dtype)]

        def plain(
            h: Tensor, w: Tensor, b: Tensor, teacher: Any = teacher, beta: float = beta, cap: Any = softcap, t: Any = t
        ) -> Tensor:
            """Return the mean divergence from all logits."""

            def log_softmax(z: Tensor) -> Tensor:
                """Apply soft-cap and temperature before the log-softmax."""
                return ((z if cap is None else cap * torch.tanh(z / cap)) / 1.3).log_softmax(-1)

            q, p = log_softmax(F.linear(h, w, b)), log_softmax(teacher[0].double() @ teacher[1].double().T)
            kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
            m = torch.logaddexp(p + math.log(max(beta, 1e-300)), q + math.log(max(1 - beta, 1e-300)))
            token_losses = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, m) + (1 - beta) * kl(q, m)
            valid = t != -100
            return token_losses.where(valid, 0).sum() / valid.sum()

        teacher_on_device = [y.to(setup.device) for y in teacher]

        def fused(
            h: Tensor,
            w: Tensor,
            b: Tensor,
            teacher_on_device: Any = teacher_on_device,
            beta: float = beta,
            cap: Any = softcap,
            t: Any = t,
        ) -> Tensor:
            """Return the same mean from `linear_divergence`."""
            return linear_divergence(
                h, w, *teacher_on_device, t.to(setup.device), b, beta=beta, temperature=1.3, softcap=cap, logits="fp32"
            )

        truth = differentiate(plain, [y.double() for y in inputs], None)
        results = differentiate(fused, [y.to(setup.device) for y in inputs], None)
        name = f"{str(dtype)[6:]} beta={beta} softcap={softcap}"
        figures += compare_results(name, results, truth, 10 * TOLERANCES[dtype])
    return figures


def tied_steps(setup: Setup) -> list[Figure]:
    """Check the gradient of a tied table, the norms of its two paths, and `into`.

    With `into`, two parts of a batch add to one gradient buffer.
    """
    figures = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        (_, w, _), t = draw_problem(setup, dtype)
        t = t.clamp(min=0)
        ids, body = t.roll(1), torch.linspace(-1, 1, setup.e * setup.e, dtype=torch.float64).view(setup.e, setup.e)
        input_table_fp64, output_table_fp64 = (w.double().clone().requires_grad_() for _ in "ab")
        F.cross_entropy(
            torch.tanh(F.embedding(ids, input_table_fp64) @ body.to(dtype).double()) @ output_table_fp64.T, t
        ).backward()
        total = input_table_fp64.grad + output_table_fp64.grad
        table, record = w.clone().to(setup.device).requires_grad_(), PathRecord()
        body, tolerance = body.to(setup.device, dtype), TOLERANCES[dtype]
        rows, output_table = tied_lookup(table, ids.to(setup.device), LookupOptions(record=record))
        linear_cross_entropy(torch.tanh(rows @ body), output_table, t.to(setup.device)).backward()
        figures.append(Figure(f"{str(dtype)[6:]}: table", relative_distance(table.grad, total), tolerance))
        norms = path_norms(table.grad, record)
        figures.append(
            Figure(f"{str(dtype)[6:]}: path A", abs(norms.a / input_table_fp64.grad.norm().item() - 1), tolerance)
        )
        figures.append(
            Figure(f"{str(dtype)[6:]}: path B", abs(norms.b / output_table_fp64.grad.norm().item() - 1), tolerance)
        )
        cpu_record = PathRecord([tuple(x.cpu() for x in piece) for piece in record.pieces])
        difference = abs(path_norms(table.grad, cpu_record).b / norms.b - 1)
        figures.append(Figure(f"{str(dtype)[6:]}: record on the CPU", difference, 1e-5))
        into = torch.zeros_like(table, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        table.grad = None
        for part in torch.arange(setup.n).split(-(-setup.n // 2)):
            share = len(part) / setup.n
            rows, output_table = tied_lookup(table, ids[part].to(setup.device), LookupOptions(into=into))
            loss = linear_cross_entropy(
                torch.tanh(rows @ body), output_table, t[part].to(setup.device), into=into, upstream=share
            )
            (loss * share).backward()
        figures.append(Figure(f"{str(dtype)[6:]}: into", relative_distance(into, total), tolerance))
    return figures


# N3, N5, N6


def list_kernels() -> list[str]:
    """Return the backends to check: ours, and those of installed packages."""
    installed = [package.name for package in gpu_packages.read_optional() if gpu_packages.find_version(package)]
    optional = {
        "torch": hasattr(F, "linear_cross_entropy"),
        "liger": "liger-kernel" in installed,
        "cce": "cut-cross-entropy" in installed,
    }
    return [*OWN_KERNELS, *(name for name, is_there in optional.items() if is_there)]


def check_kernel(setup: Setup, name: str) -> list[Figure]:
    """Check a backend by token and as a mean, without options and with a soft-cap (N3).

    A package's kernel may lack a type or an option; ours may not.
    """
    setup.require_gpu()
    figures, reasons = [], []
    for dtype, chosen, reduction in product((torch.float32, torch.bfloat16), ({}, {"softcap": 2.0}), ("mean", "none")):
        try:
            figures += compare_kernel(setup, name, dtype, chosen | {"reduction": reduction})
        except tiewise.core.errors.UnsupportedError as error:
            reasons.append(str(error))
    if reasons and (name in OWN_KERNELS or not figures):
        raise NotRun("; ".join(dict.fromkeys(reasons)))
    return figures


def compare_kernel(setup: Setup, name: str, dtype: torch.dtype, options: dict[str, Any]) -> list[Figure]:
    """Return the distances of a backend's loss and gradients from fp64."""
    (h, w, _), t = draw_problem(setup, dtype)
    upstream = torch.linspace(-1, 2, setup.n) if options["reduction"] == "none" else torch.tensor(0.7)
    truth = differentiate(lambda h, w: oracle(h, w, t, **options), [h.double(), w.double()], upstream.double())
    targets = t.to(setup.device)
    results = differentiate(
        lambda h, w: linear_cross_entropy(h, w, targets, backend=name, **options),
        [h.to(setup.device), w.to(setup.device)],
        upstream.to(setup.device),
    )
    described = " ".join(f"{option}={value}" for option, value in options.items())
    return compare_results(f"{name} {str(dtype)[6:]} {described}", results, truth, TOLERANCES[dtype])


def memory(setup: Setup) -> list[Figure]:
    """Check that temporary memory of a loss is within the budget of a chunk (N5).

    Inputs and gradients are not temporary. All logits take four times the budget.
    """
    setup.require_gpu()
    figures = []
    share = torch.cuda.get_device_properties(setup.device).total_memory // devices.LARGE_CHUNKS_IN_MEMORY
    for dtype in (torch.float32, torch.bfloat16):
        figures += measure_memory(setup, dtype, {"plain": {}, "softcap": {"softcap": 30.0, "z_loss": 1e-4}}, share)
        chunked = {
            "plain, chunked": {"backend": "chunked"},
            "softcap, chunked": {"softcap": 30.0, "backend": "chunked"},
        }
        others = {"log-probabilities": {}, "divergence": {}}
        figures += measure_memory(setup, dtype, chunked | others, 4 * CHUNK_ELEMENTS["cuda"])
    return figures


def measure_memory(
    setup: Setup, dtype: torch.dtype, cases: dict[str, dict[str, Any]], budget: int, v: int = 32_000, e: int = 512
) -> list[Figure]:
    """Return the peak memory of losses with their gradients, by name and options, for a budget in bytes."""
    n = budget // v  # so that all logits, of 4 bytes each, take four times the budget
    h, x = (torch.randn(n, e, device=setup.device, dtype=dtype).mul_(0.1).requires_grad_() for _ in "ab")
    w, u = (torch.randn(v, e, device=setup.device, dtype=dtype).mul_(0.1).requires_grad_() for _ in "ab")
    t = torch.randint(0, v, (n,), device=setup.device)
    # both gradients in fp32, and again in the inputs' type; a narrow type adds one product of the table's size
    gradient_bytes = (n + v) * e * (4 + 2 * dtype.itemsize)
    figures = []
    for name, options in cases.items():
        for _ in range(2):
            h.grad = w.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if name == "log-probabilities":
                sum(y.mean() for y in linear_log_prob(h, w, t, entropy=True, softcap=30.0)).backward()
            elif name == "divergence":
                linear_divergence(h, w, x, u, softcap=30.0).backward()
            else:
                linear_cross_entropy(h, w, t, **options).backward()
            torch.cuda.synchronize()
            peak_bytes = torch.cuda.max_memory_allocated() - before
        described = f"{str(dtype)[6:]} {name}"
        figures.append(Figure(f"{described}: MB", peak_bytes / 1e6, (1.15 * budget + gradient_bytes) / 1e6))
        figures.append(Figure(f"{described}: of all logits", (peak_bytes - gradient_bytes) / (4 * n * v), 0.5))
    return figures


def make_asynchronous_steps(setup: Setup, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield losses and a tied step, forward and backward, that read no value from the device."""
    for dtype in (torch.float32, torch.bfloat16):
        (h, w, b), t = draw_problem(setup, dtype)
        h, w, b = (x.to(device).requires_grad_() for x in (h, w, b))
        t = t.to(device)
        weights = torch.ones(setup.v, device=device)

        def tied(w: Tensor = w, t: Tensor = t) -> Tensor:
            """Return the loss of a lookup and a head with one table."""
            rows, table = tied_lookup(w, t.clamp(min=0), LookupOptions(record=PathRecord()))
            return linear_cross_entropy(rows, table, t)

        losses: dict[str, Callable[[], Tensor]] = {
            "mean": lambda h=h, w=w, b=b, t=t: linear_cross_entropy(h, w, t, b),
            "none": lambda h=h, w=w, b=b, t=t: linear_cross_entropy(h, w, t, b, reduction="none").sum(),
            "options": lambda h=h, w=w, b=b, t=t, c=weights: linear_cross_entropy(
                h, w, t, b, softcap=3.0, z_loss=0.1, label_smoothing=0.1, class_weight=c
            ),
            "into": lambda h=h, w=w, t=t: linear_cross_entropy(
                h, w, t, into=torch.zeros(w.shape, device=device), upstream=1.0
            ),
            "log-probabilities": lambda h=h, w=w, b=b, t=t: sum(
                x.sum() for x in linear_log_prob(h, w, t, b, entropy=True)
            ),
            "divergence": lambda h=h, w=w, t=t: linear_divergence(h, w, h.detach(), w.detach(), t),
            "tied step": tied,
        }
        for name, loss in losses.items():
            yield f"{str(dtype)[6:]} {name}", lambda loss=loss: loss().backward()

        def record_paths(w: Tensor = w, t: Tensor = t) -> None:
            """Record so many micro-batches that the record merges them, and sum both paths."""
            record = PathRecord()
            for part in t.clamp(min=0).split(-(-setup.n // 10)):
                rows, table = tied_lookup(w, part, LookupOptions(record=record))
                linear_cross_entropy(rows, table, part).backward()
            path_sums(w.grad, record)

        yield f"{str(dtype)[6:]} recorded paths", record_paths


def find_synchronisation(step: Callable[[], None], on_gpu: bool) -> str:
    """Return the error of a step that reads a value from the device, else ""."""
    if on_gpu:
        step()  # the first call may read values that later calls reuse
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0][:120]
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def synchronisations(setup: Setup) -> list[Figure]:
    """Check that no loss waits for the GPU (N6).

    On a CPU the losses run on meta tensors, whose values cannot be read.
    """
    figures = []
    device = setup.device if setup.on_gpu else "meta"
    for name, step in make_asynchronous_steps(setup, device):
        error = find_synchronisation(step, setup.on_gpu)
        figures.append(Figure(f"{name} {error}", float(bool(error)), 0))
    for name in FAMILIES:
        plain, installed = build_family(name).train(), build_family(name).train()
        tiewise.install(installed)
        models = [model.to(device) for model in (plain, installed)]
        inputs = make_batch(device)
        steps = [lambda model=model, inputs=inputs: model(**inputs).loss.backward() for model in models]
        if not find_synchronisation(steps[0], setup.on_gpu):  # GPT-2 reads a value by itself
            error = find_synchronisation(steps[1], setup.on_gpu)
            figures.append(Figure(f"installed {name} {error}", float(bool(error)), 0))
    return figures


def cuda_graph(setup: Setup) -> list[Figure]:
    """Check a loss and its backward pass in a CUDA graph, replayed with other inputs (N6)."""
    setup.require_gpu()
    figures = []
    for dtype in (torch.float32, torch.bfloat16):
        (h, w, _), t = draw_problem(setup, dtype)
        h, w = (x.to(setup.device).requires_grad_() for x in (h, w))
        t = t.to(setup.device)

        def step(h: Tensor = h, w: Tensor = w, t: Tensor = t) -> list[Tensor]:
            """Return the loss and the gradients of features and table."""
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
            outputs = step()
        with torch.no_grad():
            h.mul_(0.5)
            t.copy_(t.roll(3))
        graph.replay()
        replayed = [x.clone() for x in outputs]
        figures += compare_results(f"{str(dtype)[6:]} replay", replayed, step(), 1e-6)
    return figures


def compiled(setup: Setup) -> list[Figure]:
    """Check that `torch.compile` gives the same loss and gradients from one graph.

    On a GPU it uses CUDA graphs (`reduce-overhead`).
    """
    inputs, t = draw_problem(setup, torch.float32)
    inputs, t = [x.to(setup.device) for x in inputs], t.to(setup.device)

    def step(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """Return the loss of doubled features."""
        return linear_cross_entropy(h * 2, w, t, b)

    compile_options = {"mode": "reduce-overhead"} if setup.on_gpu else {"backend": "aot_eager"}
    compiled_step = torch.compile(step, fullgraph=True, **compile_options)
    truth = differentiate(step, inputs, None)
    try:
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            results = differentiate(compiled_step, inputs, None)
    except Exception as error:
        lacks_compiler = "compiler" in str(error).lower() or "triton" in str(error).lower()
        if lacks_compiler and not setup.on_gpu:
            raise NotRun(f"torch.compile does not work here: {str(error).splitlines()[0][:120]}") from None
        raise
    return compare_results("compiled", results, truth, TOLERANCES[torch.float32])


# installed models


def build_family(name: str, **settings: Any) -> Any:
    """Build a small random model of a family; `settings` override its config without dropout."""
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


def make_batch(device: str) -> dict[str, Tensor]:
    """Draw token ids [4, 24], and labels; the first five of a row are ignored."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 503, (4, 24), generator=generator)
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def train_model(model: Any, device: str, steps: int = 3) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss and gradients of the first step of SGD, and the weights after the last."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first_loss, grads = math.nan, {}
    for step in range(steps):
        loss = model(**make_batch(device)).loss
        optimizer.zero_grad()
        loss.backward()
        if not step:
            first_loss = loss.item()
            grads = {
                name: parameter.grad.detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        optimizer.step()
    return first_loss, grads, {name: parameter.detach() for name, parameter in model.named_parameters()}


def installed_families(setup: Setup) -> list[Figure]:
    """Compare installed models of three families with plain ones, in fp32 and bf16.

    Figures are the loss and gradients of the first step and the weights after three.
    The plain model's error sets the limit.
    """
    figures = []
    for name, dtype in product(FAMILIES, (torch.float32, torch.bfloat16)):
        is_narrow = dtype == torch.bfloat16
        truth = train_model(build_family(name).to(dtype).double(), "cpu")  # from the rounded weights
        runs = {}
        for variant in ("plain", "installed"):
            model = build_family(name).to(dtype).to(setup.device)
            handle = tiewise.install(model) if variant == "installed" else None
            runs[variant] = train_model(model, setup.device)
            if handle is not None:
                figures.append(Figure(f"{name} {str(dtype)[6:]}: fused losses missing", 3 - handle.counts.fused, 0))
        for quantity, index in (("gradient", 1), ("weights", 2)):
            errors = {}
            for variant, result in runs.items():
                pairs = [(result[index][key], truth[index][key]) for key in truth[index]]
                errors[variant] = max(relative_distance(x, y) for x, y in pairs)
            limit = 1.5 * errors["plain"] + (1e-2 if is_narrow else 1e-5)
            figures.append(Figure(f"{name} {str(dtype)[6:]}: {quantity}", errors["installed"], limit))
        losses = [abs(runs[variant][0] / truth[0] - 1) for variant in ("plain", "installed")]
        figures.append(
            Figure(f"{name} {str(dtype)[6:]}: loss", losses[1], 1.5 * losses[0] + (2e-3 if is_narrow else 1e-5))
        )
    return figures


def outputs_by_config(setup: Setup) -> list[Figure]:
    """Check the hidden states of models whose config sets output_hidden_states (N1).

    Count and values are those of the plain model, both installed and after `uninstall`.
    """
    figures = []
    for name in FAMILIES:
        model = build_family(name, output_hidden_states=True).to(setup.device).eval()
        key = "decoder_hidden_states" if name == "t5" else "hidden_states"
        with torch.no_grad():
            expected = model(**make_batch(setup.device))[key]
            handle = tiewise.install(model)
            for moment in ("installed", "uninstalled"):
                states = model(**make_batch(setup.device))[key]
                figures.append(Figure(f"{name}, {moment}: hidden states", abs(len(states) - len(expected)), 0))
                largest = max(relative_distance(x, y) for x, y in zip(states, expected, strict=False))
                figures.append(Figure(f"{name}, {moment}: numbers", largest, 1e-5))
                if moment == "installed":
                    handle.uninstall()
    return figures


def seeds(setup: Setup) -> list[Figure]:
    """Check that `install` leaves the seeds of CPU and GPU unchanged before CUDA starts (N2)."""
    command = [sys.executable, "-c", SEED_SCRIPT, setup.device]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr.strip().splitlines()[-1])
    return [Figure("seeds and numbers that differ after install", float(process.stdout.split()[-1]), 0)]


CHECKS: tuple[Check, ...] = (
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
)


def run_check(check: Check, setup: Setup, name: str = "") -> Outcome:
    """Run one check; on a CPU, emulate a GPU. The outcome's name is that of the check, or `name`."""
    start = time.perf_counter()
    outcome = Outcome(name or check.__name__, "right")
    emulation = contextlib.nullcontext() if setup.on_gpu or check is synchronisations else gpu_branch()
    try:
        with emulation, warnings.catch_warnings():
            warnings.simplefilter("error", TiewiseWarning)  # a loss that cannot use its kernel warns
            outcome.figures = check(setup)
        if not outcome.figures or not all(figure.is_within_limit for figure in outcome.figures):
            outcome.state = "wrong"
    except NotRun as reason:
        outcome.state, outcome.why = "not run", str(reason)
    except Exception as error:
        outcome.state, outcome.why = "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    outcome.seconds = round(time.perf_counter() - start, 2)
    return outcome


def is_context_dead(setup: Setup) -> bool:
    """Return True if an error ended all work on the GPU in this process."""
    if not setup.on_gpu:
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def format_outcome(outcome: Outcome) -> str:
    """Return one line about a check, and one about each wrong figure, up to 12."""
    wrong = [figure for figure in outcome.figures if not figure.is_within_limit]
    share = max((figure.value / figure.limit for figure in outcome.figures if figure.limit), default=0.0)
    figures = f"{len(outcome.figures)} figures, at most {share:.2f} of the limit" if outcome.figures else outcome.why
    lines = [f"{outcome.state:8} {outcome.check:24} {outcome.seconds:6.1f} s  {figures}"]
    lines += [f"           {figure.name}: {figure.value:.3g}, limit {figure.limit:.3g}" for figure in wrong[:12]]
    return "\n".join(lines)


def run_phase(setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Run the checks that the file does not have as right, until the deadline."""
    return run_checks(list_checks(), setup, path, deadline)


def list_checks() -> dict[str, Check]:
    """Return the checks by name, with one for each kernel."""
    kernels = {f"kernel {name}": partial(check_kernel, name=name) for name in list_kernels()}
    return {check.__name__: check for check in CHECKS} | kernels


def run_checks(checks: Mapping[str, Check], setup: Setup, path: Path, deadline: float) -> PhaseResult:
    """Run the checks, by name, that a phase's file does not have as right, until the deadline."""
    record = read_record(path, describe_card(setup.device))
    right = {check["check"] for check in record.setdefault("checks", []) if check["state"] == "right"}
    result = PhaseResult()
    for name, check in checks.items():
        if name in right:
            result.right += 1
            continue
        if time.monotonic() > deadline:
            result.missing += 1
            continue
        outcome = run_check(check, setup, name)
        print(format_outcome(outcome), flush=True)
        if is_context_dead(setup):
            outcome.state = "wrong"
        others = [other for other in record["checks"] if other["check"] != name]
        record["checks"] = [*others, describe_outcome(outcome)]
        write_record(path, record)
        result.add(name, outcome.state, outcome.why)
        if is_context_dead(setup):
            break
    return result


def describe_outcome(outcome: Outcome) -> dict[str, Any]:
    """Return a check as the JSON file stores it."""
    figures = [asdict(figure) | {"right": figure.is_within_limit} for figure in outcome.figures]
    return asdict(outcome) | {"figures": figures}
