"""The right answers, by number, and the usual mistakes with what is wrong about each.

The first four were asked where this package began, the fifth in a lesson on Flax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiewise.lab.exercises.checker import right_answer

Array = np.ndarray[Any, Any]
Cases = list[tuple[Any, ...]]  # arguments of each call


def _random(*shape: int, seed: int = 0) -> Array:
    numbers: Array = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return numbers


def _softmax(z: Array) -> Array:
    e: Array = np.exp(z - z.max(-1, keepdims=True))
    softmax: Array = e / e.sum(-1, keepdims=True)
    return softmax


def _models() -> Cases:
    return [(32_000, 1024, 12), (50_257, 768, 12), (128_256, 2048, 16)]


@right_answer(1, _models)
def saved(v: int, d: int, layers: int) -> Any:
    """(Parameters that tying saves, their share of the untied model)."""
    return v * d, v * d / (2 * v * d + 12 * layers * d * d)


@saved.mistake("the share is of the untied model: both tables are in it")
def saved_of_tied(v: int, d: int, layers: int) -> Any:
    """Divide by the tied model."""
    return v * d, v / (v + 12 * layers * d)


@saved.mistake("tying keeps one of the two tables: V·d is saved, not 2·V·d")
def saved_twice(v: int, d: int, layers: int) -> Any:
    """Count both tables as saved."""
    return 2 * v * d, v / (v + 6 * layers * d)


@saved.mistake("a layer has 12·d² parameters: 8·d² are its feed-forward part")
def saved_without_ffn(v: int, d: int, layers: int) -> Any:
    """Count the attention of each layer alone."""
    return v * d, v / (2 * v + 4 * layers * d)


def _steps() -> Cases:
    ids, targets = np.array([1, 0, 1]), np.array([0, 1, 2])
    longer = np.random.default_rng(1).integers(0, 7, (2, 20))
    return [
        (_random(4, 2), ids, targets, _random(3, 2), _random(3, 2, seed=1)),
        (_random(7, 5), *longer, _random(20, 5), _random(20, 5, seed=1)),
    ]


def _head(w: Array, targets: Array, h: Array) -> Array:
    delta = _softmax(h @ w.T)
    delta[np.arange(len(targets)), targets] -= 1
    gradient_of_table: Array = delta.T @ h
    return gradient_of_table


def _lookup(w: Array, ids: Array, upstream: Array) -> Array:
    rows = np.zeros_like(w)
    np.add.at(rows, ids, upstream)
    return rows


@right_answer(2, _steps)
def gradient(w: Array, ids: Array, targets: Array, h: Array, upstream: Array) -> Any:
    """Gradient of a tied table [V, d], both uses together."""
    return _head(w, targets, h) + _lookup(w, ids, upstream)


@gradient.mistake("the lookup's gradient is missing: rows that were read get `upstream`")
def gradient_of_head(w: Array, ids: Array, targets: Array, h: Array, upstream: Array) -> Any:
    """Leave out the lookup."""
    return _head(w, targets, h)


@gradient.mistake("the head's gradient is missing: every row gets (p − 1[target])·h")
def gradient_of_lookup(w: Array, ids: Array, targets: Array, h: Array, upstream: Array) -> Any:
    """Leave out the head."""
    return _lookup(w, ids, upstream)


@gradient.mistake("a token that stands twice gets only the last one's: np.add.at adds all")
def gradient_of_last(w: Array, ids: Array, targets: Array, h: Array, upstream: Array) -> Any:
    """Assign rows instead of adding them."""
    lookup = np.zeros_like(w)
    lookup[ids] = upstream
    return _head(w, targets, h) + lookup


def _parts(m: Array) -> tuple[Array, Array]:
    values = np.linalg.eigvalsh((m + m.T) / 2)
    return (m - m.T) / 2, np.minimum(values, 0)


def _square_matrices() -> Cases:
    return [(np.array([[0.0, 1], [0, 0]]),), (_random(6, 6),), (-np.eye(3),)]


@right_answer(3, _square_matrices)
def gap(m: Array) -> Any:
    """Least squared distance of any W·Wᵀ from m."""
    antisymmetric, negative = _parts(m)
    return np.square(antisymmetric).sum() + np.square(negative).sum()


@gap.mistake("a W·Wᵀ has no negative eigenvalue either")
def gap_antisymmetric(m: Array) -> Any:
    """Leave out the negative eigenvalues."""
    return np.square(_parts(m)[0]).sum()


@gap.mistake("the antisymmetric part of M is missing")
def gap_negative(m: Array) -> Any:
    """Leave out the antisymmetric part."""
    return np.square(_parts(m)[1]).sum()


@gap.mistake("that is the root: the loss is the squared distance")
def gap_root(m: Array) -> Any:
    """Take the root."""
    return np.sqrt(gap.answer(m))


def _tables() -> Cases:
    return [(30_000, 1024, 128), (32_000, 4096, 256), (1000, 1000, 10)]


@right_answer(4, _tables)
def factored(v: int, d: int, k: int) -> Any:
    """(Parameters that a factored table saves, the largest rank that saves any)."""
    return v * d - k * (v + d), (v * d - 1) // (v + d)


@factored.mistake("the map from k to d is missing")
def factored_without_map(v: int, d: int, k: int) -> Any:
    """Leave out the map."""
    return v * d - k * v, (v * d - 1) // (v + d)


@factored.mistake("at that rank nothing is saved any more")
def factored_rank_above(v: int, d: int, k: int) -> Any:
    """Return the first rank that saves nothing."""
    return v * d - k * (v + d), v * d // (v + d) + 1


@factored.mistake("that is what the table has; asked is what it saves")
def factored_size(v: int, d: int, k: int) -> Any:
    """Return the size of the factored table."""
    return k * (v + d), (v * d - 1) // (v + d)


STD = 0.02  # standard deviation that exercise 5 asks for


def _judge_tied_logits(seed: int, ids: Array, v: int, d: int, answer: Array) -> str | None:
    """Return what is wrong with the logits of all tokens for all tokens; None if right.

    Right are the logits W·Wᵀ for any random W.

    A judge gets all arguments of a case. This one needs neither `seed` nor `ids`, which are all tokens in order.
    """
    if answer.shape != (v * v,):
        return f"its shape is {answer.shape}, and should be {(v * v,)}: logits of T tokens for V, flattened"
    logits = answer.reshape(v, v)
    if not np.allclose(logits, logits.T, atol=1e-6):
        return "token i's logit for j is not j's for i: two calls of self.param make two tables, and nothing is tied"
    singular_values = np.linalg.svd(logits, compute_uv=False)
    if singular_values[d] > 1e-4 * singular_values[0]:  # W·Wᵀ has rank d, and every case has d < v
        return f"these logits have more than {d} directions: they are not rows of one table times one another"
    std = np.sqrt(np.trace(logits) / v / d)  # the trace is the sum of all squares of W
    if not 0.5 < std / STD < 2:
        return f"the table's numbers have a standard deviation of {std:.2g}, and should be drawn with {STD}"
    return None


def _seeds() -> Cases:
    tokens = np.arange(40, dtype=np.float32)
    return [(0, tokens, 40, 8), (1, tokens, 40, 8)]


@right_answer(5, _seeds, judge=_judge_tied_logits, needs="flax", megabytes=4096)
def tied_io_embed(seed: int, token_ids: Array, vocab_size: int, d_model: int) -> Any:
    """Return the logits [T·V] of a tied table that the function draws at random."""
    table = STD * _random(vocab_size, d_model, seed=seed)
    return (table[token_ids.astype(int)] @ table.T).ravel()


# --- input embedding and output head


def _pairs() -> Cases:
    shared = _random(30_000, 16)
    return [(_random(5, 3), _random(5, 3, seed=1)), (shared, shared + 0.5 * _random(30_000, 16, seed=2))]


def _energies(e: Array, u: Array) -> tuple[float, float]:
    cross = u.T @ e
    return float(((e.T @ e) * (u.T @ u)).sum()), float((cross * cross.T).sum())


@right_answer(6, _pairs)
def asymmetry(e: Array, u: Array) -> Any:
    """Return the share of the antisymmetric part in ‖e·uᵀ‖²."""
    energy, with_transpose = _energies(e, u)
    return (1 - with_transpose / energy) / 2


@asymmetry.mistake("that is the symmetric part's share")
def symmetry(e: Array, u: Array) -> Any:
    """Return the share of the other part."""
    energy, with_transpose = _energies(e, u)
    return (1 + with_transpose / energy) / 2


@asymmetry.mistake("that is the ratio of lengths: a share is of squares")
def asymmetry_of_lengths(e: Array, u: Array) -> Any:
    """Divide lengths instead of squares."""
    return np.sqrt(asymmetry.answer(e, u))


@asymmetry.mistake("(M − Mᵀ)/2 is the antisymmetric part, not M − Mᵀ")
def asymmetry_of_double(e: Array, u: Array) -> Any:
    """Take M − Mᵀ."""
    return 4 * asymmetry.answer(e, u)


def _batches() -> Cases:
    targets = np.random.default_rng(0).integers(0, 30_000, 3000)
    targets[::5] = -100
    small = np.array([3, -100, 0, 1])
    return [
        (_random(4, 3), _random(6, 3), small),
        (300 * _random(4, 3), _random(6, 3), small),
        (_random(3000, 8), _random(30_000, 8), targets),
    ]


def _losses(h: Array, w: Array, targets: Array) -> Array:
    counted = np.flatnonzero(targets >= 0)
    losses = []
    for part in np.array_split(counted, max(1, len(counted) * len(w) // 2_000_000)):
        z = h[part] @ w.T
        top = z.max(1)
        lse = top + np.log(np.exp(z - top[:, None]).sum(1))
        losses.append(lse - z[np.arange(len(part)), targets[part]])
    return np.concatenate(losses)


@right_answer(7, _batches, megabytes=300)
def loss(h: Array, w: Array, targets: Array) -> Any:
    """Mean cross-entropy over positions that have a target."""
    return _losses(h, w, targets).mean()


@loss.mistake("positions with −100 do not count in the mean")
def loss_over_all(h: Array, w: Array, targets: Array) -> Any:
    """Divide by all positions."""
    return _losses(h, w, targets).sum() / len(targets)


@loss.mistake("that is the sum over positions: their mean is asked")
def loss_sum(h: Array, w: Array, targets: Array) -> Any:
    """Return the sum."""
    return _losses(h, w, targets).sum()


@loss.mistake("−100 is no row of w: these positions have no loss")
def loss_of_ignored(h: Array, w: Array, targets: Array) -> Any:
    """Count −100 as a row from the end."""
    return _losses(h, w, targets % len(w)).mean()


@loss.mistake("that is in bits: the logarithm is natural")
def loss_in_bits(h: Array, w: Array, targets: Array) -> Any:
    """Take logarithms to base 2."""
    return _losses(h, w, targets).mean() / np.log(2)


def _recurrent_models() -> Cases:
    return [(10_000, 50, 300), (33_278, 300, 650), (500_000, 300, 300)]


@right_answer(8, _recurrent_models)
def rnn(c: int, d: int, h: int) -> Any:
    """(Parameters of the tied recurrent model, of the untied)."""
    body = h * d + h * h + h + c
    return c * d + d * h + body, c * d + c * h + body


@rnn.mistake("tied, the scores need a second projection")
def rnn_without_projection(c: int, d: int, h: int) -> Any:
    """Leave out the projection of the tied model."""
    tied, untied = rnn.answer(c, d, h)
    return tied - d * h, untied


@rnn.mistake("the biases are missing: H and C")
def rnn_without_biases(c: int, d: int, h: int) -> Any:
    """Leave out the biases."""
    tied, untied = rnn.answer(c, d, h)
    return tied - h - c, untied - h - c


@rnn.mistake("untied, the output table is C·H")
def rnn_with_narrow_output(c: int, d: int, h: int) -> Any:
    """Give the output table the width of the input table."""
    tied, untied = rnn.answer(c, d, h)
    return tied, untied - c * (h - d)


def _turned_tables() -> Cases:
    e, noise = _random(30, 4), _random(30, 4, seed=3)
    turned = e @ np.linalg.qr(_random(4, 4))[0]
    return [(e, turned), (e, turned + 0.3 * noise)]


@right_answer(9, _turned_tables)
def align(e: Array, u: Array) -> Any:
    """Rotation [d, d] that brings e nearest to u."""
    left, _, right = np.linalg.svd(e.T @ u)
    return left @ right


@align.mistake("that turns u onto e: it is the transpose")
def align_backwards(e: Array, u: Array) -> Any:
    """Turn the other table."""
    return align.answer(e, u).T


@align.mistake("that is the best linear map: it stretches too")
def align_by_linear_map(e: Array, u: Array) -> Any:
    """Fit any linear map."""
    return np.linalg.lstsq(e, u, rcond=None)[0]


@align.mistake("numpy's svd returns its last factor transposed")
def align_transposed(e: Array, u: Array) -> Any:
    """Transpose the last factor once more."""
    left, _, right = np.linalg.svd(e.T @ u)
    return left @ right.T


def _cosines(e: Array, u: Array) -> Array:
    unit_e = e / np.linalg.norm(e, axis=1, keepdims=True)
    unit_u = u / np.linalg.norm(u, axis=1, keepdims=True)
    cosines: Array = unit_e @ unit_u.T
    return cosines


def _leaning_tables() -> Cases:
    e, other = _random(12, 5), _random(12, 5, seed=4)
    return [(e + 1, other + 1), (e + 1, 2 * e + other + 1)]


@right_answer(10, _leaning_tables)
def excess(e: Array, u: Array) -> Any:
    """Mean cosine of paired rows, less that of rows of two tokens."""
    return _beyond_others(_cosines(e, u))


def _beyond_others(c: Array) -> float:
    diagonal = np.trace(c)
    return float(diagonal / len(c) - (c.sum() - diagonal) / (len(c) * (len(c) - 1)))


@excess.mistake("that is the mean cosine alone, which leaning rows have by chance")
def mean_cosine(e: Array, u: Array) -> Any:
    """Subtract nothing."""
    return _cosines(e, u).diagonal().mean()


@excess.mistake("pairs of one token do not belong to chance")
def excess_over_all(e: Array, u: Array) -> Any:
    """Subtract the mean of all pairs."""
    cosines = _cosines(e, u)
    return cosines.diagonal().mean() - cosines.mean()


@excess.mistake("these are dot products: divide by both lengths")
def excess_of_products(e: Array, u: Array) -> Any:
    """Take dot products instead of cosines."""
    return _beyond_others(e @ u.T)


# --- checkpoints, tokenizers, batches


_MERGES = np.array([[0, 1], [4, 2], [2, 3], [5, 6], [1, 1]])  # ids 4 … 8


def _retained_tokens() -> Cases:
    return [(4, _MERGES, np.array(ids, int)) for ids in ([7], [6, 8], [])]


@right_answer(11, _retained_tokens)
def closed(symbols: int, merges: Array, kept: Array) -> Any:
    """Return the retained ids, the ids that they are merged from, and all symbols; sorted."""
    tokens, waiting = set(range(symbols)), list(map(int, kept))
    while waiting:
        token = waiting.pop()
        if token not in tokens:
            tokens.add(token)
            waiting += _parents(symbols, merges, token)
    return sorted(tokens)


def _parents(symbols: int, merges: Array, token: int) -> list[int]:
    """Return the two ids that a token is merged of; none for a single symbol."""
    if token < symbols:
        return []
    return [int(part) for part in merges[token - symbols]]


@closed.mistake("the parents of the parents are missing")
def closed_once(symbols: int, merges: Array, kept: Array) -> Any:
    """Add the parents of the kept tokens alone."""
    tokens = {*range(symbols), *kept}
    for token in kept:
        tokens.update(_parents(symbols, merges, token))
    return sorted(tokens)


@closed.mistake("single symbols must stay, or some text has no tokens")
def closed_without_symbols(symbols: int, merges: Array, kept: Array) -> Any:
    """Keep only the symbols that a token is merged of."""
    tokens = closed.answer(symbols, merges, kept)
    parts: set[int] = set()
    for token in tokens:
        parts.update(_parents(symbols, merges, token))
    return [token for token in tokens if token >= symbols or token in parts]


@closed.mistake("the parts of kept tokens are missing: their merges are never reached")
def closed_without_parts(symbols: int, merges: Array, kept: Array) -> Any:
    """Keep the symbols and the kept tokens alone."""
    return sorted({*range(symbols), *kept})


def _fall(w: Array, h: Array, new: Any, n: int) -> Array:
    old_sum = np.exp(h @ w.T).sum(1)
    fall_of_all: Array = np.log1p(n * np.exp(new) / old_sum)
    return fall_of_all


def _growing_tables() -> Cases:
    return [(_random(9, 4), _random(6, 4, seed=6), 1), (_random(200, 8), _random(5, 8, seed=7), 50)]


@right_answer(12, _growing_tables)
def fall(w: Array, h: Array, n: int) -> Any:
    """How far every old token's log-probability falls [N]."""
    return _fall(w, h, h @ w.mean(0), n)


@fall.mistake("that is the most that it can be (Jensen)")
def fall_bound(w: Array, h: Array, n: int) -> Any:
    """Return the upper bound."""
    return np.full(len(h), np.log1p(n / len(w)))


@fall.mistake("that is for rows of zeros")
def fall_of_zeros(w: Array, h: Array, n: int) -> Any:
    """Add rows of zeros."""
    return _fall(w, h, 0.0, n)


@fall.mistake("that is one new row's: there are n of them")
def fall_of_one(w: Array, h: Array, n: int) -> Any:
    """Add one row."""
    return _fall(w, h, h @ w.mean(0), 1)


def _token_counts() -> Cases:
    return [(np.array([5, 3, 2]), 4), (1000 // np.arange(1, 200), 512)]


@right_answer(13, _token_counts)
def touched(counts: Array, n: int) -> Any:
    """Mean number of different tokens in a batch."""
    return (1 - (1 - counts / counts.sum()) ** n).sum()


@touched.mistake("exact is 1 − (1 − p)ⁿ")
def touched_poisson(counts: Array, n: int) -> Any:
    """Approximate by independent Poisson counts."""
    return (1 - np.exp(-n * counts / counts.sum())).sum()


@touched.mistake("n tokens are drawn, but some of them twice")
def touched_all(counts: Array, n: int) -> Any:
    """Count every draw."""
    return float(n)


@touched.mistake("that takes all tokens as equally frequent")
def touched_uniform(counts: Array, n: int) -> Any:
    """Draw tokens with equal probability."""
    size = len(counts)
    return size * (1 - (1 - 1 / size) ** n)
