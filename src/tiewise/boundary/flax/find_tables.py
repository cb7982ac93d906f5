"""Tables in a Flax tree, and common mistakes of models that should be tied.

    print(find_tables(params))
    2 tables of 1,000 tokens, not equal: params/Embed_0/embedding [V, 64], params/Dense_0/kernel [64, V] (transposed)

A pytree has no aliases: two leaves are two matrices, even if they have the same numbers now, and the optimizer will
make them differ. `find_tables` reads the tree. `check_ends` also runs the model, to detect mistakes that are not
visible in the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tiewise.boundary.flax.parameter_files import flat
from tiewise.core.errors import DataError, one_line_message
from tiewise.core.measurement import count


@dataclass(frozen=True)
class TableLeaf:
    """Table in a tree.

    Attributes:
        path: path of the leaf.
        shape: shape as stored.
        transposed: whether the stored shape is [·, V], the transpose of a table.
    """

    path: str
    shape: tuple[int, int]
    transposed: bool

    def __str__(self) -> str:
        if self.transposed:
            return f"{self.path} [{self.shape[0]}, V] (transposed)"
        return f"{self.path} [V, {self.shape[1]}]"


@dataclass(frozen=True)
class TreeTables:
    """Every table of a tree, in the order of the tree.

    Attributes:
        vocab: V.
        leaves: the tables.
        equal: pairs of paths with the same numbers, after transposing if necessary.
    """

    vocab: int
    leaves: tuple[TableLeaf, ...]
    equal: tuple[tuple[str, str], ...]

    @property
    def one(self) -> bool:
        """Return True if there is exactly one table, so that the tree is tied."""
        return len(self.leaves) == 1

    def __str__(self) -> str:
        tokens = f"of {count(self.vocab)} tokens"
        if not self.leaves:
            return f"no table {tokens}: "
        names = ", ".join(str(leaf) for leaf in self.leaves)
        if self.one:
            return f"1 table {tokens}: {names}"
        return f"{len(self.leaves)} tables {tokens}, {self._describe_equality()}: {names}"

    def _describe_equality(self) -> str:
        """Return a phrase on how many pairs of tables have the same numbers."""
        pairs = math.comb(len(self.leaves), 2)
        if not self.equal:
            return "not equal"
        if len(self.equal) == pairs:
            return "equal now, but free to move apart"
        return f"{len(self.equal)} of {pairs} pairs equal"


def find_tables(params: Any, vocab: int | None = None) -> TreeTables:
    """Return the tables in a tree of arrays.

    >>> print(find_tables({"embedding": jnp.zeros((10, 4))}))
    1 table of 10 tokens: embedding [V, 4]

    Args:
        params: Linen variables, an `nnx.State`, an optimizer's state, or any pytree. If JAX stores a leaf twice, it
            counts twice, as in the optimizer.
        vocab: V; None uses the longest axis of a leaf named `embedding`, or without one the longest axis of any matrix.

    Returns:
        The tables, and which of them are equal; prints as a sentence.

    Raises:
        DataError: V is not given and the tree has no matrix.
    """
    matrices = _float_matrices(params)
    if vocab is None:
        vocab = _likely_vocab(matrices)
    leaves = []
    rows = {}  # path -> [V, ·]
    for path, matrix in matrices.items():
        if vocab not in matrix.shape:
            continue
        is_transposed = matrix.shape[0] != vocab
        leaves.append(TableLeaf(path, tuple(matrix.shape), is_transposed))
        rows[path] = matrix.T if is_transposed else matrix
    equal = tuple((a, b) for a, b in combinations(rows, 2) if _are_equal(rows[a], rows[b]))
    return TreeTables(vocab, tuple(leaves), equal)


def _float_matrices(params: Any) -> dict[str, Any]:
    """Return the matrices of a tree that can be tables, by their paths."""
    matrices = {}
    for path, leaf in flat(params, "/").items():
        if getattr(leaf, "ndim", 0) == 2 and jnp.issubdtype(leaf.dtype, jnp.floating):
            matrices[path] = leaf
    return matrices


def _likely_vocab(matrices: Mapping[str, Any]) -> int:
    """Return V: the rows of the longest `embedding`, or without one the longest axis."""
    if not matrices:
        raise DataError("no matrix in this tree", "give the tree of parameters")
    rows_of_embeddings, sizes = [], []
    for path, matrix in matrices.items():
        sizes += matrix.shape
        if path.rpartition("/")[2] == "embedding":
            rows_of_embeddings.append(matrix.shape[0])
    longest: int = max(rows_of_embeddings or sizes)
    return longest


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two tables have the same numbers in the same type."""
    return first.dtype == second.dtype and bool(jnp.array_equal(first, second))


def check_ends(apply: Callable[[Any, Array], Array], params: Any, ids: Any, vocab: int | None = None) -> list[str]:
    """Return a description of each common mistake in a model that should be tied.

    >>> def apply(params, ids):
    ...     return params["embedding"][ids] @ params["embedding"].T
    >>> check_ends(apply, {"embedding": jnp.ones((10, 4))}, [1, 2])
    []

    Args:
        apply: maps (params, tokens [..]) to logits [.., V].
        params: the model's tree.
        ids: [..] tokens, fewer distinct ones than V.
        vocab: V, as in `find_tables`.

    Returns:
        One sentence for each mistake; an empty list if there is none.

    Raises:
        DataError: every token of the vocabulary is in `ids`.
    """
    mistakes = _check_id_type(jnp.asarray(ids).dtype)
    ids = jnp.asarray(ids).astype(jnp.int32)
    tables = find_tables(params, vocab)
    if len(tables.leaves) > 1:
        mistakes.append(f"{tables}; declare one and use it at both ends")
    try:
        shape = jax.eval_shape(apply, params, ids).shape
    except TypeError as error:  # shapes that do not fit, in a matrix product for example
        return [*mistakes, f"the model cannot run: {one_line_message(error)}; is the head table.T?"]
    if shape[-1] != tables.vocab:
        return [*mistakes, f"logits {shape} do not end in V = {tables.vocab}; is the head table.T?"]
    if tables.one and _moves_other_logits(apply, params, ids, tables):
        path = tables.leaves[0].path
        mistakes.append(f"a row of {path} moves other tokens' logits than its own: is the head table.T?")
    return mistakes


def _check_id_type(dtype: Any) -> list[str]:
    """Return the mistake of token ids that are not integers."""
    if jnp.issubdtype(dtype, jnp.integer):
        return []
    exact = 2 ** (jnp.finfo(dtype).nmant + 1)
    what = f"token ids are {dtype}: indexing refuses them, and beyond {count(exact)} two tokens are one number"
    return [f"{what}; keep ids in an integer type"]


def _moves_other_logits(apply: Callable[[Any, Array], Array], params: Any, ids: Array, tables: TreeTables) -> bool:
    """Return whether the row of an unread token changes logits of other tokens."""
    unread = np.setdiff1d(np.arange(tables.vocab), np.asarray(ids))
    if not len(unread):
        raise DataError(f"every one of {tables.vocab} tokens is read", "give fewer tokens")
    token = int(unread[0])
    (leaf,) = tables.leaves
    # derivative along a change of only that token's row
    direction = {path: jnp.zeros_like(x) for path, x in flat(params, "/").items()}
    row = (slice(None), token) if leaf.transposed else token
    direction[leaf.path] = direction[leaf.path].at[row].set(1)
    tangent = jax.tree.unflatten(jax.tree.structure(params), direction.values())
    _, moved = jax.jvp(lambda parameters: apply(parameters, ids), (params,), (tangent,))
    others = np.delete(np.asarray(moved), token, axis=-1)
    return bool(np.any(others))
