"""Models without attention: Mamba. A mixer takes the attention's place, also where sharing speaks of attention."""

from __future__ import annotations

from tiewise.planning.architecture import Architecture, Cache, Ends, Layer, Stack
from tiewise.planning.config import Config
from tiewise.planning.parts import Part, linear, norm, plain


def mamba(c: Config) -> Architecture:
    """Read Mamba: a gated convolution and a selective state space per layer, and no ffn."""
    d, state, kernel = c.size("hidden_size"), c.size("state_size"), c.size("conv_kernel")
    inner = int(c.number("expand") * d)
    rank = -(-d // 16) if c.get("time_step_rank") == "auto" else c.size("time_step_rank")
    bias = c.flag("use_bias")
    convolution = Part(inner * kernel, inner * kernel, inner * kernel)
    mixer = linear(d, 2 * inner, bias) + convolution + linear(inner, rank + 2 * state)
    mixer += linear(rank, inner, True) + linear(inner, d, bias)
    mixer += plain(inner * state + inner + (inner if c.flag("use_conv_bias") else 0))
    layer = Layer({"mixer": mixer, "norms": norm(d, "rms")}, {})
    stack = Stack(
        "decoder",
        (layer,) * c.size("num_hidden_layers"),
        {"norms": norm(d, "rms")},
        cache=Cache(state=inner * (state + kernel)),
        saved_per_token=2 * d + 6 * inner,
    )
    head = c.head != "none"
    tied = head and c.flag("tie_word_embeddings")
    return Architecture(c.family, d, Ends(c.size("vocab_size"), d, tied, head), (stack,))
