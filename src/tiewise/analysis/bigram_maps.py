"""A few tokens against each other, as heat maps: what a text has, and what a path says, in one unit.

Both are log p(j | i) − log π_j in nats: how much likelier token j is behind token i than anywhere. For the text that is
log(Q_ij / (π_i π_j)); a path's own softmax over the whole vocabulary is set against the same π.

What a whole row or a whole column has in common says how frequent a token is, not what follows what. `interaction` is a
map less its best fit m + a_i + b_j, and maps are compared by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.path_matrix import DirectPath
from tiewise.analysis.path_tokens import transitions
from tiewise.analysis.token_table import Array
from tiewise.core.errors import DataError

SHOWN = 24
PERMUTATIONS = 199


@dataclass(frozen=True)
class HeatMap:
    """log p(column | row) − log π(column) of K tokens, in nats."""

    ids: tuple[int, ...]  # of the tokens, most frequent first
    texts: tuple[str, ...]  # what they read as
    values: tuple[tuple[float | None, ...], ...]  # [K][K]; None for a pair that the text never has

    @property
    def matrix(self) -> Array:
        """Values [K, K], NaN for unseen pairs."""
        return np.array([[np.nan if value is None else value for value in row] for row in self.values])

    @property
    def interaction(self) -> Array:
        """Values [K, K] less m + a_i + b_j, fitted by least squares to those off the diagonal; NaN for unseen pairs."""
        values = self.matrix
        off = ~np.isnan(values) & ~np.eye(len(values), dtype=bool)
        design = _design(np.ones_like(off))
        fitted = np.linalg.lstsq(design[off.ravel()], values[off], rcond=None)[0]
        found: Array = values - (design @ fitted).reshape(values.shape)
        return found


@dataclass(frozen=True)
class Likeness:
    """How far a path's map follows the text's, over pairs off the diagonal that the text has."""

    all: float | None  # Pearson correlation of both interactions, each fitted on these pairs
    # share of permutations of the tokens that reach it (Mantel 1967): (1 + reached) / (1 + permutations)
    all_p: float | None
    # correlation of value(i, j) − value(j, i), over pairs seen both ways; a symmetric path can follow these only by its
    # rows' normalisers. None for fewer than 3 such pairs
    direction: float | None
    direction_p: float | None  # as `all_p`
    pairs: int  # pairs compared, in order
    both: int  # pairs seen both ways


def frequent(chain: Chain, count: int = SHOWN, also: Sequence[int] = ()) -> tuple[int, ...]:
    """Ids of the `count` most frequent tokens of a text, then those of `also` that the text has."""
    tokens = chain.tokens
    ranked = np.argsort(-tokens, kind="stable")[:count]
    chosen = [int(number) for number in ranked if tokens[number] > 0]
    if len(chosen) < 2:
        raise DataError("a text of one token, again and again", "give a text with more")
    return tuple(dict.fromkeys([*chosen, *(int(number) for number in also if tokens[number] > 0)]))


def text_map(chain: Chain, ids: Sequence[int], texts: Sequence[str]) -> HeatMap:
    """Return log(Q_ij / (π_i π_j)) of a text's own counts; pairs that it never has are None."""
    logs = _log_shares(chain, ids)
    place = {token: k for k, token in enumerate(ids)}
    values: list[list[float | None]] = [[None] * len(ids) for _ in ids]
    inside = np.isin(chain.before, ids) & np.isin(chain.after, ids)
    found = zip(chain.before[inside].tolist(), chain.after[inside].tolist(), chain.counts[inside].tolist(), strict=True)
    for before, after, count in found:
        i, j = place[before], place[after]
        values[i][j] = float(np.log(count / chain.pairs) - logs[i] - logs[j])
    return HeatMap(tuple(ids), tuple(texts), tuple(map(tuple, values)))


def path_map(path: DirectPath, chain: Chain, ids: Sequence[int], texts: Sequence[str]) -> HeatMap:
    """Return a path's log p(j | i) − log π_j, with π from the text."""
    logs = _log_shares(chain, ids)
    found = transitions(path, [(i, j) for i in ids for j in ids])
    values = np.array([one.log_probability for one in found]).reshape(len(ids), -1) - logs
    return HeatMap(tuple(ids), tuple(texts), tuple(map(tuple, values.tolist())))


def likeness(text: HeatMap, path: HeatMap, permutations: int = PERMUTATIONS, seed: int = 0) -> Likeness:
    """Correlate two maps of the same tokens; the null permutes the path's tokens, rows and columns alike."""
    wanted, said = text.matrix, path.matrix
    off = ~np.isnan(wanted) & ~np.eye(len(wanted), dtype=bool)
    rest = _Rest(off)
    generator = np.random.default_rng(seed)
    orders = [np.arange(len(said)), *(generator.permutation(len(said)) for _ in range(permutations))]
    target, turned = rest.of(wanted)
    found = [rest.of(said[np.ix_(order, order)]) for order in orders]
    all_, all_p = _tested(target, [one for one, _ in found])
    direction, direction_p = _tested(turned, [one for _, one in found])
    return Likeness(all_, all_p, direction, direction_p, len(target), len(turned))


class _Rest:
    """Takes m + a_i + b_j out of the marked entries of maps [K, K]."""

    def __init__(self, marked: NDArray[np.bool_]) -> None:
        self.marked, self.both = marked, np.triu(marked & marked.T)
        left, sizes, _ = np.linalg.svd(_design(marked), full_matrices=False)
        self.basis = left[:, sizes > 1e-10 * sizes.max(initial=1.0)]

    def of(self, values: Array) -> tuple[Array, Array]:
        """Interactions of the marked entries, and value(i, j) − value(j, i) of those marked both ways."""
        found = values[self.marked]
        found = found - self.basis @ (self.basis.T @ found)
        whole = np.zeros_like(values)
        whole[self.marked] = found
        return found, (whole - whole.T)[self.both]


def _design(marked: NDArray[np.bool_]) -> Array:
    """One row for each marked entry, with ones in its row's and its column's place [n, 2K]."""
    rows, columns = np.nonzero(marked)
    made = np.zeros((len(rows), 2 * len(marked)))
    made[np.arange(len(rows)), rows] = 1.0
    made[np.arange(len(rows)), len(marked) + columns] = 1.0
    return made


def _log_shares(chain: Chain, ids: Sequence[int]) -> Array:
    """log π of some tokens [K]."""
    counts = chain.tokens[list(ids)]
    if (counts == 0).any():
        raise DataError(f"the text has no token {ids[int(np.argmin(counts))]}", "choose tokens that it has")
    found: Array = np.log(counts / chain.pairs)
    return found


def _tested(wanted: Array, found: Sequence[Array]) -> tuple[float | None, float | None]:
    """Correlation with the first, and the share of all that reach it."""
    values = [_correlation(wanted, one) for one in found]
    own = values[0]
    if own is None:
        return None, None
    return own, sum(value is not None and value >= own for value in values) / len(values)


def _correlation(a: Array, b: Array) -> float | None:
    """Pearson's; None for fewer than three values, or where one side is constant."""
    if len(a) < 3 or np.ptp(a) < 1e-12 or np.ptp(b) < 1e-12:
        return None
    return float(np.corrcoef(a, b)[0, 1])
