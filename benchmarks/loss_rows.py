"""Rows of `benchmarks.loss`: a problem per shape, and a repeatable step per row.

The problem: W [V, D] ~ N(0, 1/D); targets and ids follow Zipf's law, as tokens do. Features are a standard normal plus
a_i · W[t_i] with a ~ N(ln V, 2): some targets are likely and others are not, as in a trained model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
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
except ImportError:  # its requirement triton needs Linux on x86
    cut_cross_entropy = None

EVERYWHERE, PEERS, TOKENS, QUICKEST = SHAPES, SHAPES[:3], SHAPES[1:3], SHAPES[2:3]  # shapes of a row
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ENTROPY = 0.01  # coefficient of the entropy bonus

Step = Callable[[], tuple[Any, Any, Any]]  # loss or losses by token, gradients of features and table (or None)


class Problem:
    """Inputs of one shape and type; inputs of few rows are made at first use."""

    def __init__(self, n: int, v: int, d: int, kind: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape, self.kind = (n, v, d), kind
        ranks = torch.arange(1, v + 1, dtype=torch.float64)
        self.ids, self.t = torch.multinomial(1 / ranks, 2 * n, replacement=True, generator=generator).chunk(2)
        table = torch.randn(v, d, generator=generator).mul_(d**-0.5)
        strengths = math.log(v) + 2 * torch.randn(n, 1, generator=generator)
        self.h = (torch.randn(n, d, generator=generator) + strengths * table[self.t]).to(kind)
        self.w = table.to(kind)

    def leaves(self) -> tuple[Tensor, Tensor]:
        """Return features and table that require gradients."""
        return self.h.detach().requires_grad_(), self.w.detach().requires_grad_()

    @property
    def teacher(self) -> tuple[Tensor, Tensor]:
        """Features and table of another distribution over the same vocabulary."""
        return self.h.flip(0), self.w.flip(1)

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """AdamW of an fp32 table, with its state; learning rate 0 leaves the table unchanged."""
        table = torch.nn.Parameter(self.w.float() if self.kind != torch.float32 else self.w.clone())
        table.grad = torch.zeros_like(table)
        optimizer = torch.optim.AdamW([table], lr=0.0, fused=True)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context with products of the problem's type."""
        return nullcontext() if self.kind == torch.float32 else torch.autocast("cpu", self.kind)


# Losses of (features, weight, targets), as each library computes them.


def plain_loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the cross-entropy of all logits in fp32, as transformers computes it."""
    return F.cross_entropy(F.linear(h, w).float(), t)


def narrow_loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the cross-entropy of logits in the type of the products."""
    return F.cross_entropy(F.linear(h, w), t)


def torch_loss(h: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    """Return the loss of torch's fused function."""
    return F.linear_cross_entropy(h, w, t, options=torch.nn.LinearCrossEntropyOptions(**options))


def plain_token_losses(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the losses by token from all logits in fp32."""
    return F.cross_entropy(F.linear(h, w).float(), t, reduction="none")


def token_losses(h: Tensor, w: Tensor, t: Tensor, **options: Any) -> Tensor:
    """Return the losses by token of the fused loss."""
    return linear_cross_entropy(h, w, t, reduction="none", **options)


def negative_log_prob(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return −log p by token."""
    return -linear_log_prob(h, w, t)


def policy_losses(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the losses by token of post-training: −log p − β entropy."""
    log_prob, entropy = linear_log_prob(h, w, t, entropy=True)
    return -log_prob - ENTROPY * entropy


def plain_policy_losses(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the same losses from all logits."""
    log_p = F.linear(h, w).float().log_softmax(1)
    return -log_p.gather(1, t[:, None])[:, 0] + ENTROPY * (log_p.exp() * log_p).sum(1)


def plain_tied_loss(w: Tensor, ids: Tensor, t: Tensor) -> Tensor:
    """Return the loss of a lookup and a head with one table, from all logits."""
    return plain_loss(F.embedding(ids, w), w, t)


@cache
def compiled(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss compiled by torch, whose compiler takes a second to import."""
    return torch.compile(loss, dynamic=False)


def compiled_loss(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
    """Return the loss from all logits by the compiled program."""
    return compiled(plain_loss)(h, w, t)


def compiled_tied_loss(w: Tensor, ids: Tensor, t: Tensor) -> Tensor:
    """Return the loss of a lookup and a head with one table by the compiled program."""
    return compiled(plain_tied_loss)(w, ids, t)


def plain_jax_loss(h: Any, w: Any, t: Any) -> Any:
    """Return the mean cross-entropy from all logits, in the form that XLA runs fastest."""
    z = jax.numpy.matmul(h, w.T, preferred_element_type=jax.numpy.float32)
    return (jax.nn.logsumexp(z, -1) - jax.numpy.take_along_axis(z, t[:, None], 1)[:, 0]).mean()


# Steps that a row repeats.


def make_loss_step(loss: Callable[..., Tensor], problem: Problem) -> Step:
    """Return a step that computes a loss and both gradients in new memory."""

    def step() -> tuple[Any, Any, Any]:
        """Run once."""
        h, w = problem.leaves()
        value = loss(h, w, problem.t)
        value.mean().backward()
        return value.detach(), h.grad, w.grad

    return step


def make_accumulating_step(problem: Problem) -> Step:
    """Return a step that adds the table's gradient to a zeroed fp32 buffer."""
    into = torch.zeros(problem.w.shape)

    def step() -> tuple[Any, Any, Any]:
        """Run once."""
        h = problem.h.detach().requires_grad_()
        value = linear_cross_entropy(h, problem.w, problem.t, into=into.zero_())
        value.backward()
        return value.detach(), h.grad, into

    return step


def make_tied_step(loss_of: Callable[[Tensor, Problem], Tensor], problem: Problem, wide: bool = False) -> Step:
    """Return a step of lookup, loss, backward and optimizer of a tied fp32 table.

    Products have the problem's type under autocast, or fp32 if `wide`.
    """
    (w,) = problem.optimizer.param_groups[0]["params"]

    def step() -> tuple[Any, Any, Any]:
        """Run once."""
        problem.optimizer.zero_grad()
        with nullcontext() if wide else problem.autocast():
            loss = loss_of(w, problem)
        loss.backward()
        problem.optimizer.step()
        return loss.detach(), None, w.grad

    return step


def tied_loss(w: Tensor, problem: Problem, record: PathRecord | None = None) -> Tensor:
    """Return the fused loss of a lookup and a head with one table."""
    rows, table = tied_lookup(w, problem.ids, LookupOptions(record=record))
    return linear_cross_entropy(rows, table, problem.t)


def make_tracked_step(problem: Problem) -> Step:
    """Return the tied step with the norms of both paths."""
    record = PathRecord()
    (w,) = problem.optimizer.param_groups[0]["params"]

    def step() -> tuple[Any, Any, Any]:
        """Run once."""
        problem.optimizer.zero_grad()
        with problem.autocast():
            loss = tied_loss(w, problem, record)
        loss.backward()
        path_norms(w.grad, record)
        record.clear()
        problem.optimizer.step()
        return loss.detach(), None, w.grad

    return step


def make_lookup_step(problem: Problem) -> Step:
    """Return the lookup's part of a tied step.

    It reads rows, and adds their gradient to the head's buffer.
    """
    (w,) = problem.optimizer.param_groups[0]["params"]
    by_rows, by_table = torch.zeros(len(problem.ids), w.shape[1]), torch.zeros_like(w)

    def step() -> tuple[Any, Any, Any]:
        """Run once."""
        torch.autograd.grad(tied_lookup(w, problem.ids), w, (by_rows, by_table))
        return None, None, None

    return step


def make_divergence_step(beta: float, problem: Problem) -> Step:
    """Return a step with a divergence from the teacher."""
    teacher = problem.teacher
    return make_loss_step(lambda h, w, t: linear_divergence(h, w, *teacher, t, beta=beta), problem)


def make_step_in_environment(make: Callable[[Problem], Step], problem: Problem, **settings: str) -> Step:
    """Return the step of a row that runs with these environment variables."""
    return patch.dict(os.environ, settings)(make(problem))


def make_jax_step(loss: Callable[..., Any], problem: Problem) -> Step:
    """Return a step of a loss and both gradients in JAX."""
    h, w, t = (jax.dlpack.from_dlpack(x) for x in (problem.h, problem.w, problem.t.int()))
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))

    def step() -> tuple[Any, Any, Any]:
        """Run once."""
        value, (dh, dw) = jax.block_until_ready(run(h, w, t))
        return value, dh, dw

    return step


def make_products_step(problem: Problem, fresh: bool = False) -> Step:
    """Return a step with the three matrix products of any exact method.

    With `fresh`, each call allocates the results.
    """
    n, v, d = problem.shape
    out = None if fresh else tuple(torch.empty(shape, dtype=problem.kind) for shape in ((n, v), (n, d), (v, d)))

    def step() -> tuple[Any, Any, Any]:
        """Run once."""
        z, dh, dw = out or (None, None, None)
        z = torch.mm(problem.h, problem.w.T, out=z)
        torch.mm(z, problem.w, out=dh)
        torch.mm(z.T, problem.h, out=dw)
        return None, None, None

    return step


def make_square_step(problem: Problem) -> Step:
    """Return a step with one product of square matrices."""
    a, b, c = torch.randn(3, SIDE, SIDE).to(problem.kind)
    return lambda: (torch.mm(a, b, out=c), None, None)


def make_read_step(problem: Problem) -> Step:
    """Return a step that reads memory once."""
    numbers = torch.zeros(NUMBERS)
    return lambda: (numbers.sum(), None, None)


@dataclass(frozen=True)
class Row:
    """One implementation that is measured."""

    make: Callable[[Problem], Step] | None  # None if not installed
    truth: str | None = "loss"  # true result for comparison, by name in `benchmarks.loss`; None if it has no loss
    kinds: tuple[str, ...] = ("fp32", "bf16")
    shapes: tuple[tuple[int, int, int], ...] = PEERS  # shapes at which it runs by default


make_tiewise_step, chunk_options = partial(make_loss_step, linear_cross_entropy), {"chunking_method": None}
ROWS = {
    SQUARE: Row(make_square_step, None, shapes=EVERYWHERE),
    READ: Row(make_read_step, None, shapes=EVERYWHERE),
    PRODUCTS: Row(make_products_step, None, shapes=EVERYWHERE),
    "three products, fresh": Row(partial(make_products_step, fresh=True), None, ("bf16",)),
    "tiewise": Row(make_tiewise_step, shapes=EVERYWHERE),
    "tiewise, gradient kept": Row(make_accumulating_step, shapes=EVERYWHERE),
    "tiewise, portable": Row(partial(make_step_in_environment, make_tiewise_step, TIEWISE_KERNELS="off")),
    "tiewise, portable, default products": Row(
        partial(make_step_in_environment, make_tiewise_step, TIEWISE_KERNELS="off", TIEWISE_PRODUCTS="default"),
        kinds=("fp32",),
    ),
    "tiewise, logits in fp32": Row(
        partial(make_loss_step, partial(linear_cross_entropy, logits="fp32")), kinds=("bf16",)
    ),
    "plain": Row(partial(make_loss_step, plain_loss), shapes=EVERYWHERE),
    "plain, logits in bf16": Row(partial(make_loss_step, narrow_loss), kinds=("bf16",)),
    "torch.compile(plain)": Row(partial(make_loss_step, compiled_loss)),
    "F.linear_cross_entropy, auto": Row(partial(make_loss_step, torch_loss)),
    "F.linear_cross_entropy, 512 rows": Row(
        partial(make_loss_step, partial(torch_loss, batch_chunk_size=512, **chunk_options)), kinds=("fp32",)
    ),
    "F.linear_cross_entropy, 512 rows, compact": Row(
        partial(make_loss_step, partial(torch_loss, batch_chunk_size=512, acc_policy="compact", **chunk_options)),
        kinds=("bf16",),
    ),
    "cut-cross-entropy, torch_compile": Row(
        partial(make_loss_step, partial(cut_cross_entropy, impl="torch_compile")) if cut_cross_entropy else None
    ),
    "JAX, jit(plain)": Row(partial(make_jax_step, plain_jax_loss)),
    "tiewise in JAX": Row(partial(make_jax_step, flax_cross_entropy), shapes=QUICKEST),
    "per token, tiewise": Row(partial(make_loss_step, token_losses), shapes=TOKENS),
    "per token, tiewise, logits in fp32": Row(
        partial(make_loss_step, partial(token_losses, logits="fp32")), kinds=("bf16",), shapes=QUICKEST
    ),
    "per token, plain": Row(partial(make_loss_step, plain_token_losses), kinds=("fp32",), shapes=QUICKEST),
    "log-probabilities, tiewise": Row(partial(make_loss_step, negative_log_prob), kinds=("fp32",), shapes=QUICKEST),
    "log-probabilities and entropy, tiewise": Row(partial(make_loss_step, policy_losses), "policy", shapes=TOKENS),
    "log-probabilities and entropy, plain": Row(
        partial(make_loss_step, plain_policy_losses), "policy", ("fp32",), QUICKEST
    ),
    "divergence from a teacher, KL, tiewise": Row(partial(make_divergence_step, 0.0), "kl", ("fp32",), QUICKEST),
    "divergence from a teacher, Jensen–Shannon, tiewise": Row(
        partial(make_divergence_step, 0.5), "jsd", ("fp32",), QUICKEST
    ),
    "tied step, tiewise": Row(partial(make_tied_step, tied_loss), "tied"),
    "tied step, its lookup path alone": Row(make_lookup_step, None),
    "tied step, paths tracked": Row(make_tracked_step, "tied", shapes=QUICKEST),
    "tied step, plain": Row(
        partial(make_tied_step, lambda w, problem: plain_tied_loss(w, problem.ids, problem.t)), "tied"
    ),
    "tied step, plain in fp32": Row(
        partial(make_tied_step, lambda w, problem: plain_tied_loss(w, problem.ids, problem.t), wide=True),
        "tied",
        kinds=("bf16",),
    ),
    "tied step, torch.compile(plain)": Row(
        partial(make_tied_step, lambda w, problem: compiled_tied_loss(w, problem.ids, problem.t)),
        "tied",
        shapes=QUICKEST,
    ),
}
