"""How a freshly drawn model carries its input to its head: what the step-0 loss depends on.

Only families whose measured losses it predicts within 2 % have one (`tests/analysis/test_first_loss.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish", "relu")


@dataclass(frozen=True)
class Signal:
    """Scales of a pre-norm residual stream at initialisation; weights are N(0, std²) and biases zero.

    `arrangement`: sequential (x + f(norm x), one sublayer after the other), parallel (both read the same x), sandwich
    (each sublayer's output is normalised again before it is added).
    """

    std: float
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    activation: str
    gated: bool
    arrangement: str = "sequential"
    input_scale: float = 1.0
    output_scale: float = 1.0
    residual_scale: float = 1.0
    softcap: float | None = None
    attention_scale: float | None = None  # None: head_dim^-½
    positions_std: float = 0.0
    normed_queries: bool = False  # queries and keys are normalised before their product
    depth_scaled: bool = False  # output projections drawn with std / √(2L), as GPT-2 does
