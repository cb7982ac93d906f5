"""`RNNLM`: a recurrent language model as a transformers model, so that install, Trainer and auto classes know it.

    x_t = embed(w_t)          h_t, state = layers(x_t, state)          logits_t = head(h_t)

Settings and sizes of Press & Wolf 2017, Inan, Khosravi & Socher 2017 and AWD-LSTM (arXiv:1708.02182) are configs of it;
tying, projections and corrections are boundaries that `tiewise.install` gives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from tiewise.boundary.saved import ENTRY
from tiewise.core.errors import SpecError, UnsupportedError
from tiewise.models.dropout import drop, drop_words
from tiewise.models.recurrent import Layer, Recurrent, State
from tiewise.models.rnn_config import RNNConfig


@dataclass
class RNNOutput(ModelOutput):
    """`loss` of the labels, `logits` [B, T, V_out], and the `state` behind the last token (see `detached`).

    `regularisation` is what AR and TAR add to the loss in training; it is there whether or not labels are.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: State | None = None
    regularisation: Tensor | None = None


class RNNLM(PreTrainedModel, GenerationMixin):
    """Lookup, recurrent layers, head."""

    config_class = RNNConfig
    main_input_name = "input_ids"
    _tied_weights_keys: ClassVar = {"head.weight": "embed.weight"}
    _is_stateful = True

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        rows_in, rows_out = config.rows
        self.embed = nn.Embedding(rows_in, config.widths[0])
        self.rnn = Recurrent(config)
        self.head = nn.Linear(config.widths[-1], rows_out, bias=config.output_bias)
        if not config.meets:
            self._tied_weights_keys = {}  # type: ignore[misc]  # of this model, not of its class
            _check_untied(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the lookup."""
        return self.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the lookup."""
        self.embed = value

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        state: State | None = None,
        shift_labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Predict the token behind every one of `input_ids` [B, T].

        Args:
            input_ids: tokens.
            attention_mask: padding on the right is read like any token; padding on the left is refused.
            labels: [B, T], position i's being the label of what stands before it; -100 counts for nothing.
            state: what the piece of text before returned; None starts with zeros.
            shift_labels: [B, T] in place of labels: position i's own target, so that a piece loses none at its end. An
                installed model keeps its loss fused in evaluation where `labels` are given beside them.
            logits_to_keep: give logits of the last positions alone (0: of all).
            **kwargs: `num_items_in_batch`, by which the loss is divided; `return_dict`.

        Raises:
            SpecError: padding on the left, or a state of other sequences.
        """
        _check_padding(attention_mask)
        config, training = self.config, self.training
        x = self.embed(input_ids)
        if training:
            x = drop_words(x, input_ids, self.embed.num_embeddings, config.embedding_dropout)
            x = drop(x, config.input_dropout, config.variational)
        hidden, state = self.rnn(x, state)
        read = drop(hidden, config.output_dropout, config.variational) if training else hidden
        logits = self.head(read[:, -logits_to_keep:])
        if config.outputs < self.head.out_features:
            logits = logits[..., : config.outputs]
        added = self._penalty(hidden, read) if training and (config.ar or config.tar) else None
        loss, items = None, kwargs.get("num_items_in_batch")
        if labels is not None or shift_labels is not None:
            targets = None if shift_labels is None else shift_labels.contiguous()
            given = {"num_items_in_batch": items, "shift_labels": targets}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.outputs, **given)
            if added is not None:
                loss = loss + added * (1.0 if items is None else _counted(labels, targets) / items)
        output = RNNOutput(loss, logits, state, added)
        return output if kwargs.get("return_dict") is not False else output.to_tuple()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, state: State | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Read the prompt once, then one token at a time."""
        if state is not None:
            return {"input_ids": input_ids[:, -1:], "state": state}
        return {"input_ids": input_ids, "attention_mask": kwargs.get("attention_mask"), "logits_to_keep": 1}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("beam search would give one beam another's hidden state", "use num_beams=1")

    def _penalty(self, hidden: Tensor, read: Tensor) -> Tensor:
        """α·mean(read²) + β·mean((h_t - h_{t-1})²): AR and TAR, arXiv:1708.02182 §4.2."""
        found = self.config.ar * read.pow(2).mean()
        return found + self.config.tar * hidden.diff(dim=1).pow(2).mean() if hidden.shape[1] > 1 else found

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Layer):
            reach = self.config.body_range if self.config.body_range is not None else module.width**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -reach, reach)
        elif isinstance(module, nn.Embedding | nn.Linear):
            init.uniform_(module.weight, -self.config.table_range, self.config.table_range)
            bias = getattr(module, "bias", None)
            if bias is not None:
                init.zeros_(bias)


def _counted(labels: Tensor | None, targets: Tensor | None) -> Tensor:
    """Return how many positions have a label, of those in `num_items_in_batch`."""
    if targets is None:
        assert labels is not None
        targets = labels[:, 1:]
    return (targets != -100).sum()


def _check_untied(config: RNNConfig) -> None:
    """Refuse a plain tied model whose table cannot serve both ends; a boundary's maps may make them meet.

    Raises:
        SpecError: with the way out.
    """
    if not config.tie_word_embeddings or getattr(config, ENTRY, None) is not None:
        return
    (rows_in, rows_out), widths = config.rows, config.widths
    if rows_in != rows_out:
        what = f"tied tables of {rows_in} and {rows_out} rows"
        raise SpecError(what, "set one_table, which gives both ends the rows of the larger vocabulary")
    what = f"tied: the table has E = {widths[0]} columns and the head reads H = {widths[-1]}"
    raise SpecError(what, f"leave E and H equal and install projected:{widths[0]}, which gives the table its own width")


def _check_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and not bool(attention_mask[:, 0].all()):
        raise SpecError("sequences padded on the left, which a recurrent model reads", "pad on the right")
