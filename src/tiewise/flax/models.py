"""A small decoder and a recurrent language model in NNX, both around a `Boundary`.

    model = Decoder("tied", vocab=4096, width=128, layers=4, heads=4, rngs=nnx.Rngs(0))
    loss = model.loss(ids, targets)         # [B, T] each; the table threaded from the lookup to the head
    logits = model.logits(ids)              # [B, T, V]

Their parameters, under the names that `named` gives, are those of transformers' Llama and of tiewise's recurrent model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from tiewise.core.errors import CheckpointError, SpecError
from tiewise.core.spec import BoundarySpec
from tiewise.flax.boundary import Boundary
from tiewise.flax.checkpoint import flat
from tiewise.flax.layers import LSTM, Block, RMSNorm


class LanguageModel(nnx.Module):
    """A boundary around a body; what the two models share.

    Attributes:
        boundary: owner of the table or tables.
        lookup, head, within: names of PyTorch's embedding and head, and what stands before the body's names there.
    """

    boundary: Boundary
    lookup: str
    head: str
    within: str

    def body(self, rows: Array) -> Array:
        """[B, T, D] -> [B, T, D]."""
        raise NotImplementedError

    def loss(self, ids: Any, targets: Any, probe: Array | None = None, **options: Any) -> Array:
        """Cross-entropy of `targets` [B, T] behind `ids` [B, T], the penalty of the spec included; options as
        `linear_cross_entropy`."""
        found = self.boundary(ids, self.body, targets, probe, **options)
        return found + self.boundary.penalty()

    def logits(self, ids: Any) -> Array:
        """Map tokens [B, T] to logits [B, T, V]."""
        return self.boundary.logits(self.body(self.boundary.embed(ids)))

    def named(self) -> dict[str, Array]:
        """Return name → array of every parameter as a PyTorch checkpoint has them, a tied table once."""
        return {self._torch_name(name): value for name, value in flat(self._state()).items()}

    def load_named(self, params: Mapping[str, Any]) -> None:
        """Take over a PyTorch checkpoint's parameters.

        Raises:
            CheckpointError: one is missing, unknown or of another shape.
        """
        given, mine = dict(params), self.named()
        if self.boundary.ends.tied:
            given.pop(f"{self.head}.weight", None)
        for what, names in (("lacks", mine.keys() - given.keys()), ("has the unknown", given.keys() - mine.keys())):
            if names:
                raise CheckpointError(f"the checkpoint {what} {', '.join(sorted(names)[:4])}", "build the same model")
        for name, value in mine.items():
            if tuple(given[name].shape) != value.shape:
                what = f"{name} has shape {tuple(given[name].shape)}, not {value.shape}"
                raise CheckpointError(what, "build the model with the sizes of the checkpoint")
        state = nnx.state(self, nnx.Param)
        nnx.replace_by_pure_dict(state, self._filled(self._state(), given, ""))
        nnx.update(self, state)

    def _state(self) -> dict[Any, Any]:
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def _filled(self, tree: Mapping[Any, Any], given: Mapping[str, Any], prefix: str) -> dict[Any, Any]:
        return {
            key: self._filled(value, given, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else jnp.asarray(given[self._torch_name(f"{prefix}{key}")])
            for key, value in tree.items()
        }

    def _torch_name(self, name: str) -> str:
        part, _, rest = name.partition(".")
        if part != "boundary":
            return f"{self.within}.{name}"
        own = {"table_in": f"{self.lookup}.weight", "table_out": f"{self.head}.weight", "bias": f"{self.head}.bias"}
        return own.get(rest) or f"{self.lookup if rest.startswith('in_map') else self.head}.{rest}"


class Decoder(LanguageModel):
    """Llama's decoder: pre-norm blocks with rotary attention and a gated feed-forward layer.

    Args:
        spec: of the boundary.
        vocab, width, layers, heads: V, D, L and the heads that divide D.
        inner: width of the feed-forward layer; None takes 8/3·D, rounded to a multiple of 8.
        rngs: its `params` stream draws the parameters.

    Raises:
        SpecError: sizes that do not divide, or that the spec cannot have.
    """

    lookup, head, within = "model.embed_tokens", "lm_head", "model"

    def __init__(
        self,
        spec: BoundarySpec | str,
        vocab: int,
        width: int,
        layers: int,
        heads: int,
        inner: int | None = None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        if width % (2 * heads):
            raise SpecError(f"width {width} does not divide into {heads} heads of even width", "change one of them")
        inner = inner or max(8, round(width * 8 / 3 / 8) * 8)
        # the body is drawn first, so that arms of one seed share it whatever their boundaries draw
        self.layers = nnx.List([Block(width, heads, inner, rngs=rngs) for _ in range(layers)])
        self.norm = RMSNorm(width)
        self.boundary = Boundary(spec, vocab, width, rngs=rngs)

    def body(self, rows: Array) -> Array:
        """[B, T, D] -> [B, T, D]."""
        for layer in self.layers:
            rows = layer(rows)
        return self.norm(rows)


class RNN(LanguageModel):
    """LSTM layers between lookup and head, the state starting at zero: `tiewise.models.rnn` without dropout.

    Args:
        spec: of the boundary; `tied` is the tied recurrent model of Press & Wolf 2017 and Inan et al. 2017.
        vocab, width, layers: V, H = D, L.
        rngs: its `params` stream draws the parameters.
    """

    lookup, head, within = "embed", "head", "rnn"

    def __init__(self, spec: BoundarySpec | str, vocab: int, width: int, layers: int, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([LSTM(width, rngs=rngs) for _ in range(layers)])
        self.boundary = Boundary(spec, vocab, width, rngs=rngs)

    def body(self, rows: Array) -> Array:
        """[B, T, D] -> [B, T, D]."""
        for layer in self.layers:
            rows = layer(rows)
        return rows


def count_parameters(model: nnx.Module) -> int:
    """Count a model's parameters, a tied table once."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
