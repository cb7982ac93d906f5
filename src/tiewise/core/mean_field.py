"""How much of a token's own row is left at the head of a freshly drawn model, by mean-field theory.

The share is followed through the layers: per element and position, the variance of the stream and the covariance
K[s, t] of two positions (weights are independent and Gaussian, widths large), from which attention takes its averages.

    branch    K'[s, t] = gain · f(K̂[s, t])        K̂ the normalised covariance, f the activation's or attention's map
    stream    K += K' per sublayer; the own row stays as it was: c = σ·input_scale / √K[t, t]

Mean-field theory of deep networks: arXiv:1611.01232 (Schoenholz et al.). Attention weights are taken from Gaussian
scores, whose second moment is integrated.

Only families whose measured losses it predicts within 2 % have a `FreshBody` (`tests/planning/test_first_loss.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tiewise.core.late import Late

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
else:
    np = Late("numpy")


@dataclass(frozen=True)
class FreshBody:
    """Scales of a pre-norm residual stream at initialisation; weights are N(0, std²) and biases zero."""

    std: float
    heads: int
    kv_heads: int
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
    normed_queries: bool = False  # queries and keys are normalised before their product
    depth_scaled: bool = False  # output projections drawn with std / √(2L), as GPT-2 does


@cache
def own_cosines(body: FreshBody, width: int, std: float, row_std: float, positions: int) -> Array:
    """Cosine between the state before the head and the token's own row, by position [T]."""
    k = np.eye(positions) * (row_std**2 + body.positions_std**2)
    gain = std**2 * width  # variance of a projected entry of a normalised state
    out = std**2 / (2 * body.layers if body.depth_scaled else 1)
    activation = _covariance_map(ACTIVATIONS[body.activation], gain)
    scale = body.attention_scale if body.attention_scale is not None else body.head_dim**-0.5
    # of a score between independent states; normalised queries and keys have unit entries
    score_variance = body.head_dim * scale**2 * (1.0 if body.normed_queries else gain**2)

    def attention(rho: Array) -> Array:
        return gain * out * body.heads * body.head_dim * _averaged(rho, score_variance)

    def ffn(rho: Array) -> Array:
        inner = activation(rho) * (gain * rho if body.gated else 1.0)
        return out * body.ffn * inner

    def added(branch: Array) -> Array:
        return body.residual_scale**2 * (_normalised(branch) if body.arrangement == "sandwich" else branch)

    for _ in range(body.layers):
        if body.arrangement == "parallel":
            rho = _normalised(k)
            k = k + added(attention(rho)) + added(ffn(rho))
        else:
            k = k + added(attention(_normalised(k)))
            k = k + added(ffn(_normalised(k)))
    return row_std / np.sqrt(np.diagonal(k))


def _normalised(k: Array) -> Array:
    root = np.sqrt(np.diagonal(k))
    return k / np.outer(root, root)


def _averaged(rho: Array, score_variance: float) -> Array:
    """Covariance of causal attention's averages of values with covariance `rho`."""
    t = len(rho)
    uniform = np.tril(np.ones((t, t))) / np.arange(1, t + 1)[:, None]
    found = uniform @ rho @ uniform.T
    mean = np.diagonal(found)  # (1 + (t−1)·ρ̄) / t with ρ̄ the mean correlation among the t positions seen
    seen = np.arange(1, t + 1)
    between = np.where(seen > 1, (mean * seen - 1) / np.maximum(seen - 1, 1), 0.0).clip(0, 1)
    spread = min(math.sqrt(score_variance * (1 - float(between.mean()))), 100.0)  # beyond it one position takes all
    weight = _concentration(t, round(spread, 2 if spread < 1 else 1))  # few distinct ones over many layers
    np.fill_diagonal(found, mean + (weight - 1 / seen) * (1 - between))
    return found


@cache
def _concentration(positions: int, score_std: float) -> Array:
    """E[Σ a²] of softmax weights over the first t of independent scores N(0, score_std²), t = 1 … positions.

    With w = e^score: E[Σ w²/(Σ w)²] = t ∫ x E[w² e^{-xw}] E[e^{-xw}]^{t-1} dx, taken over u = log x.
    """
    z, density = _normal()
    edge = 9 * score_std + 8
    start = -edge - math.log(positions) - 8
    u = np.linspace(start, edge, math.ceil((edge - start) / 0.15))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        xw = np.exp(np.minimum(u[:, None] + score_std * z, 300))
        decayed = np.exp(-xw)
        phi, psi = decayed @ density, (xw**2 * decayed) @ density
    t = np.arange(1, positions + 1)
    return np.asarray(t * (psi @ phi[:, None] ** (t - 1)) * (u[1] - u[0]))


def _normal() -> tuple[Array, Array]:
    """Points and weights of the standard normal distribution."""
    z = np.linspace(-8, 8, 161)
    density = np.exp(-(z**2) / 2)
    return z, density / density.sum()


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,  # its tanh form is within a thousandth
    "gelu_new": _gelu,
    "gelu_fast": _gelu,
    "gelu_pytorch_tanh": _gelu,
    "silu": _silu,
    "swish": _silu,
    "relu": lambda x: np.maximum(x, 0),
}
ORDER = 10  # Hermite terms; what is beyond them is left on the diagonal


def _covariance_map(activation: Callable[[Array], Array], variance: float) -> Callable[[Array], Array]:
    """Return ρ -> E[a(u) a(v)] for u, v ~ N(0, variance) of correlation ρ: Σ c_n² ρⁿ with Hermite coefficients c_n."""
    z, weight = _normal()
    values = activation(math.sqrt(variance) * z)
    squares = []
    before, basis = np.zeros_like(z), np.ones_like(z)  # of He(n-1) and He(n)
    for n in range(ORDER):
        squares.append(float(weight @ (values * basis)) ** 2 / math.factorial(n))
        before, basis = basis, z * basis - n * before
    rest = max(0.0, float(weight @ values**2) - sum(squares))

    def mapped(rho: Array) -> Array:
        found = np.zeros_like(rho)
        for square in reversed(squares):  # Horner
            found = found * rho + square
        return found + rest * np.eye(len(rho))

    return mapped
