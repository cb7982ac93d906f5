"""The loss of random logits, without torch: what a table's scale says of the first step.

Logits of independent rows N(0, σ²) against a hidden state of norm √D are N(0, τ²) with τ = σ√D. The expected nll of
a random target is then E[log Σ_j exp(τ g_j)] (the target's own logit has mean zero): ln V + τ²/2 for small τ, about
τ √(2 ln V) for large. Both are asymptotes; `predicted_nll` integrates the expectation itself,

    E[log S] = ∫ (exp(-e^u) - E[exp(-e^u S)]) du,      E[exp(-x S)] = φ(x)^V,   φ(x) = E[exp(-x e^{τ g})].

A tied table meets itself: the hidden state still points along its own input row (cosine c), whose logit is c σ D, far
above the others where σ is of order one. That is how a tied table drawn N(0, 1) starts near 40 instead of ln V.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

from tiewise.late import Late
from tiewise.spec import BoundarySpec

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")

# Steps of the two integrals. Their integrands are smooth and vanish at both ends, so equal steps converge faster than
# any power. In g the integrand changes over a width of 1/τ, in u of one at least.
STEP_U = 0.12
COARSEST_G, FINEST_G = 0.08, 0.015


@cache
def predicted_nll(vocab: int, logit_std: float, self_logit: float | None = None, softcap: float | None = None) -> float:
    """Expected step-0 nll (nats) of a uniformly random target over `vocab` logits N(0, logit_std²).

    Args:
        vocab: V.
        logit_std: τ = σ √E for rows N(0, σ²) of width E and hidden states of norm √E.
        self_logit: logit of the token's own input row where a tied table meets it (c σ D), or None.
        softcap: each of the normal logits z becomes softcap · tanh(z / softcap).
    """
    others = vocab if self_logit is None else vocab - 1
    step_g = max(FINEST_G, min(COARSEST_G, 0.25 / max(logit_std, 1e-9)))
    g = np.linspace(-9, 9, 2 * math.ceil(9 / step_g) + 1)
    density = np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi) * (g[1] - g[0])
    z = logit_std * g if softcap is None else softcap * np.tanh(logit_std * g / softcap)
    span = max(math.log(vocab) + float(z[-1]), self_logit or 0.0) + 25
    u = np.linspace(-span, float(z[-1]) + 25, min(4_001, math.ceil((span + float(z[-1]) + 25) / STEP_U)))
    # 1 - φ, not φ: the few in V that matter sit where φ is within 1/V of one
    with np.errstate(over="ignore"):
        lacking = -(np.expm1(-np.exp(u[:, None] + z)) @ density)
        log_survival = others * np.log1p(-lacking.clip(0, 1 - 1e-15))
        if self_logit is not None:
            log_survival = log_survival - np.exp(u + self_logit)
        return float(np.sum(np.exp(-np.exp(u)) - np.exp(log_survival)) * (u[1] - u[0]))


def logit_std(spec: BoundarySpec, d: int, std: float) -> float:
    """τ of `spec` in a model of width `d` whose output table is drawn N(0, std²) and hidden states have norm √d."""
    _, out_width = spec.table_widths(d)
    _, output_scale = spec.scales(d)
    return std * math.sqrt(out_width) * output_scale
