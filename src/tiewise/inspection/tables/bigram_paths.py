"""Direct paths held against a text's pairs: the best of a given width, tied and untied, and a model's own.

    tied   p(j|i) ∝ exp(W_i·W_j + b_j)     nll = H + irreversibility + definiteness + rank
    untied p(j|i) ∝ exp(E_i·U_j + b_j)     nll = H + rank

H and irreversibility are exact (`bigram_counts`). Definiteness is what W Wᵀ of full width still pays beyond symmetry,
because its logits have no negative eigenvalue. Narrow paths are not convex: the best of several starts is taken, an
upper bound of the optimum, and the starts' spread says how far they disagree.

Fits are made on a text's most frequent tokens. All others become one state, so the text stays a ring and every formula
holds; what is merged can no longer be told apart, and H and I are those of that coarser text.

Heat maps set a few tokens against each other, in one unit: log p(j | i) − log π_j in nats [K, K], how much likelier
token j is behind token i than anywhere. For the text that is log(Q_ij / (π_i π_j)), NaN for pairs that it never has; a
path's own softmax over the whole vocabulary is set against the same π. What a whole row or a whole column has in common
says how frequent a token is, not what follows what. `interaction` is a map less its best fit m + a_i + b_j; maps are
drawn and compared by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core import Late
from tiewise.core.errors import DataError, no_numbers
from tiewise.core.estimates import Estimate, Z, interaction
from tiewise.core.found import Grid, Quantity
from tiewise.inspection.tables.bigram_counts import Chain, frequent
from tiewise.inspection.tables.model_tables import Array, Ids
from tiewise.inspection.tables.open_path import DirectPath
from tiewise.inspection.tables.path_matrix import logit_blocks, transitions
from tiewise.inspection.tables.token_texts import read_as

optimize, special = Late("scipy.optimize"), Late("scipy.special")
MOST_TOKENS = 2048  # a dense fit takes V² memory, and time by V²·d for each step
OTHERS = 512  # tokens that stand for all others
MEMORY = 30  # steps whose curvature L-BFGS remembers


@dataclass(frozen=True)
class PathFit:
    """The best path found."""

    nll: float  # nats per token, on the chain that it was fitted to
    gradient: float  # largest element of the gradient there
    spread: float  # worst less best loss of all starts


@dataclass(frozen=True)
class Split:
    """What direct paths of one width pay on a chain, in nats per token; what comes of fits is an upper bound."""

    entropy: float  # H
    irreversibility: float  # what symmetry costs at any width
    definiteness: float  # what W Wᵀ costs beyond, at full width
    tied_rank: float  # what the width costs a tied path beyond
    untied_rank: float  # what it costs an untied path; the only part that it pays above H
    tied: float  # nll of the tied fit of the given width; of V or more it is the full one
    untied: float  # of the untied fit; of V or more it reaches H without a fit
    gradient: float  # largest element that the fits left


def split(chain: Chain, width: int, starts: int = 3, steps: int = 5000, seed: int = 0) -> Split:
    """Fit and divide; DataError for more than 2,048 tokens, or a width below 1."""
    h, i = chain.entropy, chain.irreversibility
    tied = full = fit_path(chain, chain.vocabulary, True, 1, steps, seed)
    untied = PathFit(h, 0.0, 0.0)
    if width < chain.vocabulary:
        tied, untied = (fit_path(chain, width, one, starts, steps, seed) for one in (True, False))
    gradient = max(full.gradient, tied.gradient, untied.gradient)
    return Split(h, i, full.nll - h - i, tied.nll - full.nll, untied.nll - h, tied.nll, untied.nll, gradient)


def fit_path(chain: Chain, width: int, tied: bool, starts: int = 3, steps: int = 5000, seed: int = 0) -> PathFit:
    """Fit tables and bias by L-BFGS from `starts` random starts; the bias begins at the tokens' own frequencies."""
    if chain.vocabulary > MOST_TOKENS:
        what = f"{chain.vocabulary:,} tokens are too many for a fit"
        raise DataError(what, f"keep the {MOST_TOKENS:,} most frequent ones or fewer")
    if width < 1 or starts < 1:
        raise DataError(f"width {width}, {starts} starts", "both must be 1 or more")
    q, generator, ends = chain.dense(), np.random.default_rng(seed), []
    options = {"maxiter": steps, "maxfun": 10 * steps, "maxcor": MEMORY, "ftol": 0, "gtol": 1e-10}
    for _ in range(starts):
        tables = generator.normal(0, 0.3 / np.sqrt(width), (1 if tied else 2) * len(q) * width)
        start = np.concatenate([tables, np.log(q.sum(0) + 1e-6)])
        ends.append(optimize.minimize(path_nll, start, (q, width), "L-BFGS-B", jac=True, options=options))
    best, worst = (chosen(ends, key=lambda end: float(end.fun)) for chosen in (min, max))
    return PathFit(float(best.fun), float(np.abs(best.jac).max()), float(worst.fun - best.fun))


def path_nll(x: Array, q: Array, width: int) -> tuple[float, Array]:
    """(nll of a path on Q [V, V], its gradient); `x` is one table or two of that width, and the bias, end to end."""
    v = len(q)
    tables = x[:-v].reshape(-1, v, width)
    left, right = tables[0], tables[-1]
    logits = left @ right.T + x[-v:]
    logits -= logits.max(1, keepdims=True)
    mass = np.exp(logits)
    total = mass.sum(1, keepdims=True)
    nll = float((q * (np.log(total) - logits)).sum())
    error = mass * (q.sum(1, keepdims=True) / total) - q
    to_left, to_right = error @ right, error.T @ left
    slopes = (to_left + to_right,) if len(tables) == 1 else (to_left, to_right)
    return nll, np.concatenate([*(slope.ravel() for slope in slopes), error.sum(0)])


def frequent_loss(
    path: DirectPath, chain: Chain, kept: Ids, reduced: Chain, seed: int = 0, most_others: int = OTHERS
) -> float:
    """A path's nll in nats per token on a reduced chain, never below its entropy.

    `chain` is of the whole text, `kept` its frequent tokens [K], `reduced` the chain of their states: places in `kept`,
    and K for all other tokens. p(other | i) is the path's mass on all tokens that are not kept; p(j | other) is the
    mean of p(j | i) over the other tokens i by their frequency: over all of them, or over `most_others` drawn ones.
    """
    tokens = chain.tokens
    others = np.setdiff1d(np.flatnonzero(tokens), kept)
    weights = tokens[others] / max(1, tokens[others].sum())
    if len(others) > most_others:
        others = np.random.default_rng(seed).choice(others, most_others, p=weights)
        weights = np.full(most_others, 1 / most_others)
    if int(kept.max()) >= path.output.rows:
        what = f"token {int(kept.max())} is outside the output table's {path.output.rows:,} rows"
        raise DataError(what, "use the tokenizer that belongs to the model")
    before, count = np.concatenate([kept, others]), len(kept)
    left = path.left(path.input.take(before))
    logs = np.full((len(before), count + 1), -np.inf)  # log p(state | token), over the whole output table
    for start, stop, block in logit_blocks(path, left):
        inside = np.flatnonzero((kept >= start) & (kept < stop))
        logs[:, inside] = block[:, kept[inside] - start]
        block[:, kept[inside] - start] = -np.inf
        logs[:, count] = np.logaddexp(logs[:, count], special.logsumexp(block, axis=1))
    logs -= special.logsumexp(logs, axis=1, keepdims=True)
    if len(others):
        pooled = np.log(np.clip(weights @ np.exp(logs[count:]), np.finfo(float).tiny, None))
        logs = np.concatenate([logs[:count], pooled[None]])
    return float(-(reduced.counts * logs[reduced.before, reduced.after]).sum() / reduced.pairs)


def path_loss(path: DirectPath, chain: Chain, sample: int = 4096, seed: int = 0) -> Estimate:
    """Mean of −log p(after | before) of a path over a chain's pairs, in nats per token.

    Exact, without an interval, where the chain has at most `sample` different pairs, else of that many drawn ones, each
    as often as it occurs. Every softmax runs over the whole output table: n pairs cost n·V·E.

    Raises:
        DataError: a sample below 2, a token of the chain that a table does not have, or values that are no numbers.
    """
    if sample < 2:
        raise DataError(f"a sample of {sample}", "give 2 or more")
    exact, chosen = len(chain.keys) <= sample, np.arange(len(chain.keys))
    if not exact:
        chosen = np.random.default_rng(seed).choice(len(chosen), sample, p=chain.counts / chain.pairs)
    losses = -transitions(path, np.column_stack([chain.before, chain.after])[chosen])[1]
    if not np.isfinite(losses).all():
        raise no_numbers("a table or a norm")
    if exact:
        return Estimate(float((losses * chain.counts).sum() / chain.pairs), math.nan, math.nan, len(chosen))
    nll, half = float(losses.mean()), Z * float(losses.std(ddof=1)) / math.sqrt(sample)
    return Estimate(nll, nll - half, nll + half, sample)


SHOWN = 24  # most frequent tokens of a heat map
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
    most: int = SHOWN,
    seed: int = 0,
) -> tuple[list[Grid], list[list[Quantity]]]:
    """Map what a text's `most` frequent tokens and those of `also` have behind each other, and what each path says.

    `paths` are {title of a map: (the path's name in quantities, path)}. Returns the text's map and each path's, in the
    text's colours; and of each path, how far it follows the text.
    """
    tokens = frequent(chain, most, also)
    texts, target = read_as(folder, tokens.tolist()), text_map(chain, tokens)
    colours = interaction(target)[~np.eye(len(target), dtype=bool) & ~np.isnan(target)]
    top = float(np.abs(colours).max(initial=0.0)) or 1.0

    def grid(name: str, values: Array, of: str, why: str) -> Grid:
        rows = tuple(tuple(round(float(value), 3) for value in row) for row in interaction(values))
        return Grid(name, texts, texts, rows, top, ("current token", "next token"), of, why)

    grids, follows = [grid("Bigrams", target, "the text", IN_TEXT)], []
    for name, (path_name, path) in paths.items():
        said = path_map(path, chain, tokens)
        grids.append(grid(name, said, "", BY_PATH))
        whats = (f"{path_name} follows {what}" for what in ("the text", "which order is likelier"))
        follows.append([
            Quantity(what, r, chance=0.0, unit="correlation", main=False, why=f"p = {p:.2g} by permuted tokens")
            for what, (r, p) in zip(whats, likeness(target, said, seed=seed), strict=True)
            if not math.isnan(r)
        ])  # fmt: skip
    return grids, follows


def text_map(chain: Chain, ids: Ids) -> Array:
    """log(Q_ij / (π_i π_j)) of a text's own counts, of tokens that it has."""
    counts = chain.counted((ids[:, None] * chain.vocabulary + ids).ravel()).reshape(len(ids), -1)
    logs = np.log(chain.tokens[ids] / chain.pairs)
    found: Array = np.log(np.where(counts > 0, counts / chain.pairs, np.nan)) - logs[:, None] - logs
    return found


def path_map(path: DirectPath, chain: Chain, ids: Ids) -> Array:
    """A path's log p(j | i) − log π_j, with π from the text."""
    _, logs, _ = transitions(path, np.stack(np.meshgrid(ids, ids, indexing="ij"), axis=-1))
    return logs.reshape(len(ids), -1) - np.log(chain.tokens[ids] / chain.pairs)


def likeness(text: Array, path: Array, permutations: int = PERMUTATIONS, seed: int = 0) -> list[tuple[float, float]]:
    """How far a path's map follows the text's, over pairs off the diagonal that the text has: twice (correlation, p).

    The first is Pearson's of both interactions, each fitted on these pairs; the second the same of value(i, j) −
    value(j, i) over pairs seen both ways, which a symmetric path can follow only by its rows' normalisers. p is the
    share of permutations of the path's tokens, rows and columns alike, that reach it (Mantel 1967), (1 + reached) / (1
    + permutations). NaN for fewer than 3 pairs, or a side that is constant.
    """
    off = ~np.isnan(text) & ~np.eye(len(text), dtype=bool)
    both = np.triu(off & off.T)

    def parts(values: Array) -> tuple[Array, Array]:
        """Interactions of the pairs, and the difference of both orders."""
        found = interaction(np.where(off, values, np.nan))
        return found[off], (found - found.T)[both]

    generator = np.random.default_rng(seed)
    orders = [np.arange(len(path)), *(generator.permutation(len(path)) for _ in range(permutations))]
    found = [parts(path[np.ix_(order, order)]) for order in orders]
    tested = []
    for at, wanted in enumerate(parts(text)):
        values = [
            float(np.corrcoef(wanted, one[at])[0, 1])
            if len(wanted) >= 3 and min(np.ptp(wanted), np.ptp(one[at])) >= 1e-12
            else math.nan
            for one in found
        ]
        tested.append((values[0], sum(value >= values[0] for value in values) / len(values)))
    return tested
