"""`Fitting`: the Optax loop step by step, so that it can stop between two steps, be kept, and go on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tiewise.core.backends import PathNorms
from tiewise.core.errors import CheckpointError
from tiewise.flax.models import LanguageModel
from tiewise.flax.path_gradient import path_norms, probe
from tiewise.flax.recipe import Recipe, batches, optimizer_of

POINTS = 20  # of a curve


@dataclass(frozen=True)
class Point:
    """One moment of training: mean training nll, without a spec's penalty, and mean path norms since the point before.

    The cosine is nan where each path has its own table.
    """

    step: int
    train_nll: float
    paths: PathNorms


class Fitting:
    """A training run that may stop between two steps: `arrays` and `record` are all that it needs to go on.

    Args:
        model: trained in place.
        tokens: what it is trained on.
        recipe: how.

    Attributes:
        step: optimizer steps taken.
        seconds, timed: the time of so many steps; the first of a process, which compiles, is not among them.
    """

    def __init__(self, model: LanguageModel, tokens: np.ndarray, recipe: Recipe) -> None:
        self.model, self.tokens, self.recipe = model, tokens, recipe
        self.optimizer = nnx.Optimizer(model, optimizer_of(recipe), wrt=nnx.Param)
        self.step, self.seconds, self.timed = 0, 0.0, 0
        self._window: list[np.ndarray] = []  # nll, ‖A‖², ‖B‖², A·B of each step since the last point of the curve

    def steps(self) -> Iterator[Point | None]:
        """Take the steps that are left; yield after each, with a point of the curve where one is due.

        Raises:
            DataError: fewer tokens than one batch of blocks holds.
        """
        window, began = max(1, self.recipe.steps // POINTS), self.step
        ahead = islice(batches(self.tokens, self.recipe), self.step, None)
        while self.step < self.recipe.steps:
            start = time.perf_counter()
            self._window.append(np.asarray(_step(self.model, self.optimizer, next(ahead))))
            if self.step > began:
                self.seconds += time.perf_counter() - start
                self.timed += 1
            self.step += 1
            due = self.step % window == 0 or self.step == self.recipe.steps
            yield self._point() if due else None

    def arrays(self) -> dict[str, Any]:
        """Return name → array of parameters, the optimizer's state and the steps since the last point."""
        window = np.reshape(np.array(self._window, np.float32), (-1, 4))
        return {**_named(self.model, "model"), **_named(self.optimizer, "optimizer"), "window": window}

    def record(self) -> dict[str, Any]:
        """Return the numbers beside the arrays, for JSON."""
        return {"step": self.step, "seconds": self.seconds, "timed": self.timed}

    def take_up(self, arrays: Mapping[str, Any], record: Mapping[str, Any], where: str) -> None:
        """Go on from what `arrays` and `record` returned; `where` names the place they come from.

        Raises:
            CheckpointError: arrays of another model or optimizer.
        """
        own, given = ({name: x.shape for name, x in a.items() if name != "window"} for a in (self.arrays(), arrays))
        if own != given:
            fix = "use the versions that wrote it, or remove it to start again"
            raise CheckpointError(f"{where} is of another model or optimizer", fix)
        self._window = list(np.asarray(arrays["window"]))
        self.step, self.seconds, self.timed = record["step"], record["seconds"], record["timed"]
        for module, head in ((self.model, "model"), (self.optimizer, "optimizer")):
            state = nnx.state(module)
            leaves = [arrays[name] for name in _named(module, head)]
            nnx.update(module, jax.tree.unflatten(jax.tree.structure(state), leaves))

    def _point(self) -> Point:
        found, self._window = self._window, []
        return Point(self.step, float(np.mean([x[0] for x in found])), _mean([x[1:] for x in found]))


@nnx.jit
def _step(model: LanguageModel, optimizer: nnx.Optimizer, ids: Any) -> Any:
    """One step; nll, ‖A‖², ‖B‖², A·B [4]."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, probe: Any) -> Any:
        whole = nnx.merge(graph, params, rest)
        value = whole.loss(ids[:, :-1], ids[:, 1:], probe)
        return value, value - whole.boundary.penalty()

    (_, nll), (grads, seen) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, probe())
    optimizer.update(model, grads)
    return jnp.hstack([nll, seen if model.boundary.ends.tied else _of_two_tables(grads)])


def _mean(seen: list[Any]) -> PathNorms:
    """Average what single steps' probes hold."""
    found = [path_norms(x) for x in seen]
    return PathNorms(*(float(np.mean([getattr(x, name) for x in found])) for name in ("a", "b", "total", "cosine")))


def _of_two_tables(grads: Any) -> Any:
    """‖A‖², ‖B‖² and nan [3]: the paths end in two tables, as PyTorch's runs have it."""
    return jnp.stack([*((grads["boundary"][name][...] ** 2).sum() for name in ("table_in", "table_out")), jnp.nan])


def _named(module: nnx.Module, head: str) -> dict[str, Any]:
    """Name → array of all that a module holds, in the order of its tree."""
    found = jax.tree_util.tree_leaves_with_path(nnx.state(module))
    return {f"{head}.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf for path, leaf in found}
