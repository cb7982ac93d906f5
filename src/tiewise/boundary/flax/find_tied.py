"""Which tables a Flax tree really holds, and whether a model's two ends do what tying means.

    print(find_tied(params))
    2 tables of 1,000 tokens, not equal: params/Embed_0/embedding [V, 64], params/Dense_0/kernel [64, V] (transposed)

A pytree does not alias: two leaves are two matrices, even where they hold the same numbers now, and the optimizer will
move them apart. `find_tied` reads the tree; `check_ends` also runs the model, for mistakes that leave no trace there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tiewise.boundary.flax.parameter_files import flat
from tiewise.core.errors import DataError, one_line
from tiewise.core.found import count


@dataclass(frozen=True)
class TableLeaf:
    """A table in a tree."""

    path: str
    shape: tuple[int, int]  # as stored
    transposed: bool  # whether that is [·, V], the transpose of a table

    def __str__(self) -> str:
        return f"{self.path} " + (f"[{self.shape[0]}, V] (transposed)" if self.transposed else f"[V, {self.shape[1]}]")


@dataclass(frozen=True)
class TreeTables:
    """Every table of a tree, in its order."""

    vocab: int  # V
    leaves: tuple[TableLeaf, ...]
    equal: tuple[tuple[str, str], ...]  # pairs of paths that hold the same numbers, transposed if need be

    @property
    def one(self) -> bool:
        """Whether there is exactly one table: what tied means in a tree."""
        return len(self.leaves) == 1

    def __str__(self) -> str:
        names, of = ", ".join(map(str, self.leaves)), f"of {count(self.vocab)} tokens"
        if len(self.leaves) < 2:
            return f"1 table {of}: {names}" if self.one else f"no table {of}"
        pairs = len(self.leaves) * (len(self.leaves) - 1) // 2
        same = "equal now, but free to move apart" if len(self.equal) == pairs else "not equal"
        same = f"{len(self.equal)} of {pairs} pairs equal" if 0 < len(self.equal) < pairs else same
        return f"{len(self.leaves)} tables {of}, {same}: {names}"


def find_tied(params: Any, vocab: int | None = None) -> TreeTables:
    """List the tables in a tree of arrays: Linen variables, an `nnx.State`, an optimizer's state, any pytree.

    Args:
        params: the tree; a leaf that JAX stores twice counts twice, as the optimizer counts it.
        vocab: V. None takes the longest axis of a leaf named `embedding`, or else of any matrix.

    Raises:
        DataError: no matrix in the tree to take V from.
    """
    leaves = {name: x for name, x in flat(params, "/").items() if getattr(x, "ndim", 0) == 2}
    matrices = {name: x for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    if vocab is None and not matrices:
        raise DataError("no matrix in this tree", "give the tree of parameters")
    named = [x.shape[0] for name, x in matrices.items() if name.rpartition("/")[2] == "embedding"]
    v = vocab if vocab is not None else max(named or [size for x in matrices.values() for size in x.shape])
    tables = {name: x for name, x in matrices.items() if v in x.shape}
    rows = {name: (x if x.shape[0] == v else x.T) for name, x in tables.items()}
    pairs = combinations(rows, 2)
    equal = tuple((a, b) for a, b in pairs if rows[a].dtype == rows[b].dtype and jnp.array_equal(rows[a], rows[b]))
    return TreeTables(v, tuple(TableLeaf(name, tuple(x.shape), x.shape[0] != v) for name, x in tables.items()), equal)


def check_ends(apply: Callable[[Any, Array], Array], params: Any, ids: Any, vocab: int | None = None) -> list[str]:
    """Name the classic mistakes that a model which should be tied makes; an empty list where there is none.

    Args:
        apply: maps (params, tokens [..]) to logits [.., V].
        params: its tree.
        ids: [..] tokens, fewer distinct ones than V.
        vocab: V, as `find_tied`.
    """
    found, given = [], jnp.asarray(ids).dtype
    if not jnp.issubdtype(given, jnp.integer):
        exact = 2 ** (jnp.finfo(given).nmant + 1)
        what = f"token ids are {given}: indexing refuses them, and beyond {count(exact)} two tokens are one number"
        found.append(f"{what}; keep ids in an integer type")
    ids = jnp.asarray(ids).astype(jnp.int32)
    tables = find_tied(params, vocab)
    if len(tables.leaves) > 1:
        found.append(f"{tables}; declare one and use it at both ends")
    try:
        shape = jax.eval_shape(apply, params, ids).shape
    except TypeError as error:
        return [*found, f"the model cannot run: {one_line(error)}; is the head table.T?"]
    if shape[-1] != tables.vocab:
        return [*found, f"logits {shape} do not end in V = {tables.vocab}; is the head table.T?"]
    if not tables.one:
        return found
    # the row of a token that is not read may move only that token's logit
    unread, leaf = np.setdiff1d(np.arange(tables.vocab), np.asarray(ids)), tables.leaves[0]
    if not len(unread):
        raise DataError(f"every one of {tables.vocab} tokens is read", "give fewer tokens")
    token = int(unread[0])
    tangents = {name: jnp.zeros_like(x) for name, x in flat(params, "/").items()}
    tangents[leaf.path] = tangents[leaf.path].at[(slice(None), token) if leaf.transposed else token].set(1)
    tangent = jax.tree.unflatten(jax.tree.structure(params), tangents.values())
    if np.any(np.delete(np.asarray(jax.jvp(lambda p: apply(p, ids), (params,), (tangent,))[1]), token, axis=-1)):
        found.append(f"a row of {leaf.path} moves other tokens' logits than its own: is the head table.T?")
    return found
