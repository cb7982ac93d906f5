"""Text encoders of models that compare texts with pictures: CLIP and SigLIP, without an output head."""

from __future__ import annotations

from dataclasses import replace

from tiewise.planning.architecture import (
    AppliedLayers,
    Architecture,
    Count,
    Heads,
    LayerCounts,
    feed_forward,
    linear,
    lookup,
    norm,
)
from tiewise.planning.config import Config
from tiewise.planning.model_families import register_reader


def pre_norm_layer(config: Config) -> LayerCounts:
    """Count a layer of a vision or text transformer.

    It has attention and an ffn with biases, and a LayerNorm before each.
    """
    d, ffn = config.size("hidden_size"), config.size("intermediate_size")
    heads = Heads.of(d, config.size("num_attention_heads"))
    norms = norm(d)
    attention = {"attention": heads.maps(d, True, True), "norms": norms}
    return LayerCounts(attention, {"ffn": feed_forward(d, ffn, gated=False, bias=True), "norms": norms})


@register_reader("clip_text")
def clip_text(config: Config) -> Architecture:
    """Read the text encoder of CLIP."""
    d, ffn, layers = config.size("hidden_size"), config.size("intermediate_size"), config.size("num_hidden_layers")
    around = {"positions": lookup(config.size("max_position_embeddings"), d), "norms": norm(d)}
    heads = Heads.of(d, config.size("num_attention_heads"))
    stack = AppliedLayers("encoder", (pre_norm_layer(config),) * layers, around, heads, 8 * d + 2 * ffn)
    return Architecture(config.family, d, config.token_tables(d, head=False), (stack,))


@register_reader("siglip_text")
def _siglip_text(config: Config) -> Architecture:
    """Read the text encoder of SigLIP: a CLIP whose last state is projected."""
    architecture = clip_text(config)
    d = architecture.width
    return replace(architecture, around={"pooler": linear(d, config.size("projection_size", d), True)})


def total_of_layers(config: Config) -> Count:
    """Return the sum over all pre-norm layers of a config."""
    layer, total = pre_norm_layer(config), Count()
    for counts in (layer.attention, layer.ffn):
        total = sum(counts.values(), total)
    return total.times(config.size("num_hidden_layers"))
