"""Parts of a model that no formula counts: by its model type, or by the keys of its config.

parts_of_body(config, known)     experts, state-space layers, low-rank attention, layers of several kinds, …
towers(config)                   models for images or sound that stand beside the language model
has_token_head(config)           whether the config's class computes logits over tokens

A total without such a part can be wrong by a factor of ten, so a plan then counts the token tables alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import Family
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
WITHOUT_HEAD = ("Model", "Classification", "Answering")  # how names of classes without a token head end
KINDS_OF_LAYERS = re.compile(r"layer_types$|layers_block_type$|block_types?$|attn_type")
ONE_SHAPE = {"full_attention", "sliding_attention", "chunked_attention", "attention", "full", "sliding", "dense"}
TOWER = re.compile(r"vision|visual|image|img|video|audio|speech|vit_|qformer|perceiver|vq_|tower|backbone|codec|talker")


def parts_of_body(config: Mapping[str, Any], known: Family) -> tuple[str, ...]:
    """Name each part that the generic formula leaves out, with the key that shows it. Empty if there is none."""
    present = [key for key, value in config.items() if _says_so(value)]
    parts = []
    for part, names in PARTS.items():
        keys = _named(re.compile(names), present)
        if keys:
            parts.append(f"{part} ({keys[0]})")
    kinds = [key for key in _named(KINDS_OF_LAYERS, config) if _differ(config[key])]
    if kinds:
        parts.append(f"layers of several kinds ({kinds[0]})")
    if not parts and known.has_uncounted_parts:
        parts.append(f"what a layer of {known.model_type} has besides plain attention and ffn matrices")
    return tuple(parts)


def towers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the parts next to the text model of a config that nests it."""
    keys = [key for key in _named(TOWER, config) if _describes_part(config[key])]
    if not keys:
        return (f"what {config.get('model_type', 'the model')} has besides text_config",)
    return tuple(f"{key.removesuffix('_config')} tower ({key})" for key in keys)


def _named(names: re.Pattern[str], keys: Iterable[str]) -> list[str]:
    """Return the keys in which a pattern is found, in their order."""
    return [key for key in keys if names.search(key)]


def _describes_part(value: Any) -> bool:
    """Return whether a value is a config or a name, and not empty."""
    return isinstance(value, Mapping | str) and bool(value)


def has_token_head(config: Mapping[str, Any]) -> bool:
    """Return whether the class has a token head. A class that nobody named is the one of its type."""
    name = saved_class(config)
    if not name:
        return not family(config.get("model_type")).is_headless
    return name.endswith(LANGUAGE_HEADS) or not name.endswith(WITHOUT_HEAD)


def _says_so(value: Any) -> bool:
    """Return whether a value is a size, a switch that is on, or something that holds one."""
    if isinstance(value, str):
        return False  # the name of an implementation, a dtype
    return value not in (None, False, 0, [], {})


def _differ(value: Any) -> bool:
    """Return whether a list of layers names one that has other matrices than attention and ffn."""
    return isinstance(value, list | str) and not ONE_SHAPE.issuperset(map(str, value))
