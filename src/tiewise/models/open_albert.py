"""ALBERT (Lan et al. 2020, arXiv:1909.11942) with every choice open: widths, place of the norm, what layers share.

    from tiewise.models import OpenAlbertForPreTraining, from_hugging_face, preset, to_hugging_face
    model = OpenAlbertForPreTraining(preset("base", sharing="ffn"))    # or all, attention, none, all:groups=2, …
    model = OpenAlbertForPreTraining.from_pretrained(path)             # what save_pretrained wrote
    ours = from_hugging_face(transformers.AlbertForPreTraining.from_pretrained("albert/albert-base-v2"))
    theirs = to_hugging_face(ours)                                     # then theirs.save_pretrained(path)

Encoder, pooler, a masked-token head whose decoder is the token table, and a head on pairs of segments: label 1 where
the second follows the first in the text, 0 where they are swapped (SOP) or strangers (NSP). The second logit of
transformers' ALBERT says "swapped": between the two the head's rows change places, and a
label is 1 − label. Its classes norm before the projection, and share whole layers in
runs (`all:groups=G`) or cycles (`all:cycle=N`): nothing else has a place there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.utils import ModelOutput

from tiewise.boundary.saved import DepthTying, is_family
from tiewise.core.errors import UnsupportedError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.models.albert_layers import AlbertEmbeddings, AlbertLayer, OpenAlbertConfig, make_real
from tiewise.sharing.layout import ENTRY
from tiewise.sharing.share import build_shared, is_relaxed


@dataclass
class OpenAlbertOutput(ModelOutput):
    """`loss` is the sum of `mlm_loss` and `pair_loss`, of those whose labels were given.

    `logits` are [B, T, V], or [M, V] of the M positions asked for; `pair_logits` [B, 2].
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    pair_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    pair_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class OpenAlbertPreTrainedModel(DepthTying, PreTrainedModel):
    """What all ALBERTs have."""

    config_class = OpenAlbertConfig
    base_model_prefix = "albert"
    main_input_name = "input_ids"
    _input_embed_layer = "token"
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if is_relaxed(module):
            rows, columns = module.get_parameter("delta_in"), module.get_parameter("delta_out")
            init.normal_(rows, std=rows.shape[1] ** -0.5)
            init.zeros_(columns)


class OpenAlbertModel(OpenAlbertPreTrainedModel):
    """Encoder and pooler."""

    def __init__(self, config: OpenAlbertConfig) -> None:
        super().__init__(config)
        self.embeddings = AlbertEmbeddings(config)
        device = self.embeddings.token.weight.device
        with torch.device("meta"):  # L layers of which most may be one: none takes room before it is known which
            self.layers = nn.ModuleList(AlbertLayer(config) for _ in range(config.num_hidden_layers))
        entry = getattr(config, ENTRY, None)
        if entry is not None and not is_family(config):  # a family's models build what their config names themselves
            build_shared(self, entry)
        if device.type != "meta":
            make_real(self.layers, device)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Encode tokens [B, T].

        Args:
            input_ids: tokens.
            attention_mask: [B, T], 0 where there is padding; None where there is none.
            token_type_ids: [B, T], 0 in the first segment and 1 in the second; None: all 0.
            position_ids: [.., T]; None: 0 … T − 1.
            output_hidden_states: also return what enters the stack and what each layer gives.
            **kwargs: `return_dict`.

        Returns:
            `last_hidden_state` [B, T, H], and `pooler_output` [B, H] of the first token.

        Raises:
            SpecError: more tokens than positions.
        """
        x = self.embeddings(input_ids, token_type_ids, position_ids)
        readable = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        states = [x]
        for layer in self.layers:
            x = layer(x, readable)
            states.append(x)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        output = BaseModelOutputWithPooling(x, pooled, tuple(states) if output_hidden_states else None)
        return output if kwargs.get("return_dict") is not False else output.to_tuple()


class Predictions(nn.Module):
    """Masked-token head: dense to width E, activation, norm, and the decoder, whose weight is the token table."""

    def __init__(self, config: OpenAlbertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.act = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Turn [.., H] into logits [.., V]."""
        return self.decoder(self.norm(self.act(self.dense(hidden))))


class OpenAlbertForPreTraining(OpenAlbertPreTrainedModel):
    """Encoder with both heads of pretraining."""

    _tied_weights_keys: ClassVar = {"predictions.decoder.weight": "albert.embeddings.token.weight"}

    def __init__(self, config: OpenAlbertConfig) -> None:
        super().__init__(config)
        self.albert = OpenAlbertModel(config)
        self.predictions = Predictions(config)
        self.pair = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the decoder of the masked-token head."""
        return self.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace it."""
        self.predictions.decoder = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        pair_labels: Tensor | None = None,
        predict: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Encode as `OpenAlbertModel`, and predict masked tokens and whether the second segment follows the first.

        Args:
            labels: [B, T], the tokens that were masked; -100 where nothing is to be predicted.
            pair_labels: [B], 1 where the second segment follows the first in the text.
            predict: bool [B, T]; give logits of these positions alone, which is all that a loss needs.
        """
        states = kwargs.get("output_hidden_states", False)
        encoded = self.albert(input_ids, attention_mask, token_type_ids, position_ids, output_hidden_states=states)
        hidden = encoded.last_hidden_state
        logits = self.predictions(hidden if predict is None else hidden[predict])
        pairs = self.pair(encoded.pooler_output)
        mlm_loss = pair_loss = None
        if labels is not None:
            wanted = labels if predict is None else labels[predict]
            mlm_loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), wanted.reshape(-1))
        if pair_labels is not None:
            pair_loss = F.cross_entropy(pairs, pair_labels)
        losses = [loss for loss in (mlm_loss, pair_loss) if loss is not None]
        total = sum(losses[1:], losses[0]) if losses else None
        output = OpenAlbertOutput(total, logits, pairs, mlm_loss, pair_loss, encoded.hidden_states)
        return output if kwargs.get("return_dict") is not False else output.to_tuple()


class OpenAlbertForSequenceClassification(OpenAlbertPreTrainedModel):
    """Encoder with a head on labels. Labels are no tokens: this head is never tied, and `install` refuses it."""

    def __init__(self, config: OpenAlbertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.albert = OpenAlbertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Score sequences [B, T]: logits [B, num_labels]; the loss is that of every transformers classifier.

        `labels`: [B] classes, [B] numbers where num_labels is 1, [B, num_labels] where several may hold.
        """
        wanted = kwargs.pop("return_dict", None)
        encoded = self.albert(input_ids, **kwargs)
        logits = self.classifier(self.dropout(encoded.pooler_output))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output if wanted is not False else output.to_tuple()


# weights of transformers' ALBERT, both ways

PAIRS = (
    (OpenAlbertForPreTraining, "AlbertForPreTraining"),
    (OpenAlbertForSequenceClassification, "AlbertForSequenceClassification"),
    (OpenAlbertModel, "AlbertModel"),
    (OpenAlbertForPreTraining, "AlbertForMaskedLM"),  # back it goes as the first
)
_MAY_LACK = ("albert.pooler.", "pooler.", "pair.")  # of ours: a model for masked tokens alone has none of these
# fields that both configs have under one name
_SAME = (
    *("vocab_size", "embedding_size", "hidden_size", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "layer_norm_eps"),
    *("max_position_embeddings", "type_vocab_size", "initializer_range", "tie_word_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id"),
)
# beginnings of names, ours → theirs, outside the layers and within one; whatever else is called the same
_NAMES = {
    "albert.embeddings.token.": "albert.embeddings.word_embeddings.",
    "albert.embeddings.position.": "albert.embeddings.position_embeddings.",
    "albert.embeddings.segment.": "albert.embeddings.token_type_embeddings.",
    "albert.embeddings.norm.": "albert.embeddings.LayerNorm.",
    "albert.embeddings.projection.": "albert.encoder.embedding_hidden_mapping_in.",
    "predictions.norm.": "predictions.LayerNorm.",
    "pair.": "sop_classifier.classifier.",
    "attention.norm.": "attention.LayerNorm.",
    "ffn.up.": "ffn.",
    "ffn.down.": "ffn_output.",
    "ffn.norm.": "full_layer_layer_norm.",
}


def from_hugging_face(theirs: Any) -> Any:
    """Return our model of the same function as transformers' AlbertForPreTraining, AlbertModel or classifier.

    AlbertForMaskedLM becomes ours for pretraining; the pooler and the head on pairs, which it lacks, are drawn anew.

    Raises:
        UnsupportedError: another class, layers both in groups and repeated within them, or not two labels of order.
    """
    kind = next((ours for ours, name in PAIRS if type(theirs) is getattr(transformers, name)), None)
    if kind is None:
        names = ", ".join(name for _, name in PAIRS)
        raise UnsupportedError(f"a {type(theirs).__name__} has no model of ours", f"load it as one of {names}")
    config = theirs.config
    groups, inner = config.num_hidden_groups, config.inner_group_num
    if groups > 1 and inner > 1:
        raise UnsupportedError(f"{groups} groups of {inner} layers each", "groups or repeats, not both, can be shared")
    pairs = hasattr(theirs, "sop_classifier")
    if pairs and config.num_labels != 2:
        fix = "in order or swapped: set num_labels=2"
        raise UnsupportedError(f"sentence order with {config.num_labels} labels", fix)
    spec = SharingSpec("all", groups=groups, cycle=inner if inner > 1 else 0)
    fields = {name: getattr(config, name) for name in _SAME}
    if kind is OpenAlbertForPreTraining and not pairs:
        del fields["id2label"], fields["label2id"]  # of no head of theirs, and our pairs have two
    made = OpenAlbertConfig(**fields, num_hidden_layers=config.num_hidden_layers * inner, sharing=spec)
    ours = kind(made).to(theirs.dtype)
    _copy_weights(ours, theirs, into_ours=True)
    return ours.train(theirs.training)


def to_hugging_face(ours: Any) -> Any:
    """Return transformers' model of the same function as one of ours.

    Raises:
        UnsupportedError: the norm is behind the projection, or layers share what its classes cannot.
    """
    theirs = next((name for kind, name in PAIRS if type(ours) is kind), None)
    if theirs is None:
        what = f"transformers' ALBERT has no place for a {type(ours).__name__}"
        raise UnsupportedError(what, "take the boundary or the sharing out")
    config, spec = ours.config, SharingSpec.parse(ours.config.sharing)
    groups, inner = (config.num_hidden_layers, 1) if spec.kind == "none" else (spec.groups, spec.cycle or 1)
    whole = spec.kind in ("all", "none") and not (spec.ends or spec.rank) and config.num_hidden_layers % inner == 0
    if config.norm == "after" or not config.projection or not whole:
        what = f"transformers' ALBERT has no place for norm={config.norm}, projection={config.projection}, {spec}"
        raise UnsupportedError(what, "it norms before its projection, and shares none, all, all:groups or all:cycle")
    made = transformers.AlbertConfig(
        **{name: getattr(config, name) for name in _SAME},
        num_hidden_layers=config.num_hidden_layers // inner,
        num_hidden_groups=groups,
        inner_group_num=inner,
    )
    other = getattr(transformers, theirs)(made).to(ours.dtype)
    _copy_weights(ours, other, into_ours=False)
    return other.train(ours.training)


@torch.no_grad()
def _copy_weights(ours: nn.Module, theirs: Any, *, into_ours: bool) -> None:
    values = theirs.state_dict()
    encoder = "" if hasattr(ours, "albert") else "albert."  # an encoder alone names its parts without it
    for name, mine in ours.state_dict().items():
        named = _name_in_theirs(encoder + name, theirs.config).removeprefix(encoder)
        if named not in values and name.startswith(_MAY_LACK):
            continue
        target, source = (mine, values[named]) if into_ours else (values[named], mine)
        target.copy_(source.flip(0) if name.startswith("pair.") else source)


def _name_in_theirs(name: str, config: Any) -> str:
    within = ""
    if name.startswith("albert.layers."):
        index, _, name = name.removeprefix("albert.layers.").partition(".")
        step, inner = divmod(int(index), config.inner_group_num)
        group = step * config.num_hidden_groups // config.num_hidden_layers
        within = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{inner}."
    begun = next((begin for begin in _NAMES if name.startswith(begin)), "")
    return within + _NAMES.get(begun, "") + name.removeprefix(begun)
