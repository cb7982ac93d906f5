"""Stored tensors, other than the two ends, that token ids index.

A tensor counts if it has one of these names and a fitting shape.

    per-layer table   a row for each token, the widths of all layers side by side (Gemma 3n, Gemma 4)
    n-gram table      a row for each value of a hash of several ids (LongCat-Flash-Lite, Qwen 4, BLT)
    modality table    rows for the ids from an offset on, which represent pictures or sounds (Gemma 3n)
    MTP input         the tables of the layers that predict further tokens, mostly copies of the two ends
    MTP output        (DeepSeek-V3, README_WEIGHTS.md)
    draft head        a head over a target's hidden states, one for each further token (Medusa)
    draft map         a draft's own ids as the target's, and back (EAGLE-3: d2t, t2d; vLLM's Medusa: token_map)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint import claims
from tiewise.checkpoint.claims import model_levels, positive_int
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import object_of

PER_LAYER, NGRAM, MODALITY = "per-layer table", "n-gram table", "modality table"
MTP_INPUT, MTP_OUTPUT, DRAFT_HEAD, DRAFT_MAP = "MTP input", "MTP output", "draft head", "draft map"
PLAIN_TABLE = re.compile(  # without ProphetNet's `ngram_embeddings`, which belongs to its streams
    r"(^|\.)(embed_tokens_per_layer|ngram_embeddings\.embedders\.\d+|ngram_embedding(\.shard_\d+)?|encoder_hash_tok_embedding)$"
)
_MODALITY = re.compile(r"(^|\.)embed_(vision|audio)\.embedding$")
_MTP = re.compile(r"(^|\.)(mtp|nextn)\w*\.")  # prefix of layers for multi-token prediction (MTP)
_MTP_CLASS = re.compile(r"nextn|mtp", re.IGNORECASE)  # part of the name of a class that has only such layers
# Medusa's heads inside a model, alone, and by vLLM's names
_DRAFT_HEAD = re.compile(r"((.+\.)?medusa_heads?\.)?(\d{1,3}\.\d{1,3}|lm_heads\.\d{1,3})")
_DRAFT_MAPS = ("d2t", "t2d", "token_map")
_LAYER = re.compile(r"(^|\.)layers\.(\d{1,9})\.(embed_tokens|shared_head\.head)$")
_TABLE_PARAMETERS = ("weight", *claims.PACKED)
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer")  # config keys
_INPUTS = ("embed_tokens", "word_embeddings", "tok_embeddings", "tok_emb", "embed", "embedding", "embeddings", "emb")
_OUTPUTS = ("lm_head", "head", "shared_head", "output", "output_head", "output_layer", "unembed")
_HASHED = re.compile(r"\.embedders\.(\d{1,9})$")  # LongCat-Flash's n-gram tables


@dataclass(frozen=True)
class IndexedTensor:
    """Stored tensor, other than the two ends, that token ids index."""

    role: str  # one of the roles above, such as "per-layer table"
    tensor: Stored  # [rows, width]; a draft map is [rows]
    module: str  # module name without wrappers; for a draft map, the name before `d2t`

    @property
    def has_row_per_token(self) -> bool:
        """Return whether the tensor has one row per token of the vocabulary."""
        return self.role in (PER_LAYER, MTP_INPUT, MTP_OUTPUT, DRAFT_HEAD)


def token_tables(
    tensors: Mapping[str, Stored], config: Mapping[str, Any], ends: Collection[Stored]
) -> Iterator[IndexedTensor]:
    """Yield the tensors that token ids index, without the tables in `ends`.

    The keys of `tensors` are names without wrappers.
    """
    first_mtp_layer = _first_mtp_layer(config)
    names_of_ends = {table.name for table in ends}
    for name, tensor in tensors.items():
        module, parameter = module_of(name)
        role = role_of(module, parameter, first_mtp_layer)
        if role is None or tensor.name in names_of_ends:
            continue
        # packed numbers have another shape, and a draft map is no matrix
        if parameter != "weight" or _has_shape_of(role, tensor, ends):
            yield IndexedTensor(role, tensor, module)


def _has_shape_of(role: str, tensor: Stored, ends: Collection[Stored]) -> bool:
    """Return whether an unquantised weight has a shape that fits its role."""
    if len(tensor.shape) != 2:
        return False
    # a projection may have the name `mtp.head`; a table has the rows or the width of an end
    return role not in (MTP_INPUT, MTP_OUTPUT) or _fits_an_end(tensor, ends)


def _first_mtp_layer(config: Mapping[str, Any]) -> int:
    """Return the number of the first MTP layer.

    These layers follow the model's layers: it is the smallest number of layers at any level of the config.
    """
    if _MTP_CLASS.search(claims.architecture(config) or ""):
        return 0
    layers = list[int]()
    for _, level in model_levels(config):
        counts = [positive_int(level.get(key)) for key in LAYER_COUNTS]
        layers += filter(None, counts)
    return min(layers, default=0)


def _fits_an_end(tensor: Stored, ends: Collection[Stored]) -> bool:
    """Return whether a matrix has the rows or the width of an end. True if no end is a matrix."""
    axes = set[tuple[int, int]]()
    for end in ends:
        if len(end.shape) == 2:
            axes |= set(enumerate(end.shape))
    return not axes or not axes.isdisjoint(enumerate(tensor.shape))


def role_of(module: str, parameter: str, first_mtp_layer: int) -> str | None:
    """Return the role of a tensor by its name, else None. MTP layers start at `first_mtp_layer`."""
    if parameter in _DRAFT_MAPS:
        return DRAFT_MAP
    if parameter not in _TABLE_PARAMETERS:
        return None
    last = module.rpartition(".")[2]
    if last == "embed_tokens_per_layer":
        return PER_LAYER
    if _DRAFT_HEAD.fullmatch(module):
        return DRAFT_HEAD
    if PLAIN_TABLE.search(module):
        return NGRAM
    if _MODALITY.search(module):
        return MODALITY
    if _MTP.search(module):
        return _mtp_role(last)
    layer = _LAYER.search(module)
    if layer is None:
        return None
    if int(layer[2]) >= first_mtp_layer:
        return _mtp_role(last)
    return PER_LAYER if last == "embed_tokens" else None


def _mtp_role(last: str) -> str | None:
    """Return the role of a module in an MTP layer, by its name's last part."""
    if last in _INPUTS:
        return MTP_INPUT
    if last in _OUTPUTS:
        return MTP_OUTPUT
    return None


def modality_config(other: IndexedTensor, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a modality's table: vision_config for embed_vision.embedding.

    It is empty for any other table.
    """
    if other.role != MODALITY:
        return {}
    parent = other.module.rpartition(".")[0]
    modality = parent.rpartition("embed_")[2]
    return object_of(config.get(f"{modality}_config"))


def rows_in_config(other: IndexedTensor, config: Mapping[str, Any]) -> int | None:
    """Return the number of rows of a table by the config, else None.

    It is a size in the config, or the size of a hash that the class computes from it.
    """
    if other.role == MODALITY:
        return positive_int(modality_config(other, config).get("vocab_size"))
    levels = [level for _, level in model_levels(config)]
    if other.role == PER_LAYER and other.module.endswith("embed_tokens_per_layer"):
        return claims.first_count(levels, "vocab_size_per_layer_input")
    if other.role != NGRAM:
        return None
    for level in levels:
        rows = _ngram_rows(other.module, level)
        if rows is not None:
            return rows
    return None


def _ngram_rows(module: str, level: Mapping[str, Any]) -> int | None:
    """Return the number of rows of an n-gram table by one config level, else None."""
    hashed = _HASHED.search(module)
    if hashed is not None:
        return _hashed_rows(int(hashed[1]), level)
    if module.endswith("encoder_hash_tok_embedding"):
        return _byte_group_rows(level)
    return None


def _hashed_rows(index: int, level: Mapping[str, Any]) -> int | None:
    """Return the number of rows of LongCat-Flash's n-gram table with this index.

    Each table has a different odd number of rows, so the hashes differ.
    """
    ratio, vocab_size = claims.finite_number(level.get("ngram_vocab_size_ratio")), positive_int(level.get("vocab_size"))
    if ratio is None or vocab_size is None:
        return None
    base = ratio * vocab_size
    if not 0 < base < 2**63:
        return None
    return int(base + 2 * index + 1)


def _byte_group_rows(level: Mapping[str, Any]) -> int | None:
    """Return the number of rows of BLT's table of byte groups.

    It has a row for each combination of group size, hash function and hash value.
    """
    sizes = level.get("encoder_hash_byte_group_size")
    values = positive_int(level.get("encoder_hash_byte_group_vocab"))
    functions = positive_int(level.get("encoder_hash_byte_group_nb_functions"))
    if not isinstance(sizes, list) or values is None or functions is None:
        return None
    return len(sizes) * values * functions
