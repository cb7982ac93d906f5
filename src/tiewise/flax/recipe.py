"""The recipe that the PyTorch comparison trains by, for Optax.

AdamW (β 0.9, 0.98), clipped at norm 1, cosine with a tenth of the steps as warm-up, decay on matrices alone
blocks of T tokens in an order drawn from the seed; each predicts T − 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import optax

from tiewise.core.errors import DataError


@dataclass(frozen=True)
class Recipe:
    """Numbers of a run; letters as in `tiewise.core`.

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


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW as the module says; one object for all seeds, so that a step is compiled once for them."""
    return _adamw(recipe.steps, recipe.learning_rate, recipe.weight_decay)


@lru_cache(8)
def _adamw(steps: int, peak: float, weight_decay: float) -> optax.GradientTransformation:
    warm = max(1, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warm, max(steps, warm + 1))
    decayed = optax.adamw(rate, b2=0.98, weight_decay=weight_decay, mask=_matrices)
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


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)
