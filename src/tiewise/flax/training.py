"""Training a small Flax model to the end, and the measures that a comparison reports of it.

`fit` trains by `tiewise.flax.recipe` and returns the curve with the norms of both gradient paths. `token_losses` gives
the loss of every predicted token of a split, from which means, perplexity, bits per byte and frequency bins follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from tiewise.core.errors import DataError
from tiewise.flax.fitting import Fitting, Point
from tiewise.flax.models import LanguageModel
from tiewise.flax.recipe import Recipe


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
    fitting, curve = Fitting(model, tokens, recipe), []
    for point in fitting.steps():
        if point is not None:
            curve.append(point)
            progress(point, recipe.steps)
    return Trained(tuple(curve), fitting.seconds, fitting.timed * recipe.batch * recipe.length)


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
def _losses(model: LanguageModel, ids: Any) -> Any:
    return model.boundary(ids[:, :-1], model.body, ids[:, 1:], reduction="none")
