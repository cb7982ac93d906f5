"""Sizes and regularisers of a recurrent language model, as `config.json` holds them.

Letters: V tokens read, V_out tokens predicted, E width of what the cell reads, H hidden width, L layers. A table that
is wider or narrower than the cell is the boundary's business (`projected:300`), and no field here.
"""

from __future__ import annotations

from typing import ClassVar

from transformers import PreTrainedConfig

from tiewise.core.errors import SpecError
from tiewise.models.cells import CELLS

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
    """Refuse what cannot be built.

    Raises:
        SpecError: with the first reason found.
    """
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
