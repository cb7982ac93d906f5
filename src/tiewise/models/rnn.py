"""`RNNLM`: a recurrent language model as a transformers model, so that install, Trainer and auto classes know it.

    x_t = embed(w_t)          h_t, state = layers(x_t, state)          logits_t = head(h_t)

Settings and sizes of Press & Wolf 2017, Inan, Khosravi & Socher 2017 and AWD-LSTM (arXiv:1708.02182) are configs of it;
tying, projections and corrections are boundaries that `tiewise.install` gives it.

Letters: V tokens read, V_out tokens predicted, E width of what the cell reads, H hidden width, L layers. A table that
is wider or narrower than the cell is the boundary's business (`projected:300`), and no field of the config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from tiewise.boundary.saved import ENTRY
from tiewise.core.errors import SpecError, UnsupportedError
from tiewise.models.recurrent_layers import CELLS, RecurrentLayer, RecurrentStack, State, drop, drop_words

SHARES = (
    "embedding_dropout",
    "input_dropout",
    "layer_dropout",
    "recurrent_dropout",
    "output_dropout",
    "weight_dropout",
)


class RNNConfig(PreTrainedConfig):
    """Config of `RNNLM`; None means what the comment says.

    Raises:
        SpecError: sizes or options that no model can have.
    """

    model_type = "tiewise-rnn"
    keys_to_ignore_at_inference: ClassVar = ["state"]

    vocab_size: int = 10_000
    output_vocab_size: int | None = None  # V_out; None: V
    one_table: bool = False  # where V_out differs: both ends have max(V, V_out) rows, so that one table can serve both
    hidden_size: int = 200
    embedding_size: int | None = None  # E; None: H
    last_hidden_size: int | None = None  # of the last layer, which the head reads; None: H
    num_hidden_layers: int = 2

    cell: str = "lstm"  # tanh and relu (Elman), gru, lstm
    lstm_bias: str = "one"  # or two, as torch's kernels have them: of an LSTM or Elman cell the same functions
    input_matrix: bool = True  # False: h = f(e + W h + b), Elman cells with E = H alone
    output_bias: bool = True

    # shares that are dropped in training
    embedding_dropout: float = 0.0  # whole words: every occurrence of a dropped one in the batch
    input_dropout: float = 0.0
    layer_dropout: float = 0.0  # between layers
    recurrent_dropout: float = 0.0  # of h before its matrix, one mask per sequence
    output_dropout: float = 0.0
    weight_dropout: float = 0.0  # of the matrix that multiplies h
    variational: bool = False  # input, layer and output masks are one per sequence, not one per token
    ar: float = 0.0  # α of the mean square of the head's input, added to the training loss
    tar: float = 0.0  # β of the mean square of the last layer's change from token to token

    table_range: float = 0.1  # tables start uniform in ± this
    body_range: float | None = None  # everything else; None: 1/√H, as torch's own cells

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        check(self)

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of the input table and of the output table."""
        outputs = self.outputs
        return (max(self.vocab_size, outputs),) * 2 if self.one_table else (self.vocab_size, outputs)

    @property
    def outputs(self) -> int:
        """V_out."""
        return self.output_vocab_size or self.vocab_size

    @property
    def widths(self) -> list[int]:
        """E, then the hidden width of every layer."""
        between = [self.hidden_size] * (self.num_hidden_layers - 1)
        return [self.embedding_size or self.hidden_size, *between, self.last_hidden_size or self.hidden_size]

    @property
    def meets(self) -> bool:
        """Whether one table can serve both ends as they are."""
        return self.rows[0] == self.rows[1] and self.widths[0] == self.widths[-1]


def check(config: RNNConfig) -> None:
    """Refuse what cannot be built."""
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "layers": config.num_hidden_layers}
    optional = {name: getattr(config, name) for name in ("output_vocab_size", "embedding_size", "last_hidden_size")}
    sizes |= {name: value for name, value in optional.items() if value is not None}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise SpecError(f"{name} = {value!r}", "sizes are whole numbers, 1 or more")
    if config.cell not in CELLS:
        raise SpecError(f"unknown cell {str(config.cell)[:40]!r}", f"choose one of {', '.join(CELLS)}")
    if config.lstm_bias not in ("one", "two"):
        raise SpecError(f"lstm_bias = {str(config.lstm_bias)[:40]!r}", "choose one or two")
    if config.cell == "gru" and config.lstm_bias == "one":
        what = "a GRU with one bias is another function: its reset gate stands between the two"
        raise SpecError(what, "use lstm_bias two")
    if not config.input_matrix and CELLS[config.cell].gates > 1:
        raise SpecError(f"{config.cell} without an input matrix: which of its gates would read the word?", "use tanh")
    if not config.input_matrix and len(set(config.widths)) > 1:
        what = f"without an input matrix E = {config.widths[0]} must be H = {config.hidden_size} in every layer"
        raise SpecError(what, "leave E and H equal; projected:E gives the table another width")
    for name in SHARES:
        if not 0 <= getattr(config, name) < 1:
            raise SpecError(f"{name} = {getattr(config, name)}", "give the share that is dropped, 0 or more, below 1")
    for name in ("ar", "tar", "table_range"):
        if not 0 <= getattr(config, name) < float("inf"):
            raise SpecError(f"{name} = {getattr(config, name)}", "give a number, 0 or more")


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
    _input_embed_layer = "embed"
    _tied_weights_keys: ClassVar = {"head.weight": "embed.weight"}
    _is_stateful = True

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        rows_in, rows_out = config.rows
        self.embed = nn.Embedding(rows_in, config.widths[0])
        self.rnn = RecurrentStack(config)
        self.head = nn.Linear(config.widths[-1], rows_out, bias=config.output_bias)
        if not config.meets:
            self._tied_weights_keys = {}  # type: ignore[misc]  # of this model, not of its class
            _check_untied(config)
        self.post_init()

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
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise SpecError("sequences padded on the left, which a recurrent model reads", "pad on the right")
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
                counted = targets if targets is not None else labels[:, 1:]  # type: ignore[index]  # one of them
                loss = loss + added * (1.0 if items is None else (counted != -100).sum() / items)
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
        if isinstance(module, RecurrentLayer):
            reach = self.config.body_range if self.config.body_range is not None else module.width**-0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -reach, reach)
        elif isinstance(module, nn.Embedding | nn.Linear):
            init.uniform_(module.weight, -self.config.table_range, self.config.table_range)
            bias = getattr(module, "bias", None)
            if bias is not None:
                init.zeros_(bias)


def _check_untied(config: RNNConfig) -> None:
    """Refuse a plain tied model whose table cannot serve both ends; a boundary's maps may make them meet."""
    if not config.tie_word_embeddings or getattr(config, ENTRY, None) is not None:
        return
    (rows_in, rows_out), widths = config.rows, config.widths
    if rows_in != rows_out:
        what = f"tied tables of {rows_in} and {rows_out} rows"
        raise SpecError(what, "set one_table, which gives both ends the rows of the larger vocabulary")
    what = f"tied: the table has E = {widths[0]} columns and the head reads H = {widths[-1]}"
    raise SpecError(what, f"leave E and H equal and install projected:{widths[0]}, which gives the table its own width")
