"""Parts of a model that no formula counts, found by model type or config keys.

uncounted_parts(config, record)  experts, state-space layers, low-rank attention, layers of several kinds, …
towers(config)                   models for images or sound, next to the language model
has_token_head(config)           the config's class computes logits over tokens

A total without such a part can be wrong by a factor of ten. A plan then counts only the token tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import Family
from tiewise.core.errors import to_printable
from tiewise.planning.config import LANGUAGE_HEADS, saved_class

# Name of a part → how configs name its sizes.
PARTS = {
    "experts": r"expert|moe",
    "state-space or recurrent layers": r"mamba|ssm|rwkv|lru_|retention|time_step|^state_size$|conv_kernel|^d_conv$"
    r"|conv_L_cache|^linear_(num|key|value|conv)|linear_attn",
    "low-rank attention": r"lora_rank|latent|^index_(n_heads|head_dim|topk)$|^(q|kv)_rank$",
    "low-rank maps": r"^laurel_rank$|^altup_",
    "several shapes of attention": r"^(swa|global)_.*head|^num_(swa|global)_.*heads$|^v_head_dim$|^attention_k_eq_v$",
    "layers of several shapes": r"^per_layer_config$|^block_configs$|hybrid|layer_pattern",
    "layers that share keys and values": r"kv_shared|cross_layer",
    "cross-attention": r"cross_attention",
    "an encoder and a decoder": r"^is_encoder_decoder$|^(encoder|decoder)_layers$|^num_(encoder|decoder)_layers$",
}
WITHOUT_HEAD = ("Model", "Classification", "Answering")  # endings of class names without a token head
KINDS_OF_LAYERS = re.compile(r"layer_types$|layers_block_type$|block_types?$|attn_type")
ONE_SHAPE = {"full_attention", "sliding_attention", "chunked_attention", "attention", "full", "sliding", "dense"}
TOWER = re.compile(r"vision|visual|image|img|video|audio|speech|vit_|qformer|perceiver|vq_|tower|backbone|codec|talker")


def uncounted_parts(config: Mapping[str, Any], record: Family) -> tuple[str, ...]:
    """Return each part that the generic formula leaves out, with the config key that shows it."""
    present = [key for key, value in config.items() if _is_size_or_switch(value)]
    parts = []
    for part, names in PARTS.items():
        keys = _matching_keys(re.compile(names), present)
        if keys:
            parts.append(f"{part} ({keys[0]})")
    kinds = [key for key in _matching_keys(KINDS_OF_LAYERS, config) if _names_other_layers(config[key])]
    if kinds:
        parts.append(f"layers of several kinds ({kinds[0]})")
    if not parts and record.has_uncounted_parts:
        parts.append(f"parts of a layer of {record.model_type} other than attention and ffn matrices")
    return tuple(map(to_printable, parts))


def towers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts next to the text model of a config that nests it."""
    keys = [key for key in _matching_keys(TOWER, config) if _describes_part(config[key])]
    if not keys:
        return (to_printable(f"parts of {config.get('model_type', 'the model')} outside text_config"),)
    return tuple(to_printable(f"{key.removesuffix('_config')} tower ({key})") for key in keys)


def _matching_keys(names: re.Pattern[str], keys: Iterable[str]) -> list[str]:
    """Return the keys that match a pattern, in their order."""
    return [key for key in keys if names.search(key)]


def _describes_part(value: Any) -> bool:
    """Return whether a value is a config or a name, and not empty."""
    return isinstance(value, Mapping | str) and bool(value)


def has_token_head(config: Mapping[str, Any]) -> bool:
    """Return whether the class has a token head.

    A config without `architectures` has the usual class of its model type.
    """
    name = saved_class(config)
    if name.endswith(LANGUAGE_HEADS):
        return True
    return not name.endswith(WITHOUT_HEAD) and not family(config.get("model_type")).is_headless


def _is_size_or_switch(value: Any) -> bool:
    """Return whether a value is a size, an enabled switch, or a container with entries."""
    if isinstance(value, str):
        return False  # an implementation's name or a dtype, not a size
    return value not in (None, False, 0, [], {})


def _names_other_layers(value: Any) -> bool:
    """Return whether a list of layer types names one without plain attention and ffn matrices."""
    return isinstance(value, list | str) and not ONE_SHAPE.issuperset(map(str, value))
