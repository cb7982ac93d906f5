"""ALBERT with a choice of widths, position of the norm, and layer sharing.

Source: Lan et al. 2020, arXiv:1909.11942.

    from tiewise.models import OpenAlbertForPreTraining, from_hugging_face, preset, to_hugging_face
    model = OpenAlbertForPreTraining(preset("base", sharing="ffn"))    # or all, attention, none, all:groups=2, …
    model = OpenAlbertForPreTraining.from_pretrained(path)             # what save_pretrained wrote
    ours = from_hugging_face(transformers.AlbertForPreTraining.from_pretrained("albert/albert-base-v2"))
    theirs = to_hugging_face(ours)                                     # then theirs.save_pretrained(path)

    e = norm(token + position + segment) · projection                    norm before (as released)
    e = norm((token + position + segment) · projection)                  norm after
    a = norm(x + attention(x))          y = norm(a + down(act(up(a))))

Letters: V tokens, E width of the three tables, H hidden width, L layers. `config.sharing` is the `SharingSpec` of the
layers as text. `config.json` stores it in the same form as a model of `tiewise.share_layers`.

The model has an encoder, a pooler, a masked-token head whose decoder is the token table, and a head on pairs of
segments. A pair's label is 1 if the second segment follows the first in the text. It is 0 if they are swapped (SOP) or
from different documents (NSP). The second logit of transformers' ALBERT means "swapped". Converting weights therefore
swaps the rows of that head, and a label becomes 1 − label. The classes of transformers norm before the projection, and
share full layers in runs (`all:groups=G`) or cycles (`all:cycle=N`); they support nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.utils import ModelOutput, can_return_tuple

from tiewise.boundary.saved import DepthTying, is_family_config
from tiewise.boundary.sharing.layout import ENTRY, make_layout
from tiewise.boundary.sharing.share import build_shared, is_relaxed
from tiewise.core.errors import SpecError, UnsupportedError
from tiewise.core.records import require
from tiewise.core.sharing_spec import SharingSpec

# Lan et al. 2020, Table 1, for V = 30,000; the MLPs are four times as wide, the heads as in the released models.
PRESETS = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    "xlarge": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16},
    "xxlarge": {"hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 64},
}


class OpenAlbertConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]  # no types
    """Config of `OpenAlbertModel` and the models around it.

    Args:
        sharing: a `SharingSpec` as text, such as "all" or "ffn", for the layers of a new model. It can also be set
            later.
            Without it layers share nothing.

    The fields and their comments describe the other arguments.

    Raises:
        SpecError: no model can have these sizes or options.

    >>> OpenAlbertConfig(hidden_size=8, num_attention_heads=2, sharing="ffn").sharing
    'ffn'
    """

    model_type = "tiewise-albert"

    vocab_size: int = 30_000
    embedding_size: int = 128  # E
    hidden_size: int = 768  # H
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None  # None: 4·H
    hidden_act: str = "gelu_new"
    norm: str = "before"  # norm of the summed embeddings: before their projection to H, at width E, or after it
    projection: bool = True  # False: no projection, which needs E = H
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    classifier_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | None = 3
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        sharing = kwargs.pop("sharing", None)
        super().__post_init__(**kwargs)
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        sizes = "vocab_size embedding_size hidden_size num_hidden_layers num_attention_heads intermediate_size"
        sizes += " max_position_embeddings type_vocab_size"
        require(self, sizes, lambda n: isinstance(n, int) and n >= 1, "sizes are whole numbers, 1 or more", SpecError)
        width, heads = self.hidden_size, self.num_attention_heads
        if width % heads:
            raise SpecError(f"{heads} heads do not divide width {width}", "choose heads that do")
        require(self, "norm", ("before", "after").__contains__, "choose before or after the projection", SpecError)
        if not self.projection and self.embedding_size != width:
            problem = f"tables of width {self.embedding_size} without a projection to {width}"
            raise SpecError(problem, "leave projection on, or give both one width")
        dropped = "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout_prob"
        require(self, dropped, lambda x: 0 <= x < 1, "give the share that is dropped, 0 or more, below 1", SpecError)
        require(self, "hidden_act", ACT2FN.__contains__, "choose gelu, gelu_new, relu or another of ACT2FN", SpecError)
        require(self, "initializer_range layer_norm_eps", lambda x: 0 <= x < float("inf"), "give 0 or more", SpecError)
        if sharing is not None:
            self.sharing = sharing

    @property
    def sharing(self) -> str:
        """Layer sharing, a `SharingSpec` as text."""
        entry = getattr(self, ENTRY, None)
        return "none" if entry is None else str(entry["spec"])

    @sharing.setter
    def sharing(self, text: SharingSpec | str) -> None:
        """Set the layer sharing; SpecError if these layers cannot have it."""
        spec = SharingSpec.parse(text)
        if spec.kind == "none":
            self.__dict__.pop(ENTRY, None)
            return
        with torch.device("meta"):
            layer = AlbertLayer(self)
        parts = {name: name.partition(".")[0] for name, _ in layer.named_parameters()}
        setattr(self, ENTRY, make_layout({"layers": [(layer, parts)] * self.num_hidden_layers}, spec).record())


def preset(name: str, **changes: Any) -> OpenAlbertConfig:
    """Return the config of a published size, with one layer's weights for all layers.

    Args:
        name: "base", "large", "xlarge" or "xxlarge" (Lan et al. 2020, Table 1).
        changes: fields of the config. `norm="after", hidden_act="gelu", vocab_size=30522` gives a variant that
            descriptions of ALBERT often show.

    Returns:
        An `OpenAlbertConfig`.

    Raises:
        SpecError: there is no such size.

    >>> preset("base").hidden_size, preset("base", sharing="ffn").sharing
    (768, 'ffn')
    """
    if name not in PRESETS:
        raise SpecError(f"no ALBERT of size {name[:40]!r}", f"choose one of {', '.join(PRESETS)}")
    return OpenAlbertConfig(**{"sharing": "all", **PRESETS[name], **changes})


class AlbertEmbeddings(nn.Module):
    """Sum of three tables of width E, with a norm and a projection to H."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.embedding_size
        self.token = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width)
        self.segment = nn.Embedding(config.type_vocab_size, width)
        self.projection = nn.Linear(width, config.hidden_size) if config.projection else nn.Identity()
        self.norm_first = config.norm == "before"
        self.norm = nn.LayerNorm(width if self.norm_first else config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, segments: Tensor | None, positions: Tensor | None) -> Tensor:
        """Embed tokens [B, T] with their segments and positions; return [B, T, H].

        `segments` [B, T] are 0 unless given, `positions` [.., T] are 0 … T − 1.

        Raises:
            SpecError: there are more tokens than positions.
        """
        length, room = input_ids.shape[1], self.position.num_embeddings
        if positions is None:
            if length > room:
                raise SpecError(f"a sequence of {length} tokens, and {room} positions", f"cut it to {room} tokens")
            positions = torch.arange(length, device=input_ids.device)
        if segments is None:
            segments = torch.zeros_like(input_ids)
        x: Tensor = self.token(input_ids) + self.segment(segments) + self.position(positions)
        if self.norm_first:
            x = self.projection(self.dropout(self.norm(x)))
        else:
            x = self.dropout(self.norm(self.projection(x)))
        return x


class AlbertAttention(nn.Module):
    """Self-attention of all tokens to all tokens that are not padding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.share = config.attention_probs_dropout_prob
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, readable: Tensor | None) -> Tensor:
        """Map x [B, T, H] to [B, T, H]; `readable` is bool [B, 1, 1, T]."""
        q, k, v = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        share = self.share if self.training else 0.0
        read = F.scaled_dot_product_attention(q, k, v, readable, share)
        joined = read.transpose(1, 2).flatten(2)
        y: Tensor = self.norm(x + self.dropout(self.dense(joined)))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """Divide [B, T, H] into heads [B, heads, T, H / heads]."""
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)


class AlbertFeedForward(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [.., H] to [.., H]."""
        inner = self.act(self.up(x))
        y: Tensor = self.norm(x + self.down(inner))
        return y


class AlbertLayer(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = AlbertAttention(config)
        self.ffn = AlbertFeedForward(config)

    def forward(self, x: Tensor, readable: Tensor | None) -> Tensor:
        """Map x [B, T, H] to [B, T, H]."""
        y: Tensor = self.ffn(self.attention(x, readable))
        return y


@dataclass
class OpenAlbertOutput(ModelOutput):  # type: ignore[misc, unused-ignore]  # no types
    """Output of `OpenAlbertForPreTraining`.

    Attributes:
        loss: sum of `mlm_loss` and `pair_loss`, as far as their labels were given, in nats.
        logits: [B, T, V], or [M, V] of the M positions in `predict`.
        pair_logits: [B, 2].
        mlm_loss: mean nll of the masked tokens, in nats.
        pair_loss: mean nll of the pairs, in nats.
        hidden_states: input of the layers, and the output of each, [B, T, H]; None unless requested.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    pair_logits: Tensor | None = None
    mlm_loss: Tensor | None = None
    pair_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class OpenAlbertPreTrainedModel(DepthTying, PreTrainedModel):  # type: ignore[misc, unused-ignore]  # no types
    """Base of all open ALBERTs."""

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
    """Encoder and pooler of an ALBERT.

    Args:
        config: an `OpenAlbertConfig`.

    >>> import torch
    >>> model = OpenAlbertModel(preset("base", hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
    >>> model(torch.tensor([[2, 5, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: OpenAlbertConfig) -> None:
        super().__init__(config)
        self.embeddings = AlbertEmbeddings(config)
        device = self.embeddings.token.weight.device
        with torch.device("meta"):  # layers may share their weights, so no memory is allocated yet
            self.layers = nn.ModuleList(AlbertLayer(config) for _ in range(config.num_hidden_layers))
        entry = getattr(config, ENTRY, None)
        if entry is not None and not is_family_config(
            config
        ):  # a family's models build what their config names themselves
            build_shared(self, entry)
        if device.type != "meta":  # allocate each remaining parameter once
            real = {id(old): nn.Parameter(torch.empty_like(old, device=device)) for old in self.layers.parameters()}
            self.layers = deepcopy(self.layers, real)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator, unused-ignore]  # no types
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
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 0 at padding; None without padding.
            token_type_ids: [B, T], 0 in the first segment and 1 in the second; None: all 0.
            position_ids: [.., T]; None: 0 … T − 1.
            output_hidden_states: also return the input of the layers and the output of each.

        Returns:
            `last_hidden_state` [B, T, H], and `pooler_output` [B, H] of the first token.

        Raises:
            SpecError: there are more tokens than positions.
        """
        x = self.embeddings(input_ids, token_type_ids, position_ids)
        readable = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        states = [x]
        for layer in self.layers:
            x = layer(x, readable)
            states.append(x)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return BaseModelOutputWithPooling(x, pooled, tuple(states) if output_hidden_states else None)


class Predictions(nn.Module):
    """Masked-token head: dense layer to width E, activation, norm, decoder.

    The decoder's weight is the token table.
    """

    def __init__(self, config: OpenAlbertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.act = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [.., H] to logits [.., V]."""
        features = self.norm(self.act(self.dense(hidden)))
        logits: Tensor = self.decoder(features)
        return logits


class OpenAlbertForPreTraining(OpenAlbertPreTrainedModel):
    """Encoder with the heads on masked tokens and on pairs of segments.

    Args:
        config: an `OpenAlbertConfig`.

    >>> import torch
    >>> model = OpenAlbertForPreTraining(preset("base", hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
    >>> output = model(torch.tensor([[2, 5, 3]]), pair_labels=torch.tensor([1]))
    >>> output.logits.shape, output.pair_logits.shape
    (torch.Size([1, 3, 30000]), torch.Size([1, 2]))
    """

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
        """Replace the decoder of the masked-token head."""
        self.predictions.decoder = new_embeddings

    @can_return_tuple  # type: ignore[untyped-decorator, unused-ignore]  # no types
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
        """Predict masked tokens, and whether the second segment follows the first.

        Args:
            input_ids, attention_mask, token_type_ids, position_ids: as in `OpenAlbertModel`.
            labels: [B, T], the tokens that were masked; -100 at positions without a target.
            pair_labels: [B], 1 if the second segment follows the first in the text, else 0.
            predict: bool [B, T]; return logits of these positions alone, which suffice for the loss.

        Returns:
            An `OpenAlbertOutput`.

        Raises:
            SpecError: there are more tokens than positions.
        """
        kwargs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "return_dict": True}
        encoded = self.albert(input_ids, attention_mask, **kwargs)
        hidden = encoded.last_hidden_state
        logits = self.predictions(hidden if predict is None else hidden[predict])
        pairs = self.pair(encoded.pooler_output)
        total = mlm_loss = pair_loss = None
        if labels is not None:
            targets = labels if predict is None else labels[predict]
            total = mlm_loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
        if pair_labels is not None:
            pair_loss = F.cross_entropy(pairs, pair_labels)
            total = pair_loss if total is None else total + pair_loss
        return OpenAlbertOutput(total, logits, pairs, mlm_loss, pair_loss, encoded.hidden_states)


class OpenAlbertForSequenceClassification(OpenAlbertPreTrainedModel):
    """Encoder with a classification head.

    Its labels are no tokens, so this head is never tied, and `install` refuses the model.

    Args:
        config: an `OpenAlbertConfig` with `num_labels`.

    >>> import torch
    >>> small = preset("base", hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_labels=3)
    >>> OpenAlbertForSequenceClassification(small)(torch.tensor([[2, 5, 3]])).logits.shape
    torch.Size([1, 3])
    """

    def __init__(self, config: OpenAlbertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.albert = OpenAlbertModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator, unused-ignore]  # no types
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Score sequences [B, T]; return logits [B, num_labels] and the loss of the labels.

        The loss is that of every classifier of transformers.

        Args:
            input_ids: [B, T] token ids.
            labels: [B] classes; [B] numbers if num_labels is 1; [B, num_labels] if several may apply.
            kwargs: other arguments of `OpenAlbertModel`.
        """
        encoded = self.albert(input_ids, **kwargs, return_dict=True)
        logits = self.classifier(self.dropout(encoded.pooler_output))
        loss_arguments = {"labels": labels, "pooled_logits": logits, "config": self.config}
        loss = None if labels is None else self.loss_function(**loss_arguments)
        return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)


# weights of transformers' ALBERT, both ways

CLASS_PAIRS = (
    (OpenAlbertForPreTraining, "AlbertForPreTraining"),
    (OpenAlbertForSequenceClassification, "AlbertForSequenceClassification"),
    (OpenAlbertModel, "AlbertModel"),
    (OpenAlbertForPreTraining, "AlbertForMaskedLM"),  # converts back to AlbertForPreTraining
)
_MAY_LACK = ("albert.pooler.", "pooler.", "pair.")  # beginnings of names that a model for masked tokens alone lacks
# fields that both configs have under one name
_SAME = [name for name in OpenAlbertConfig.__annotations__ if name not in ("num_hidden_layers", "norm", "projection")]
_SAME += ["id2label", "label2id"]
# beginnings of names, ours → theirs, outside the layers and within one; other names are equal
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
    """Return our model that computes the same as an ALBERT of transformers.

    AlbertForMaskedLM becomes ours for pretraining. It lacks the pooler and the head on pairs, which are random then.

    Args:
        theirs: AlbertForPreTraining, AlbertForMaskedLM, AlbertModel or AlbertForSequenceClassification.

    Returns:
        An `OpenAlbertForPreTraining`, `OpenAlbertModel` or `OpenAlbertForSequenceClassification`.

    Raises:
        UnsupportedError: it is of another class, has layers both in groups and repeated within them, or has another
            number of order labels than two.

    >>> import transformers
    >>> config = transformers.AlbertConfig(hidden_size=8, num_attention_heads=2, embedding_size=4, intermediate_size=16)
    >>> type(from_hugging_face(transformers.AlbertModel(config))).__name__
    'OpenAlbertModel'
    """
    model_class = _our_class(theirs)
    config = theirs.config
    groups, inner = config.num_hidden_groups, config.inner_group_num
    if groups > 1 and inner > 1:
        raise UnsupportedError(f"{groups} groups of {inner} layers each", "groups or repeats, not both, can be shared")
    has_pairs = hasattr(theirs, "sop_classifier")
    if has_pairs and config.num_labels != 2:
        raise UnsupportedError(f"sentence order of {config.num_labels} labels", "in order or swapped: set num_labels=2")
    spec = SharingSpec("all", groups=groups, cycle=inner if inner > 1 else 0)
    fields = {name: getattr(config, name) for name in _SAME}
    if model_class is OpenAlbertForPreTraining and not has_pairs:
        del fields["id2label"], fields["label2id"]  # no head of theirs has labels, and our pairs have two
    ours = model_class(OpenAlbertConfig(**fields, num_hidden_layers=config.num_hidden_layers * inner, sharing=spec))
    ours = ours.to(theirs.dtype).train(theirs.training)
    for weight in _matched_weights(ours, theirs):
        weight.copy_to_ours()
    return ours


def _our_class(theirs: Any) -> Any:
    """Return our class for a model of transformers. Raises UnsupportedError."""
    for ours, name in CLASS_PAIRS:
        if type(theirs) is getattr(transformers, name):
            return ours
    names = ", ".join(name for _, name in CLASS_PAIRS)
    raise UnsupportedError(f"a {type(theirs).__name__} has no model of ours", f"load it as one of {names}")


def to_hugging_face(ours: Any) -> Any:
    """Return transformers' model that computes the same as one of ours.

    Args:
        ours: a model of this module.

    Returns:
        An ALBERT of transformers.

    Raises:
        UnsupportedError: the norm is after the projection, or the layers share parts that its classes cannot share.

    >>> model = OpenAlbertModel(preset("base", hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
    >>> type(to_hugging_face(model)).__name__
    'AlbertModel'
    """
    name = next((name for model_class, name in CLASS_PAIRS if type(ours) is model_class), None)
    if name is None:
        remedy = "take the boundary or the sharing out"
        raise UnsupportedError(f"transformers' ALBERT has no place for a {type(ours).__name__}", remedy)
    config, spec = ours.config, SharingSpec.parse(ours.config.sharing)
    layers, groups, inner = config.num_hidden_layers, config.num_hidden_layers, 1
    if spec.kind != "none":
        groups, inner = spec.groups, spec.cycle or 1
    shares_full_layers = spec.kind in ("all", "none") and not (spec.ends or spec.rank)
    can_be_written = config.norm != "after" and config.projection and layers % inner == 0
    if not shares_full_layers or not can_be_written:
        problem = f"transformers' ALBERT has no place for norm={config.norm}, projection={config.projection}, {spec}"
        raise UnsupportedError(problem, "it norms before its projection, and shares none, all, all:groups or all:cycle")
    fields = {name: getattr(config, name) for name in _SAME} | {"num_hidden_layers": layers // inner}
    their_config = transformers.AlbertConfig(**fields, num_hidden_groups=groups, inner_group_num=inner)
    theirs = getattr(transformers, name)(their_config).to(ours.dtype).train(ours.training)
    for weight in _matched_weights(ours, theirs):
        weight.copy_to_theirs()
    return theirs


@dataclass(frozen=True)
class _Weight:
    """One weight of our model and its counterpart in transformers.

    `swaps` is True if their rows are in opposite order.
    """

    ours: Tensor
    theirs: Tensor
    swaps: bool

    @torch.no_grad()
    def copy_to_ours(self) -> None:
        """Write transformers' weight into ours."""
        self.ours.copy_(self.theirs.flip(0) if self.swaps else self.theirs)

    @torch.no_grad()
    def copy_to_theirs(self) -> None:
        """Write our weight into transformers'."""
        self.theirs.copy_(self.ours.flip(0) if self.swaps else self.ours)


def _matched_weights(ours: Any, theirs: Any) -> Iterator[_Weight]:
    """Yield every weight of ours with theirs.

    A model for masked tokens alone lacks some of ours.
    """
    values, config = theirs.state_dict(), theirs.config
    encoder = "" if hasattr(ours, "albert") else "albert."  # names in an encoder alone lack this prefix
    for name, value in ours.state_dict().items():
        their_name = _their_name(encoder + name, config).removeprefix(encoder)
        if their_name in values or not name.startswith(_MAY_LACK):
            yield _Weight(value, values[their_name], name.startswith("pair."))


def _their_name(name: str, config: Any) -> str:
    """Return transformers' name of one of our weights in a model with heads."""
    layer = ""
    if name.startswith("albert.layers."):
        index, _, name = name.removeprefix("albert.layers.").partition(".")
        step, inner = divmod(int(index), config.inner_group_num)
        group = step * config.num_hidden_groups // config.num_hidden_layers
        layer = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{inner}."
    for our_begin, their_begin in _NAMES.items():
        if name.startswith(our_begin):
            return layer + their_begin + name.removeprefix(our_begin)
    return layer + name
