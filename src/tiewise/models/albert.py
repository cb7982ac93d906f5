"""ALBERT (Lan et al. 2020, arXiv:1909.11942) with every choice open: widths, place of the norm, what layers share.

    from tiewise.models import OpenAlbertForPreTraining, preset
    model = OpenAlbertForPreTraining(preset("base", sharing="ffn"))    # or all, attention, none, all:groups=2, …
    model = OpenAlbertForPreTraining.from_pretrained(path)             # what save_pretrained wrote

Encoder, pooler, a masked-token head whose decoder is the token table, and a head on pairs of segments: label 1 where
the second follows the first in the text, 0 where they are swapped (SOP) or strangers (NSP). Weights of transformers'
ALBERT come and go by `tiewise.models.albert_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.utils import ModelOutput

from tiewise.boundary.locate import depth_keys
from tiewise.boundary.saved import BUILDERS, is_family
from tiewise.models.albert_config import OpenAlbertConfig
from tiewise.models.albert_layers import Embeddings, Layer, make_real
from tiewise.sharing.layout import ENTRY
from tiewise.sharing.relaxed import is_relaxed
from tiewise.sharing.share import register_sharing

register_sharing()


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


class OpenAlbertPreTrainedModel(PreTrainedModel):
    """What all ALBERTs have."""

    config_class = OpenAlbertConfig
    base_model_prefix = "albert"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return {target: source} of all tied Parameters; what layers share does not depend on the config's flag."""
        return {**super().get_expanded_tied_weights_keys(all_submodels), **depth_keys(self)}

    def _adjust_bias(self, module: Any, table: Any) -> None:
        if isinstance(module, nn.Linear):  # the other modules of layers that share have nothing to fit
            super()._adjust_bias(module, table)

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
        self.embeddings = Embeddings(config)
        device = self.embeddings.token.weight.device
        with torch.device("meta"):  # L layers of which most may be one: none takes room before it is known which
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        entry = getattr(config, ENTRY, None)
        if entry is not None and not is_family(config):  # a family's models build what their config names themselves
            BUILDERS[ENTRY](self, entry)
        if device.type != "meta":
            make_real(self.layers, device)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token table."""
        return self.embeddings.token

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token table."""
        self.embeddings.token = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Encode tokens.

        Args:
            input_ids: [B, T].
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
        """Encode, and predict masked tokens and whether the second segment follows the first.

        Args:
            input_ids: [B, T], as `attention_mask`, `token_type_ids` and `position_ids` in `OpenAlbertModel`.
            attention_mask: 0 where there is padding.
            token_type_ids: segments.
            position_ids: positions.
            labels: [B, T], the tokens that were masked; -100 where nothing is to be predicted.
            pair_labels: [B], 1 where the second segment follows the first in the text.
            predict: bool [B, T]; give logits of these positions alone, which is all that a loss needs.
            **kwargs: `output_hidden_states`, `return_dict`.

        Returns:
            An `OpenAlbertOutput`.
        """
        encoded = self.albert(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            output_hidden_states=kwargs.get("output_hidden_states", False),
        )
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

        Args:
            input_ids: [B, T].
            labels: [B] classes, [B] numbers where num_labels is 1, [B, num_labels] where several may hold.
            **kwargs: as in `OpenAlbertModel`.
        """
        wanted = kwargs.pop("return_dict", None)
        encoded = self.albert(input_ids, **kwargs)
        logits = self.classifier(self.dropout(encoded.pooler_output))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=encoded.hidden_states)
        return output if wanted is not False else output.to_tuple()
