"""Training of a small Flax model with Optax, and the losses that a comparison reports.

    fitting = Fitting(model, tokens, OptaxRecipe(steps=300))
    for point in fitting.steps():               # one step each; yields a point of the curve when one is due
        ...                                     # to stop, save `fitting.arrays()` and `fitting.record()`, then resume

`token_losses` returns the loss of every predicted token of a split, from which means, perplexity, bits per byte and
frequency bins follow. The recipe is that of the PyTorch comparison: AdamW (β 0.9, 0.98), gradients clipped at norm 1, a
cosine schedule whose first tenth is warm-up, weight decay on matrices alone. Blocks of T tokens come in an order drawn
from the seed, and each predicts T − 1 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tiewise.boundary.flax.models import FlaxDecoder
from tiewise.boundary.flax.parameter_files import flat
from tiewise.boundary.flax.paths import path_norms, probe
from tiewise.core.backends import PathNorms
from tiewise.core.errors import CheckpointError, DataError

POINTS = 20  # points of a training curve


@dataclass(frozen=True)
class OptaxRecipe:
    """Settings of a run; letters as in `tiewise.core`."""

    steps: int = 300
    batch: int = 8  # B, blocks per step
    length: int = 128  # T, tokens per block
    learning_rate: float = 3e-3  # peak of the schedule
    weight_decay: float = 0.1  # weight decay of matrices only
    seed: int = 1  # seed of the order of blocks


@lru_cache(8)  # one object for all seeds, so that they share one compiled step
def adamw(steps: int, peak: float, weight_decay: float) -> optax.GradientTransformation:
    """Return the recipe's optimizer."""
    warm = max(1, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warm, max(steps, warm + 1))
    decayed = optax.adamw(rate, b2=0.98, weight_decay=weight_decay, mask=_are_matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), decayed)


def _are_matrices(params: Any) -> Any:
    """Return a tree of booleans: whether each parameter has two axes or more, and so decays."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def batches(tokens: np.ndarray, recipe: OptaxRecipe) -> Iterator[np.ndarray]:
    """Yield [B, T] tokens without end.

    Each pass yields every full batch of a new permutation of the blocks.

    Raises:
        DataError: there are fewer tokens than one batch has.
    """
    blocks = len(tokens) // recipe.length
    if blocks < recipe.batch:
        what = f"{len(tokens)} tokens hold no batch of {recipe.batch} blocks of {recipe.length}"
        raise DataError(what, "give more text, or smaller batches")
    rows = tokens[: blocks * recipe.length].reshape(blocks, recipe.length)
    random = np.random.default_rng(recipe.seed)
    while True:
        order = random.permutation(blocks)
        for start in range(0, blocks - recipe.batch + 1, recipe.batch):
            chosen = np.sort(order[start : start + recipe.batch])
            yield rows[chosen].astype(np.int32)


@dataclass(frozen=True)
class TrainingPoint:
    """Point of a training curve: means over the steps since the previous point.

    The training nll does not include a spec's penalty. The cosine is nan if each path has a separate table.
    """

    step: int
    train_nll: float
    paths: PathNorms


class Fitting:
    """Training run that can stop between two steps.

    `arrays` and `record` return everything that it needs to resume. The model is trained in place.
    """

    def __init__(self, model: FlaxDecoder, tokens: np.ndarray, recipe: OptaxRecipe) -> None:
        self.model, self.tokens, self.recipe = model, tokens, recipe
        optimizer = adamw(recipe.steps, recipe.learning_rate, recipe.weight_decay)
        self.optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        self.step = 0  # number of steps taken
        self.seconds = 0.0  # duration of the timed steps
        self.timed = 0  # number of timed steps; the first step of a process compiles and is not timed
        self._window: list[np.ndarray] = []  # nll, ‖A‖², ‖B‖², A·B of each step since the last point of the curve

    def steps(self) -> Iterator[TrainingPoint | None]:
        """Take the remaining steps; after each, yield a point of the curve if one is due.

        Raises:
            DataError: there are fewer tokens than one batch has.
        """
        steps = self.recipe.steps
        interval, first = max(1, steps // POINTS), self.step
        upcoming = islice(batches(self.tokens, self.recipe), first, None)
        while self.step < steps:
            start = time.perf_counter()
            self._window.append(np.asarray(_step(self.model, self.optimizer, next(upcoming))))
            if self.step > first:
                self.seconds += time.perf_counter() - start
                self.timed += 1
            self.step += 1
            is_due = self.step % interval == 0 or self.step == steps
            yield self._take_point() if is_due else None

    def arrays(self) -> dict[str, Any]:
        """Return name → array of parameters, optimizer state, and the steps since the last point."""
        arrays = {}
        for prefix, part in self._parts():
            for name, array in flat(nnx.state(part)).items():
                arrays[f"{prefix}.{name}"] = array
        arrays["window"] = np.reshape(np.array(self._window, np.float32), (-1, 4))
        return arrays

    def record(self) -> dict[str, Any]:
        """Return the numbers that complete the arrays, for JSON."""
        return {"step": self.step, "seconds": self.seconds, "timed": self.timed}

    def resume(self, arrays: Mapping[str, Any], record: Mapping[str, Any], where: str) -> None:
        """Restore a state that `arrays()` and `record()` returned.

        Raises:
            CheckpointError: they are of another model.
        """
        if _state_shapes(arrays) != _state_shapes(self.arrays()):
            what = f"{where} is of another model or optimizer"
            raise CheckpointError(what, "use the versions that wrote it, or remove it to start again")
        self._window = list(np.asarray(arrays["window"]))
        self.step, self.seconds, self.timed = record["step"], record["seconds"], record["timed"]
        for prefix, part in self._parts():
            state = nnx.state(part)
            leaves = [arrays[f"{prefix}.{name}"] for name in flat(state)]
            nnx.update(part, jax.tree.unflatten(jax.tree.structure(state), leaves))

    def _parts(self) -> tuple[tuple[str, Any], ...]:
        """Return the modules with a state, by name."""
        return ("model", self.model), ("optimizer", self.optimizer)

    def _take_point(self) -> TrainingPoint:
        """Return the means of the steps since the last point, and clear the window."""
        window, self._window = self._window, []
        nll = float(np.mean([numbers[0] for numbers in window]))
        norms = [astuple(path_norms(numbers[1:])) for numbers in window]
        return TrainingPoint(self.step, nll, PathNorms(*np.mean(norms, 0).tolist()))


def _state_shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and optimizer state.

    The window is left out: it has as many rows as steps.
    """
    return {name: array.shape for name, array in arrays.items() if name != "window"}


@nnx.jit
def _step(model: FlaxDecoder, optimizer: nnx.Optimizer, ids: Any) -> Any:
    """Take one step, and return nll, ‖A‖², ‖B‖², A·B [4]."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, probe: Any) -> Any:
        """Return the loss, and the nll without the penalty."""
        merged_model = nnx.merge(graph, params, rest)
        value = merged_model.loss(ids[:, :-1], ids[:, 1:], probe)
        return value, value - merged_model.boundary.penalty()

    (_, nll), (gradients, products) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, probe())
    optimizer.update(model, gradients)
    if not model.boundary.pure.tied:
        # A and B are gradients of two tables, and the probe covers A alone; A·B is nan, as in PyTorch's runs
        tables = gradients["boundary"]
        a_squared = (tables["table_in"][...] ** 2).sum()
        b_squared = (tables["table_out"][...] ** 2).sum()
        products = jnp.stack([a_squared, b_squared, jnp.nan])
    return jnp.hstack([nll, products])


def token_losses(
    model: FlaxDecoder, tokens: np.ndarray, length: int, blocks: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss of each predicted token in nats, and the token.

    Both are [blocks · (T − 1)]. T is `length`. At most `blocks` blocks are used, spread evenly over the split. The
    losses do not include the spec's penalty.

    Raises:
        DataError: the split has no complete block.
    """
    available = len(tokens) // length
    if not available:
        raise DataError(f"{len(tokens)} tokens hold no block of {length}", "give more text, or another length")
    chosen = min(available, blocks or available)
    evenly = np.arange(chosen) * available // chosen
    ids = tokens[: available * length].reshape(available, length)[evenly].astype(np.int32)
    size = max(1, min(chosen, 4096 // length))
    losses = []
    for start in range(0, chosen, size):
        part = ids[start : start + size]
        filled = np.pad(part, ((0, size - len(part)), (0, 0)))  # one shape needs one compilation
        losses.append(np.asarray(_losses(model, filled))[: len(part)])
    return np.concatenate(losses).ravel(), ids[:, 1:].ravel()


@nnx.jit
def _losses(model: FlaxDecoder, ids: Any) -> Any:
    """Return the loss of each predicted token [B, T − 1]."""
    return model.boundary(ids[:, :-1], model.body, ids[:, 1:], reduction="none")
