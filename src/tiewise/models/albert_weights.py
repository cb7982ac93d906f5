"""Weights of transformers' ALBERT, both ways: the same function in the other's classes.

    ours = from_hugging_face(transformers.AlbertForPreTraining.from_pretrained("albert/albert-base-v2"))
    theirs = to_hugging_face(ours)             # then theirs.save_pretrained(path)

Their second logit of a pair of segments says "swapped", ours says "in order": the head's two rows change places, and
labels as `tiewise.data.sentence_pairs.swapped_labels` says. Their classes norm before the projection, and share whole
layers in runs (`all:groups=G`) or cycles (`all:cycle=N`): nothing else has a place there.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tiewise.core.errors import UnsupportedError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.models.albert import OpenAlbertForPreTraining, OpenAlbertForSequenceClassification, OpenAlbertModel
from tiewise.models.albert_config import OpenAlbertConfig

PAIRS = (
    (OpenAlbertForPreTraining, transformers.AlbertForPreTraining),
    (OpenAlbertForSequenceClassification, transformers.AlbertForSequenceClassification),
    (OpenAlbertModel, transformers.AlbertModel),
    (OpenAlbertForPreTraining, transformers.AlbertForMaskedLM),  # back it goes as the first
)
_MAY_LACK = ("albert.pooler.", "pooler.", "pair.")  # of ours: a model for masked tokens alone has none of these
# fields that both configs have under one name
_SAME = (
    *("vocab_size", "embedding_size", "hidden_size", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "layer_norm_eps"),
    *("max_position_embeddings", "type_vocab_size", "initializer_range", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id"),
)
# ours → theirs, outside the layers; of a part, the name without "albert."
_NAMES = {
    "albert.embeddings.token": "albert.embeddings.word_embeddings",
    "albert.embeddings.position": "albert.embeddings.position_embeddings",
    "albert.embeddings.segment": "albert.embeddings.token_type_embeddings",
    "albert.embeddings.norm": "albert.embeddings.LayerNorm",
    "albert.embeddings.projection": "albert.encoder.embedding_hidden_mapping_in",
    "albert.pooler": "albert.pooler",
    "predictions.dense": "predictions.dense",
    "predictions.norm": "predictions.LayerNorm",
    "predictions.decoder": "predictions.decoder",
    "pair": "sop_classifier.classifier",
    "classifier": "classifier",
}
_LAYER = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.dense": "attention.dense",
    "attention.norm": "attention.LayerNorm",
    "ffn.up": "ffn",
    "ffn.down": "ffn_output",
    "ffn.norm": "full_layer_layer_norm",
}


def from_hugging_face(theirs: Any) -> Any:
    """Return our model of the same function as transformers' AlbertForPreTraining, AlbertModel or classifier.

    AlbertForMaskedLM becomes ours for pretraining; the pooler and the head on pairs, which it lacks, are drawn anew.

    Raises:
        UnsupportedError: another class, layers both in groups and repeated within them, or not two labels of order.
    """
    kind = next((ours for ours, other in PAIRS if type(theirs) is other), None)
    if kind is None:
        names = ", ".join(other.__name__ for _, other in PAIRS)
        raise UnsupportedError(f"a {type(theirs).__name__} has no model of ours", f"load it as one of {names}")
    config = theirs.config
    groups, inner = config.num_hidden_groups, config.inner_group_num
    if groups > 1 and inner > 1:
        raise UnsupportedError(f"{groups} groups of {inner} layers each", "groups or repeats, not both, can be shared")
    pairs = hasattr(theirs, "sop_classifier")
    if pairs and config.num_labels != 2:
        raise UnsupportedError(
            f"sentence order with {config.num_labels} labels", "in order or swapped: set num_labels=2"
        )
    spec = SharingSpec("all", groups=groups, cycle=inner if inner > 1 else 0)
    fields = {name: getattr(config, name) for name in _SAME}
    if kind is OpenAlbertForPreTraining and not pairs:
        del fields["id2label"], fields["label2id"]  # of no head of theirs, and our pairs have two
    made = OpenAlbertConfig(**fields, num_hidden_layers=config.num_hidden_layers * inner, sharing=spec)
    ours = kind(made).to(theirs.dtype)
    _copy(ours, theirs, into_ours=True)
    return ours.train(theirs.training)


def to_hugging_face(ours: Any) -> Any:
    """Return transformers' model of the same function as one of ours.

    Raises:
        UnsupportedError: the norm is behind the projection, or layers share what its classes cannot.
    """
    theirs = next((other for kind, other in PAIRS if type(ours) is kind), None)
    if theirs is None:
        raise UnsupportedError(
            f"transformers' ALBERT has no place for a {type(ours).__name__}", "take the boundary or the sharing out"
        )
    config, spec = ours.config, SharingSpec.parse(ours.config.sharing)
    groups, inner = (config.num_hidden_layers, 1) if spec.kind == "none" else (spec.groups, spec.cycle or 1)
    whole = spec.kind in ("all", "none") and not (spec.ends or spec.rank) and config.num_hidden_layers % inner == 0
    if config.norm == "after" or not config.projection or not whole:
        what = f"transformers' ALBERT has no place for norm={config.norm}, projection={config.projection}, {spec}"
        raise UnsupportedError(what, "it norms before its projection, and shares none, all, all:groups or all:cycle")
    fields = {name: getattr(config, name) for name in _SAME}
    made = transformers.AlbertConfig(
        **fields,
        num_hidden_layers=config.num_hidden_layers // inner,
        num_hidden_groups=groups,
        inner_group_num=inner,
    )
    other = theirs(made).to(ours.dtype)
    _copy(ours, other, into_ours=False)
    return other.train(ours.training)


@torch.no_grad()
def _copy(ours: nn.Module, theirs: Any, *, into_ours: bool) -> None:
    values = theirs.state_dict()
    for name, mine in ours.state_dict().items():
        named = _theirs(name, theirs.config)
        if named not in values and name.startswith(_MAY_LACK):
            continue
        other = values[named]
        target, source = (mine, other) if into_ours else (other, mine)
        target.copy_(_turned(name, source))


def _turned(name: str, value: Tensor) -> Tensor:
    return value.flip(0) if name.startswith("pair.") else value


def _theirs(name: str, config: Any) -> str:
    """Name in their model of what ours calls `name`, whole models and encoders alike."""
    part, _, leaf = name.rpartition(".")
    full = part if part in _NAMES or part.startswith("albert.") else f"albert.{part}"
    if full in _NAMES:
        found = _NAMES[full]
    else:
        index, _, inside = full.removeprefix("albert.layers.").partition(".")
        step, inner = divmod(int(index), config.inner_group_num)
        group = step * config.num_hidden_groups // config.num_hidden_layers
        found = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{inner}.{_LAYER[inside]}"
    return f"{found if full == part else found.removeprefix('albert.')}.{leaf}"
