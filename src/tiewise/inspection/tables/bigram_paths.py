"""Direct paths fitted to a text's bigrams, tied and untied, and compared with a model's path.

    tied   p(j|i) ∝ exp(W_i·W_j + b_j)     nll = H + irreversibility + definiteness + rank
    untied p(j|i) ∝ exp(E_i·U_j + b_j)     nll = H + rank

H and irreversibility are exact (`bigram_counts`). Definiteness is the further cost of W Wᵀ of full width, because its
logits have no negative eigenvalue. Fits of narrow paths are not convex: the best of several starts is used, an upper
bound of the optimum. The spread of the starts measures how far they disagree.

Fits use a text's most frequent tokens. All others become one state, so the text stays a ring and every formula holds.
Merged tokens are no longer distinguished, and H and I are those of that coarser text.

Heat maps have a few tokens on both axes and one unit: log p(j | i) − log π_j in nats [K, K], how much likelier token j
is after token i than anywhere. For the text this is log(Q_ij / (π_i π_j)), NaN for pairs that it lacks. For a path, its
softmax over the full vocabulary is compared with the same π. The mean of a row or of a column depends on a token's
frequency, not on its neighbours. `interaction_residuals` is a map less its best fit m + a_i + b_j; maps are displayed
and compared by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core import Late
from tiewise.core.errors import DataError, non_finite_error
from tiewise.core.estimates import Estimate, Z, interaction_residuals
from tiewise.core.measurement import Grid, Quantity
from tiewise.inspection.tables.bigram_counts import Chain, frequent
from tiewise.inspection.tables.model_tables import Array, Ids, Mask
from tiewise.inspection.tables.open_path import DirectPath
from tiewise.inspection.tables.path_matrix import logit_blocks, transitions
from tiewise.inspection.tables.token_texts import read_as

optimize, special = Late("scipy.optimize"), Late("scipy.special")
MOST_TOKENS = 2048  # a dense fit needs V² memory, and time of V²·d for each step
OTHERS = 512  # sampled tokens that represent all others
MEMORY = 30  # steps whose curvature L-BFGS stores


@dataclass(frozen=True)
class PathFit:
    """Result of the best fit."""

    nll: float  # nats per token, on the chain that it was fitted to
    gradient: float  # largest element of the gradient at the best fit
    spread: float  # worst minus best loss of all starts


@dataclass(frozen=True)
class Split:
    """Losses of direct paths of one width on a chain, in nats per token.

    Values from fits are upper bounds.
    """

    entropy: float  # H
    irreversibility: float  # cost of symmetry at any width
    definiteness: float  # further cost of W Wᵀ at full width
    tied_rank: float  # further cost of the width for a tied path
    untied_rank: float  # cost of the width for an untied path; its only cost above H
    tied: float  # nll of the tied fit of the requested width; from V on, of the full one
    untied: float  # nll of the untied fit; from a width of V on it is H, without a fit
    gradient: float  # largest gradient element of all fits


def split(chain: Chain, width: int, starts: int = 3, steps: int = 5000, seed: int = 0) -> Split:
    """Fit direct paths to a chain and divide their loss into its causes.

    Raises:
        DataError: more than 2,048 tokens, or a width below 1.
    """
    entropy, irreversibility = chain.entropy, chain.irreversibility
    tied = full = fit_path(chain, chain.vocabulary, True, 1, steps, seed)
    untied = PathFit(entropy, 0.0, 0.0)
    if width < chain.vocabulary:
        tied = fit_path(chain, width, True, starts, steps, seed)
        untied = fit_path(chain, width, False, starts, steps, seed)
    return Split(
        entropy,
        irreversibility,
        definiteness=full.nll - entropy - irreversibility,
        tied_rank=tied.nll - full.nll,
        untied_rank=untied.nll - entropy,
        tied=tied.nll,
        untied=untied.nll,
        gradient=max(full.gradient, tied.gradient, untied.gradient),
    )


def fit_path(chain: Chain, width: int, tied: bool, starts: int = 3, steps: int = 5000, seed: int = 0) -> PathFit:
    """Fit tables and bias by L-BFGS from `starts` random starts.

    The bias starts at the tokens' frequencies.
    """
    if chain.vocabulary > MOST_TOKENS:
        problem = f"{chain.vocabulary:,} tokens are too many for a fit"
        raise DataError(problem, f"keep the {MOST_TOKENS:,} most frequent ones or fewer")
    if width < 1 or starts < 1:
        raise DataError(f"width {width}, {starts} starts", "both must be 1 or more")
    q = chain.dense()
    values = len(q) * width if tied else 2 * len(q) * width  # of one table or two
    bias = np.log(q.sum(0) + 1e-6)
    generator = np.random.default_rng(seed)
    options = {"maxiter": steps, "maxfun": 10 * steps, "maxcor": MEMORY, "ftol": 0, "gtol": 1e-10}
    ends = []
    for _ in range(starts):
        tables = generator.normal(0, 0.3 / np.sqrt(width), values)
        start = np.concatenate([tables, bias])
        ends.append(optimize.minimize(path_nll, start, (q, width), "L-BFGS-B", jac=True, options=options))
    ends.sort(key=lambda end: float(end.fun))
    best, worst = ends[0], ends[-1]
    steepest = float(np.abs(best.jac).max())
    return PathFit(float(best.fun), steepest, float(worst.fun - best.fun))


def path_nll(x: Array, q: Array, width: int) -> tuple[float, Array]:
    """Return (nll of a path on Q [V, V], its gradient).

    `x` is a vector of one table or two of that width, followed by the bias.
    """
    v = len(q)
    tables = x[:-v].reshape(-1, v, width)
    left, right = tables[0], tables[-1]
    logits = left @ right.T + x[-v:]
    logits -= logits.max(1, keepdims=True)
    mass = np.exp(logits)
    total = mass.sum(1, keepdims=True)
    nll = float((q * (np.log(total) - logits)).sum())
    error = mass * (q.sum(1, keepdims=True) / total) - q
    to_left, to_right, to_bias = error @ right, error.T @ left, error.sum(0)
    if len(tables) == 1:
        to_table = to_left + to_right
        return nll, np.concatenate([to_table.ravel(), to_bias])
    return nll, np.concatenate([to_left.ravel(), to_right.ravel(), to_bias])


def frequent_loss(
    path: DirectPath, chain: Chain, retained: Ids, reduced: Chain, seed: int = 0, most_others: int = OTHERS
) -> float:
    """Return a path's nll in nats per token on a reduced chain, never below its entropy.

    `chain` is of the full text, `retained` its frequent tokens [K], `reduced` the chain of their states: indices in
    `retained`, and K for all other tokens. p(other | i) is the path's mass on all tokens that are not retained. p(j |
    other)
    is the mean of p(j | i) over the other tokens i by their frequency: over all of them, or over `most_others` random
    ones.
    """
    tokens = chain.tokens
    others = np.setdiff1d(np.flatnonzero(tokens), retained)
    weights = tokens[others] / max(1, tokens[others].sum())
    if len(others) > most_others:
        others = np.random.default_rng(seed).choice(others, most_others, p=weights)
        weights = np.full(most_others, 1 / most_others)
    largest = int(retained.max())
    if largest >= path.output.rows:
        problem = f"token {largest} is outside the output table's {path.output.rows:,} rows"
        raise DataError(problem, "use the tokenizer that belongs to the model")
    logs = _state_logs(path, np.concatenate([retained, others]), retained)
    if len(others):
        count = len(retained)
        pooled = weights @ np.exp(logs[count:])
        pooled = np.log(np.clip(pooled, np.finfo(float).tiny, None))
        logs = np.concatenate([logs[:count], pooled[None]])
    pair_logs = logs[reduced.before, reduced.after]
    return float(-(reduced.counts * pair_logs).sum() / reduced.pairs)


def _state_logs(path: DirectPath, before: Ids, retained: Ids) -> Array:
    """Return log p(state | token) [n, K + 1] after each of the tokens `before` [n].

    A state is one of the tokens `retained` [K], or the last one for all others. The softmax runs over every output row.
    """
    count = len(retained)
    left = path.left(path.input.take(before))
    logs = np.full((len(before), count + 1), -np.inf)
    for start, stop, block in logit_blocks(path, left):
        inside = np.flatnonzero((retained >= start) & (retained < stop))
        columns = retained[inside] - start
        logs[:, inside] = block[:, columns]
        block[:, columns] = -np.inf
        logs[:, count] = np.logaddexp(logs[:, count], special.logsumexp(block, axis=1))
    logs -= special.logsumexp(logs, axis=1, keepdims=True)
    return logs


def path_loss(path: DirectPath, chain: Chain, sample: int = 4096, seed: int = 0) -> Estimate:
    """Return the mean of −log p(after | before) of a path over a chain's pairs.

    It is in nats per token. If the chain has at most `sample` different pairs, the mean is exact, without an interval.
    Else
    it is over that many random pairs, drawn by their frequency. Every softmax runs over the full output table: n pairs
    cost
    n·V·E.

    Raises:
        DataError: a sample below 2, a token of the chain that a table lacks, or values that are no numbers.
    """
    if sample < 2:
        raise DataError(f"a sample of {sample}", "give 2 or more")
    pairs = np.column_stack([chain.before, chain.after])
    is_exact = len(pairs) <= sample
    if not is_exact:
        generator = np.random.default_rng(seed)
        pairs = pairs[generator.choice(len(pairs), sample, p=chain.counts / chain.pairs)]
    _, logs, _ = transitions(path, pairs)
    losses = -logs
    if not np.isfinite(losses).all():
        raise non_finite_error("a table or a norm")
    if is_exact:
        nll = float((losses * chain.counts).sum() / chain.pairs)
        return Estimate(nll, math.nan, math.nan, len(pairs))
    nll = float(losses.mean())
    half = Z * float(losses.std(ddof=1)) / math.sqrt(sample)
    return Estimate(nll, nll - half, nll + half, sample)


MAP_TOKENS = 24  # most frequent tokens of a heat map
PERMUTATIONS = 199
IN_TEXT = (
    "How much likelier the next token (column) is behind the current one (row) than anywhere in the text, log Q/(ππ) "
    "in nats, less what its row and column have in common. Crosses: the text never has the pair."
)
BY_PATH = "The same by the path: log p(next | current) less the text's log π(next); colours end where the text's do."


def heat_maps(
    chain: Chain,
    folder: Folder,
    paths: Mapping[str, tuple[str, DirectPath]],
    also: Sequence[int] = (),
    most: int = MAP_TOKENS,
    seed: int = 0,
) -> tuple[list[Grid], list[list[Quantity]]]:
    """Return heat maps of a text and of paths, and their correlations.

    The tokens are the text's `most` frequent ones and those of `also`. `paths` are {title of a map: (the path's name in
    quantities, path)}. All maps have the text's colours. The correlations are those of each path's map with the text's.
    """
    tokens = frequent(chain, most, also)
    of_text = text_map(chain, tokens)
    is_coloured = ~np.eye(len(of_text), dtype=bool) & ~np.isnan(of_text)
    top = float(np.abs(interaction_residuals(of_text)[is_coloured]).max(initial=0.0))
    axes = _MapAxes(read_as(folder, tokens.tolist()), top or 1.0)
    grids = [axes.grid("Bigrams", of_text, "the text", IN_TEXT)]
    follows = []
    for title, (path_name, path) in paths.items():
        of_path = path_map(path, chain, tokens)
        grids.append(axes.grid(title, of_path, "", BY_PATH))
        follows.append(list(_following(path_name, of_text, of_path, seed)))
    return grids, follows


@dataclass(frozen=True)
class _MapAxes:
    """Axes and colours that all heat maps of one text share."""

    texts: tuple[str, ...]  # texts of the tokens, on both axes
    top: float  # value at the end of the colours, both signs

    def grid(self, name: str, values: Array, of: str, why: str) -> Grid:
        """Return the interaction of a map [K, K] as a grid."""
        rows = []
        for row in interaction_residuals(values).tolist():
            rows.append(tuple(round(value, 3) for value in row))
        return Grid(name, self.texts, self.texts, tuple(rows), self.top, ("current token", "next token"), of, why)


def _following(path_name: str, of_text: Array, of_path: Array, seed: int) -> Iterator[Quantity]:
    """Yield the correlations of a path's map with the text's: by value, and by order."""
    by_value, by_order = likeness(of_text, of_path, seed=seed)
    for target, (correlation, p) in {"the text": by_value, "which order is likelier": by_order}.items():
        if not math.isnan(correlation):
            name, why = f"{path_name} follows {target}", f"p = {p:.2g} by permuted tokens"
            yield Quantity(name, correlation, chance=0.0, unit="correlation", main=False, why=why)


def text_map(chain: Chain, ids: Ids) -> Array:
    """Return log(Q_ij / (π_i π_j)) from a text's counts, for tokens that it has."""
    keys = ids[:, None] * chain.vocabulary + ids
    counts = chain.counted(keys.ravel()).reshape(keys.shape)
    shares = np.where(counts > 0, counts / chain.pairs, np.nan)
    logs = np.log(chain.tokens[ids] / chain.pairs)
    likelier: Array = np.log(shares) - logs[:, None] - logs
    return likelier


def path_map(path: DirectPath, chain: Chain, ids: Ids) -> Array:
    """Return a path's log p(j | i) − log π_j, with π from the text."""
    _, logs, _ = transitions(path, np.stack(np.meshgrid(ids, ids, indexing="ij"), axis=-1))
    return logs.reshape(len(ids), -1) - np.log(chain.tokens[ids] / chain.pairs)


def likeness(text: Array, path: Array, permutations: int = PERMUTATIONS, seed: int = 0) -> list[tuple[float, float]]:
    """Return the two correlations (correlation, p) of a path's map with the text's.

    They use pairs off the diagonal that the text has. The first is Pearson's of both interactions, each fitted on these
    pairs. The second is that of value(i, j) − value(j, i) over pairs that occur in both orders, which a symmetric path
    can
    follow only by its rows' normalisers. p is the share of permutations of the path's tokens, rows and columns alike,
    that
    reach the correlation (Mantel 1967), (1 + reached) / (1 + permutations). Both are NaN for fewer than 3 pairs, or if
    one
    side is constant.
    """
    off = ~np.isnan(text) & ~np.eye(len(text), dtype=bool)
    both = np.triu(off & off.T)
    values, differences = _interactions(text, off, both)
    generator = np.random.default_rng(seed)
    orders = [np.arange(len(path)), *(generator.permutation(len(path)) for _ in range(permutations))]
    of_path = [_interactions(path[np.ix_(order, order)], off, both) for order in orders]
    by_value = [_correlation(values, values_of_path) for values_of_path, _ in of_path]
    by_order = [_correlation(differences, differences_of_path) for _, differences_of_path in of_path]
    return [(by_value[0], _reaching(by_value)), (by_order[0], _reaching(by_order))]


def _interactions(values: Array, off: Mask, both: Mask) -> tuple[Array, Array]:
    """Return a map's interactions at the pairs `off` [K, K], and order differences at `both`."""
    fitted = interaction_residuals(np.where(off, values, np.nan))
    return fitted[off], (fitted - fitted.T)[both]


def _correlation(first: Array, second: Array) -> float:
    """Return Pearson's correlation of two vectors.

    It is NaN for fewer than 3 values, or if one vector is constant.
    """
    if len(first) < 3 or min(np.ptp(first), np.ptp(second)) < 1e-12:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _reaching(values: Sequence[float]) -> float:
    """Return the share of values that reach the first one, which is among them."""
    reached = [value for value in values if value >= values[0]]
    return len(reached) / len(values)
