"""`NNXBoundary` for Flax NNX and `LinenBoundary` for Linen: the one owner of a model's table or tables.

    boundary = NNXBoundary("factored:64+bias", vocab=10_000, width=256, rngs=nnx.Rngs(0))

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

from tiewise.core.spec import BoundarySpec, Vocabularies
from tiewise.flax.pure_boundary import Body, PureBoundary


class _Verbs:
    """The verbs of a boundary, for whoever has `pure` functions and a flat mapping of parameters."""

    def _pure(self) -> PureBoundary:
        raise NotImplementedError

    def parameters(self) -> dict[str, Array]:
        """Return name → array of every parameter, as a safetensors file holds them."""
        raise NotImplementedError

    def embed(self, ids: Any) -> Array:
        """Map tokens [..] to the body's input [.., D]; see `PureBoundary.embed`."""
        return self._pure().embed(self.parameters(), ids)

    def logits(self, hidden: Array) -> Array:
        """Map hidden states [.., D] to logits [.., V_out]."""
        return self._pure().logits(self.parameters(), hidden)

    def loss(self, hidden: Array, targets: Any, **options: Any) -> Array:
        """Cross-entropy of `logits(hidden)`, fused; options of `linear_cross_entropy`. `penalty()` is not included."""
        return self._pure().loss(self.parameters(), hidden, targets, **options)

    def __call__(self, ids: Any, body: Body, targets: Any, probe: Array | None = None, **options: Any) -> Array:
        """Loss of `body` between lookup and head; see `PureBoundary.whole`."""
        return self._pure().whole(self.parameters(), ids, body, targets, probe, **options)

    def penalty(self) -> Array:
        """Penalty of a `projected` spec, to be added to the loss; 0 elsewhere."""
        return self._pure().penalty(self.parameters())

    def dense(self) -> tuple[Array, Array]:
        """Tables [V_in, D] and [V_out, D] of a plain untied boundary that does the same; see `PureBoundary.dense`."""
        return self._pure().dense(self.parameters())

    def predicted_nll(self) -> float:
        """Expected loss (nats) of the first step; see `PureBoundary.predicted_nll`."""
        return self._pure().predicted_nll()


class _Map(nnx.Module):
    """Parameters of one map, by their last name."""


class NNXBoundary(_Verbs, nnx.Module):
    """Boundary for NNX, its parameters drawn from the `params` stream of `rngs`.

    Attributes:
        table_in: [V, E] Param; the output table too where tied.
        table_out, bias, in_map, out_map: [V, E] and [V_out] Params and modules with the maps', where the spec has them.

    Raises:
        SpecError: a spec that these sizes cannot have, or a schedule (which belongs to a training run).
    """

    def __init__(self, spec: BoundarySpec | str, vocab: int | Vocabularies, width: int, *, rngs: nnx.Rngs) -> None:
        self.pure = PureBoundary.of(spec, vocab, width)
        for name in self.pure.shapes():
            holder, leaf = self._place(name)
            setattr(holder, leaf, nnx.Param(self.pure.draw(name, rngs.params())))

    def load_rows(self, rows: Any) -> None:
        """Start the input table (and a tied output) from pretrained rows [V, E]; see `PureBoundary.with_rows`."""
        self.table_in[...] = self.pure.with_rows(self.parameters(), rows)["table_in"]

    def load(self, params: dict[str, Array]) -> None:
        """Take over every parameter; `tiewise.flax.parameter_files.load` gives and checks them."""
        for name in self.pure.shapes():
            holder, leaf = self._place(name)
            setattr(holder, leaf, nnx.Param(params[name]))

    def _place(self, name: str) -> tuple[Any, str]:
        head, _, leaf = name.rpartition(".")
        if head and not hasattr(self, head):
            setattr(self, head, _Map())
        return (getattr(self, head) if head else self), leaf

    def _pure(self) -> PureBoundary:
        return self.pure

    def parameters(self) -> dict[str, Array]:
        """Return name → array of every parameter, as a safetensors file holds them."""
        places = {name: self._place(name) for name in self.pure.shapes()}
        return {name: getattr(holder, leaf)[...] for name, (holder, leaf) in places.items()}


class LinenBoundary(_Verbs, linen.Module):
    """Boundary for Linen: the same parameters under `params`, maps nested (`params["out_map"]["weight"]`).

    Raises:
        SpecError: at `init`, as `NNXBoundary`.
    """

    spec: BoundarySpec | str
    vocab: int | Vocabularies  # V; both where input and output differ
    width: int  # D

    def setup(self) -> None:
        """Declare every parameter, each once."""
        pure = self._pure()
        names = pure.shapes()
        self._flat = {name: self.param(name, _drawing(pure, name)) for name in names if "." not in name}
        for head in sorted({name.partition(".")[0] for name in names if "." in name}):
            setattr(self, head, _LinenMap(pure, head))

    def _pure(self) -> PureBoundary:
        return PureBoundary.of(self.spec, self.vocab, self.width)

    def parameters(self) -> dict[str, Array]:
        """The same, of a bound module."""
        maps = [getattr(self, head)() for head in ("in_map", "out_map") if hasattr(self, head)]
        return {**self._flat, **{name: value for part in maps for name, value in part.items()}}


class _LinenMap(linen.Module):
    pure: PureBoundary
    head: str

    @linen.compact
    def __call__(self) -> dict[str, Array]:
        names = [name for name in self.pure.shapes() if name.startswith(self.head + ".")]
        return {name: self.param(name.rpartition(".")[2], _drawing(self.pure, name)) for name in names}


def _drawing(pure: PureBoundary, name: str) -> Any:
    return lambda key: pure.draw(name, key)
