"""`RNNLM`: a recurrent language model for transformers.

`install`, the Trainer and the auto classes accept it like any model of transformers.

    x_t = embed(w_t)          h_t, state = layers(x_t, state)          logits_t = head(h_t)

Configs of it have the settings and sizes of Press & Wolf 2017, Inan, Khosravi & Socher 2017 and AWD-LSTM
(arXiv:1708.02182). Tying, projections and corrections are boundaries that `tiewise.install` adds.

Letters: V input tokens, V_out output tokens, E width of the cell's input, H hidden width, L layers. A table that is
wider or narrower than the cell needs a boundary (`projected:300`), and no field of the config.

Layers of cells, [B, T, E] -> [B, T, H], with a state:

    Elman   h' = f(W x + b + U h + c)                               f = tanh or relu
    GRU     r, z = σ(W x + b + U h + c)                             n = tanh(W x + b + r · (U h + c))
            h' = (1 - z) · n + z · h
    LSTM    i, f, o = σ(W x + b + U h + c), g = tanh(…)             s' = f · s + i · g,  h' = o · tanh(s')

Matrices are stacked by gate, in torch's order (GRU r z n, LSTM i f g o), so torch's kernels can run them. One layer's
state is (h,) or (h, s), each [B, H].

One call of torch's kernel runs all layers of one width, unless a mask is shared over time. Only a mask on h itself
needs steps in Python, and only in training. Dropout in training:

    fresh      a mask per token                     Zaremba et al., arXiv:1409.2329
    locked     a mask per sequence, at every token  Gal & Ghahramani, arXiv:1512.05287
    of words   rows of a table, for all occurrences the same
    of weights a mask per matrix (DropConnect)      Merity et al., arXiv:1708.02182

Remaining values are divided by their share. Every forward pass draws new masks: a sequence is one piece of text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput, can_return_tuple

from tiewise.boundary.link import divisor
from tiewise.boundary.saved import ENTRY
from tiewise.core.errors import SpecError, UnsupportedError
from tiewise.core.records import require, require_choice

LayerState = tuple[Tensor, ...]  # (h,) or (h, s), each [B, H]
Step = Callable[[Tensor, Tensor, LayerState], LayerState]


@dataclass(frozen=True)
class Cell:
    """A type of recurrent cell: gates, tensors of its state, torch's kernel and one step.

    `step(from_input, from_state, state)` takes W x + b and U h + c, both [B, G·H], and the state before.
    """

    gates: int
    states: int
    kernel: Callable[..., tuple[Tensor, ...]]
    step: Step


def _elman(function: Callable[[Tensor], Tensor]) -> Step:
    """Return the step of an Elman cell with this activation function."""

    def step(from_input: Tensor, from_state: Tensor, state: LayerState) -> LayerState:
        """Return the new state (h,)."""
        return (function(from_input + from_state),)

    return step


def _gru(from_input: Tensor, from_state: Tensor, state: LayerState) -> LayerState:
    input_r, input_z, input_n = from_input.chunk(3, -1)
    state_r, state_z, state_n = from_state.chunk(3, -1)
    r, z = torch.sigmoid(input_r + state_r), torch.sigmoid(input_z + state_z)
    n = torch.tanh(input_n + r * state_n)
    return (torch.lerp(n, state[0], z),)


def _lstm(from_input: Tensor, from_state: Tensor, state: LayerState) -> LayerState:
    i, f, g, o = (from_input + from_state).chunk(4, -1)
    s = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(s), s


CELLS = {
    "tanh": Cell(1, 1, torch.rnn_tanh, _elman(torch.tanh)),
    "relu": Cell(1, 1, torch.rnn_relu, _elman(torch.relu)),
    "gru": Cell(3, 1, torch.gru, _gru),
    "lstm": Cell(4, 2, torch.lstm, _lstm),
}


# One layer's weights in the order of torch's kernels: input [G·H, E], recurrent [G·H, H], their biases [G·H] each.
Weights = list[Tensor]


def run_fused(
    cell: Cell, x: Tensor, states: Sequence[LayerState], weights: Sequence[Weights], dropout: float
) -> tuple[Tensor, list[LayerState]]:
    """Run layers of one width over x [B, T, E] in one call of torch's kernel.

    `dropout` applies to every token between the layers. Return the last layer's h [B, T, H], and every layer's state
    after the last token.
    """
    before = [torch.stack(parts) for parts in zip(*states, strict=True)]
    # training mode if a gradient is needed: otherwise cuDNN stores nothing for the backward pass
    keeps = dropout > 0 or torch.is_grad_enabled()
    hidden = before if cell.states > 1 else before[0]
    flat = [tensor for layer in weights for tensor in layer]
    with warnings.catch_warnings():
        if x.is_cuda:  # the kernel copies the weights into one buffer, which costs little, and warns about it
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        y, *after = cell.kernel(x, hidden, flat, True, len(weights), dropout, keeps, False, True)
    return y, list(zip(*(part.unbind(0) for part in after), strict=True))


def run_stepped(
    cell: Cell, x: Tensor, state: LayerState, weights: Weights, dropout_mask: Tensor
) -> tuple[Tensor, list[LayerState]]:
    """Run one layer over x [B, T, E] step by step, with a mask on h.

    `dropout_mask` [B, H] multiplies h before the recurrent matrix at every step. Return as `run_fused`.
    """
    matrix, recurrent, bias, recurrent_bias = weights
    # The matrix gets its gradient from `_repeat_bias`, in one product over all steps: it needs every h that the matrix
    # multiplied, and autograd must not multiply step by step, hence the detached transpose.
    multiplied: list[Tensor] = []
    biases = _repeat_bias(recurrent, recurrent_bias, multiplied, x.shape[:2])
    transpose = recurrent.detach().T
    hidden = []
    for from_input, step_bias in zip(F.linear(x, matrix, bias).unbind(1), biases, strict=True):
        masked = state[0] * dropout_mask
        multiplied.append(masked.detach())
        from_state = torch.addmm(step_bias, masked, transpose)
        state = cell.step(from_input, from_state, state)
        hidden.append(state[0])
    return torch.stack(hidden, 1), [state]


class _RepeatedBias(Function):
    """The recurrent bias of every step [T, B, G·H], with the recurrent matrix's gradient.

    The backward pass computes that gradient in one product. Autograd would add T matrices [G·H, H], one per step, which
    takes longer than the steps themselves. `read` is filled while stepping, with the inputs of the matrix, detached.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, bias: Tensor, read: list[Tensor], sizes: tuple[int, int]) -> Tensor:
        """Return the bias [G·H] repeated for steps and rows."""
        ctx.read, ctx.dtype = read, matrix.dtype
        rows, steps = sizes
        return bias.repeat(steps, rows, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the matrix and of the bias."""
        flat = grad.flatten(0, 1)
        matrix = flat.T @ torch.cat(ctx.read).to(flat.dtype)
        return matrix.to(ctx.dtype), flat.sum(0).to(ctx.dtype), None, None


# torch's `apply` has no types
_repeat_bias: Callable[[Tensor, Tensor, list[Tensor], Sequence[int]], Iterable[Tensor]] = _RepeatedBias.apply


def dropout_mask(like: Tensor, shape: tuple[int, ...], share: float) -> Tensor:
    """Return factors of `shape`: 0 with probability `share`, else 1 / (1 - share)."""
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - share).div_(1 - share)


def drop(x: Tensor, share: float, locked: bool) -> Tensor:
    """Drop features of x [B, T, D] with probability `share`.

    If `locked`, the same features are dropped at all tokens of a sequence.
    """
    if share == 0:
        return x
    if locked:
        return x * dropout_mask(x, (x.shape[0], 1, x.shape[2]), share)
    return F.dropout(x, share, training=True)


def drop_words(x: Tensor, ids: Tensor, words: int, share: float) -> Tensor:
    """Drop words from x [B, T, D], the vectors of `ids` [B, T].

    Every occurrence of a dropped word is zero; `words` is their number. The result equals dropping rows of the table,
    without a second table, also after a linear map.
    """
    if share == 0:
        return x
    return x * dropout_mask(x, (words, 1), share)[ids]


State = tuple[LayerState, ...]  # one entry per layer


def detached(state: State) -> State:
    """Return the same state, detached: truncated back-propagation ends here.

    Args:
        state: state of every layer, as `RNNLM` returns it.

    Returns:
        The same values without history.

    >>> import torch
    >>> h = torch.ones(1, 2, requires_grad=True)
    >>> detached(((h,),))[0][0].requires_grad
    False
    """
    return tuple(tuple(part.detach() for part in layer) for layer in state)


class RecurrentLayer(nn.Module):
    """Matrices and biases of one layer."""

    def __init__(self, config: Any, width_from: int, width: int) -> None:
        super().__init__()
        rows = CELLS[config.cell].gates * width
        self.weight_ih = nn.Parameter(torch.empty(rows, width_from)) if config.input_matrix else None  # [G·H, E]
        self.weight_hh = nn.Parameter(torch.empty(rows, width))  # [G·H, H]
        self.bias_ih = nn.Parameter(torch.empty(rows))
        self.bias_hh = nn.Parameter(torch.empty(rows)) if config.lstm_bias == "two" else None

    def weights(self, dropped: float) -> Weights:
        """Return the matrices and biases, with a `dropped` share of the recurrent matrix.

        A missing matrix becomes the identity, a missing bias zeros.
        """
        bias, recurrent = self.bias_ih, F.dropout(self.weight_hh, dropped)
        matrix: Tensor | None = self.weight_ih
        if matrix is None:
            matrix = torch.ones_like(bias).diag()
        recurrent_bias: Tensor | None = self.bias_hh
        if recurrent_bias is None:
            recurrent_bias = torch.zeros_like(bias)
        return [matrix, recurrent, bias, recurrent_bias]


class Dropouts(NamedTuple):
    """Dropout probabilities within a stack of layers."""

    between: float  # dropout of a layer's output before the next layer
    on_h: float  # dropout of h before the recurrent matrix
    on_weights: float  # dropout of the recurrent matrix


class RecurrentStack(nn.Module):
    """All layers, with dropout between them, on h and on the recurrent matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(RecurrentLayer(config, *widths) for widths in pairwise(config.widths))

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Run the layers over x [B, T, E] from `state`; None starts from zeros.

        Return the last layer's h [B, T, H] and the state after the last token.

        Raises:
            SpecError: the state has another shape, or x has another width, which the kernel of an LSTM does not check.
        """
        config, cell = self.config, CELLS[self.config.cell]
        state = self._checked_state(x, state)
        dropouts = self._dropouts()
        after: list[LayerState] = []
        for indices in self._runs(dropouts):
            if after:
                x = drop(x, dropouts.between, config.variational)
            states = [tuple(part.to(x.dtype) for part in state[index]) for index in indices]
            weights = [self._layer(index).weights(dropouts.on_weights) for index in indices]
            if dropouts.on_h:
                x, last = run_stepped(
                    cell, x, states[0], weights[0], dropout_mask(x, states[0][0].shape, dropouts.on_h)
                )
            else:
                x, last = run_fused(cell, x, states, weights, dropouts.between if len(indices) > 1 else 0.0)
            after += last
        return x, tuple(after)

    def _layer(self, index: int) -> RecurrentLayer:
        layer = self.layers[index]
        assert isinstance(layer, RecurrentLayer), "all layers are recurrent"
        return layer

    def _dropouts(self) -> Dropouts:
        """Return the config's probabilities in training, zeros in evaluation."""
        if not self.training:
            return Dropouts(0.0, 0.0, 0.0)
        return Dropouts(self.config.layer_dropout, self.config.recurrent_dropout, self.config.weight_dropout)

    def _checked_state(self, x: Tensor, state: State | None) -> State:
        """Return the state before x [B, T, E], zeros if there is none; raises as `forward`."""
        reads, *widths = self.config.widths
        if x.shape[2] != reads:
            problem = f"the first layer reads vectors of {reads}, and is given {x.shape[2]} columns"
            raise SpecError(problem, f"let a map stand between: projected:{x.shape[2]} without in=none")
        tensors = CELLS[self.config.cell].states
        shapes = [[(len(x), width)] * tensors for width in widths]
        if state is None:
            return tuple(tuple(x.new_zeros(shape) for shape in layer) for layer in shapes)
        state_shapes = [[tuple(part.shape) for part in layer] for layer in state]
        if state_shapes != shapes:
            problem = f"the state has the shapes {state_shapes}, and {len(x)} sequences need {shapes}"
            raise SpecError(problem, "give each sequence the state that its own last piece returned")
        return state

    def _runs(self, dropouts: Dropouts) -> list[list[int]]:
        """Return the groups of layers that one call runs.

        A group has consecutive layers of one width. If a mask is shared over time, every layer is a group.
        """
        widths = self.config.widths[1:]
        if dropouts.on_h > 0 or (dropouts.between > 0 and self.config.variational):
            return [[index] for index in range(len(widths))]
        return [list(run) for _, run in groupby(range(len(widths)), widths.__getitem__)]


class RNNConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]  # no types
    """Config of `RNNLM`.

    Args:
        vocab_size: V, the number of input tokens.
        output_vocab_size: V_out, the number of output tokens; None: V.
        one_table: if V_out differs from V, give both tables max(V, V_out) rows, so that one table can serve both.
        hidden_size: H of every layer but the last.
        embedding_size: E, the width of the first layer's input; None: H.
        last_hidden_size: width of the last layer; None: H.
        num_hidden_layers: L.
        cell: "tanh", "relu", "gru" or "lstm".

    The comments of the fields describe the others.

    Raises:
        SpecError: no model can have these sizes or options.

    >>> RNNConfig(cell="gru", lstm_bias="two", hidden_size=8, embedding_size=4).widths
    [4, 8, 8]
    """

    model_type = "tiewise-rnn"
    keys_to_ignore_at_inference: ClassVar = ["state"]

    vocab_size: int = 10_000
    output_vocab_size: int | None = None  # V_out; None: V
    one_table: bool = False  # if V_out differs: both tables have max(V, V_out) rows, so that one can serve both
    hidden_size: int = 200
    embedding_size: int | None = None  # E; None: H
    last_hidden_size: int | None = None  # width of the last layer, which the head reads; None: H
    num_hidden_layers: int = 2

    cell: str = "lstm"  # tanh and relu (Elman), gru, lstm
    lstm_bias: str = "one"  # biases per gate; two, as in torch's kernels, give an LSTM or Elman cell the same functions
    input_matrix: bool = True  # False: h = f(e + W h + b), Elman cells with E = H alone
    output_bias: bool = True

    # dropout probabilities in training
    embedding_dropout: float = 0.0  # of words: every occurrence in the batch
    input_dropout: float = 0.0
    layer_dropout: float = 0.0  # between layers
    recurrent_dropout: float = 0.0  # of h before the recurrent matrix, one mask per sequence
    output_dropout: float = 0.0
    weight_dropout: float = 0.0  # of the recurrent matrix
    variational: bool = False  # input, layer and output masks are one per sequence, not one per token
    ar: float = 0.0  # α of the mean square of the head's input, added to the training loss
    tar: float = 0.0  # β of the mean square of the last layer's change from token to token

    table_range: float = 0.1  # initial tables are uniform within ± this
    body_range: float | None = None  # the same for all other weights; None: 1/√H, as in torch's cells

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        sizes = "vocab_size hidden_size num_hidden_layers output_vocab_size embedding_size last_hidden_size"
        require(self, sizes, lambda n: isinstance(n, int) and n >= 1, "sizes are whole numbers, 1 or more", SpecError)
        require_choice(self, "cell", CELLS, SpecError)
        require(self, "lstm_bias", ("one", "two").__contains__, "choose one or two", SpecError)
        if self.cell == "gru" and self.lstm_bias == "one":
            raise SpecError("a GRU with one bias is another function: a gate stands between", "use lstm_bias two")
        if not self.input_matrix and CELLS[self.cell].gates > 1:
            raise SpecError(f"{self.cell} without an input matrix: which of its gates would read the word?", "use tanh")
        if not self.input_matrix and len(set(self.widths)) > 1:
            problem = f"without an input matrix E = {self.widths[0]} must be H = {self.hidden_size} in every layer"
            raise SpecError(problem, "leave E and H equal; projected:E gives the table another width")
        dropped = "embedding_dropout input_dropout layer_dropout recurrent_dropout output_dropout weight_dropout"
        require(self, dropped, lambda x: 0 <= x < 1, "give the share that is dropped, 0 or more, below 1", SpecError)
        require(self, "ar tar table_range body_range", lambda x: 0 <= x < float("inf"), "give 0 or more", SpecError)

    @property
    def outputs(self) -> int:
        """V_out, the number of output tokens."""
        return self.output_vocab_size or self.vocab_size

    @property
    def widths(self) -> list[int]:
        """E, then the hidden width of every layer."""
        between = [self.hidden_size] * (self.num_hidden_layers - 1)
        return [self.embedding_size or self.hidden_size, *between, self.last_hidden_size or self.hidden_size]


@dataclass
class RNNOutput(ModelOutput):  # type: ignore[misc, unused-ignore]  # no types
    """Output of `RNNLM`.

    Attributes:
        loss: loss of the labels, in nats per token; None without labels.
        logits: [B, T, V_out].
        state: state after the last token, to be passed on (see `detached`).
        regularisation: the terms AR and TAR of the training loss, with or without labels.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: State | None = None
    regularisation: Tensor | None = None


class RNNLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc, unused-ignore]  # no types
    """Recurrent language model: input embedding, recurrent layers, output head.

    Args:
        config: an `RNNConfig`.

    Raises:
        SpecError: the config asks for a tied table, and the two tables differ in shape.

    >>> import torch
    >>> model = RNNLM(RNNConfig(vocab_size=10, hidden_size=4))
    >>> output = model(torch.tensor([[1, 2, 3]]))
    >>> output.logits.shape, len(output.state)
    (torch.Size([1, 3, 10]), 2)
    """

    config_class = RNNConfig
    main_input_name = "input_ids"
    _input_embed_layer = "embed"
    _tied_weights_keys: ClassVar = {"head.weight": "embed.weight"}
    _is_stateful = True

    def __init__(self, config: RNNConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        rows_in, rows_out, (table_width, *_, read) = config.vocab_size, config.outputs, config.widths
        if config.one_table:
            rows_in = rows_out = max(rows_in, rows_out)
        self.embed = nn.Embedding(rows_in, table_width)
        self.rnn = RecurrentStack(config)
        self.head = nn.Linear(read, rows_out, bias=config.output_bias)
        if (rows_in, table_width) != (rows_out, read):  # one table cannot serve both
            self._tied_weights_keys = {}  # type: ignore[misc]  # set on this model, not on its class
            adapted = getattr(config, ENTRY, None) is not None
            if config.tie_word_embeddings and not adapted:  # a boundary's maps may make the shapes fit
                raise self._untieable()
        self.post_init()

    def _untieable(self) -> SpecError:
        """Return the error for a tied model whose tables differ in rows or columns."""
        rows_in, table_width = self.embed.weight.shape
        rows_out, read = self.head.weight.shape
        if rows_in != rows_out:
            problem = f"tied tables of {rows_in} and {rows_out} rows"
            return SpecError(problem, "set one_table, which gives both ends the rows of the larger vocabulary")
        problem = f"tied: the table has E = {table_width} columns and the head reads H = {read}"
        remedy = f"leave E and H equal and install projected:{table_width}, which gives the table its own width"
        return SpecError(problem, remedy)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output head."""
        self.head = new_embeddings

    @can_return_tuple  # type: ignore[untyped-decorator, unused-ignore]  # no types
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
        """Predict the token after every one of `input_ids` [B, T].

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T]. Padding on the right is read like any token; padding on the left is refused.
            labels: [B, T], not shifted: the label at position i is the target of the tokens before i. -100 is ignored.
            state: the state that the piece of text before returned; None starts with zeros.
            shift_labels: [B, T], instead of labels. Position i has its target, so a piece loses none at its end. In
                evaluation
                an installed model keeps its loss fused if `labels` are also given.
            logits_to_keep: return logits of this many last positions; 0: of all.
            **kwargs: `num_items_in_batch`, by which the loss is divided.

        Returns:
            An `RNNOutput`.

        Raises:
            SpecError: there is padding on the left, or the state is that of other sequences.
        """
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise SpecError("sequences padded on the left, which a recurrent model reads", "pad on the right")
        config = self.config
        x = self.embed(input_ids)
        if self.training:
            x = drop_words(x, input_ids, self.embed.num_embeddings, config.embedding_dropout)
            x = drop(x, config.input_dropout, config.variational)
        hidden, state = self.rnn(x, state)
        read = hidden
        if self.training:
            read = drop(hidden, config.output_dropout, config.variational)
        logits = self.head(read[:, -logits_to_keep:])
        if config.outputs < self.head.out_features:
            logits = logits[..., : config.outputs]
        added = self._regularisation(hidden, read)
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self._loss(logits, labels, shift_labels, kwargs.get("num_items_in_batch"), added)
        return RNNOutput(loss, logits, state, added)

    def _regularisation(self, hidden: Tensor, read: Tensor) -> Tensor | None:
        """Return AR of the head's input plus TAR of the last layer's h (arXiv:1708.02182 §4.2).

        None in evaluation, and without coefficients.
        """
        ar, tar = self.config.ar, self.config.tar
        if not self.training or not (ar or tar):
            return None
        added: Tensor = ar * read.pow(2).mean()
        if hidden.shape[1] > 1:
            added = added + tar * hidden.diff(dim=1).pow(2).mean()
        return added

    def _loss(
        self, logits: Tensor, labels: Tensor | None, shift_labels: Tensor | None, items: Any, added: Tensor | None
    ) -> Tensor:
        """Return the loss of labels, or of shifted labels, plus the regularisation.

        If several micro-batches have `items` in all, each adds its share of the regularisation.
        """
        if items is not None:
            items = divisor(items)
        if shift_labels is not None:
            shift_labels = shift_labels.contiguous()
        targets = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": items}
        loss: Tensor = self.loss_function(logits=logits, vocab_size=self.config.outputs, **targets)
        if added is None:
            return loss
        if items is None:
            return loss + added
        counted = shift_labels
        if counted is None:
            assert labels is not None, "a loss has labels of one kind"
            counted = labels[:, 1:]
        share: Tensor = (counted != -100).sum() / items
        return loss + added * share

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, state: State | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the inputs of the next step: first the prompt, then one token at a time."""
        if state is not None:
            return {"input_ids": input_ids[:, -1:], "state": state}
        return {"input_ids": input_ids, "attention_mask": kwargs.get("attention_mask"), "logits_to_keep": 1}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("beam search would give one beam another's hidden state", "use num_beams=1")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RecurrentLayer):
            reach = self.config.body_range
            if reach is None:
                reach = module.weight_hh.shape[1] ** -0.5
            for parameter in module.parameters():
                init.uniform_(parameter, -reach, reach)
        elif isinstance(module, nn.Embedding | nn.Linear):
            init.uniform_(module.weight, -self.config.table_range, self.config.table_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
