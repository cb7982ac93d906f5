"""GLM with experts: GLM-5 (sparse latent attention)."""

from __future__ import annotations

from tiewise.planning.architecture import Architecture
from tiewise.planning.config import Config
from tiewise.planning.model_families import register_reader
from tiewise.planning.readers.deepseek import dense_first, latent_decoder, rerouted_experts
from tiewise.planning.readers.parts import layer_kinds

INDEXER_KINDS = {"F": "full", "S": "shared"}


@register_reader("glm_moe_dsa")
def _glm_moe_dsa(config: Config) -> Architecture:
    """Read GLM-5: a DeepSeek V3.2 in which some layers use the indexer of an earlier one."""
    has_indexer = [kind != "shared" for kind in _indexer_kinds(config)]
    return latent_decoder(config, dense_first(config), has_indexer, rerouted_experts(config))


def _indexer_kinds(config: Config) -> list[str]:
    """Return which layers have an indexer ("full") and which use an earlier one ("shared")."""
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str):
        usual = [INDEXER_KINDS.get(letter, letter) for letter in pattern]
    elif isinstance(pattern, list):
        usual = pattern
    else:
        usual = _every_few(config)
    return layer_kinds(config, "indexer_types", usual)


def _every_few(config: Config) -> list[str]:
    """Return kinds with an indexer in every `index_topk_freq`-th layer, after the first ones."""
    every, offset = config.size("index_topk_freq", 1), config.size("index_skip_topk_offset", 2, least=0)
    kinds = []
    for index in range(config.size("num_hidden_layers")):
        position = max(index - offset + 1, 0)
        kinds.append("shared" if position % every else "full")
    return kinds
