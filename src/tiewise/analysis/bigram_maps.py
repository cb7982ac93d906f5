"""A few tokens against each other, as heat maps: what a text has, and what a path says, in one unit.

Both are log p(j | i) − log π_j in nats [K, K]: how much likelier token j is behind token i than anywhere. For the text
that is log(Q_ij / (π_i π_j)), NaN for pairs that it never has; a path's own softmax over the whole vocabulary is set
against the same π.

What a whole row or a whole column has in common says how frequent a token is, not what follows what. `interaction` is a
map less its best fit m + a_i + b_j; maps are drawn and compared by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.model_tables import Array, Ids
from tiewise.analysis.path_matrix import DirectPath
from tiewise.analysis.path_tokens import transitions
from tiewise.core.errors import DataError
from tiewise.core.found import Grid, Quantity

SHOWN = 24
PERMUTATIONS = 199
IN_TEXT = (
    "How much likelier the next token (column) is behind the current one (row) than anywhere in the text, log Q/(ππ) "
    "in nats, less what its row and column have in common. Crosses: the text never has the pair."
)
BY_PATH = "The same by the path: log p(next | current) less the text's log π(next); colours end where the text's do."


def frequent(chain: Chain, count: int = SHOWN, also: Sequence[int] = ()) -> Ids:
    """Ids of the `count` most frequent tokens of a text, then those of `also` that the text has."""
    tokens = chain.tokens
    ranked = np.argsort(-tokens, kind="stable")[:count]
    if np.count_nonzero(tokens[ranked]) < 2:
        raise DataError("a text of one token, again and again", "give a text with more")
    return np.array([number for number in dict.fromkeys([*ranked.tolist(), *also]) if tokens[number]], np.int64)


def text_map(chain: Chain, ids: Ids) -> Array:
    """log(Q_ij / (π_i π_j)) of a text's own counts."""
    counts = chain.counted((ids[:, None] * chain.vocabulary + ids).ravel()).reshape(len(ids), -1)
    logs = _log_shares(chain, ids)
    with np.errstate(divide="ignore"):
        found: Array = np.log(counts / chain.pairs) - logs[:, None] - logs
    return np.where(counts > 0, found, np.nan)


def path_map(path: DirectPath, chain: Chain, ids: Ids) -> Array:
    """A path's log p(j | i) − log π_j, with π from the text."""
    found = transitions(path, [(i, j) for i in ids.tolist() for j in ids.tolist()])
    made: Array = np.array([one.log_probability for one in found]).reshape(len(ids), -1) - _log_shares(chain, ids)
    return made


def _log_shares(chain: Chain, ids: Ids) -> Array:
    counts = chain.tokens[ids]
    if (counts == 0).any():
        raise DataError(f"the text has no token {ids[int(np.argmin(counts))]}", "choose tokens that it has")
    found: Array = np.log(counts / chain.pairs)
    return found


def interaction(values: Array) -> Array:
    """A map less m + a_i + b_j, fitted by least squares to what is there off the diagonal."""
    off = ~np.isnan(values) & ~np.eye(len(values), dtype=bool)
    design = _design(np.ones_like(off))
    fitted = np.linalg.lstsq(design[off.ravel()], values[off], rcond=None)[0]
    found: Array = values - (design @ fitted).reshape(values.shape)
    return found


def _design(marked: NDArray[np.bool_]) -> Array:
    """One row for each marked entry, with ones in its row's and its column's place [n, 2K]."""
    rows, columns = np.nonzero(marked)
    made = np.zeros((len(rows), 2 * len(marked)))
    made[np.arange(len(rows)), rows] = 1.0
    made[np.arange(len(rows)), len(marked) + columns] = 1.0
    return made


Tested = tuple[float, float] | tuple[None, None]  # a correlation and its p


def likeness(text: Array, path: Array, permutations: int = PERMUTATIONS, seed: int = 0) -> tuple[Tested, Tested]:
    """How far a path's map follows the text's, over pairs off the diagonal that the text has.

    Returns:
        Pearson's correlation of both interactions, each fitted on these pairs; the same of value(i, j) − value(j, i)
        over pairs seen both ways, which a symmetric path can follow only by its rows' normalisers. p is the share of
        permutations of the path's tokens, rows and columns alike, that reach it (Mantel 1967), (1 + reached) / (1 +
        permutations). None for fewer than 3 pairs, or a side that is constant.
    """
    off = ~np.isnan(text) & ~np.eye(len(text), dtype=bool)
    left, sizes, _ = np.linalg.svd(_design(off), full_matrices=False)
    basis, both = left[:, sizes > 1e-10 * sizes.max(initial=1.0)], np.triu(off & off.T)

    def parts(values: Array) -> tuple[Array, Array]:
        """Interactions of the pairs, and the difference of both orders."""
        found = values[off] - basis @ (basis.T @ values[off])
        whole = np.zeros_like(values)
        whole[off] = found
        return found, (whole - whole.T)[both]

    generator = np.random.default_rng(seed)
    orders = [np.arange(len(path)), *(generator.permutation(len(path)) for _ in range(permutations))]
    found = [parts(path[np.ix_(order, order)]) for order in orders]
    tested: list[Tested] = []
    for at, wanted in enumerate(parts(text)):
        values = [
            float(np.corrcoef(wanted, one[at])[0, 1])
            if len(wanted) >= 3 and min(np.ptp(wanted), np.ptp(one[at])) >= 1e-12
            else math.nan
            for one in found
        ]
        reached = sum(value >= values[0] for value in values) / len(values)
        tested.append((None, None) if math.isnan(values[0]) else (values[0], reached))
    return tested[0], tested[1]


def like_text(text: Array, said: Array, seed: int, path: str = "direct path") -> Iterator[Quantity]:
    """`likeness` as quantities."""
    names = (f"{path} follows the text", f"{path} follows which order is likelier")
    for name, (value, p) in zip(names, likeness(text, said, seed=seed), strict=True):
        if value is not None:
            why = f"p = {p:.2g} by permuted tokens"
            yield Quantity(name, value, chance=0.0, unit="correlation", main=False, why=why)


def text_grid(texts: tuple[str, ...], target: Array) -> Grid:
    """What the text has behind what."""
    return _grid("Bigrams", texts, target, target, IN_TEXT, "the text")


def path_grid(name: str, texts: tuple[str, ...], said: Array, target: Array) -> Grid:
    """What a path says of the same tokens, in the text's colours."""
    return _grid(name, texts, said, target, BY_PATH)


def _grid(name: str, texts: tuple[str, ...], said: Array, target: Array, why: str, of: str = "") -> Grid:
    colours = interaction(target)
    off = colours[~np.eye(len(colours), dtype=bool) & ~np.isnan(colours)]
    top = float(np.abs(off).max(initial=0.0)) or 1.0
    rows = tuple(tuple(round(float(value), 3) for value in row) for row in interaction(said))
    return Grid(name, texts, texts, rows, top, ("current token", "next token"), of, why)
