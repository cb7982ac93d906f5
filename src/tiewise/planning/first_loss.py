"""Loss of a fresh model's first step, computed without torch from the scale of its tables.

Logits of independent rows N(0, σ²) and a hidden state of norm √D are N(0, τ²) with τ = σ√D. The expected nll of a
random target is then E[log Σ_j exp(τ g_j)] (the target's logit has mean zero): ln V + τ²/2 for small τ, about
τ √(2 ln V) for large τ. Both are asymptotes; `predicted_nll` integrates the expectation itself,

    E[log S] = ∫ (exp(-e^u) - E[exp(-e^u S)]) du,      E[exp(-x S)] = φ(x)^V,   φ(x) = E[exp(-x e^{τ g})].

With a tied table the hidden state still has a component along the token's input row (cosine c), so the logit of that
row is c σ D. This self-logit is far above the others if σ is of order one. For that reason a tied table drawn N(0, 1)
starts near a loss of D instead of ln V.

`self_cosines` follows c through the layers by mean-field theory (arXiv:1611.01232, Schoenholz et al.): per element and
position, the variance of the residual stream and the covariance K[s, t] of two positions, with independent Gaussian
weights and large widths. Attention weights follow from Gaussian scores, whose second moment is integrated.

    branch    K'[s, t] = gain · f(K̂[s, t])        K̂ the normalised covariance, f the activation's or attention's map
    stream    K += K' per sublayer; the input row's part does not change: c = σ·input_scale / √K[t, t]

A family has a `FreshBody` only if the prediction is within 2 % of its measured losses
(`tests/planning/test_first_loss.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tiewise.core import Late
from tiewise.core.spec import BoundarySpec, Vocabularies

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
else:
    np = Late("numpy")

# Steps of the two integrals. Their integrands are smooth and vanish at both ends, so equal steps converge faster than
# any power. In g the integrand changes over a width of 1/τ, in u of one at least.
STEP_U = 0.12
COARSEST_G, FINEST_G = 0.08, 0.015
POSITIONS = 64  # number of positions followed; longer texts average over more, which changes little
LossAndCosine = tuple[float, float | None]  # nll in nats; mean of `self_cosines`, None without self-similarity


@dataclass(frozen=True)
class FreshBody:
    """Scales of a pre-norm residual stream at initialisation; weights are N(0, std²) and biases zero."""

    std: float
    heads: int
    head_dim: int
    ffn: int
    layers: int
    activation: str
    gated: bool
    # sequential (x + f(norm x), one sublayer after the other), parallel (both read the same x), or sandwich (each
    # sublayer's output is normalised again before it is added)
    arrangement: str = "sequential"
    input_scale: float = 1.0
    output_scale: float = 1.0
    residual_scale: float = 1.0
    softcap: float | None = None
    attention_scale: float | None = None  # None: head_dim^-½
    positions_std: float = 0.0
    normed_queries: bool = False  # queries and keys have norms
    depth_scaled: bool = False  # output projections drawn with std / √(2L), as GPT-2 does


@dataclass(frozen=True)
class SelfSimilarity:
    """Inputs of `self_cosines`: the sizes and scales that decide a token's self-logit."""

    body: FreshBody
    width: int
    std: float
    row_std: float
    positions: int


@dataclass(frozen=True)
class FirstStep:
    """Inputs of a first loss. `self_similarity` is None unless one table serves both ends without maps."""

    vocab: int
    logit_std: float
    softcap: float | None
    self_similarity: SelfSimilarity | None = None

    def compute(self) -> LossAndCosine:
        """Return the expected nll of a uniformly random target, and the mean self-cosine."""
        row, tau, cap = self.self_similarity, self.logit_std, self.softcap
        if row is None:
            return predicted_nll(self.vocab, tau, softcap=cap), None
        cosines = self_cosines(row)
        logits = cosines * tau * math.sqrt(row.width)  # of the token's own row, by position
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        mean_cosine = float(cosines.mean())
        # below e^-8 of the sum of the V other terms, the self-logit changes the loss by less than a thousandth
        if logits.max() < math.log(self.vocab) - 8:
            return predicted_nll(self.vocab, tau, softcap=cap), mean_cosine
        # positions are averaged in a few groups of equal size
        nlls = []
        for group in np.array_split(np.sort(logits), min(4, len(logits))):
            z = float(group.mean())
            # one target in V is the token itself, whose logit is z; the mean of the others' logits is 0
            nlls.append(predicted_nll(self.vocab, tau, self_logit=z, softcap=cap) - z / self.vocab)
        return sum(nlls) / len(nlls), mean_cosine


def sound_std(d: int) -> float:
    """Return the default scale of a table's entries, d^-½.

    Embedded rows then have norm 1 for every width. The body gets an input of the size that its norms expect, and the
    loss starts within half a nat of ln V. On the built-in text, half and twice this scale end at a higher loss for
    every arm (the table in docs/compare.md).
    """
    std: float = d**-0.5
    return std


def first_step(
    spec: BoundarySpec,
    vocab: int,
    d: int,
    std: float,
    body: FreshBody | None = None,
    *,
    body_std: float | None = None,
    scale: float = 1.0,
    positions: int = POSITIONS,
) -> FirstStep:
    """Return the inputs of the first loss of `spec` in a model of width `d`.

    The tables are drawn N(0, std²). Without a `body`, hidden states have norm √d and are independent of their tokens,
    and the head multiplies by `scale`. The matrices of a `body` are drawn with `body_std`, or with the body's std if
    that is None. Positions at the start of T `positions` average over fewer positions.
    """
    # τ: the output table is drawn N(0, std²), and hidden states have norm √d
    logit_std = std * math.sqrt(spec.table_widths(d)[1]) * spec.scales(d)[1]
    if body is None:
        return FirstStep(vocab, scale * logit_std, spec.softcap)
    tau = body.output_scale * logit_std
    cap = spec.softcap or body.softcap
    if spec.tables == 2 or any(spec.maps(d)):
        return FirstStep(vocab, tau, cap)  # random maps or a second table leave no self-similarity
    row_std = std * spec.scales(d)[0] * body.input_scale
    return FirstStep(vocab, tau, cap, SelfSimilarity(body, d, body_std or body.std, row_std, min(positions, POSITIONS)))


def is_head_from_file(spec: BoundarySpec) -> bool:
    """Return whether the head starts from pretrained vectors, whose scale no formula knows."""
    return spec.vectors is not None and spec.tables == 1


def starting_nll(spec: BoundarySpec, vocab: Vocabularies, d: int) -> float:
    """Return the expected first loss of a boundary around `small_decoder`, with its default scale."""
    std = spec.init or sound_std(d)
    with_self_logit, _ = first_step(spec, vocab.outputs, d, std, small_decoder(d)).compute()
    share = vocab.read_and_predicted / vocab.inputs  # share of the read tokens that can be targets
    if share == 1:
        return with_self_logit
    without_self_logit, _ = first_step(spec, vocab.outputs, d, std).compute()
    return share * with_self_logit + (1 - share) * without_self_logit


def small_decoder(d: int) -> FreshBody:
    """Return the default body of `compare`: two layers of a Llama of width `d`."""
    ffn = max(8, round(d * 8 / 3 / 8) * 8)
    return FreshBody(std=0.5 * sound_std(d), heads=1, head_dim=d, ffn=ffn, layers=2, activation="silu", gated=True)


@cache
def predicted_nll(vocab: int, logit_std: float, self_logit: float | None = None, softcap: float | None = None) -> float:
    """Return the expected step-0 nll in nats of a uniformly random target.

    The `vocab` logits are N(0, logit_std²). That is τ = σ √E for rows N(0, σ²) of width E and hidden states of norm √E.
    `self_logit` is the logit of the token's input row if a tied table is used (c σ D). With `softcap`, every other
    logit z becomes softcap · tanh(z / softcap).
    """
    others = vocab
    if self_logit is not None:
        others -= 1
    step_g = max(FINEST_G, min(COARSEST_G, 0.25 / max(logit_std, 1e-9)))
    g = np.linspace(-9, 9, 2 * math.ceil(9 / step_g) + 1)
    density = np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi) * (g[1] - g[0])
    z = logit_std * g
    if softcap is not None:
        z = softcap * np.tanh(z / softcap)
    span = max(math.log(vocab) + float(z[-1]), self_logit or 0.0) + 25
    u = np.linspace(-span, float(z[-1]) + 25, min(4_001, math.ceil((span + float(z[-1]) + 25) / STEP_U)))
    # 1 - φ instead of φ: the integrand changes where φ is within 1/V of one
    with np.errstate(over="ignore"):
        lacking = -(np.expm1(-np.exp(u[:, None] + z)) @ density)
        log_survival = others * np.log1p(-lacking.clip(0, 1 - 1e-15))
        if self_logit is not None:
            log_survival = log_survival - np.exp(u + self_logit)
        return float(np.sum(np.exp(-np.exp(u)) - np.exp(log_survival)) * (u[1] - u[0]))


@cache
def self_cosines(row: SelfSimilarity) -> Array:
    """Return the cosine between the last hidden state and the token's input row, by position [T]."""
    body, sublayers = row.body, _Sublayers(row)
    k = np.eye(row.positions) * (row.row_std**2 + body.positions_std**2)
    for _ in range(body.layers):
        after = k + sublayers.attention(k)
        k = after + sublayers.ffn(k if body.arrangement == "parallel" else after)
    cosines: Array = row.row_std / np.sqrt(np.diagonal(k))
    return cosines


class _Sublayers:
    """Contributions of a fresh body's sublayers to the covariance [T, T] of the residual stream."""

    def __init__(self, row: SelfSimilarity) -> None:
        body = row.body
        self.body = body
        self.gain = row.std**2 * row.width  # variance of a projected entry of a normalised state
        self.out = row.std**2 / (2 * body.layers if body.depth_scaled else 1)
        self.activation = _covariance_map(ACTIVATIONS[body.activation], self.gain)
        scale = body.attention_scale
        if scale is None:
            scale = body.head_dim**-0.5
        # variance of a score between independent states; normalised queries and keys have unit entries
        self.score_variance = body.head_dim * scale**2
        if not body.normed_queries:
            self.score_variance *= self.gain**2

    def attention(self, k: Array) -> Array:
        """Return the covariance that attention adds."""
        body = self.body
        averaged = _average_values(_normalised(k), self.score_variance)
        return self._scale_branch(self.gain * self.out * body.heads * body.head_dim * averaged)

    def ffn(self, k: Array) -> Array:
        """Return the covariance that the feed-forward layer adds."""
        rho = _normalised(k)
        output = self.out * self.body.ffn * self.activation(rho)
        if self.body.gated:
            output = output * (self.gain * rho)
        return self._scale_branch(output)

    def _scale_branch(self, branch: Array) -> Array:
        """Return a branch's covariance after the sublayer's output norm and residual scale."""
        if self.body.arrangement == "sandwich":
            branch = _normalised(branch)
        added: Array = self.body.residual_scale**2 * branch
        return added


def _normalised(k: Array) -> Array:
    """Return the correlations [T, T] of a covariance."""
    root = np.sqrt(np.diagonal(k))
    correlations: Array = k / np.outer(root, root)
    return correlations


def _average_values(rho: Array, score_variance: float) -> Array:
    """Return the covariance of causal attention's averages of values with covariance `rho`."""
    counts = np.arange(1, len(rho) + 1)  # number of positions that each position reads
    uniform = np.tril(np.ones_like(rho)) / counts[:, None]
    averaged = uniform @ rho @ uniform.T
    mean = np.diagonal(averaged)  # (1 + (t−1)·ρ̄) / t with ρ̄ the mean correlation among the t positions read
    between = np.where(counts > 1, (mean * counts - 1) / np.maximum(counts - 1, 1), 0.0).clip(0, 1)
    # above 100 one position has all the weight
    spread = min(math.sqrt(score_variance * (1 - float(between.mean()))), 100.0)
    # rounded, so that many layers share cached results
    weight = _concentration(len(rho), round(spread, 2 if spread < 1 else 1))
    np.fill_diagonal(averaged, mean + (weight - 1 / counts) * (1 - between))
    return averaged


@cache
def _concentration(positions: int, score_std: float) -> Array:
    """Return E[Σ a²] of softmax weights over t independent scores, for t = 1 … positions.

    Scores are N(0, score_std²). With w = e^score: E[Σ w²/(Σ w)²] = t ∫ x E[w² e^{-xw}] E[e^{-xw}]^{t-1} dx, integrated
    over u = log x.
    """
    z, density = _normal_distribution()
    edge = 9 * score_std + 8
    start = -edge - math.log(positions) - 8
    u = np.linspace(start, edge, math.ceil((edge - start) / 0.15))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        xw = np.exp(np.minimum(u[:, None] + score_std * z, 300))
        decayed = np.exp(-xw)
        phi, psi = decayed @ density, (xw**2 * decayed) @ density
    t = np.arange(1, positions + 1)
    return np.asarray(t * (psi @ phi[:, None] ** (t - 1)) * (u[1] - u[0]))


def _normal_distribution() -> tuple[Array, Array]:
    """Return points and weights of the standard normal distribution."""
    z = np.linspace(-8, 8, 161)
    density = np.exp(-(z**2) / 2)
    return z, density / density.sum()


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    **dict.fromkeys(  # the erf form is within a thousandth of the tanh form
        ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    **dict.fromkeys(("silu", "swish"), lambda x: x * (1 + np.tanh(x / 2)) / 2),  # x / (1 + exp −x), which overflows
    "relu": lambda x: np.maximum(x, 0),
}
ORDER = 10  # Hermite terms; the remaining variance is added on the diagonal


def _covariance_map(activation: Callable[[Array], Array], variance: float) -> Callable[[Array], Array]:
    """Return the map from a correlation ρ to E[a(u) a(v)] for u, v ~ N(0, variance).

    The map is Σ c_n² ρⁿ with Hermite coefficients c_n.
    """
    z, weight = _normal_distribution()
    values = activation(math.sqrt(variance) * z)
    coefficients = (weight * values) @ np.polynomial.hermite_e.hermevander(z, ORDER - 1)
    squares = coefficients**2 / [math.factorial(n) for n in range(ORDER)]
    rest = max(0.0, float(weight @ values**2 - squares.sum()))
    return lambda rho: np.polynomial.polynomial.polyval(rho, squares) + rest * np.eye(len(rho))
