"""The loss of a freshly drawn model's first step, from its config, without building it.

A norm before the head makes the hidden state's norm √D, so the logits of other words are N(0, σ²E·scale²), and
`predicted_nll` integrates their expected log-sum-exp. A tied table meets itself besides: the residual stream still
carries the token's own row, and how much of it is left at the head decides. That share is followed through the layers
in mean-field theory: per element and position, the variance of the stream and the covariance K[s, t] of two positions
(weights are independent and Gaussian, widths large), from which attention takes its averages.

    branch    K'[s, t] = gain · f(K̂[s, t])        K̂ the normalised covariance, f the activation's or attention's map
    stream    K += K' per sublayer; the own row stays as it was: c = σ·input_scale / √K[t, t]

Mean-field theory of deep networks: arXiv:1611.01232 (Schoenholz et al.). Attention weights are taken from Gaussian
scores, whose second moment is integrated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.architecture import Architecture
from tiewise.analysis.signal import Signal
from tiewise.ops.random_logits import logit_std, predicted_nll
from tiewise.sharing_spec import SharingSpec
from tiewise.spec import BoundarySpec

POSITIONS = 64  # positions followed; longer texts average more, and differ little
Array = NDArray[np.float64]


@dataclass(frozen=True)
class FirstLoss:
    """`nll` in nats; `own` is the mean cosine between hidden state and the token's own row (tied tables; else None).

    `assumed` says what the prediction takes for granted; empty where the family has been measured.
    """

    nll: float
    own: float | None = None
    assumed: str = ""


def first_loss(
    architecture: Architecture,
    spec: BoundarySpec,
    sharing: SharingSpec | None = None,
    std: float | None = None,
    length: int = POSITIONS,
) -> FirstLoss | None:
    """Expected nll of a uniformly random target at step 0; None where the model has no head over words.

    Args:
        architecture: the model.
        spec: its boundary; `init` overrides the tables' std.
        sharing: of its layers; shared layers are followed as if they were independent, which `assumed` says.
        std: of tables and body; None takes the config's.
        length: T; early positions average fewer others.
    """
    ends, signal = architecture.ends, architecture.signal
    if not ends.head:
        return None
    body_std = std if std is not None else signal.std if signal else architecture.table_std
    table_std = spec.init if spec.init is not None else body_std
    tau = architecture.output_scale * logit_std(spec, ends.width, table_std)
    cap = spec.softcap or (signal.softcap if signal else None)
    if signal is None:
        assumed = "hidden states of norm √D that are independent of their tokens"
        return FirstLoss(predicted_nll(ends.vocab, tau, softcap=cap), assumed=assumed)
    if spec.kind not in ("tied", "residual", "spd"):  # behind random maps or in another table no row meets itself
        return FirstLoss(predicted_nll(ends.vocab, tau, softcap=cap))
    row_std = table_std * spec.scales(ends.width)[0] * signal.input_scale
    own = own_cosines(signal, architecture.width, body_std, row_std, min(length, POSITIONS))
    assumed = "shared layers followed as if they were independent" if sharing and sharing.kind != "none" else ""
    nll = _meeting_itself(ends.vocab, tau, own * tau * math.sqrt(ends.width), cap)
    return FirstLoss(nll, float(own.mean()), assumed)


def _meeting_itself(vocab: int, tau: float, own: Array, cap: float | None) -> float:
    """Mean nll over positions whose own logits are `own`; positions are averaged in a few groups of equal size."""
    if cap is not None:
        own = cap * np.tanh(own / cap)
    if own.max() < math.log(vocab) - 8:  # a thousandth of the sum
        return predicted_nll(vocab, tau, softcap=cap)
    groups = [float(group.mean()) for group in np.array_split(np.sort(own), min(4, len(own)))]
    nlls = [predicted_nll(vocab, tau, self_logit=logit, softcap=cap) - logit / vocab for logit in groups]
    return sum(nlls) / len(nlls)


@cache
def own_cosines(signal: Signal, width: int, std: float, row_std: float, positions: int) -> Array:
    """Cosine between the state before the head and the token's own row, by position [T]."""
    k = np.eye(positions) * (row_std**2 + signal.positions_std**2)
    gain = std**2 * width  # variance of a projected entry of a normalised state
    out = std**2 / (2 * signal.layers if signal.depth_scaled else 1)
    activation = _covariance_map(ACTIVATIONS[signal.activation], gain)

    def attention(rho: Array) -> Array:
        averaged = _averaged(rho, _score_variance(signal, gain))
        return gain * out * signal.heads * signal.head_dim * averaged

    def ffn(rho: Array) -> Array:
        inner = activation(rho) * (gain * rho if signal.gated else 1.0)
        return out * signal.ffn * inner

    def added(branch: Array) -> Array:
        return signal.residual_scale**2 * (_normalised(branch) if signal.arrangement == "sandwich" else branch)

    for _ in range(signal.layers):
        if signal.arrangement == "parallel":
            rho = _normalised(k)
            k = k + added(attention(rho)) + added(ffn(rho))
        else:
            k = k + added(attention(_normalised(k)))
            k = k + added(ffn(_normalised(k)))
    return row_std / np.sqrt(np.diagonal(k))


def _score_variance(signal: Signal, gain: float) -> float:
    """Variance of an attention score between independent states; normalised queries and keys have unit entries."""
    scale = signal.attention_scale if signal.attention_scale is not None else signal.head_dim**-0.5
    return signal.head_dim * scale**2 * (1.0 if signal.normed_queries else gain**2)


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


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,  # its tanh form is within a thousandth
    "gelu_new": _gelu,
    "gelu_fast": _gelu,
    "gelu_pytorch_tanh": _gelu,
    "silu": _silu,
    "swish": _silu,
    "relu": _relu,
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
