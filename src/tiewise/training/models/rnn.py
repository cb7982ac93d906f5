"""`RNNLM`: a recurrent language model as a transformers model, so that install, Trainer and auto classes know it.

    x_t = embed(w_t)          h_t, state = layers(x_t, state)          logits_t = head(h_t)

Settings and sizes of Press & Wolf 2017, Inan, Khosravi & Socher 2017 and AWD-LSTM (arXiv:1708.02182) are configs of it;
tying, projections and corrections are boundaries that `tiewise.install` gives it.

Letters: V tokens read, V_out tokens predicted, E width of what the cell reads, H hidden width, L layers. A table that
is wider or narrower than the cell is the boundary's business (`projected:300`), and no field of the config.

Layers of cells, [B, T, E] -> [B, T, H], with a state:

    Elman   h' = f(W x + b + U h + c)                               f = tanh or relu
    GRU     r, z = σ(W x + b + U h + c)                             n = tanh(W x + b + r · (U h + c))
            h' = (1 - z) · n + z · h
    LSTM    i, f, o = σ(W x + b + U h + c), g = tanh(…)             s' = f · s + i · g,  h' = o · tanh(s')

Matrices are stacked by gate, in torch's order (GRU r z n, LSTM i f g o), so that torch's own modules can lend theirs.
One layer's state is (h,) or (h, s), each [B, H].

One call of torch's kernel runs all layers of one width where no mask is shared over time; only a mask on h itself is
stepped through in Python, and only in training. What is dropped in training:

    fresh      a mask per token                     Zaremba et al., arXiv:1409.2329
    locked     a mask per sequence, at every token  Gal & Ghahramani, arXiv:1512.05287
    of words   whole rows of a table                the same
    of weights a mask per matrix (DropConnect)      Merity et al., arXiv:1708.02182

What is kept is divided by its share. Masks are drawn anew by every forward: a sequence is one piece of text.
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

LayerState = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, LayerState], LayerState]


@dataclass(frozen=True)
class Cell:
    """One kind: its gates, the tensors of its state, torch's kernel, and one step.

    `step(given, recalled, state)` takes W x + b and U h + c, both [B, G·H], and the state before.
    """

    gates: int
    states: int
    kernel: Callable[..., tuple[Tensor, ...]]
    step: Step


def _elman(function: Callable[[Tensor], Tensor]) -> Step:
    """Return the step of an Elman cell with this function."""

    def step(from_input: Tensor, from_state: Tensor, state: LayerState) -> LayerState:
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


# What one layer multiplies by, as torch's kernels take it: input [G·H, E], recurrent [G·H, H], their biases [G·H] each.
Weights = list[Tensor]


def run_fused(
    cell: Cell, x: Tensor, states: Sequence[LayerState], weights: Sequence[Weights], dropout: float
) -> tuple[Tensor, list[LayerState]]:
    """Run layers of one width over x [B, T, E] in one call; `dropout` of every token stands between them.

    Returns: the last layer's h [B, T, H], and every layer's state behind the last token.
    """
    before = [torch.stack(parts) for parts in zip(*states, strict=True)]
    # as in training wherever a gradient is wanted: cuDNN keeps nothing for the backward pass otherwise
    keeps = dropout > 0 or torch.is_grad_enabled()
    hidden = before if cell.states > 1 else before[0]
    flat = [tensor for layer in weights for tensor in layer]
    with warnings.catch_warnings():
        if x.is_cuda:  # its kernel copies weights into one buffer, a small part of the work, and warns that it does
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        y, *after = cell.kernel(x, hidden, flat, True, len(weights), dropout, keeps, False, True)
    return y, list(zip(*(part.unbind(0) for part in after), strict=True))


def run_stepped(
    cell: Cell, x: Tensor, state: LayerState, weights: Weights, mask: Tensor
) -> tuple[Tensor, list[LayerState]]:
    """Run one layer over x [B, T, E], h multiplied by `mask` [B, H] before its matrix at every step.

    Returns: as `run_fused`.
    """
    matrix, recurrent, bias, recurrent_bias = weights
    # The matrix gets its gradient from `_repeat_bias`, in one product over all steps: it needs every h that the matrix
    # multiplied, and autograd must not multiply step by step, hence the detached transpose.
    multiplied: list[Tensor] = []
    biases = _repeat_bias(recurrent, recurrent_bias, multiplied, x.shape[:2])
    transpose = recurrent.detach().T
    hidden = []
    for from_input, step_bias in zip(F.linear(x, matrix, bias).unbind(1), biases, strict=True):
        masked = state[0] * mask
        multiplied.append(masked.detach())
        from_state = torch.addmm(step_bias, masked, transpose)
        state = cell.step(from_input, from_state, state)
        hidden.append(state[0])
    return torch.stack(hidden, 1), [state]


class _Together(Function):
    """The recurrent bias of every step [T, B, G·H], whose gradient tells that of the matrix in one product.

    Step by step autograd would add T matrices [G·H, H], which takes longer than the steps themselves. `read` is filled
    while stepping: what the matrix was multiplied by, without history.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, bias: Tensor, read: list[Tensor], sizes: tuple[int, int]) -> Tensor:
        ctx.read, ctx.dtype = read, matrix.dtype
        rows, steps = sizes
        return bias.repeat(steps, rows, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat = grad.flatten(0, 1)
        matrix = flat.T @ torch.cat(ctx.read).to(flat.dtype)
        return matrix.to(ctx.dtype), flat.sum(0).to(ctx.dtype), None, None


# torch's `apply` has no types
_repeat_bias: Callable[[Tensor, Tensor, list[Tensor], Sequence[int]], Iterable[Tensor]] = _Together.apply


def mask(like: Tensor, shape: tuple[int, ...], share: float) -> Tensor:
    """Return factors of `shape`: 0 with probability `share`, else 1 / (1 - share)."""
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - share).div_(1 - share)


def drop(x: Tensor, share: float, locked: bool) -> Tensor:
    """Drop features of x [B, T, D], other ones at every token, or alike over each sequence."""
    if share == 0:
        return x
    if locked:
        return x * mask(x, (x.shape[0], 1, x.shape[2]), share)
    return F.dropout(x, share, training=True)


def drop_words(x: Tensor, ids: Tensor, words: int, share: float) -> Tensor:
    """Drop words from x [B, T, D], the vectors of `ids` [B, T]: every occurrence of a dropped one, of `words` in all.

    The same as dropping rows of the table (and it may be done behind a linear map), without a second table.
    """
    if share == 0:
        return x
    return x * mask(x, (words, 1), share)[ids]


State = tuple[LayerState, ...]  # of every layer


def detached(state: State) -> State:
    """Return the same values without their history: truncated back-propagation ends here."""
    return tuple(tuple(part.detach() for part in layer) for layer in state)


class RecurrentLayer(nn.Module):
    """One layer's matrices and biases."""

    def __init__(self, config: Any, width_from: int, width: int) -> None:
        super().__init__()
        rows = CELLS[config.cell].gates * width
        self.weight_ih = nn.Parameter(torch.empty(rows, width_from)) if config.input_matrix else None  # [G·H, E]
        self.weight_hh = nn.Parameter(torch.empty(rows, width))  # [G·H, H]
        self.bias_ih = nn.Parameter(torch.empty(rows))
        self.bias_hh = nn.Parameter(torch.empty(rows)) if config.lstm_bias == "two" else None

    def weights(self, dropped: float) -> Weights:
        """Return the matrices and biases, a share of the recurrent one dropped; what is lacking changes nothing."""
        bias, recurrent = self.bias_ih, F.dropout(self.weight_hh, dropped)
        matrix: Tensor | None = self.weight_ih
        if matrix is None:
            matrix = torch.ones_like(bias).diag()
        recurrent_bias: Tensor | None = self.bias_hh
        if recurrent_bias is None:
            recurrent_bias = torch.zeros_like(bias)
        return [matrix, recurrent, bias, recurrent_bias]


class Dropouts(NamedTuple):
    """Shares that are dropped within a stack."""

    between: float  # of what one layer gives to the next
    on_h: float  # of h before its matrix
    on_weights: float  # of that matrix


class RecurrentStack(nn.Module):
    """All layers, with dropout between them, on h and on its matrix."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(RecurrentLayer(config, *widths) for widths in pairwise(config.widths))

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Run over x [B, T, E] from `state` (None: zeros); return the last layer's h [B, T, H] and the state behind.

        Raises:
            SpecError: a state of another shape, or x of another width, which the kernel of an LSTM does not notice.
        """
        config, cell = self.config, CELLS[self.config.cell]
        state = self._checked_state(x, state)
        dropouts = self._dropouts()
        after: list[LayerState] = []
        for places in self._runs(dropouts):
            if after:
                x = drop(x, dropouts.between, config.variational)
            states = [tuple(part.to(x.dtype) for part in state[place]) for place in places]
            weights = [self._layer(place).weights(dropouts.on_weights) for place in places]
            if dropouts.on_h:
                x, last = run_stepped(cell, x, states[0], weights[0], mask(x, states[0][0].shape, dropouts.on_h))
            else:
                x, last = run_fused(cell, x, states, weights, dropouts.between if len(places) > 1 else 0.0)
            after += last
        return x, tuple(after)

    def _layer(self, place: int) -> RecurrentLayer:
        layer = self.layers[place]
        assert isinstance(layer, RecurrentLayer), "all layers are recurrent"
        return layer

    def _dropouts(self) -> Dropouts:
        """Return the config's shares in training, none in evaluation."""
        if not self.training:
            return Dropouts(0.0, 0.0, 0.0)
        return Dropouts(self.config.layer_dropout, self.config.recurrent_dropout, self.config.weight_dropout)

    def _checked_state(self, x: Tensor, state: State | None) -> State:
        """Return the state before x [B, T, E], zeros where there is none. Raises as `forward`."""
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
        """Return the layers that one call runs: consecutive ones of one width, unless a mask is shared over time."""
        widths = self.config.widths[1:]
        if dropouts.on_h > 0 or (dropouts.between > 0 and self.config.variational):
            return [[place] for place in range(len(widths))]
        return [list(run) for _, run in groupby(range(len(widths)), widths.__getitem__)]


class RNNConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]  # no types
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
        """V_out."""
        return self.output_vocab_size or self.vocab_size

    @property
    def widths(self) -> list[int]:
        """E, then the hidden width of every layer."""
        between = [self.hidden_size] * (self.num_hidden_layers - 1)
        return [self.embedding_size or self.hidden_size, *between, self.last_hidden_size or self.hidden_size]


@dataclass
class RNNOutput(ModelOutput):  # type: ignore[misc, unused-ignore]  # no types
    """`loss` of the labels, `logits` [B, T, V_out], and the `state` behind the last token (see `detached`).

    `regularisation` is what AR and TAR add to the loss in training; it is there whether or not labels are.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: State | None = None
    regularisation: Tensor | None = None


class RNNLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc, unused-ignore]  # no types
    """Lookup, recurrent layers, head."""

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
        if (rows_in, table_width) != (rows_out, read):  # as they are, one table cannot serve both ends
            self._tied_weights_keys = {}  # type: ignore[misc]  # of this model, not of its class
            adapted = getattr(config, ENTRY, None) is not None
            if config.tie_word_embeddings and not adapted:  # a boundary's maps may make the two ends meet
                raise self._untieable()
        self.post_init()

    def _untieable(self) -> SpecError:
        """Return the error for a tied model whose two tables differ in rows or columns."""
        rows_in, table_width = self.embed.weight.shape
        rows_out, read = self.head.weight.shape
        if rows_in != rows_out:
            problem = f"tied tables of {rows_in} and {rows_out} rows"
            return SpecError(problem, "set one_table, which gives both ends the rows of the larger vocabulary")
        problem = f"tied: the table has E = {table_width} columns and the head reads H = {read}"
        remedy = f"leave E and H equal and install projected:{table_width}, which gives the table its own width"
        return SpecError(problem, remedy)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
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
        """Predict the token behind every one of `input_ids` [B, T].

        Args:
            attention_mask: padding on the right is read like any token; padding on the left is refused.
            labels: [B, T], position i's being the label of what stands before it; -100 counts for nothing.
            state: what the piece of text before returned; None starts with zeros.
            shift_labels: [B, T] in place of labels: position i's own target, so that a piece loses none at its end. An
                installed model keeps its loss fused in evaluation where `labels` are given beside them.
            logits_to_keep: give logits of the last positions alone (0: of all).
            **kwargs: `num_items_in_batch`, by which the loss is divided.

        Raises:
            SpecError: padding on the left, or a state of other sequences.
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
        """Return AR of the head's input and TAR of the last layer's h, in training (arXiv:1708.02182 §4.2)."""
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
        """Return the loss of labels, or of targets that are shifted already, with what regularisation adds.

        Of several micro-batches with `items` in all, each adds its share of the regularisation.
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
        """Read the prompt once, then one token at a time."""
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
