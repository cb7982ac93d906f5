"""Tensors beside the two ends that token ids index: which a checkpoint stores, and what each of them is.

per-layer table   a row for each token, the widths of all layers side by side (Gemma 3n, Gemma 4)
n-gram table      a row for each value of a hash of several ids (LongCat-Flash-Lite, Qwen 4, BLT)
modality table    rows for the ids from an offset on, which stand for pictures or sounds (Gemma 3n)
MTP input         the tables of the layers that predict further tokens, mostly copies of the two ends
MTP output        (DeepSeek-V3, README_WEIGHTS.md)
draft head        a head over a target's hidden states, one for each further token (Medusa)
draft map         a draft's own ids as the target's, and back (EAGLE-3: d2t, t2d; vLLM's Medusa: token_map)

Names find them, then shapes: what is called so and has the shape of something else is none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tiewise.checkpoint.claims import PACKED, architecture, count, model_levels, module_of, number
from tiewise.checkpoint.stored import Stored

PER_LAYER, NGRAM, MODALITY = "per-layer table", "n-gram table", "modality table"
MTP_INPUT, MTP_OUTPUT, DRAFT_HEAD, DRAFT_MAP = "MTP input", "MTP output", "draft head", "draft map"
PLAIN_TABLE = re.compile(  # ProphetNet's `ngram_embeddings` is of its streams
    r"(^|\.)(embed_tokens_per_layer|ngram_embeddings\.embedders\.\d+|ngram_embedding(\.shard_\d+)?|encoder_hash_tok_embedding)$"
)
_MODALITY = re.compile(r"(^|\.)embed_(vision|audio)\.embedding$")
_FURTHER = re.compile(r"(^|\.)(mtp|nextn)\w*\.")  # what stands before the layers that predict further tokens
_FURTHER_CLASS = re.compile(r"nextn|mtp", re.IGNORECASE)  # a class of such layers alone
# Medusa's heads within a model and alone; the same as vLLM has them
_DRAFT_HEAD = re.compile(r"((.+\.)?medusa_heads?\.)?(\d{1,3}\.\d{1,3}|lm_heads\.\d{1,3})")
_LAYER = re.compile(r"(^|\.)layers\.(\d{1,9})\.(embed_tokens|shared_head\.head)$")
_INPUTS = ("embed_tokens", "word_embeddings", "tok_embeddings", "tok_emb", "embed", "embedding", "embeddings", "emb")
_OUTPUTS = ("lm_head", "head", "shared_head", "output", "output_head", "output_layer", "unembed")


@dataclass(frozen=True)
class IndexedTensor:
    """A stored tensor beside the two ends that token ids index."""

    role: str  # one of the words above
    tensor: Stored  # [rows, width]; of a draft map [rows]
    module: str  # its module's name without wrappers; of a draft map, what stands before `d2t`

    @property
    def by_id(self) -> bool:
        """Whether it has a row for each token, so that a token more or less is a row more or less here too."""
        return self.role in (PER_LAYER, MTP_INPUT, MTP_OUTPUT, DRAFT_HEAD)


def token_tables(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], ends: Collection[Stored]
) -> Iterator[IndexedTensor]:
    """Yield those among `tensors`, which stand under names without wrappers, that are none of the `ends`."""
    keys = ("num_hidden_layers", "num_layers", "n_layer")
    layers = [number for _, level in model_levels(config) for key in keys if (number := count(level.get(key)))]
    layers = [0] if _FURTHER_CLASS.search(architecture(config) or "") else layers
    taken = {table.name for table in ends}
    for name, tensor in tensors.items():
        module, parameter = module_of(name)
        role = role_of(module, parameter, min(layers, default=0))
        flat = role == DRAFT_MAP
        if role is None or tensor.name in taken or (len(tensor.shape) != (1 if flat else 2) and parameter == "weight"):
            continue
        # a projection may be called `mtp.head`: a table is as wide or as long as an end
        if role in (MTP_INPUT, MTP_OUTPUT) and parameter == "weight":
            like = {axis for end in ends if len(end.shape) == 2 for axis in enumerate(end.shape)}
            if like and like.isdisjoint(enumerate(tensor.shape)):
                continue
        yield IndexedTensor(role, tensor, module)


def role_of(module: str, parameter: str, layers: int) -> str | None:
    """The role that a name sounds like; layers from number `layers` on predict further tokens."""
    if parameter in ("d2t", "t2d", "token_map"):
        return DRAFT_MAP
    if parameter not in ("weight", *PACKED):
        return None
    if _DRAFT_HEAD.fullmatch(module):
        return DRAFT_HEAD
    last = module.rpartition(".")[2]
    if PLAIN_TABLE.search(module):
        return PER_LAYER if last == "embed_tokens_per_layer" else NGRAM
    if _MODALITY.search(module):
        return MODALITY
    inside = _LAYER.search(module)
    if (inside is not None and int(inside[2]) >= layers) or _FURTHER.search(module):
        return MTP_INPUT if last in _INPUTS else MTP_OUTPUT if last in _OUTPUTS else None
    return PER_LAYER if inside is not None and last == "embed_tokens" else None


def rows_said(other: IndexedTensor, config: Mapping[str, Any]) -> int | None:
    """Rows that a config gives a table: its own size, or that of the hash of its class; None where it says none."""
    if other.role == MODALITY:  # embed_vision.embedding, by vision_config
        level = config.get(f"{other.module.rpartition('.')[0].rpartition('embed_')[2]}_config")
        return count(level.get("vocab_size")) if isinstance(level, Mapping) else None
    for _, level in model_levels(config):
        said = None
        if other.role == PER_LAYER and other.module.endswith("embed_tokens_per_layer"):
            said = count(level.get("vocab_size_per_layer_input"))
        elif other.role == NGRAM and (index := re.search(r"\.embedders\.(\d{1,9})$", other.module)):
            # longcat_flash_ngram: each has another odd size, so that the hashes differ
            base = (number(level.get("ngram_vocab_size_ratio")) or 0.0) * (count(level.get("vocab_size")) or 0)
            said = int(base + 2 * int(index[1]) + 1) if 0 < base < 2**63 else None
        elif other.role == NGRAM and other.module.endswith("encoder_hash_tok_embedding"):
            sizes = level.get("encoder_hash_byte_group_size")
            parts = [count(level.get(f"encoder_hash_byte_group_{key}")) for key in ("vocab", "nb_functions")]
            parts.append(len(sizes) if isinstance(sizes, list) else None)
            said = None if None in parts else prod(part for part in parts if part is not None)
        if said is not None:
            return said
    return None
