"""A small Optax loop with the recipe that the PyTorch comparison trains by, and the measures that it reports.

    AdamW (β 0.9, 0.98), clipped at norm 1, cosine with a tenth of the steps as warm-up, decay on matrices alone
    blocks of T tokens in an order drawn from the seed; each predicts T − 1

`fit` trains and returns the curve with the norms of both gradient paths; `token_losses` gives the loss of every
predicted token of a split, from which means, perplexity, bits per byte and frequency bins follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tiewise.errors import DataError
from tiewise.flax.models import LanguageModel
from tiewise.flax.path_gradient import path_norms, probe
from tiewise.paths import PathNorms

POINTS = 20  # of a curve


@dataclass(frozen=True)
class Recipe:
    """Numbers of a run; letters as in `tiewise.shapes`.

    Args:
        steps: optimizer steps.
        batch: B, blocks per step.
        length: T, tokens per block.
        learning_rate: at its peak.
        weight_decay: of matrices.
        seed: of the order of blocks.
    """

    steps: int = 300
    batch: int = 8
    length: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 1


@dataclass(frozen=True)
class Point:
    """One moment of training: mean training nll and mean path norms since the point before."""

    step: int
    train_nll: float
    paths: PathNorms


@dataclass(frozen=True)
class Trained:
    """What a run leaves beside its model: the curve; seconds and tokens of all steps but the compiling first."""

    curve: tuple[Point, ...]
    seconds: float
    tokens: int


Progress = Callable[[Point, int], None]  # called at every point of the curve with the steps of the run


def silent(point: Point, steps: int) -> None:
    """Show nothing."""


def fit(model: LanguageModel, tokens: np.ndarray, recipe: Recipe, progress: Progress = silent) -> Trained:
    """Train `model` in place on blocks of `tokens`.

    Raises:
        DataError: fewer tokens than one batch of blocks holds.
    """
    optimizer = nnx.Optimizer(model, optimizer_of(recipe), wrt=nnx.Param)
    window, curve, losses, norms = max(1, recipe.steps // POINTS), [], [], []
    start, shown = time.perf_counter(), 0.0
    for step, ids in zip(range(1, recipe.steps + 1), batches(tokens, recipe), strict=False):
        loss, seen = _step(model, optimizer, ids)
        losses.append(loss)
        norms.append(seen)
        if step == 1:
            jax.block_until_ready(loss)
            start = time.perf_counter()
        if step % window == 0 or step == recipe.steps:
            curve.append(Point(step, float(np.mean([float(x) for x in losses])), _mean(norms)))
            losses.clear()
            norms.clear()
            paused = time.perf_counter()
            progress(curve[-1], recipe.steps)
            shown += time.perf_counter() - paused
    jax.block_until_ready(loss)
    spent = time.perf_counter() - start - shown
    return Trained(tuple(curve), spent, (recipe.steps - 1) * recipe.batch * recipe.length)


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW as the module says."""
    warm = max(1, recipe.steps // 10)
    peak = recipe.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warm, max(recipe.steps, warm + 1))
    decayed = optax.adamw(rate, b2=0.98, weight_decay=recipe.weight_decay, mask=_matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), decayed)


def batches(tokens: np.ndarray, recipe: Recipe) -> Iterator[np.ndarray]:
    """Yield [B, T] tokens without end: every whole batch of a permutation of the blocks, then another permutation."""
    blocks = len(tokens) // recipe.length
    if blocks < recipe.batch:
        what = f"{len(tokens)} tokens hold no batch of {recipe.batch} blocks of {recipe.length}"
        raise DataError(what, "give more text, or smaller batches")
    rows = tokens[: blocks * recipe.length].reshape(blocks, recipe.length)
    random = np.random.default_rng(recipe.seed)
    while True:
        order = random.permutation(blocks)
        for start in range(0, blocks - recipe.batch + 1, recipe.batch):
            yield rows[np.sort(order[start : start + recipe.batch])].astype(np.int32)


def token_losses(
    model: LanguageModel, tokens: np.ndarray, length: int, blocks: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(loss of each predicted token in nats, the token) of blocks spread evenly over a split, each [blocks · (T − 1)].

    Args:
        model: as trained; the spec's penalty is not in the losses.
        tokens: the split.
        length: T.
        blocks: at most so many; None takes all.

    Raises:
        DataError: the split holds no block.
    """
    whole = len(tokens) // length
    if not whole:
        raise DataError(f"{len(tokens)} tokens hold no block of {length}", "give more text, or another length")
    chosen = min(whole, blocks or whole)
    where = np.arange(chosen) * whole // chosen
    ids = tokens[: whole * length].reshape(whole, length)[where].astype(np.int32)
    size = max(1, min(chosen, 4096 // length))
    found = []
    for start in range(0, chosen, size):
        part = ids[start : start + size]
        filled = np.pad(part, ((0, size - len(part)), (0, 0)))  # one shape, one compilation
        found.append(np.asarray(_losses(model, filled))[: len(part)])
    return np.concatenate(found).ravel(), ids[:, 1:].ravel()


@nnx.jit
def _step(model: LanguageModel, optimizer: nnx.Optimizer, ids: Any) -> tuple[Any, Any]:
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, probe: Any) -> Any:
        return nnx.merge(graph, params, rest).loss(ids[:, :-1], ids[:, 1:], probe)

    value, (grads, seen) = jax.value_and_grad(loss, (0, 1))(params, probe())
    optimizer.update(model, grads)
    return value, seen if model.boundary.ends.tied else _of_two_tables(grads)


@nnx.jit
def _losses(model: LanguageModel, ids: Any) -> Any:
    return model.boundary(ids[:, :-1], model.body, ids[:, 1:], reduction="none")


def _mean(seen: list[Any]) -> PathNorms:
    """Average what single steps' probes hold."""
    found = [path_norms(x) for x in seen]
    return PathNorms(*(float(np.mean([getattr(x, name) for x in found])) for name in ("a", "b", "total", "cosine")))


def _of_two_tables(grads: Any) -> Any:
    """‖A‖², ‖B‖², A·B [3] where each table has one gradient; A·B is nan where their widths differ."""
    a, b = (grads["boundary"][name][...] for name in ("table_in", "table_out"))
    return jnp.stack([(a**2).sum(), (b**2).sum(), (a * b).sum() if a.shape == b.shape else jnp.nan])


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)
