"""Rows of `benchmarks.loss`: the problem of a shape, and each row as a repeatable step.

The problem: W [V, D] ~ N(0, 1/D); targets and ids by Zipf's law, as tokens are; features a standard normal plus
a_i · W[t_i] with a ~ N(ln V, 2), so that some targets are likely and some are not, as a trained model's are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import jax
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.performance import NUMBERS, PRODUCTS, READ, SHAPES, SIDE, SQUARE
from tiewise.boundary.flax.loss import linear_cross_entropy as flax_cross_entropy
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.log_prob import linear_log_prob
from tiewise.boundary.ops.path_gradient import LookupOptions, PathRecord, path_norms, tied_lookup
from tiewise.boundary.ops.soft_targets import linear_divergence

try:
    from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy
except ImportError:  # it needs triton, which needs Linux on x86
    cut_cross_entropy = None

EVERYWHERE, PEERS, TOKENS, QUICKEST = SHAPES, SHAPES[:3], SHAPES[1:3], SHAPES[2:3]  # where a row is measured
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ENTROPY = 0.01  # coefficient of the entropy, as a bonus for exploring has it

Step = Callable[[], tuple[Any, Any, Any]]  # loss or losses of the tokens, gradients of features and of table (or None)


class Problem:
    """Inputs of one shape and type; what only some rows need is made when asked for."""

    def __init__(self, n: int, v: int, d: int, kind: torch.dtype) -> None:
        g = torch.Generator().manual_seed(0)
        self.shape, self.kind = (n, v, d), kind
        ranks = torch.arange(1, v + 1, dtype=torch.float64)
        self.ids, self.t = torch.multinomial(1 / ranks, 2 * n, replacement=True, generator=g).chunk(2)
        table = torch.randn(v, d, generator=g).mul_(d**-0.5)
        likely = math.log(v) + 2 * torch.randn(n, 1, generator=g)
        self.h = (torch.randn(n, d, generator=g) + likely * table[self.t]).to(kind)
        self.w = table.to(kind)

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.h.detach().requires_grad_(), self.w.detach().requires_grad_()

    @property
    def teacher(self) -> tuple[Tensor, Tensor]:
        """Features and table of another distribution over the same vocabulary."""
        return self.h.flip(0), self.w.flip(1)

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """An optimizer of an fp32 table with its state; at a rate of zero the table stays what it is."""
        table = torch.nn.Parameter(self.w.float() if self.kind != torch.float32 else self.w.clone())
        table.grad = torch.zeros_like(table)
        made = torch.optim.AdamW([table], lr=0.0, fused=True)
        made.step()
        made.zero_grad()
        return made

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.kind == torch.float32 else torch.autocast("cpu", self.kind)


# Losses of (features, weight, targets), as each peer computes them.


def plain(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Cross-entropy of all logits, in fp32 as transformers has it."""
    return F.cross_entropy(F.linear(h, w).float(), t)


def narrow(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """The same, of logits that are left in the products' type."""
    return F.cross_entropy(F.linear(h, w), t)


def of_torch(h: Tensor, w: Tensor, t: Tensor, **how: Any) -> Tensor:
    return F.linear_cross_entropy(h, w, t, options=torch.nn.LinearCrossEntropyOptions(**how))


def plain_each(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).float(), t, reduction="none")


def each(h: Tensor, w: Tensor, t: Tensor, **how: Any) -> Tensor:
    return linear_cross_entropy(h, w, t, reduction="none", **how)


def log_prob(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return -linear_log_prob(h, w, t)


def policy(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Losses by token of −log p − β entropy, as post-training has them."""
    log_prob, entropy = linear_log_prob(h, w, t, entropy=True)
    return -log_prob - ENTROPY * entropy


def plain_policy(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    log_p = F.linear(h, w).float().log_softmax(1)
    return -log_p.gather(1, t[:, None])[:, 0] + ENTROPY * (log_p.exp() * log_p).sum(1)


def plain_tied(w: Tensor, ids: Tensor, t: Tensor) -> Tensor:
    return plain(F.embedding(ids, w), w, t)


compiled, compiled_tied = (torch.compile(f, dynamic=False) for f in (plain, plain_tied))


def plain_jax(h: Any, w: Any, t: Any) -> Any:
    """Mean cross-entropy from logits, in the form of several that XLA runs fastest."""
    z = jax.numpy.matmul(h, w.T, preferred_element_type=jax.numpy.float32)
    return (jax.nn.logsumexp(z, -1) - jax.numpy.take_along_axis(z, t[:, None], 1)[:, 0]).mean()


# Steps: what a row repeats.


def scalar(loss: Callable[..., Tensor], p: Problem) -> Step:
    """Loss and both gradients, made fresh."""

    def step() -> tuple[Any, Any, Any]:
        h, w = p.leaves()
        found = loss(h, w, p.t)
        found.mean().backward()
        return found.detach(), h.grad, w.grad

    return step


def kept(p: Problem) -> Step:
    """The same, added to a gradient of the table in fp32 that stays in memory, zeroed before."""
    into = torch.zeros(p.w.shape)

    def step() -> tuple[Any, Any, Any]:
        h = p.h.detach().requires_grad_()
        found = linear_cross_entropy(h, p.w, p.t, into=into.zero_())
        found.backward()
        return found.detach(), h.grad, into

    return step


def tied(run: Callable[[Tensor, Problem], Tensor], p: Problem, wide: bool = False) -> Step:
    """Lookup, loss, backward and optimizer of a tied fp32 table; under autocast to bf16 products, but where `wide`."""
    (w,) = p.optimizer.param_groups[0]["params"]

    def step() -> tuple[Any, Any, Any]:
        p.optimizer.zero_grad()
        with nullcontext() if wide else p.autocast():
            loss = run(w, p)
        loss.backward()
        p.optimizer.step()
        return loss.detach(), None, w.grad

    return step


def tied_loss(w: Tensor, p: Problem, record: PathRecord | None = None) -> Tensor:
    rows, table = tied_lookup(w, p.ids, LookupOptions(record=record))
    return linear_cross_entropy(rows, table, p.t)


def tracked(p: Problem) -> Step:
    """The tied step with the norms of both paths."""
    record = PathRecord()
    (w,) = p.optimizer.param_groups[0]["params"]

    def step() -> tuple[Any, Any, Any]:
        p.optimizer.zero_grad()
        with p.autocast():
            loss = tied_loss(w, p, record)
        loss.backward()
        path_norms(w.grad, record)
        record.clear()
        p.optimizer.step()
        return loss.detach(), None, w.grad

    return step


def lookup(p: Problem) -> Step:
    """Return the lookup's part of a tied step: rows, and their gradient into the head's buffer."""
    (w,) = p.optimizer.param_groups[0]["params"]
    by_rows, by_table = torch.zeros(len(p.ids), w.shape[1]), torch.zeros_like(w)

    def step() -> tuple[Any, Any, Any]:
        torch.autograd.grad(tied_lookup(w, p.ids), w, (by_rows, by_table))
        return None, None, None

    return step


def divergence(beta: float, p: Problem) -> Step:
    teacher = p.teacher
    return scalar(lambda h, w, t: linear_divergence(h, w, *teacher, t, beta=beta), p)


def under(make: Callable[[Problem], Step], p: Problem, **settings: str) -> Step:
    """The step of a row, each time with these variables in the environment."""
    return patch.dict(os.environ, settings)(make(p))


def in_jax(loss: Callable[..., Any], p: Problem) -> Step:
    h, w, t = (jax.dlpack.from_dlpack(x) for x in (p.h, p.w, p.t.int()))
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))

    def step() -> tuple[Any, Any, Any]:
        value, (dh, dw) = jax.block_until_ready(run(h, w, t))
        return value, dh, dw

    return step


def products(p: Problem, fresh: bool = False) -> Step:
    """The three matrix products of any exact method."""
    n, v, d = p.shape
    out = None if fresh else tuple(torch.empty(shape, dtype=p.kind) for shape in ((n, v), (n, d), (v, d)))

    def step() -> tuple[Any, Any, Any]:
        z, dh, dw = out or (None, None, None)
        z = torch.mm(p.h, p.w.T, out=z)
        torch.mm(z, p.w, out=dh)
        torch.mm(z.T, p.h, out=dw)
        return None, None, None

    return step


def square(p: Problem) -> Step:
    a, b, c = torch.randn(3, SIDE, SIDE).to(p.kind)
    return lambda: (torch.mm(a, b, out=c), None, None)


def read(p: Problem) -> Step:
    numbers = torch.zeros(NUMBERS)
    return lambda: (numbers.sum(), None, None)


@dataclass(frozen=True)
class Row:
    """How the step of a row is made, which truth it must equal, for which types and of `SHAPES` where it is run."""

    make: Callable[[Problem], Step] | None  # None: not installed here
    truth: str | None = "loss"
    kinds: tuple[str, ...] = ("fp32", "bf16")
    shapes: tuple[tuple[int, int, int], ...] = PEERS


ours, chunks = partial(scalar, linear_cross_entropy), {"chunking_method": None}
ROWS = {
    SQUARE: Row(square, None, shapes=EVERYWHERE),
    READ: Row(read, None, shapes=EVERYWHERE),
    PRODUCTS: Row(products, None, shapes=EVERYWHERE),
    "three products, fresh": Row(partial(products, fresh=True), None, ("bf16",)),
    "tiewise": Row(ours, shapes=EVERYWHERE),
    "tiewise, gradient kept": Row(kept, shapes=EVERYWHERE),
    "tiewise, portable": Row(partial(under, ours, TIEWISE_KERNELS="off")),
    "tiewise, portable, default products": Row(
        partial(under, ours, TIEWISE_KERNELS="off", TIEWISE_PRODUCTS="default"), kinds=("fp32",)
    ),
    "tiewise, logits in fp32": Row(partial(scalar, partial(linear_cross_entropy, logits="fp32")), kinds=("bf16",)),
    "plain": Row(partial(scalar, plain), shapes=EVERYWHERE),
    "plain, logits in bf16": Row(partial(scalar, narrow), kinds=("bf16",)),
    "torch.compile(plain)": Row(partial(scalar, compiled)),
    "F.linear_cross_entropy, auto": Row(partial(scalar, of_torch)),
    "F.linear_cross_entropy, 512 rows": Row(
        partial(scalar, partial(of_torch, batch_chunk_size=512, **chunks)), kinds=("fp32",)
    ),
    "F.linear_cross_entropy, 512 rows, compact": Row(
        partial(scalar, partial(of_torch, batch_chunk_size=512, acc_policy="compact", **chunks)), kinds=("bf16",)
    ),
    "cut-cross-entropy, torch_compile": Row(
        partial(scalar, partial(cut_cross_entropy, impl="torch_compile")) if cut_cross_entropy else None
    ),
    "JAX, jit(plain)": Row(partial(in_jax, plain_jax)),
    "tiewise in JAX": Row(partial(in_jax, flax_cross_entropy), shapes=QUICKEST),
    "per token, tiewise": Row(partial(scalar, each), shapes=TOKENS),
    "per token, tiewise, logits in fp32": Row(
        partial(scalar, partial(each, logits="fp32")), kinds=("bf16",), shapes=QUICKEST
    ),
    "per token, plain": Row(partial(scalar, plain_each), kinds=("fp32",), shapes=QUICKEST),
    "log-probabilities, tiewise": Row(partial(scalar, log_prob), kinds=("fp32",), shapes=QUICKEST),
    "log-probabilities and entropy, tiewise": Row(partial(scalar, policy), "policy", shapes=TOKENS),
    "log-probabilities and entropy, plain": Row(partial(scalar, plain_policy), "policy", ("fp32",), QUICKEST),
    "divergence from a teacher, KL, tiewise": Row(partial(divergence, 0.0), "kl", ("fp32",), QUICKEST),
    "divergence from a teacher, Jensen–Shannon, tiewise": Row(partial(divergence, 0.5), "jsd", ("fp32",), QUICKEST),
    "tied step, tiewise": Row(partial(tied, tied_loss), "tied"),
    "tied step, its lookup path alone": Row(lookup, None),
    "tied step, paths tracked": Row(tracked, "tied", shapes=QUICKEST),
    "tied step, plain": Row(partial(tied, lambda w, p: plain_tied(w, p.ids, p.t)), "tied"),
    "tied step, plain in fp32": Row(
        partial(tied, lambda w, p: plain_tied(w, p.ids, p.t), wide=True), "tied", kinds=("bf16",)
    ),
    "tied step, torch.compile(plain)": Row(
        partial(tied, lambda w, p: compiled_tied(w, p.ids, p.t)), "tied", shapes=QUICKEST
    ),
}
