"""The founding exercise: one Linen module that ties by declaring its matrix once.

    embedding[ids]          lookup, [T, D]
    … @ embedding.T         logits, [T, V]

`flax.linen.Embed` would own a matrix of its own, and two calls of `self.param` would make two.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax import Array

STD = 0.02


class TiedIO(linen.Module):
    """The lookup followed at once by the output projection: the direct path of a tied table.

    Attributes:
        vocab_size: V.
        d_model: D.
    """

    vocab_size: int
    d_model: int

    @linen.compact
    def __call__(self, token_ids: Array) -> Array:
        """Map tokens [T] to logits [T, V]."""
        table = self.param("embedding", linen.initializers.normal(STD), (self.vocab_size, self.d_model))
        return table[token_ids] @ table.T


def tied_io_embed(seed: int, token_ids: Any, vocab_size: Any, d_model: Any) -> Array:
    """Initialise `TiedIO` from `PRNGKey(seed)` and apply it to the tokens.

    Args:
        seed: of the initialisation.
        token_ids: [T], of any number type; cast to int32.
        vocab_size, d_model: V and D, of any number type; cast to int.

    Returns:
        logits of every token, flattened to [T · V].
    """
    ids = jnp.asarray(token_ids).astype(jnp.int32)
    module = TiedIO(int(vocab_size), int(d_model))
    params = module.init(jax.random.PRNGKey(int(seed)), ids)
    return module.apply(params, ids).reshape(-1)
