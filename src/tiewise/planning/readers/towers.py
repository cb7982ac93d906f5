"""Vision and audio towers next to a language model, with the maps between them.

A tower counts as one component. No token of a text uses it, so its `multiplied` and `read` are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiewise.planning.architecture import Count, elementwise, feed_forward, linear, norm
from tiewise.planning.config import Config
from tiewise.planning.readers.encoders import total_of_layers
from tiewise.planning.readers.parts import depthwise

# names of the parts of a composite config
VISION, AUDIO, TEXT = "vision_config", "audio_config", "text_config"


class Composite:
    """A config that nests several models."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.outer = Config(values, str(values.get("model_type")))

    def part(self, name: str, family: str) -> Config:
        """Return a nested config, completed with the defaults of a family; all defaults for null."""
        values = self.outer.values.get(name)
        return Config(values if isinstance(values, Mapping) else {}, family)

    def has(self, name: str) -> bool:
        """Return whether the config nests a part that is not null."""
        return self.outer.values.get(name) is not None

    @property
    def text_width(self) -> int:
        """Width D of the language model."""
        values = self.outer.values[TEXT]
        return Config(values, str(values.get("model_type") or "")).width


TowerReader = Callable[..., Count]
TOWER_READERS: dict[str, TowerReader] = {}


def register_tower(name: str) -> Callable[[TowerReader], TowerReader]:
    """Register a function under the name that records of families use."""

    def register(reader: TowerReader) -> TowerReader:
        """Add `reader` to `TOWER_READERS` and return it."""
        TOWER_READERS[name] = reader
        return reader

    return register


def pair(config: Config, key: str) -> tuple[int, int]:
    """Return two sizes from a number or a list of two.

    Raises:
        PlanError: a size is no whole number above zero.
    """
    value = config.get(key)
    if isinstance(value, list | tuple) and len(value) == 2:
        return config.require_size(key, value[0]), config.require_size(key, value[1])
    return config.size(key), config.size(key)


def patches(config: Config) -> int:
    """Return the number of patches of a picture of the config's size."""
    height, width = pair(config, "image_size")
    rows, columns = pair(config, "patch_size")
    return (height // rows) * (width // columns)


def patch_map(config: Config, bias: bool, channels: str = "num_channels") -> Count:
    """Count the map of a patch's pixels to the tower's width."""
    rows, columns = pair(config, "patch_size")
    return linear(config.size(channels) * rows * columns, config.size("hidden_size"), bias)


@register_tower("clip")
def _clip(model: Composite) -> Count:
    """Count CLIP's vision tower, both projections and the temperature."""
    vision, text = model.part(VISION, "clip_vision_model"), model.part(TEXT, "clip_text_model")
    projected = model.outer.size("projection_dim", 512)
    maps = linear(vision.size("hidden_size"), projected) + linear(text.size("hidden_size"), projected)
    return clip_vision(vision) + maps + elementwise(1)


def clip_vision(config: Config) -> Count:
    """Count a vision transformer with a class token and learned positions.

    A norm is before its layers, and one after them.
    """
    d = config.size("hidden_size")
    positions = elementwise((patches(config) + 2) * d)  # and the class token itself
    return patch_map(config, False) + positions + total_of_layers(config) + norm(d, count=2)


@register_tower("siglip")
def _siglip(model: Composite) -> Count:
    """Count SigLIP's vision tower, the temperature and the bias."""
    vision = model.part(VISION, "siglip_vision_model")
    return siglip_vision(vision) + elementwise(2)


def siglip_vision(config: Config, positions: int | None = None) -> Count:
    """Count a vision transformer with learned positions.

    If the config says so, a head pools by attention.


    Args:
        config: the tower's config.
        positions: number of learned positions; None: one for each patch.
    """
    d = config.size("hidden_size")
    rows = patches(config) if positions is None else positions
    tower = patch_map(config, True) + elementwise(rows * d) + total_of_layers(config) + norm(d)
    if not config.flag("vision_use_head"):
        return tower
    pooling = elementwise(d) + linear(d, 3 * d, True) + linear(d, d, True) + norm(d)
    return tower + pooling + feed_forward(d, config.size("intermediate_size"), gated=False, bias=True)


@register_tower("gemma3")
def _gemma3(model: Composite) -> Count:
    """Count SigLIP's tower, a norm and a map to the language model."""
    vision = model.part(VISION, "siglip_vision_model")
    d = vision.size("hidden_size")
    return siglip_vision(vision) + norm(d, "rms") + linear(d, model.text_width)


@register_tower("lfm2_vl")
def _lfm2_vl(model: Composite) -> Count:
    """Count SigLIP 2's tower and a projector of two maps."""
    vision, outer = model.part(VISION, "siglip2_vision_model"), model.outer
    merged, width = (
        vision.size("hidden_size") * outer.size("downsample_factor") ** 2,
        outer.size("projector_hidden_size"),
    )
    bias = outer.flag("projector_bias")
    projector = norm(merged).times(outer.flag("projector_use_layernorm")) + linear(merged, width, bias)
    return siglip_vision(vision, vision.size("num_patches")) + projector + linear(width, model.text_width, bias)


@register_tower("qwen3_vl")
def _qwen3_vl(model: Composite, family: str, deep: bool = True) -> Count:
    """Count the tower of Qwen3-VL or Qwen3.5: patches over time, learned positions, and mergers of patches.

    Args:
        model: the composite config.
        family: model type of the tower.
        deep: states of several layers are merged (DeepStack).
    """
    vision = model.part(VISION, family)
    d, out = vision.size("hidden_size"), vision.size("out_hidden_size")
    rows, columns = pair(vision, "patch_size")
    frames, _ = pair(vision, "temporal_patch_size")
    patch = linear(vision.size("in_channels") * frames * rows * columns, d, True)
    merged = d * vision.size("spatial_merge_size") ** 2
    merger = linear(merged, merged, True) + linear(merged, out, True)
    tower = patch + elementwise(vision.size("num_position_embeddings") * d) + total_of_layers(vision)
    tower += merger + norm(d)
    if not deep:
        return tower
    count = 3
    if vision.get("deepstack_visual_indexes") is not None:
        count = len(vision.indices("deepstack_visual_indexes"))
    return tower + (merger + norm(merged)).times(count)


@register_tower("llama4")
def _llama4(model: Composite) -> Count:
    """Count the tower of Llama 4: a transformer, an adapter of shuffled patches, and a map."""
    vision = model.part(VISION, "llama4_vision_model")
    out = vision.size("projector_output_dim")
    adapter = linear(vision.size("intermediate_size"), vision.size("projector_input_dim")) + linear(out, out)
    projector = linear(vision.size("vision_output_dim"), model.text_width)
    return clip_vision(vision) + adapter + projector


@register_tower("kimi_k25")
def _kimi_k25(model: Composite) -> Count:
    """Count the tower of Kimi K2.5: positions in two dimensions, and a projector."""
    vision = model.part(VISION, "kimi_k25_vision")
    d = vision.size("hidden_size")
    rows, columns = pair(vision, "merge_kernel_size")
    merged, patch_rows, patch_columns = d * rows * columns, *pair(vision, "patch_size")
    positions = elementwise(vision.size("pos_emb_height") * vision.size("pos_emb_width") * d)
    tower = linear(3 * patch_rows * patch_columns, d, True) + positions + total_of_layers(vision) + norm(d)
    projector = norm(model.outer.size("projection_hidden_size", d)) + linear(merged, merged, True)
    return tower + projector + linear(merged, model.text_width, True)


@register_tower("gemma4")
def _gemma4(model: Composite) -> Count:
    """Count the towers of Gemma 4, each with a map to the language model."""
    towers = Count()
    if model.has(VISION):
        vision = model.part(VISION, "gemma4_vision")
        towers += _gemma4_vision(vision) + linear(vision.size("hidden_size"), model.text_width)
    if model.has(AUDIO):
        audio = model.part(AUDIO, "gemma4_audio")
        towers += _gemma4_audio(audio) + linear(audio.size("output_proj_dims"), model.text_width)
    return towers


def _gemma4_vision(config: Config) -> Count:
    """Count a vision transformer with gates, four RMS norms per layer, and positions in two dimensions."""
    d, width, heads = config.size("hidden_size"), config.size("head_dim"), config.size("num_attention_heads")
    kv = config.size("num_key_value_heads", heads)
    maps = linear(d, heads * width).times(2) + linear(d, kv * width).times(2) + elementwise(2 * width)
    layer = maps + feed_forward(d, config.size("intermediate_size")) + norm(d, "rms", 4)
    positions = elementwise(2 * config.size("position_embedding_size") * d)
    return linear(3 * config.size("patch_size") ** 2, d) + positions + layer.times(config.size("num_hidden_layers"))


def _gemma4_audio(config: Config) -> Count:
    """Count a Conformer: two convolutions over the spectrogram, then layers of ffn, attention, convolution and ffn."""
    d, out = config.size("hidden_size"), config.size("output_proj_dims")
    first, second = pair(config, "subsampling_conv_channels")
    sampling = linear(9, first) + elementwise(first) + linear(9 * first, second) + elementwise(second)
    sampling += linear(first // 4 * second, d)
    head = d // config.size("num_attention_heads")
    attention = linear(d, d).times(5) + elementwise(head) + norm(d, "rms", 2)
    convolution = linear(d, 2 * d) + linear(d, d) + depthwise(d, config.size("conv_kernel_size")) + norm(d, "rms", 2)
    halves = (feed_forward(d, 4 * d, gated=False) + norm(d, "rms", 2)).times(2)
    layer = attention + convolution + halves + norm(d, "rms")
    return sampling + layer.times(config.size("num_hidden_layers")) + linear(d, out, True)
