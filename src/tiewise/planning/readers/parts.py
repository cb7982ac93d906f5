"""Parts of decoders whose layers differ, and the decoder that they form.

attention(d, heads)       queries, keys, values and output, with options
delta_net(config)         gated delta rule (Qwen3-Next, Qwen3.5)
mamba2(d, shape)          selective state space of Mamba 2
short_convolution(d, …)   gated convolution (LFM2)
ffn(d, width)             feed-forward part
layer_kinds(config, key)  names of the layers' kinds
ffn_kinds(config, dense)  the same of their feed-forward parts
mixed_decoder(config, …)  the decoder
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiewise.core.errors import PlanError
from tiewise.planning.architecture import (
    AppliedLayers,
    Architecture,
    Count,
    Counts,
    Heads,
    LayerCounts,
    elementwise,
    feed_forward,
    linear,
    norm,
)
from tiewise.planning.config import Config
from tiewise.planning.model_families import Experts

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
SPARSE, DENSE = "sparse", "dense"  # feed-forward parts: experts, or one for all tokens
# older names of kinds of layers, which transformers 5.23 still accepts
OLDER_KINDS = {"mamba": LINEAR, "attention": FULL, "deepseek_sparse_attention": "indexed_attention"}


@dataclass(frozen=True)
class Sublayer:
    """Counts of one sublayer, its heads or state, and values saved for the backward pass."""

    counts: Counts
    heads: Heads = field(default_factory=Heads)
    saved: int = 0  # by one token


@dataclass(frozen=True)
class Layer:
    """One layer: what mixes tokens, what follows it, and the number of norms of both."""

    mixer: Sublayer
    ffn: Sublayer = Sublayer({})
    norms: int = 2
    other: Count = field(default_factory=Count)  # parts of the layer besides the two sublayers

    def counts(self, d: int) -> LayerCounts:
        """Return the counts by sublayer in a model of width `d`, with RMS norms."""
        common = {"norms": norm(d, "rms", self.norms), "other": self.other}
        return LayerCounts(self.mixer.counts, self.ffn.counts, common)

    def saved(self, d: int) -> int:
        """Return the values that the backward pass needs of one token."""
        return self.norms * d + self.mixer.saved + self.ffn.saved


def attention(
    d: int,
    heads: Heads,
    *,
    bias: bool = False,
    out_bias: bool | None = None,  # None: as `bias`
    norms: int = 0,  # parameters of norms of queries and keys, or of sinks
    gated: bool = False,  # a gate as wide as the queries multiplies the output
) -> Sublayer:
    """Count attention with grouped heads."""
    maps = heads.maps(d, bias, bias if out_bias is None else out_bias, norms)
    queries = heads.count * heads.width
    if gated:
        maps += linear(d, queries, bias)
    return Sublayer({"attention": maps}, heads, 2 * (heads.count + heads.kv) * heads.width + queries * gated)


def depthwise(channels: int, kernel: int, bias: bool = False) -> Count:
    """Count a convolution over tokens in which each channel has its own kernel."""
    weights = channels * kernel
    return Count(weights, weights, weights) + elementwise(channels * bias)


def delta_net(config: Config) -> Sublayer:
    """Count the gated delta rule, whose state per head is keys × values."""
    d = config.size("hidden_size")
    key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    key, value = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    kernel = config.size("linear_conv_kernel_dim")
    values = value_heads * value
    convolved = 2 * key_heads * key + values
    maps = linear(d, convolved) + linear(d, values) + linear(d, value_heads).times(2) + linear(values, d)
    decays_and_norm = elementwise(2 * value_heads + value)
    state = Heads(state=value_heads * key * value + convolved * kernel)
    return Sublayer({"mixer": maps + depthwise(convolved, kernel) + decays_and_norm}, state, 2 * convolved + 2 * values)


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a Mamba 2 layer."""

    inner: int  # width of the state's inputs
    heads: int
    groups: int  # of heads that share their maps into and out of the state
    state: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True


def mamba2(d: int, shape: Mamba2Shape) -> Sublayer:
    """Count a gated convolution and a selective state space with one decay per head."""
    convolved = shape.inner + 2 * shape.groups * shape.state
    maps = linear(d, shape.inner + convolved + shape.heads, shape.bias) + linear(shape.inner, d, shape.bias)
    decays_and_norm = elementwise(3 * shape.heads + shape.inner)
    mixer = maps + depthwise(convolved, shape.kernel, shape.conv_bias) + decays_and_norm
    state = Heads(state=shape.inner * shape.state + convolved * shape.kernel)
    return Sublayer({"mixer": mixer}, state, 2 * convolved + 2 * shape.inner)


def short_convolution(d: int, kernel: int, bias: bool) -> Sublayer:
    """Count a convolution over tokens between two gates."""
    mixer = linear(d, 3 * d, bias) + depthwise(d, kernel, bias) + linear(d, d, bias)
    return Sublayer({"mixer": mixer}, Heads(state=d * kernel), 5 * d)


def ffn(d: int, width: int, gated: bool = True, bias: bool = False) -> Sublayer:
    """Count a feed-forward part."""
    between = 4 if gated else 2
    return Sublayer({"ffn": feed_forward(d, width, gated, bias)}, saved=between * width)


def experts_part(d: int, experts: Experts) -> Sublayer:
    """Count experts as a sublayer."""
    between = 4 if experts.gated else 2
    return Sublayer(experts.counts(d), saved=between * (experts.width * experts.chosen + experts.shared_width))


def layer_kinds(config: Config, key: str = "layer_types", otherwise: Sequence[str] | None = None) -> list[str]:
    """Return the kind of each layer under its current name.

    Args:
        config: the model's config.
        key: the key of the list.
        otherwise: kinds for a config without the list; None if it needs one.

    Raises:
        PlanError: there is no list, or it has another length than the model has layers.
    """
    listed = config.get(key)
    if listed is None and otherwise is not None:
        listed = list(otherwise)
    if not isinstance(listed, list):
        raise PlanError(f"the config of {config.family} has no {key}", f"add {key}, a list with the kind of each layer")
    kinds = [str(kind) for kind in listed]
    layers = config.get("num_hidden_layers")
    if layers is not None and len(kinds) != config.size("num_hidden_layers"):
        problem = f"{key} of {config.family} has {len(kinds)} kinds for {layers} layers"
        raise PlanError(problem, "give one kind for each layer")
    return [OLDER_KINDS.get(kind, kind) for kind in kinds]


def ffn_kinds(config: Config, dense: int) -> list[str]:
    """Return the kind of each layer's feed-forward part.

    By default the first `dense` layers are dense, the others sparse.
    """
    layers = config.size("num_hidden_layers")
    dense = min(layers, dense)
    return layer_kinds(config, "mlp_layer_types", [DENSE] * dense + [SPARSE] * (layers - dense))


def choose(parts: Mapping[str, Any], kind: str, config: Config) -> Any:
    """Return the entry of a kind of layer. Raises PlanError for a kind that the family lacks."""
    if kind not in parts:
        raise PlanError(f"{config.family} has no layers of kind {kind[:40]!r}", f"choose from {', '.join(parts)}")
    return parts[kind]


def mixed_decoder(
    config: Config, layers: Iterable[Layer], around: Counts | None = None, final_norms: int = 1
) -> Architecture:
    """Return a decoder of layers that differ, with RMS norms.

    Args:
        config: the model's config.
        layers: its layers in the order in which they are applied.
        around: counts of parts outside the layers.
        final_norms: norms after the last layer.
    """
    d, listed = config.size("hidden_size"), tuple(layers)
    stack = AppliedLayers(
        "decoder",
        tuple(layer.counts(d) for layer in listed),
        {"norms": norm(d, "rms", final_norms), **(around or {})},
        saved_per_token=sum(layer.saved(d) for layer in listed) // max(1, len(listed)),
        normed_per_token=sum(layer.norms * d for layer in listed) // max(1, len(listed)),
        layer_heads=tuple(layer.mixer.heads for layer in listed),
    )
    return Architecture(config.family, d, config.token_tables(d), (stack,))
