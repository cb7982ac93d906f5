"""Boundary of a model in JAX: `NNXBoundary` for Flax NNX, `LinenBoundary` for Linen.

    boundary = NNXBoundary("factored:64+bias", vocab=10_000, width=256, rngs=nnx.Rngs(0))

    rows = boundary.embed(ids)              # [..] -> [.., D]
    logits = boundary.logits(hidden)        # [.., D] -> [.., V]
    loss = boundary.loss(hidden, targets)   # the cross-entropy of these logits, fused, without logits
    loss = boundary(ids, body, targets)     # all steps, with one gradient buffer; body maps [.., D] to [.., D]

Both call `PureBoundary`, whose functions take a flat mapping of parameters, for a program without Flax:

    pure = PureBoundary.of("factored:64+bias", vocab=10_000, width=256)
    params = pure.initial(jax.random.key(0))        # {"table_in": [V, 64], "in_map.weight": …, "bias": [V]}
    loss = pure.model_loss(params, ids, body, targets)

Names and shapes of parameters are those of PyTorch's `Boundary`. A tied boundary has no second table: the tree has one
leaf `table_in`, and so has the optimizer's state. Maps are between a table and the body: `in_map` after the lookup [..,
E] -> [.., D], `out_map` before the head [.., D] -> [.., E].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax

from tiewise.boundary.flax.loss import FlaxLossOptions, as_array, check_range, linear_cross_entropy
from tiewise.boundary.flax.paths import enter
from tiewise.core.errors import SpecError
from tiewise.core.frequent_tokens import most_frequent
from tiewise.core.spec import FREE_ROWS, BoundarySpec, Vocabularies
from tiewise.core.spec_options import FLAX
from tiewise.planning.first_loss import sound_std, starting_nll

Spec = BoundarySpec | str
Params = Mapping[str, Array]  # names of PyTorch's boundary → arrays: `table_in`, `in_map.weight`, `out_map.p`, …
Body = Callable[[Array], Array]
START_AT_ZERO = ("bias", "out_map.p", "out_map.factor", "out_map.bias", FREE_ROWS)


@dataclass(frozen=True)
class PureBoundary:
    """Functions of the tables, maps, bias and scales of one spec; `PureBoundary.of` makes it.

    The letters in shapes are those of `tiewise.core`.

    >>> pure = PureBoundary.of("tied", vocab=10, width=4)
    >>> params = pure.initial(jax.random.key(0))
    >>> pure.logits(params, pure.embed(params, [1, 2, 3])).shape
    (3, 10)

    Attributes:
        spec: the spec.
        vocab: V of input and output.
        width: D, the body's width.
        free_ids: the tokens of `+free=K`, in ascending order.
    """

    spec: BoundarySpec
    vocab: Vocabularies
    width: int
    free_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: Spec, vocab: Vocabularies | int, width: int, counts: Any = None) -> PureBoundary:
        """Return the boundary of a spec, after checking that these sizes allow it.

        Args:
            spec: a `BoundarySpec` or its written form.
            vocab: V, or both vocabularies if input and output differ.
            width: D, the body's width.
            counts: [V_out], how often each token occurs, by which `+free=K` chooses its tokens.

        Raises:
            SpecError: these sizes do not allow the spec, it has a schedule (which belongs to a training run), or
                `+free=K` has no counts.
        """
        chosen = BoundarySpec.parse(spec)
        if not isinstance(vocab, Vocabularies):
            vocab = Vocabularies.same(vocab)
        pure = cls(chosen, vocab, width)
        chosen.require(FLAX)
        rows = pure.vocab.rows(pure.tied)
        if chosen.pad is not None and chosen.pad >= rows:
            raise SpecError(f"pad={chosen.pad} is outside the table of {rows} rows", "lower it")
        pure.shapes()
        if chosen.free is not None:
            return replace(pure, free_ids=most_frequent(chosen, counts, vocab))
        return pure

    @property
    def tied(self) -> bool:
        """Return True if the input embedding and the output head use one table."""
        return self.spec.tables == 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name → shape of every parameter.

        Raises:
            SpecError: the widths do not allow the spec.
        """
        in_width, out_width = self.spec.table_widths(self.width)
        shapes: dict[str, tuple[int, ...]] = {"table_in": (self.vocab.rows(self.tied), in_width)}
        if not self.tied:
            shapes["table_out"] = (self.vocab.outputs, out_width)
        shapes |= self.spec.map_shapes(self.width)
        if self.spec.bias:
            shapes["bias"] = (self.vocab.outputs,)
        return shapes

    def draw(self, name: str, key: Array) -> Array:
        """Draw one parameter from its initial distribution.

        Tables are N(0, σ²), with σ = `init` of the spec or `sound_std`; maps are N(0, 1/from). Biases, a padding row, P
        of a correction and the definite map's factor are zero.
        """
        shape = self.shapes()[name]
        if name in START_AT_ZERO:
            return jnp.zeros(shape)
        normal = jax.random.normal(key, shape)
        if not name.startswith("table"):
            return normal * shape[1] ** -0.5
        table = (self.spec.init or sound_std(self.width)) * normal
        if self.spec.pad is not None:
            table = table.at[self.spec.pad].set(0)
        return table

    def initial(self, key: Array) -> dict[str, Array]:
        """Draw every parameter."""
        names = self.shapes()
        keys = jax.random.split(key, len(names))
        return {name: self.draw(name, part) for name, part in zip(names, keys, strict=True)}

    def with_rows(self, params: Params, rows: Any) -> dict[str, Array]:
        """Set the input table (and a tied output) to pretrained rows [V, E].

        Rows of nan keep their values.

        Raises:
            SpecError: the rows have another shape.
        """
        table, rows = params["table_in"], jnp.asarray(rows)
        if rows.shape != table.shape:
            fix = f"use factored:{rows.shape[1]} or, beyond the model's width, projected:{rows.shape[1]}"
            raise SpecError(f"{self.spec}: vectors {rows.shape} do not fit the table {table.shape}", fix)
        keeps = jnp.isnan(rows)
        if self.spec.pad is not None:
            keeps = keeps.at[self.spec.pad].set(True)
        return {**params, "table_in": jnp.where(keeps, table, rows.astype(table.dtype))}

    def predicted_nll(self) -> float:
        """Return the predicted loss (nats) of the first step on uniformly random targets.

        The prediction assumes a body of two Llama layers.
        """
        return starting_nll(self.spec, self.vocab, self.width)

    def embed(self, params: Params, ids: Any) -> Array:
        """Map tokens [..] to the body's input [.., D], or [.., E] without an input map.

        Raises:
            SpecError: the token ids are not integers.
            IndexError: a token is outside the input vocabulary; if ids are traced, its row is nan instead.
        """
        return self._embed(params, ids, None)[0]

    def logits(self, params: Params, hidden: Array) -> Array:
        """Map hidden states [.., D] to all logits [.., V_out]."""
        rows = self._free_rows(params, self._output_rows(self._output_table(params)))
        z = self._features(params, hidden) @ rows.T * self.spec.scales(self.width)[1]
        if self.spec.bias:
            z = z + params["bias"]
        if self.spec.softcap is not None:
            z = self.spec.softcap * jnp.tanh(z / self.spec.softcap)
        return z

    def loss(self, params: Params, hidden: Array, targets: Any, **options: Any) -> Array:
        """Return the cross-entropy of `logits(hidden)` against `targets`, fused.

        `options` are those of `linear_cross_entropy`. The penalty is not included.
        """
        return self._loss(params, hidden, self._output_table(params), targets, options)

    def model_loss(
        self, params: Params, ids: Any, body: Body, targets: Any, probe: Array | None = None, **options: Any
    ) -> Array:
        """Return the loss of `body` between lookup and head.

        The lookup returns the table that the head uses, so that a tied table has one gradient buffer. The gradient of
        `probe` (`paths.probe()`) contains the norms of both paths. If the boundary is untied, the head path belongs to
        the other table, and the probe covers the lookup path alone.
        """
        rows, table = self._embed(params, ids, probe)
        hidden = body(rows)
        if not self.tied:  # otherwise the head uses the table that the lookup returned
            table = self._output_table(params)
        return self._loss(params, hidden, table, targets, options)

    def penalty(self, params: Params) -> Array:
        """Return λ‖P‖₂ + c/2 ‖P‖²_F of a `projected` spec's P, to add to the loss.

        It is 0 if the spec has neither term.
        """
        spec = self.spec
        is_penalised = spec.penalty or spec.decay
        if not is_penalised or "out_map.weight" not in params:
            return jnp.zeros(())
        squares = (params["out_map.weight"] ** 2).sum()
        if not spec.penalty:
            return spec.decay / 2 * squares
        safe = jnp.where(squares > 0, squares, 1)  # the norm has no derivative at zero, where its gradient is zero
        return spec.penalty * jnp.where(squares > 0, jnp.sqrt(safe), 0) + spec.decay / 2 * squares

    def dense(self, params: Params) -> tuple[Array, Array]:
        """Return tables [V_in, D] and [V_out, D] of a plain untied boundary with the same function.

        The tables include the scales.

        Raises:
            SpecError: the head has a soft-cap after the product or a bias before it, which no table can express.
        """
        self.spec.require_tables_alone()
        in_scale, out_scale = self.spec.scales(self.width)
        input_table = _apply_in_map(params, params["table_in"][: self.vocab.inputs])
        output_table = self._free_rows(params, self._output_rows(params[self._output_name]))
        if any(name.startswith("out_map.") for name in params):
            output_table = output_table @ self._features(params, jnp.eye(self.width, dtype=output_table.dtype)).T
        return input_table * in_scale, output_table * out_scale

    def _embed(self, params: Params, ids: Any, probe: Array | None) -> tuple[Array, Array]:
        """Return the body's input, and the input table to use next."""
        ids = as_array(ids)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise SpecError(f"token ids of type {ids.dtype}", "cast them to an integer type")
        check_range(ids, self.vocab.inputs, "token {} is outside the input vocabulary of {}")
        ids = jnp.asarray(ids)
        table = self._table(params, "table_in")
        if self.vocab.inputs < table.shape[0]:  # rows of tokens that are only outputs cannot be read
            ids = jnp.where(ids < self.vocab.inputs, ids, table.shape[0])
        rows, table = enter(table, ids, probe, stopped=self.spec.pad, alpha=self.spec.alpha)
        return _apply_in_map(params, rows) * self.spec.scales(self.width)[0], table

    @property
    def _output_name(self) -> str:
        """Name of the parameter that is the output table."""
        return "table_in" if self.tied else "table_out"

    def _table(self, params: Params, name: str) -> Array:
        """Return a table, without a gradient if the spec freezes it."""
        if self.spec.freeze and name == "table_in":
            return lax.stop_gradient(params[name])
        return params[name]

    def _output_table(self, params: Params) -> Array:
        """Return the output table, whose padding row gets no gradient."""
        table = self._table(params, self._output_name)
        if self.spec.pad is None:
            return table
        no_ids = jnp.zeros(0, jnp.int32)  # `enter` looks nothing up; it only applies `stopped`
        return enter(table, no_ids, stopped=self.spec.pad)[1]

    def _output_rows(self, table: Array) -> Array:
        """Return the output tokens' rows [V_out, E], in the order of the tokens."""
        index = self.vocab.output_index() if self.tied else None
        if index is None:
            return table[: self.vocab.outputs]
        return table[jnp.asarray(index)]

    def _free_rows(self, params: Params, rows: Array) -> Array:
        """Return output rows [V_out, E] with the separate rows of the free tokens."""
        if FREE_ROWS not in params:
            return rows
        return rows.at[jnp.asarray(self.free_ids)].add(params[FREE_ROWS].astype(rows.dtype), indices_are_sorted=True)

    def _features(self, params: Params, hidden: Array) -> Array:
        """Map hidden states [.., D] to [.., E] before the head; without a map, return them."""
        if hidden.shape[-1] != self.width:
            what = f"hidden states {hidden.shape} meet a boundary of width {self.width}"
            raise SpecError(what, f"give hidden states [.., {self.width}]")
        if "out_map.weight" in params:
            mapped = hidden @ params["out_map.weight"].T
            if "out_map.bias" in params:
                mapped = mapped + params["out_map.bias"]
            return mapped
        if "out_map.p" in params:
            return hidden + self.spec.strength * (hidden @ params["out_map.q"].T) @ params["out_map.p"].T
        if "out_map.factor" in params:
            c = _cholesky(params["out_map.factor"])
            return (hidden @ c) @ c.T
        return hidden

    def _loss(self, params: Params, hidden: Array, table: Array, targets: Any, options: dict[str, Any]) -> Array:
        """Return the loss of hidden states by an output table."""
        chosen = FlaxLossOptions(scale=self.spec.scales(self.width)[1], softcap=self.spec.softcap)
        features, rows = self._features(params, hidden), self._free_rows(params, self._output_rows(table))
        return linear_cross_entropy(features, rows, targets, params.get("bias"), chosen, **options)


def _apply_in_map(params: Params, rows: Array) -> Array:
    """Map rows [.., E] to [.., D] after the lookup; without a map, return them."""
    if "in_map.weight" in params:
        return rows @ params["in_map.weight"].T
    if "out_map.factor" in params:
        return _solve(rows, _cholesky(params["out_map.factor"]))
    return rows


def _solve(rows: Array, c: Array) -> Array:
    """Return rows · (C Cᵀ)⁻¹ [.., D] by two triangular systems, in fp32 or wider."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    columns = rows.reshape(-1, rows.shape[-1]).T.astype(wide)
    half = jax.scipy.linalg.solve_triangular(c.astype(wide), columns, lower=True)
    solved = jax.scipy.linalg.solve_triangular(c.astype(wide), half, lower=True, trans=1)
    return solved.T.reshape(rows.shape).astype(rows.dtype)


def _cholesky(factor: Array) -> Array:
    """Return C [D, D], lower triangular; its diagonal is the exponential of the parameter's."""
    return jnp.tril(factor, -1) + jnp.diag(jnp.exp(jnp.diag(factor)))


class _BoundaryMethods:
    """Methods of a boundary that has `pure` functions and a flat mapping of parameters."""

    pure: PureBoundary

    def parameters(self) -> dict[str, Array]:
        """Return name → array of every parameter."""
        raise NotImplementedError

    def embed(self, ids: Any) -> Array:
        """Map tokens [..] to the body's input [.., D], as `PureBoundary.embed` does."""
        return self.pure.embed(self.parameters(), ids)

    def logits(self, hidden: Array) -> Array:
        """Map hidden states [.., D] to logits [.., V_out], as `PureBoundary.logits` does."""
        return self.pure.logits(self.parameters(), hidden)

    def loss(self, hidden: Array, targets: Any, **options: Any) -> Array:
        """Return the fused cross-entropy of `logits(hidden)`, as `PureBoundary.loss` does."""
        return self.pure.loss(self.parameters(), hidden, targets, **options)

    def __call__(self, ids: Any, body: Body, targets: Any, probe: Array | None = None, **options: Any) -> Array:
        """Return the loss of `body` between lookup and head, as `PureBoundary.model_loss` does."""
        return self.pure.model_loss(self.parameters(), ids, body, targets, probe, **options)

    def penalty(self) -> Array:
        """Return the spec's penalty, to add to the loss, as `PureBoundary.penalty` does."""
        return self.pure.penalty(self.parameters())

    def dense(self) -> tuple[Array, Array]:
        """Return the tables of a plain untied boundary, as `PureBoundary.dense` does."""
        return self.pure.dense(self.parameters())

    def predicted_nll(self) -> float:
        """Return the predicted loss (nats) of the first step, as `PureBoundary.predicted_nll` does."""
        return self.pure.predicted_nll()


class _Map(nnx.Module):
    """Parameters of one map, by the last part of their names."""


class NNXBoundary(_BoundaryMethods, nnx.Module):
    """Boundary for NNX, with parameters drawn from the `params` stream of `rngs`.

    >>> boundary = NNXBoundary("tied", vocab=10, width=4, rngs=nnx.Rngs(0))
    >>> boundary.logits(boundary.embed([1, 2, 3])).shape
    (3, 10)

    Args:
        spec: a `BoundarySpec` or its written form.
        vocab: V, or both vocabularies if input and output differ.
        width: D, the body's width.
        rngs: random streams of NNX.
        counts: as in `PureBoundary.of`.

    Attributes:
        table_in: [V, E] Param; also the output table if tied.
        table_out, bias, in_map, out_map: [V, E] and [V_out] Params, and modules with the maps' Params, if the spec has
            them.

    Raises:
        SpecError: these sizes do not allow the spec, or it has a schedule (which belongs to a training run).
    """

    def __init__(
        self, spec: Spec, vocab: int | Vocabularies, width: int, *, rngs: nnx.Rngs, counts: Any = None
    ) -> None:
        self.pure = PureBoundary.of(spec, vocab, width, counts)
        self.load({name: self.pure.draw(name, rngs.params()) for name in self.pure.shapes()})

    def load_rows(self, rows: Any) -> None:
        """Set the input table (and a tied output) to rows [V, E], as `PureBoundary.with_rows` does."""
        self.table_in[...] = self.pure.with_rows(self.parameters(), rows)["table_in"]

    def load(self, params: Params) -> None:
        """Replace every parameter; `tiewise.boundary.flax.parameter_files.load` reads and checks them."""
        for name in self.pure.shapes():
            module, leaf = self._module_of(name)
            setattr(module, leaf, nnx.Param(params[name]))

    def parameters(self) -> dict[str, Array]:
        """Return name → array of every parameter, with the names of a safetensors file."""
        modules = {name: self._module_of(name) for name in self.pure.shapes()}
        return {name: getattr(module, leaf)[...] for name, (module, leaf) in modules.items()}

    def _module_of(self, name: str) -> tuple[Any, str]:
        """Return the module of a parameter, and the parameter's name there.

        If the module of a map is missing, it is created.
        """
        map_name, _, leaf = name.rpartition(".")
        if not map_name:
            return self, leaf
        if not hasattr(self, map_name):
            setattr(self, map_name, _Map())
        return getattr(self, map_name), leaf


class LinenBoundary(_BoundaryMethods, linen.Module):
    """Boundary for Linen: the parameters of `NNXBoundary` under `params`.

    The parameters of a map are nested (`params["out_map"]["weight"]`).

    >>> boundary = LinenBoundary("tied", vocab=10, width=4)
    >>> ids = jnp.array([1, 2, 3])
    >>> params = boundary.init(jax.random.key(0), ids, method="embed")
    >>> boundary.apply(params, ids, method="embed").shape
    (3, 4)

    Attributes:
        spec: a `BoundarySpec` or its written form.
        vocab: V, or both vocabularies if input and output differ.
        width: D, the body's width.
        counts: as in `PureBoundary.of`, a tuple.

    Raises:
        SpecError: at `init`, as `NNXBoundary`.
    """

    spec: Spec
    vocab: int | Vocabularies
    width: int
    counts: tuple[float, ...] | None = None

    @property
    def pure(self) -> PureBoundary:  # type: ignore[override]
        """Functions that all methods call."""
        return PureBoundary.of(self.spec, self.vocab, self.width, self.counts)

    def setup(self) -> None:
        """Declare every parameter once; those of a map are one tree."""
        pure = self.pure

        def draw(key: Array, names: Any) -> Any:
            """Draw every parameter of a tree of names."""
            return jax.tree.map(lambda name: pure.draw(name, key), names)

        trees = unflatten_dict({name: name for name in pure.shapes()}, sep=".")
        declared = {name: self.param(name, draw, names) for name, names in trees.items()}
        self._flat = flatten_dict(declared, sep=".")

    def parameters(self) -> dict[str, Array]:
        """Return name → array of every parameter of a bound module."""
        return dict(self._flat)
