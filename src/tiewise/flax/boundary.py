"""`Boundary` for Flax NNX and `LinenBoundary` for Linen: the one owner of a model's table or tables.

    boundary = Boundary("factored:64+bias", vocab=10_000, width=256, rngs=nnx.Rngs(0))

    rows = boundary.embed(ids)              # [..] -> [.., D]
    logits = boundary.logits(hidden)        # [.., D] -> [.., V]
    loss = boundary.loss(hidden, targets)   # the same, fused, without logits
    loss = boundary(ids, body, targets)     # all of it: body maps [.., D] to [.., D]

Tied means that there is no second table: the parameter tree has one leaf `table_in`, and so has the optimizer's state.
Names and shapes of parameters are those of PyTorch's `Boundary`.
"""

from __future__ import annotations

from typing import Any

from flax import linen, nnx
from jax import Array

from tiewise.core.spec import BoundarySpec
from tiewise.core.vocabulary import Vocabularies
from tiewise.flax.ends import Body, Ends


class _Verbs:
    """The verbs of a boundary, for whoever has `ends` and a flat mapping of parameters."""

    def _ends(self) -> Ends:
        raise NotImplementedError

    def _params(self) -> dict[str, Array]:
        raise NotImplementedError

    def embed(self, ids: Any) -> Array:
        """Map tokens [..] to the body's input [.., D]; see `Ends.embed`."""
        return self._ends().embed(self._params(), ids)

    def logits(self, hidden: Array) -> Array:
        """Map hidden states [.., D] to logits [.., V_out]."""
        return self._ends().logits(self._params(), hidden)

    def loss(self, hidden: Array, targets: Any, **options: Any) -> Array:
        """Cross-entropy of `logits(hidden)`, fused; options of `linear_cross_entropy`. `penalty()` is not included."""
        return self._ends().loss(self._params(), hidden, targets, **options)

    def __call__(self, ids: Any, body: Body, targets: Any, probe: Array | None = None, **options: Any) -> Array:
        """Loss of `body` between lookup and head; see `Ends.whole`."""
        return self._ends().whole(self._params(), ids, body, targets, probe, **options)

    def penalty(self) -> Array:
        """Penalty of a `projected` spec, to be added to the loss; 0 elsewhere."""
        return self._ends().penalty(self._params())

    def dense(self) -> tuple[Array, Array]:
        """Tables [V_in, D] and [V_out, D] of a plain untied boundary with the same function; see `Ends.dense`."""
        return self._ends().dense(self._params())

    def predicted_nll(self) -> float:
        """Expected loss (nats) of the first step; see `Ends.predicted_nll`."""
        return self._ends().predicted_nll()


class _Map(nnx.Module):
    """Parameters of one map, by their last name."""


class Boundary(_Verbs, nnx.Module):
    """Boundary for NNX.

    Args:
        spec: what to build.
        vocab: V, or `Vocabularies` where input and output differ.
        width: D.
        rngs: its `params` stream draws the parameters.

    Attributes:
        table_in: [V, E] Param; the output table too where tied.
        table_out: [V, E] Param, where untied.
        in_map, out_map: modules that hold the maps' Params, where the spec has them.
        bias: [V_out] Param, where the spec has one.

    Raises:
        SpecError: a spec that these sizes cannot have, or a schedule (which belongs to a training run).
    """

    def __init__(self, spec: BoundarySpec | str, vocab: int | Vocabularies, width: int, *, rngs: nnx.Rngs) -> None:
        self.ends = Ends.of(spec, vocab, width)
        for name in self.ends.shapes():
            holder, leaf = self._place(name)
            setattr(holder, leaf, nnx.Param(self.ends.draw(name, rngs.params())))

    def load_rows(self, rows: Any) -> None:
        """Start the input table (and a tied output) from pretrained rows [V, E]; see `Ends.with_rows`."""
        self.table_in[...] = self.ends.with_rows(self._params(), rows)["table_in"]

    def parameters(self) -> dict[str, Array]:
        """Return name → array of every parameter, as a safetensors file holds them."""
        return self._params()

    def load(self, params: dict[str, Array]) -> None:
        """Take over every parameter; `tiewise.flax.checkpoint.read` gives and checks them."""
        for name in self.ends.shapes():
            holder, leaf = self._place(name)
            setattr(holder, leaf, nnx.Param(params[name]))

    def _place(self, name: str) -> tuple[Any, str]:
        head, _, leaf = name.rpartition(".")
        if head and not hasattr(self, head):
            setattr(self, head, _Map())
        return (getattr(self, head) if head else self), leaf

    def _ends(self) -> Ends:
        return self.ends

    def _params(self) -> dict[str, Array]:
        places = {name: self._place(name) for name in self.ends.shapes()}
        return {name: getattr(holder, leaf)[...] for name, (holder, leaf) in places.items()}


class LinenBoundary(_Verbs, linen.Module):
    """Boundary for Linen: the same parameters under `params`, maps nested (`params["out_map"]["weight"]`).

    Attributes:
        spec: what to build.
        vocab: V, or `Vocabularies` where input and output differ.
        width: D.

    Raises:
        SpecError: at `init`, as `Boundary`.
    """

    spec: BoundarySpec | str
    vocab: int | Vocabularies
    width: int

    def setup(self) -> None:
        """Declare every parameter, each once."""
        ends = self._ends()
        names = ends.shapes()
        self._flat = {name: self.param(name, _drawing(ends, name)) for name in names if "." not in name}
        for head in sorted({name.partition(".")[0] for name in names if "." in name}):
            setattr(self, head, _LinenMap(ends, head))

    def _ends(self) -> Ends:
        return Ends.of(self.spec, self.vocab, self.width)

    def _params(self) -> dict[str, Array]:
        maps = [getattr(self, head)() for head in ("in_map", "out_map") if hasattr(self, head)]
        return {**self._flat, **{name: value for part in maps for name, value in part.items()}}


class _LinenMap(linen.Module):
    ends: Ends
    head: str

    @linen.compact
    def __call__(self) -> dict[str, Array]:
        names = [name for name in self.ends.shapes() if name.startswith(self.head + ".")]
        return {name: self.param(name.rpartition(".")[2], _drawing(self.ends, name)) for name in names}


def _drawing(ends: Ends, name: str) -> Any:
    return lambda key: ends.draw(name, key)
