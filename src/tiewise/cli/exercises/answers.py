"""The right answers, by number, and the usual mistakes with what is wrong about each.

The first four were asked where this package began, the fifth in a lesson on Flax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tiewise.cli.exercises.checker import exercise


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def _softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@exercise(1, lambda: [(32_000, 1024, 12), (50_257, 768, 12), (128_256, 2048, 16)])
def saved(v: int, d: int, layers: int) -> Any:
    """(Parameters that tying saves, their share of the untied model)."""
    return v * d, v * d / (2 * v * d + 12 * layers * d * d)


saved.mistakes = [
    ("the share is of the untied model: both tables are in it", lambda v, d, n: (v * d, v / (v + 12 * n * d))),
    ("tying keeps one of the two tables: V·d is saved, not 2·V·d", lambda v, d, n: (2 * v * d, v / (v + 6 * n * d))),
    ("a layer has 12·d² parameters: 8·d² are its feed-forward part", lambda v, d, n: (v * d, v / (2 * v + 4 * n * d))),
]


def _steps() -> list[tuple[Any, ...]]:
    ids, targets = np.array([1, 0, 1]), np.array([0, 1, 2])
    longer = np.random.default_rng(1).integers(0, 7, (2, 20))
    return [
        (_random(4, 2), ids, targets, _random(3, 2), _random(3, 2, seed=1)),
        (_random(7, 5), *longer, _random(20, 5), _random(20, 5, seed=1)),
    ]


def _head(w: np.ndarray, targets: np.ndarray, h: np.ndarray) -> np.ndarray:
    delta = _softmax(h @ w.T)
    delta[np.arange(len(targets)), targets] -= 1
    return delta.T @ h


def _lookup(w: np.ndarray, ids: np.ndarray, upstream: np.ndarray) -> np.ndarray:
    made = np.zeros_like(w)
    np.add.at(made, ids, upstream)
    return made


@exercise(2, _steps)
def gradient(w: np.ndarray, ids: np.ndarray, targets: np.ndarray, h: np.ndarray, upstream: np.ndarray) -> Any:
    """Gradient of a tied table [V, d], both uses together."""
    return _head(w, targets, h) + _lookup(w, ids, upstream)


def _once(w: np.ndarray, ids: np.ndarray, targets: np.ndarray, h: np.ndarray, upstream: np.ndarray) -> np.ndarray:
    made = np.zeros_like(w)
    made[ids] = upstream
    return _head(w, targets, h) + made


gradient.mistakes = [
    ("the lookup's gradient is missing: rows that were read get `upstream`", lambda w, i, t, h, u: _head(w, t, h)),
    ("the head's gradient is missing: every row gets (p − 1[target])·h", lambda w, i, t, h, u: _lookup(w, i, u)),
    ("a token that stands twice gets only the last one's: np.add.at adds all", _once),
]


def _parts(m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = np.linalg.eigvalsh((m + m.T) / 2)
    return (m - m.T) / 2, np.minimum(values, 0)


@exercise(3, lambda: [(np.array([[0.0, 1], [0, 0]]),), (_random(6, 6),), (-np.eye(3),)])
def gap(m: np.ndarray) -> Any:
    """Least squared distance of any W·Wᵀ from m."""
    odd, below = _parts(m)
    return np.square(odd).sum() + np.square(below).sum()


gap.mistakes = [
    ("a W·Wᵀ has no negative eigenvalue either", lambda m: np.square(_parts(m)[0]).sum()),
    ("the antisymmetric part of M is missing", lambda m: np.square(_parts(m)[1]).sum()),
    ("that is the root: the loss is the squared distance", lambda m: np.sqrt(gap.answer(m))),
]


@exercise(4, lambda: [(30_000, 1024, 128), (32_000, 4096, 256), (1000, 1000, 10)])
def factored(v: int, d: int, k: int) -> Any:
    """(Parameters that a factored table saves, the largest rank that saves any)."""
    return v * d - k * (v + d), (v * d - 1) // (v + d)


factored.mistakes = [
    ("the map from k to d is missing", lambda v, d, k: (v * d - k * v, (v * d - 1) // (v + d))),
    ("at that rank nothing is saved any more", lambda v, d, k: (v * d - k * (v + d), v * d // (v + d) + 1)),
    ("that is what the table has; asked is what it saves", lambda v, d, k: (k * (v + d), (v * d - 1) // (v + d))),
]


def _embedded(seed: int, ids: np.ndarray, v: int, d: int, found: np.ndarray) -> str | None:
    """What is wrong with the logits of every token for every token, which are W·Wᵀ whatever W was drawn."""
    if found.shape != (v * v,):
        return f"its shape is {found.shape}, and should be {(v * v,)}: logits of T tokens for V, flattened"
    logits = found.reshape(v, v)
    if not np.allclose(logits, logits.T, atol=1e-6):
        return "token i's logit for j is not j's for i: two calls of self.param make two tables, and nothing is tied"
    if (values := np.linalg.svd(logits, compute_uv=False))[d] > 1e-4 * values[0]:
        return f"these logits have more than {d} directions: they are not rows of one table times one another"
    if not 0.5 < (std := np.sqrt(np.trace(logits) / v / d)) / 0.02 < 2:
        return f"the table's numbers have a standard deviation of {std:.2g}, and should be drawn with 0.02"
    return None


_TOKENS = np.arange(40, dtype=np.float32)


@exercise(5, lambda: [(seed, _TOKENS, 40, 8) for seed in (0, 1)], judge=_embedded, needs="flax", megabytes=4096)
def tied_io_embed(seed: int, token_ids: np.ndarray, vocab_size: int, d_model: int) -> Any:
    """Logits [T·V] of a tied table of its own drawing."""
    table = 0.02 * _random(vocab_size, d_model, seed=seed)
    return (table[token_ids.astype(int)] @ table.T).ravel()


# --- what the ends do


def _pairs() -> list[tuple[Any, ...]]:
    shared = _random(30_000, 16)
    return [(_random(5, 3), _random(5, 3, seed=1)), (shared, shared + 0.5 * _random(30_000, 16, seed=2))]


def _energies(e: np.ndarray, u: np.ndarray) -> tuple[float, float]:
    cross = u.T @ e
    return float(((e.T @ e) * (u.T @ u)).sum()), float((cross * cross.T).sum())


@exercise(6, _pairs)
def asymmetry(e: np.ndarray, u: np.ndarray) -> Any:
    """Share of the antisymmetric part in ‖e·uᵀ‖²."""
    whole, with_transpose = _energies(e, u)
    return (1 - with_transpose / whole) / 2


asymmetry.mistakes = [
    ("that is the symmetric part's share", lambda e, u: (1 + _energies(e, u)[1] / _energies(e, u)[0]) / 2),
    ("that is the ratio of lengths: a share is of squares", lambda e, u: np.sqrt(asymmetry.answer(e, u))),
    ("(M − Mᵀ)/2 is the antisymmetric part, not M − Mᵀ", lambda e, u: 4 * asymmetry.answer(e, u)),
]


def _batches() -> list[tuple[Any, ...]]:
    targets = np.random.default_rng(0).integers(0, 30_000, 3000)
    targets[::5] = -100
    small = np.array([3, -100, 0, 1])
    return [
        (_random(4, 3), _random(6, 3), small),
        (300 * _random(4, 3), _random(6, 3), small),
        (_random(3000, 8), _random(30_000, 8), targets),
    ]


def _losses(h: np.ndarray, w: np.ndarray, targets: np.ndarray) -> np.ndarray:
    at = np.flatnonzero(targets >= 0)
    found = []
    for part in np.array_split(at, max(1, len(at) * len(w) // 2_000_000)):
        z = h[part] @ w.T
        top = z.max(1)
        found.append(top + np.log(np.exp(z - top[:, None]).sum(1)) - z[np.arange(len(part)), targets[part]])
    return np.concatenate(found)


@exercise(7, _batches, megabytes=300)
def loss(h: np.ndarray, w: np.ndarray, targets: np.ndarray) -> Any:
    """Mean cross-entropy over positions that have a target."""
    return _losses(h, w, targets).mean()


loss.mistakes = [
    ("positions with −100 do not count in the mean", lambda h, w, t: _losses(h, w, t).sum() / len(t)),
    ("that is the sum over positions: their mean is asked", lambda h, w, t: _losses(h, w, t).sum()),
    ("−100 is no row of w: these positions have no loss", lambda h, w, t: _losses(h, w, t % len(w)).mean()),
    ("that is in bits: the logarithm is natural", lambda h, w, t: _losses(h, w, t).mean() / np.log(2)),
]


@exercise(8, lambda: [(10_000, 50, 300), (33_278, 300, 650), (500_000, 300, 300)])
def rnn(c: int, d: int, h: int) -> Any:
    """(Parameters of the tied recurrent model, of the untied)."""
    body = h * d + h * h + h + c
    return c * d + d * h + body, c * d + c * h + body


rnn.mistakes = [
    ("tied, the scores need a second projection", lambda c, d, h: tuple(np.subtract(rnn.answer(c, d, h), (d * h, 0)))),
    ("the biases are missing: H and C", lambda c, d, h: tuple(x - h - c for x in rnn.answer(c, d, h))),
    ("untied, the output table is C·H", lambda c, d, h: tuple(np.subtract(rnn.answer(c, d, h), (0, c * (h - d))))),
]


_TURN = np.linalg.qr(_random(4, 4))[0]


@exercise(9, lambda: [(_random(30, 4), _random(30, 4) @ _TURN + noise * _random(30, 4, seed=3)) for noise in (0, 0.3)])
def align(e: np.ndarray, u: np.ndarray) -> Any:
    """Rotation [d, d] that brings e nearest to u."""
    left, _, right = np.linalg.svd(e.T @ u)
    return left @ right


align.mistakes = [
    ("that turns u onto e: it is the transpose", lambda e, u: align.answer(e, u).T),
    ("that is the best linear map: it stretches too", lambda e, u: np.linalg.lstsq(e, u, rcond=None)[0]),
    ("numpy's svd returns its last factor transposed", lambda e, u: (s := np.linalg.svd(e.T @ u))[0] @ s[2].T),
]


def _cosines(e: np.ndarray, u: np.ndarray) -> np.ndarray:
    return (e / np.linalg.norm(e, axis=1, keepdims=True)) @ (u / np.linalg.norm(u, axis=1, keepdims=True)).T


@exercise(10, lambda: [(_random(12, 5) + 1, _random(12, 5) * near + _random(12, 5, seed=4) + 1) for near in (0, 2)])
def excess(e: np.ndarray, u: np.ndarray) -> Any:
    """Mean cosine of paired rows, less that of rows of two tokens."""
    return _beyond_others(_cosines(e, u))


def _beyond_others(c: np.ndarray) -> float:
    diagonal = np.trace(c)
    return float(diagonal / len(c) - (c.sum() - diagonal) / (len(c) * (len(c) - 1)))


excess.mistakes = [
    ("that is the mean cosine alone, which leaning rows have by chance", lambda e, u: _cosines(e, u).diagonal().mean()),
    ("pairs of one token do not belong to chance", lambda e, u: (c := _cosines(e, u)).diagonal().mean() - c.mean()),
    ("these are dot products: divide by both lengths", lambda e, u: _beyond_others(e @ u.T)),
]


# --- checkpoints, tokenizers, batches


_MERGES = np.array([[0, 1], [4, 2], [2, 3], [5, 6], [1, 1]])  # ids 4 … 8


@exercise(11, lambda: [(4, _MERGES, np.array(kept, int)) for kept in ([7], [6, 8], [])])
def closed(symbols: int, merges: np.ndarray, kept: np.ndarray) -> Any:
    """Kept ids, all that they are made of, and all symbols; sorted."""
    found, waiting = set(range(symbols)), list(map(int, kept))
    while waiting:
        token = waiting.pop()
        if token not in found:
            found.add(token)
            waiting += map(int, merges[token - symbols])
    return sorted(found)


def _made(symbols: int, merges: np.ndarray, tokens: list[int]) -> list[int]:
    """Those of the tokens that are merged of others, or that others of them are merged of."""
    parts = {part for token in tokens if token >= symbols for part in merges[token - symbols]}
    return [token for token in tokens if token >= symbols or token in parts]


closed.mistakes = [
    (
        "the parents of the parents are missing",
        lambda s, m, k: sorted({*range(s), *k, *(p for t in k if t >= s for p in m[t - s])}),
    ),
    ("single symbols must stay, or some text has no tokens", lambda s, m, k: _made(s, m, closed.answer(s, m, k))),
    ("the parts of kept tokens are missing: their merges are never reached", lambda s, m, k: sorted({*range(s), *k})),
]


def _fall(w: np.ndarray, h: np.ndarray, new: Any, n: int) -> np.ndarray:
    return np.log1p(n * np.exp(new) / np.exp(h @ w.T).sum(1))


@exercise(12, lambda: [(_random(9, 4), _random(6, 4, seed=6), 1), (_random(200, 8), _random(5, 8, seed=7), 50)])
def fall(w: np.ndarray, h: np.ndarray, n: int) -> Any:
    """How far every old token's log-probability falls [N]."""
    return _fall(w, h, h @ w.mean(0), n)


fall.mistakes = [
    ("that is the most that it can be (Jensen)", lambda w, h, n: np.full(len(h), np.log1p(n / len(w)))),
    ("that is for rows of zeros", lambda w, h, n: _fall(w, h, 0.0, n)),
    ("that is one new row's: there are n of them", lambda w, h, n: _fall(w, h, h @ w.mean(0), 1)),
]


@exercise(13, lambda: [(np.array([5, 3, 2]), 4), (1000 // np.arange(1, 200), 512)])
def touched(counts: np.ndarray, n: int) -> Any:
    """Mean number of different tokens in a batch."""
    return (1 - (1 - counts / counts.sum()) ** n).sum()


touched.mistakes = [
    ("exact is 1 − (1 − p)ⁿ", lambda c, n: (1 - np.exp(-n * c / c.sum())).sum()),
    ("n tokens are drawn, but some of them twice", lambda c, n: float(n)),
    ("that takes all tokens as equally frequent", lambda c, n: len(c) * (1 - (1 - 1 / len(c)) ** n)),
]
