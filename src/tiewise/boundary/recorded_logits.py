"""Logits as a record: hidden states, a table, and the later steps of a model's forward.

`RecordedLogits` stores them, computes the real logits on demand, and stores the result of the last pass over the
vocabulary. `tiewise.boundary.deferred` adds the methods of a Tensor, and `tiewise.boundary.logit_answers` computes
losses and statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tiewise.boundary.ops.log_prob import VocabularyStatistics
from tiewise.boundary.ops.problem import accumulator, compute_dtype
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard, exchange_rows, gather_inputs, gather_ranks
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

# the forms that logits take on the way to a loss or a statistic
LOGITS, LOG_P, P, P_LOG_P, P_LOGITS = "logits", "log p", "p", "p · log p", "p · logits"
MINUS_LOG_P = "−log p"
PRODUCTS = {frozenset((P, LOG_P)): P_LOG_P, frozenset((P, LOGITS)): P_LOGITS}


class Fold(NamedTuple):
    """All recorded steps combined: scale · product + bias.

    If `post` is not None, the logits are post · tanh(scale · product + bias).

    / 30 → tanh → * 30          Fold(scale=1/30) → Fold(scale=1/30, post=1) → Fold(scale=1/30, post=30)
    """

    scale: float = 1.0
    bias: Tensor | None = None
    post: float | None = None

    def scaled_bias(self, factor: float) -> Tensor | None:
        """Return the bias times a factor, in fp32 or wider; None without a bias."""
        if self.bias is None:
            return None
        return self.bias.to(accumulator(self.bias.dtype)) * factor


class Step(NamedTuple):
    """One recorded operation: `function(logits, *arguments)`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass
class Counts:
    """Counts of fused losses and of computed logits."""

    fused: int = 0  # losses and statistics without logits
    materialised: int = 0  # times that logits were computed
    operations: list[str] = field(default_factory=list)  # names of the operations that needed logits


class FusedLoss(NamedTuple):
    """A fused loss of deferred logits, with what is needed to repeat it from the logits."""

    edge: GradientEdge  # of the loss in autograd's graph
    positions: Tensor | None  # tokens of the loss; None: all tokens
    dtype: torch.dtype
    target: Tensor
    options: LossOptions


class PassTargets:
    """Targets [N] of a pass, compared with those of a later call."""

    def __init__(self, targets: Tensor) -> None:
        self.source, self.version = targets, _version(targets)
        self.values = targets.clone()  # the caller may write into its tensor

    def match(self, other: Tensor) -> bool:
        """Return whether `other` has the same values.

        On a GPU a comparison would make the host wait for all queued work. So the same memory, if nothing was written
        to it, is not compared again. On a CPU values are always compared, which also detects writes that do not change
        autograd's version counters.
        """
        if other.device.type != "cpu" and self._is_unchanged(other):
            return True
        return torch.equal(self.values, other)

    def _is_unchanged(self, other: Tensor) -> bool:
        """Return whether `other` is the same view of the source's memory, without later writes."""
        if self.version is None or self.version != _version(other):
            return False
        return _view_of(self.source) == _view_of(other)


def _view_of(x: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    """Return address, shape, strides, dtype and device, which identify a view."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


def _version(x: Tensor) -> int | None:
    """Return the number of writes to a tensor's memory, or None for an inference tensor."""
    if x.is_inference():
        return None
    return x._version


class VocabularyPass(NamedTuple):
    """Result of one pass over the vocabulary, with its targets (None: without targets)."""

    targets: PassTargets | None
    statistics: VocabularyStatistics


class RecordedLogits:
    """Logits steps(hidden [..., E] @ table [V, E]ᵀ + bias [V]), stored as their operands.

    `shard` describes the rows of a larger vocabulary that `table` and `bias` have. `logits` is the option of
    `LossOptions`, for losses and statistics without logits.
    """

    def __init__(
        self,
        hidden: Tensor,
        table: Tensor,
        bias: Tensor | None,
        counts: Counts,
        logits: str | None = None,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.hidden, self.table, self.bias, self.counts = hidden, table, bias, counts
        self.shard = shard
        self.logits = logits
        self.fold = Fold(bias=bias)  # all steps combined
        self.steps: tuple[Step, ...] = ()
        self.dtype = compute_dtype(hidden, table)
        self.product = self.dtype  # dtype in which the head multiplies
        self.grad_mode = torch.is_grad_enabled()  # at the call of the head
        self.form = LOGITS  # LOGITS, LOG_P, P, …
        self.parent: RecordedLogits | None = None  # logits that store the pass, of these tokens or of more
        self.positions: Tensor | None = None  # [n] positions of these tokens in the parent; None: all
        self.last_pass: VocabularyPass | None = None
        self.losses: list[FusedLoss] = []  # fused losses of these logits, stored in the origin only
        # the counter is shared by all logits that would be views of one memory; a step in place increments it
        self.memory, self.version = [0], 0
        self._real: Tensor | None = None

    def derive(self, step: Step | None = None, **changes: Any) -> Self:
        """Return new logits after one more `step`, if any, with the attributes in `changes`."""
        self.require_unchanged()
        new = type(self)(self.hidden, self.table, self.bias, self.counts, self.logits, self.shard)
        new.fold, new.dtype, new.product, new.form = self.fold, self.dtype, self.product, self.form
        new.grad_mode = new.grad_mode and self.grad_mode
        if step is None:
            new.steps = self.steps
            new.memory, new.version = self.memory, self.version  # a view of the same memory
        else:
            new.steps = (*self.steps, step)
        for name, value in changes.items():
            setattr(new, name, value)
        return new

    def derive_aligned(self, step: Step | None = None, **changes: Any) -> Self:
        """Derive logits of the same tokens in the same order, which share one pass."""
        return self.derive(step, parent=self.origin(), positions=self.positions, **changes)

    def origin(self) -> RecordedLogits:
        """Return the logits that store the pass. No step in place changes them."""
        if self.parent is None:
            self.parent = self.derive(memory=[0], version=0, grad_mode=self.grad_mode)
        return self.parent

    def __repr__(self) -> str:
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.steps)} steps)"

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        vocab = len(self.table)
        if self.shard is not None:
            vocab = self.shard.total
        return torch.Size((*self.hidden.shape[:-1], vocab))

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        """True if logits that are computed now would require a gradient."""
        if not (torch.is_grad_enabled() and self.grad_mode):
            return False
        if self.hidden.requires_grad or self.table.requires_grad:
            return True
        bias = self.fold.bias
        return bias is not None and bias.requires_grad

    @property
    def is_computed(self) -> bool:
        """True if the real logits have been computed."""
        return self._real is not None

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one dimension of it."""
        if dim is None:
            return self.shape
        return self.shape[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Return the number of logits."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def is_vocabulary(self, dim: Any) -> bool:
        """Return whether `dim` is the vocabulary's dimension."""
        return dim in (-1, self.ndim - 1, (-1,), [-1]) and not isinstance(dim, bool)

    def require_unchanged(self) -> None:
        """Refuse logits that a step in place would have changed, or whose table was freed.

        `fully_shard` frees the memory of a gathered table while these logits still refer to the tensor.
        """
        needs_table = not self.is_computed and self.table.numel() > 0 and not torch.compiler.is_compiling()
        if needs_table and not self.table.untyped_storage().nbytes():
            remedy = "call set_reshard_after_forward(False, recurse=False) on the module that was sharded with the head"
            raise UnsupportedError("fully_shard freed the table before these deferred logits were read", remedy)
        if self.version != self.memory[0]:
            problem = "these logits share memory with others that were scaled in place, and these are deferred"
            raise UnsupportedError(problem, "read those, or divide into a new tensor: logits / temperature")

    def real(self, reason: str = "real") -> Tensor:
        """Compute the logits by repeating the recorded steps, and store them.

        `reason` names the operation that needs them, for `Counts`.
        """
        self.require_unchanged()
        real = self._real
        if real is not None and (real.requires_grad or not self.requires_grad):  # else it was computed under no_grad
            return real
        logits = self.compute()
        if not torch.compiler.is_compiling():
            self._count_computation(reason)
            self._real = logits
        return logits

    def _count_computation(self, reason: str) -> None:
        """Count the computation, with its operation and the softmaxes before it."""
        self.counts.materialised += 1
        functions = [step.function for step in self.steps]
        softmaxes = [f.__name__ for f in functions if f in (torch.softmax, torch.log_softmax)]
        self.counts.operations.append(", ".join([*softmaxes, reason]))

    def compute(self) -> Tensor:
        """Return the computed logits without storing them."""
        self.require_unchanged()
        # restore the head's autocast and gradient mode, which may have changed
        with torch.set_grad_enabled(self.requires_grad), torch.autocast(self.device.type, enabled=False):
            logits = self._multiply()
            for function, arguments in self.steps:
                logits = function(logits, *[_computed_argument(x) for x in arguments])
        return logits

    def _multiply(self) -> Tensor:
        """Return hidden @ tableᵀ + bias [..., V], in the dtype in which the head multiplies."""
        dtype = self.product
        table = self.table.to(dtype)
        bias = self.bias
        if bias is not None:
            bias = bias.to(dtype)
        if self.shard is None:
            return F.linear(self.hidden.to(dtype), table, bias)
        tokens = self.hidden.reshape(-1, self.hidden.shape[-1])
        room = self.shard.max_tokens(tokens)
        all_tokens = gather_inputs(tokens, self.shard, room).to(dtype)
        logits = gather_vocabulary(F.linear(all_tokens, table, bias), self.shard, room)
        return logits[: len(tokens)].view(self.shape)


def _computed_argument(argument: Any) -> Any:
    """Return an argument of a step, computed if it is deferred logits."""
    if isinstance(argument, RecordedLogits):
        return argument.compute()
    return argument


def gather_vocabulary(logits: Tensor, shard: VocabularyShard, room: int | None = None) -> Tensor:
    """Return logits [..., V] of the full vocabulary, from each rank's [..., V_r].

    If `room` is given, ranks have separate tokens, at most `room` each, and every rank multiplied the tokens of all W
    ranks. Then `logits` is [W · room, V_r], and the result is for this rank's tokens.
    """
    padded = F.pad(logits, (0, shard.rows - logits.shape[-1]))  # the last rank has fewer rows
    if room is None:
        parts = gather_ranks(padded, shard)
    else:
        parts = exchange_rows(torch.unflatten(padded, 0, (shard.size, room)), shard)
    return parts.movedim(0, -2).flatten(-2)[..., : shard.total]


def head_of(z: RecordedLogits) -> tuple[Tensor, Tensor, Tensor | None, LossOptions]:
    """Return hidden states, table, bias and options that give the logits of `z`."""
    scale, bias, softcap = z.fold
    if softcap is not None:  # post · tanh(x) = softcap(post · x), with softcap(x) = c · tanh(x / c)
        scale = scale * softcap
        bias = z.fold.scaled_bias(softcap)
    return z.hidden, z.table, bias, LossOptions(scale, softcap, logits=z.logits)
