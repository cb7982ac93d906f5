"""Deferred logits: what an installed head returns so that a model's own forward ends in the fused loss.

A family's forward does a handful of things between its head and its loss: a cast, a scale, a soft-cap, a bias, a
reshape, a slice of positions. `Deferred` records them instead of computing, and `Fold` says what they amount to:

    logits = head(hidden)                                                   # Deferred(hidden, table)
    logits = logits / cap; logits = torch.tanh(logits); logits = logits * cap
    loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))     # linear_cross_entropy(..., softcap=cap)

It is no Tensor: nothing outside Python can touch it by accident, and what it does not know, a method or an argument of
one, computes the real logits by repeating the recorded steps: slower, never different. What would be lost is refused:
steps in place, as there is nothing to change, but for a scale that can be recorded; and hooks on a gradient that the
fused loss never makes.

What losses and trainers ask in the end is answered in chunks of tokens, without the [N, V] logits:

    asked of z [..., V], t [...] token ids                     answer, from one sweep of all tokens
    F.cross_entropy(z, t)                                      the fused loss, a sweep of its own
    log_softmax(z, -1).gather(-1, t[..., None])                log p_t
    softmax(z, -1).gather(-1, t[..., None])                    exp log p_t
    z.gather(-1, t[..., None])                                 lse + log p_t
    z.logsumexp(-1)                                            lse
    (log_p.exp() * log_p).sum(-1), and p from softmax          −H
    (−log_p).sum(-1), as the Trainer smooths labels            V times the fused loss with all its weight on smoothing
    (p * z).sum(-1)                                            lse − H
    z.argmax(-1), and z.mean(-1) without gradients             by rows of logits, a chunk at a time

`torch.autograd.grad(loss, z)` computes the logits and repeats the loss from them (`gradients`).

H is the entropy, lse the log-sum-exp, of the logits with everything recorded before, such as a temperature. The sweep
is remembered, and what iteration, `split` and `chunk` make of z takes its tokens from it: trainers ask row by row to
save memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tiewise.boundary.ops.chunked import compute_dtype
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.log_prob import VocabularyStatistics, vocabulary_statistics
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard, brought, exchanged, gathered
from tiewise.core.backends import LossOptions, chunk_rows
from tiewise.core.errors import UnsupportedError

# what deferred logits have become
LOGITS, LOG_P, P, P_LOG_P, P_LOGITS = "logits", "log p", "p", "p · log p", "p · logits"
MINUS_LOG_P = "−log p"
PRODUCTS = {frozenset((P, LOG_P)): P_LOG_P, frozenset((P, LOGITS)): P_LOGITS}


class Fold(NamedTuple):
    """scale · product + bias, and post · tanh(·) of it where `post` is not None.

    / 30 → tanh → * 30          Fold(scale=1/30) → Fold(scale=1/30, post=1) → Fold(scale=1/30, post=30)
    """

    scale: float = 1.0
    bias: Tensor | None = None
    post: float | None = None


@dataclass
class Counts:
    """What became of deferred logits: losses and statistics fused, logits computed, and by which operations."""

    fused: int = 0
    materialised: int = 0
    operations: list[str] = field(default_factory=list)


class Deferred:
    """Logits [..., V] = steps(hidden [..., E] @ table [V, E]ᵀ + bias [V]) that have not been computed."""

    __array_priority__ = Tensor.__array_priority__  # NumPy's numbers leave their operators to ours

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
        self.shard = shard  # whose rows table and bias are, of logits over the whole vocabulary
        self.logits = logits  # as in `LossOptions`, for what is answered without computing them
        self.fold = Fold(bias=bias)  # what the steps amount to
        self.steps: tuple[tuple[Any, ...], ...] = ()  # (function, *arguments) behind the logits
        self.dtype = self.product = compute_dtype(hidden, table)
        self.grad_mode = torch.is_grad_enabled()  # where the head was called
        self.form = LOGITS  # or what they have become: probabilities, say
        self.whole: Deferred | None = None  # whose tokens these are, all of them or those at `place` [n]
        self.place: Tensor | None = None
        self.swept: tuple[_Targets | None, Any] = None, None  # the targets of a sweep, and what it found
        self.losses: list[_FusedLoss] = []  # of an origin: the losses that were computed from its logits
        self.memory, self.version = [0], 0  # shared by what would be views: steps in place count it up
        self._real: Tensor | None = None

    def _with(self, *step: Any, **changed: Any) -> Deferred:
        """Return these logits with other attributes, and one more `step` where there is one."""
        self.require_unchanged()
        new = Deferred(self.hidden, self.table, self.bias, self.counts, self.logits, self.shard)
        new.fold, new.dtype, new.product, new.form = self.fold, self.dtype, self.product, self.form
        new.steps = (*self.steps, step) if step else self.steps
        new.grad_mode = new.grad_mode and self.grad_mode
        if not step:
            new.memory, new.version = self.memory, self.version
        for name, value in changed.items():
            setattr(new, name, value)
        return new

    def origin(self) -> Deferred:
        """What remembers the sweep of these logits; no step in place changes it."""
        if self.whole is None:
            self.whole = self._with(memory=[0], version=0, grad_mode=self.grad_mode)
        return self.whole

    def _same(self, *step: Any, **changed: Any) -> Deferred:
        """`_with` of the same logits at the same tokens, in the same order: a sweep of one serves the other."""
        return self._with(*step, whole=self.origin(), place=self.place, **changed)

    def __repr__(self) -> str:
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.steps)} steps)"

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], len(self.table) if self.shard is None else self.shard.total))

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
        """Whether computing them now would give a tensor with a gradient."""
        leaves = (self.hidden, self.table, self.fold.bias)
        return torch.is_grad_enabled() and self.grad_mode and any(x is not None and x.requires_grad for x in leaves)

    def size(self, dim: int | None = None) -> Any:
        """Shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of logits."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    # each records a method of torch (`_RECORDERS` says which) as a step, or is None where the fold cannot hold it

    def last(self, dim: Any) -> bool:
        """Whether `dim` is the vocabulary's."""
        return dim in (-1, self.ndim - 1, (-1,), [-1]) and not isinstance(dim, bool)

    def _to(self, *args: Any, **kwargs: Any) -> Deferred | None:
        """Cast to fp32, in which the fused loss accumulates in any case, or stay as it is."""
        try:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):  # a copy, deferred logits whose type is wanted, or nothing that torch knows
            return None
        dtype = dtype or self.dtype
        if device not in (None, self.device) or dtype not in (self.dtype, torch.float32) or layout is not None:
            return None
        return self if dtype == self.dtype else self._same(Tensor.to, dtype, dtype=dtype)

    def _view(self, *shape: Any) -> Deferred | None:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        width = self.shape[-1]
        if sizes and (sizes[-1] == width or (sizes[-1] == -1 and self.numel() == prod(sizes[:-1]) * width)):
            return self._same(hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return None

    def _pieces(self, dim: int, cut: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Deferred, ...] | None:
        """What `cut` makes of the leading dimensions; the sweep stays that of the whole."""
        if dim % self.ndim == self.ndim - 1:
            return None
        count = self.hidden.shape[:-1].numel()
        place = torch.arange(count, device=self.device) if self.place is None else self.place
        pieces = zip(cut(self.hidden), cut(place.view(*self.hidden.shape[:-1], 1)), strict=True)
        return tuple(self._with(hidden=h, whole=self.origin(), place=p.reshape(-1)) for h, p in pieces)

    def _at(self, index: Any) -> Deferred | None:
        split = _split_index(index, self.ndim)
        if split is None:
            return None
        positions, tokens = split
        if tokens == slice(None):
            return self._with(hidden=self.hidden[positions])
        scale, bias, post = self.fold
        of_steps = bias is not self.bias or (bias is not None and scale != 1.0)  # which has all tokens
        if self.form != LOGITS or of_steps or self.shard is not None:
            return None
        bias = None if bias is None else bias[tokens]
        fold = Fold(scale, bias, post)
        return self._with(hidden=self.hidden[positions], table=self.table[tokens], bias=bias, fold=fold)

    def _times(self, other: Any) -> Deferred | None:
        if not isinstance(other, Deferred):
            return self._scaled(Tensor.mul, other, other)
        form = PRODUCTS.get(frozenset((self.form, other.form)))
        if form is None or any(getattr(self, of) is not getattr(other, of) for of in ("hidden", "table", "fold")):
            return None
        return self._same(Tensor.mul, other, form=form, dtype=torch.promote_types(self.dtype, other.dtype))

    def _divided(self, other: Any) -> Deferred | None:
        return self._scaled(Tensor.div, other, 1 / other) if isinstance(other, int | float) and other else None

    def _scaled(self, function: Any, number: Any, factor: Any) -> Deferred | None:
        """`function` of `number` multiplies by a finite `factor`; a soft-cap is only known with a positive one."""
        scale, bias, post = self.fold
        known = isinstance(factor, int | float) and not isinstance(factor, bool) and abs(factor) < inf
        if not known or self.form != LOGITS or (post is not None and factor <= 0):
            return None
        scaled = Fold(scale * factor, None if bias is None else bias * factor)
        return self._with(function, number, fold=scaled if post is None else Fold(scale, bias, post * factor))

    def _plus(self, other: Any) -> Deferred | None:
        """Add a vector [V] (or [1, V], [1, 1, V]) of biases."""
        v, (scale, bias, post) = self.shape[-1], self.fold
        if not torch.is_tensor(other) or other.shape[-1:] != (v,) or other.numel() != v or post is not None:
            return None
        dtype = torch.promote_types(self.dtype, other.dtype)
        if other.dim() > self.ndim or dtype not in (self.dtype, torch.float32) or self.form != LOGITS:
            return None
        vector = other.reshape(-1)
        here = vector if self.shard is None else vector[self.shard.start : self.shard.stop]
        return self._with(Tensor.add, vector, fold=Fold(scale, here if bias is None else bias + here), dtype=dtype)

    def _scale_in_place(self, scaled: Deferred | None) -> Deferred | None:
        """Become `scaled`; what would share memory with these logits is not to be read any more."""
        with torch.enable_grad():
            ungraded = self.requires_grad  # a step that the gradient would not know of
        if scaled is None or self._real is not None or (ungraded and not torch.is_grad_enabled()):
            return None
        self.memory[0] += 1
        vars(self).update(vars(scaled) | {"memory": self.memory, "version": self.memory[0]})
        return self

    def _normalised(
        self, form: str, function: Any, dim: Any = None, *, dtype: Any = None, _stacklevel: int = 3
    ) -> Deferred | None:
        """The (log-)softmax over the vocabulary."""
        if self.form != LOGITS or not self.last(dim):
            return None
        device, narrow = self.device.type, self.dtype in (torch.bfloat16, torch.float16)
        widened = narrow and device == "cuda" and torch.is_autocast_enabled(device)  # a CPU's autocast leaves it
        dtype = dtype or (torch.float32 if widened else self.dtype)
        return self._same(function, -1, dtype, form=form, dtype=dtype) if dtype in (self.dtype, torch.float32) else None

    def require_unchanged(self) -> None:
        """Refuse logits that another step in place would have changed, or whose table is no longer there."""
        # `fully_shard` frees a gathered table by taking its memory away, under whoever still holds it
        gone = self._real is None and self.table.numel() and not torch.compiler.is_compiling()
        if gone and not self.table.untyped_storage().nbytes():
            fix = "call set_reshard_after_forward(False, recurse=False) on the module that was sharded with the head"
            raise UnsupportedError("fully_shard freed the table before these deferred logits were read", fix)
        if self.version != self.memory[0]:
            what = "these logits share memory with others that were scaled in place, and these are deferred"
            raise UnsupportedError(what, "read those, or divide into a new tensor: logits / temperature")

    def real(self, because: str = "real") -> Tensor:
        """Compute the logits by repeating the recorded steps; `because` names the operation that needs them."""
        self.require_unchanged()
        if self._real is not None and (self._real.requires_grad or not self.requires_grad):
            return self._real
        logits = self.computed()
        if not torch.compiler.is_compiling():
            self.counts.materialised += 1
            first = [function.__name__ for function, *_ in self.steps if function in (torch.softmax, torch.log_softmax)]
            self.counts.operations.append(", ".join([*first, because]))
            self._real = logits
        return logits

    def computed(self) -> Tensor:
        """Compute them, and remember nothing."""
        self.require_unchanged()
        # as the head would have: autocast and gradient mode may have changed since
        kind = self.product
        with torch.set_grad_enabled(self.requires_grad), torch.autocast(self.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(kind)
            if (shard := self.shard) is None:
                logits = F.linear(self.hidden.to(kind), self.table.to(kind), bias)
            else:
                hidden, n = self.hidden.reshape(-1, self.hidden.shape[-1]), self.hidden.shape[:-1].numel()
                room = shard.room(hidden)
                logits = F.linear(brought(hidden, shard, room).to(kind), self.table.to(kind), bias)
                logits = all_words(logits, shard, room)[:n].view(self.shape)
            for function, *arguments in self.steps:
                logits = function(logits, *(x.computed() if isinstance(x, Deferred) else x for x in arguments))
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record or answer what `_KNOWN` knows, refuse what would be lost, and compute everything else."""
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        operands = args[::-1] if func in _COMMUTING and args and not isinstance(args[0], Deferred) else args
        if func in _KNOWN and operands and isinstance(operands[0], Deferred):
            ask, product = _KNOWN[func], operands[0].form in PRODUCTS.values()
            try:
                found = None if product and ask is not ANSWERS["sum"] else ask(*operands, **kwargs)
            except TypeError:  # arguments that are not known
                found = None
            if found is not None:
                return found
        if func is torch.autograd.grad:
            return gradients(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        augmented = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")  # __imul__ of __mul__, not __invert__
        in_place = augmented or name in ("__setitem__", "__delitem__") or (name[-1:] == "_" and name[-2:] != "__")
        changed = (args[:1] if in_place or kwargs.get("inplace") else (), kwargs.get("out"))
        if any(isinstance(x, Deferred) for x in tree_leaves(changed)):
            what = f"{name} would change logits in place, and these are deferred: never computed"
            raise UnsupportedError(what, "use the operation that returns a new tensor, or take .real() first")
        if name in ("register_hook", "retain_grad"):
            what = f"{name} asks for the gradient of logits, and these are deferred: the fused loss never makes it"
            raise UnsupportedError(what, "take .real() first and compute the loss from that")
        args, kwargs = tree_map(lambda x: x.real(name) if isinstance(x, Deferred) else x, (args, kwargs))
        return func(*args, **kwargs)


def all_words(logits: Tensor, shard: VocabularyShard, room: int | None = None) -> Tensor:
    """Logits [..., V] of every rank's [..., V_r]; with room, of everyone's [W · room, V_r] those of the tokens here."""
    padded = F.pad(logits, (0, shard.rows - logits.shape[-1]))  # only behind the vocabulary's last word
    parts = gathered(padded, shard) if room is None else exchanged(padded.unflatten(0, (shard.size, room)), shard)
    return parts.movedim(0, -2).flatten(-2)[..., : shard.total]


def _split_index(index: Any, dims: int) -> tuple[tuple[Any, ...], slice] | None:
    """Which positions and which tokens an index into logits [..., V] asks for; None where it does not slice tokens.

    (..., :-1, :) → (..., :-1, :), all        0 → (0,), all        (..., :n) → (..., :), :n        (:, -1, 5) → None
    """
    items, used, dots = index if isinstance(index, tuple) else (index,), 0, False
    for item in items:
        if item is Ellipsis and not dots:
            dots = True
        elif torch.is_tensor(item):
            used += item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(item, int | slice) and not isinstance(item, bool):
            used += 1
        elif item is not None:  # two ellipses, or what takes more thought than it is worth
            return None
    if used != dims and (not dots or items[-1] is Ellipsis):
        return items, slice(None)
    last = items[-1]
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    return (*items[:-1], slice(None)), last


# what is asked of them in the end: an answer, or None for something else, for which the logits are computed

_GATHERED: dict[str, Callable[[Any], Tensor]] = {
    LOGITS: lambda s: s.lse + s.log_prob,
    LOG_P: lambda s: s.log_prob.clone(),  # the caller may write into it
    MINUS_LOG_P: lambda s: -s.log_prob,
    P: lambda s: s.log_prob.exp(),
}
_SUMMED: dict[str, Callable[[Any], Tensor]] = {P_LOG_P: lambda s: -s.entropy, P_LOGITS: lambda s: s.lse - s.entropy}
_LSE: dict[str, Callable[[Any], Tensor]] = {LOGITS: lambda s: s.lse.clone()}


def head_of(z: Deferred) -> tuple[Tensor, Tensor, Tensor | None, LossOptions]:
    """Features, table, bias and options whose logits are those of `z`."""
    scale, bias, softcap = z.fold
    if softcap is not None:  # post · tanh(x) = softcap(post · x), with softcap(x) = c · tanh(x / c)
        scale, bias = scale * softcap, None if bias is None else bias * softcap
    return z.hidden, z.table, bias, LossOptions(scale, softcap, logits=z.logits)


class _Targets:
    """Targets [N] of a sweep, to be recognised when they are asked for again."""

    def __init__(self, given: Tensor) -> None:
        self.given, self.version = given, _version(given)
        self.values = given.clone()  # the caller may write into its own

    def are(self, other: Tensor) -> bool:
        """Whether `other` has the same values. On a GPU, memory that nobody wrote to since is not compared again.

        A comparison there would have the host wait for all work that is queued. On a CPU it costs nothing, and sees
        what is written past autograd's version counters.
        """
        if other.device.type != "cpu" and self._is_unchanged(other):
            return True
        return torch.equal(self.values, other)

    def _is_unchanged(self, other: Tensor) -> bool:
        one, two = ((x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in (self.given, other))
        return one == two and self.version is not None and self.version == _version(other)


def _version(x: Tensor) -> int | None:
    """How often the memory of a tensor was written to; None of one that does not count."""
    return None if x.is_inference() else x._version


def _swept(z: Deferred, targets: Tensor | None = None) -> VocabularyStatistics:
    """Statistics [N] of the tokens of `z`; a piece with targets of its own is swept by itself."""
    z.require_unchanged()
    owner = z if targets is not None and z.place is not None else z.origin()
    known, found = owner.swept
    other = targets is not None and (known is None or not known.are(targets))
    if found is None or other or (owner.requires_grad and not found.lse.requires_grad):
        hidden, table, bias, options = head_of(owner)
        narrow = owner.product in (torch.bfloat16, torch.float16)  # as the head multiplied, whatever autocast is now
        with (
            torch.set_grad_enabled(owner.requires_grad),
            torch.autocast(owner.device.type, owner.product if narrow else None, enabled=narrow),
        ):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            found = vocabulary_statistics(hidden, table, targets, bias, options, entropy=True, shard=owner.shard)
        owner.counts.fused += 1
        owner.swept = None if targets is None else _Targets(targets), found
    if owner is z or z.place is None:
        return found
    return VocabularyStatistics(None, found.lse[z.place], found.entropy[z.place])


def gather(z: Deferred, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor | None:
    """`torch.gather` of one token per position."""
    fits = torch.is_tensor(index) and index.shape == (*z.shape[:-1], 1) and not sparse_grad
    if not fits or index.dtype != torch.long or torch.compiler.is_compiling():
        return None
    if index.device.type == "cpu" and index.numel() and not 0 <= index.min() <= index.max() < z.shape[-1]:
        return None  # torch says what is wrong with it
    return _of_sweep(_GATHERED, z, dim, True, index.reshape(-1))


def _of_sweep(
    answers: dict[str, Callable[[Any], Tensor]], z: Deferred, dim: Any, keepdim: bool, targets: Tensor | None = None
) -> Tensor | None:
    if not z.last(dim) or z.form not in answers or torch.compiler.is_compiling():
        return None
    with torch.set_grad_enabled(z.requires_grad):
        return _handed(z, answers[z.form](_swept(z, targets)), keepdim)


def total(z: Deferred, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor | None:
    """`torch.sum` over the vocabulary of log-probabilities, or of a product with probabilities."""
    if z.form not in (LOG_P, MINUS_LOG_P):
        return _of_sweep(_SUMMED, z, dim, keepdim) if dtype is None else None
    if not z.last(dim) or dtype not in (None, z.dtype, torch.float32) or torch.compiler.is_compiling():
        return None
    z.require_unchanged()
    hidden, table, bias, options = head_of(z)
    # with ε = 1 the loss of a token is the mean of −log p over the vocabulary, whatever its target
    options = replace(options, label_smoothing=1.0, reduction="none")
    targets = torch.zeros(z.shape[:-1], dtype=torch.long, device=z.device)
    with torch.set_grad_enabled(z.requires_grad):
        each = linear_cross_entropy(hidden, table, targets, bias, options, shard=z.shard) * z.shape[-1]
        z.counts.fused += 1
        found = _handed(z, each if z.form == MINUS_LOG_P else -each, keepdim)
        return found if dtype is None else found.to(dtype)


def mean(z: Deferred, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """`torch.mean` over the vocabulary, or over everything, where no gradient is wanted."""
    if z.requires_grad or not (dim is None or z.last(dim)):
        return None
    found = _by_rows(z, torch.mean, keepdim and dim is not None)
    return found.mean() if dim is None and found is not None else found


def _by_rows(z: Deferred, function: Callable[..., Tensor], keepdim: bool) -> Tensor | None:
    apart = z.shard is not None and z.shard.own_tokens  # ranks that may have other numbers of chunks
    if z.form in _SUMMED or apart or torch.compiler.is_compiling():
        return None
    with torch.no_grad():
        flat = z.hidden.reshape(-1, z.hidden.shape[-1])
        rows = flat.split(chunk_rows(len(flat), z.shape[-1], z.device.type))
        return _handed(z, torch.cat([function(z._with(hidden=h).computed(), -1) for h in rows]), keepdim)


def _handed(z: Deferred, found: Tensor, keepdim: bool) -> Tensor:
    # transformers casts logits to fp32, which narrows those of an fp64 model: what is made of them is fp32 then
    found = found.to(z.dtype) if found.dtype == torch.float64 else found
    return found.reshape((*z.shape[:-1], 1) if keepdim else z.shape[:-1])


def fused_cross_entropy(
    input: Deferred,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` of deferred logits [N, V], fused; None where the fused loss does not compute what is asked."""
    if not torch.is_tensor(target) or target.is_floating_point() or input.form != LOGITS:
        return None
    if input.dim() != 2 or target.dim() != 1 or (size_average, reduce) != (None, None):
        return None
    input.require_unchanged()
    if not torch.compiler.is_compiling():
        input.counts.fused += 1
    hidden, table, bias, o = head_of(input)
    o = replace(o, ignore_index=ignore_index, label_smoothing=label_smoothing, class_weight=weight, reduction=reduction)
    with torch.set_grad_enabled(input.requires_grad):
        loss = linear_cross_entropy(hidden, table, target, bias, o, shard=input.shard)
    loss = loss.to(input.dtype) if loss.dtype == torch.float64 else loss  # as in `_handed`
    if not torch.compiler.is_compiling():  # first, since Dynamo traces no question about a graph
        _note_loss(input, loss, target, o)
    return loss


def _note_loss(logits: Deferred, loss: Tensor, target: Tensor, options: LossOptions) -> None:
    """Remember a fused loss for `gradients`, if autograd recorded it."""
    if loss.grad_fn is None or torch._C._are_functorch_transforms_active():
        return
    edge = torch.autograd.graph.get_gradient_edge(loss)
    logits.origin().losses.append(_FusedLoss(edge, logits.place, logits.dtype, target.clone(), options))


# the gradient of a loss with respect to its logits


class _FusedLoss(NamedTuple):
    """A fused loss of deferred logits: where it is in autograd's graph, and how to compute it again from the logits."""

    edge: Any
    place: Tensor | None  # the tokens that it is of; None: all of them
    dtype: torch.dtype
    target: Tensor
    options: LossOptions

    def gradient(self, logits: Tensor, upstream: Tensor, create_graph: bool) -> Tensor:
        """Gradient of this loss with respect to all `logits` [..., V], times the gradient `upstream` of the loss."""
        o = self.options
        if not self.target.ne(o.ignore_index).any():
            return torch.zeros_like(logits)
        logits = logits if create_graph else logits.detach().requires_grad_()
        with torch.enable_grad():
            rows = logits.reshape(-1, logits.shape[-1]).to(self.dtype)
            rows = rows if self.place is None else rows[self.place]
            named: dict[str, Any] = {
                "ignore_index": o.ignore_index,
                "reduction": o.reduction,
                "label_smoothing": o.label_smoothing,
            }
            loss = F.cross_entropy(rows, self.target, o.class_weight, **named)
        return torch.autograd.grad(loss, logits, upstream.to(loss.dtype), create_graph=create_graph)[0]


def gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Answer `torch.autograd.grad` where deferred logits are among the inputs.

    A fused loss has no logits in its graph. So the logits are computed, each fused loss is repeated from them, and its
    gradient is multiplied by the gradient of `outputs` with respect to the fused loss.
    """
    outputs, inputs = ([x] if isinstance(x, Tensor | Deferred) else list(x) for x in (outputs, inputs))
    real = [x.real("grad") if isinstance(x, Deferred) else x for x in inputs]
    losses = [
        (i, loss)
        for i, z in enumerate(inputs)
        if isinstance(z, Deferred) and z.form == LOGITS and z.place is None
        for loss in z.origin().losses
    ]
    if losses and options.get("is_grads_batched"):
        raise UnsupportedError("is_grads_batched with deferred logits", "ask for one gradient at a time")
    edges = [loss.edge for _, loss in losses]
    outputs = [x.real("grad") if isinstance(x, Deferred) else x for x in outputs]
    found = torch.autograd.grad(outputs, [*real, *edges], grad_outputs, allow_unused=True, **options)
    answer = list(found[: len(real)])
    for (i, loss), upstream in zip(losses, found[len(real) :], strict=True):
        if upstream is not None:
            own = loss.gradient(real[i], upstream, bool(options.get("create_graph")))
            answer[i] = own if answer[i] is None else answer[i] + own
    if materialize_grads:
        answer = [torch.zeros_like(x) if g is None else g for g, x in zip(answer, real, strict=True)]
    elif not allow_unused and any(g is None for g in answer):
        raise RuntimeError("one of the inputs of torch.autograd.grad was not used in the graph: set allow_unused=True")
    return tuple(answer)


ANSWERS: dict[str, Callable[..., Tensor | None]] = {
    "gather": gather,
    "take_along_dim": lambda z, indices, dim=None: None if dim is None else gather(z, dim, indices),
    "logsumexp": lambda z, dim, keepdim=False: _of_sweep(_LSE, z, dim, keepdim),
    "sum": total,
    "argmax": lambda z, dim=None, keepdim=False: (
        _by_rows(z, torch.argmax, keepdim) if isinstance(dim, int) and z.last(dim) else None
    ),
    "mean": mean,
    "cross_entropy": fused_cross_entropy,
}


# name of a method -> what records it, where it can
_COMMUTE = dict.fromkeys(("__mul__", "__rmul__", "mul", "multiply"), Deferred._times)
_COMMUTE |= dict.fromkeys(("__add__", "__radd__", "add"), Deferred._plus)
_RECORDERS: dict[str, Callable[..., Any]] = {
    "to": Deferred._to,
    "float": lambda z, **kwargs: z._to(torch.float32, **kwargs),
    "detach": lambda z: z._same(grad_mode=False),
    "view": Deferred._view,
    "reshape": Deferred._view,
    "flatten": lambda z, start_dim=0, end_dim=-1: (
        None if end_dim % z.ndim == z.ndim - 1 else z._same(hidden=z.hidden.flatten(start_dim, end_dim))
    ),
    "contiguous": lambda z: z,  # logits that do not exist are
    "__getitem__": Deferred._at,
    "__iter__": lambda z: None if (rows := z._pieces(0, torch.unbind)) is None else iter(rows),
    "unbind": lambda z, dim=0: z._pieces(dim, lambda x: x.unbind(dim)),
    "split": lambda z, split_size, dim=0: z._pieces(dim, lambda x: x.split(split_size, dim)),
    "chunk": lambda z, chunks, dim=0: z._pieces(dim, lambda x: x.chunk(chunks, dim)),
    "tanh": lambda z: (  # once, as the middle of a soft-cap
        z._with(Tensor.tanh, fold=z.fold._replace(post=1.0)) if z.fold.post is None and z.form == LOGITS else None
    ),
    "exp": lambda z: z._same(torch.exp, form=P) if z.form == LOG_P else None,
    **dict.fromkeys(
        ("__neg__", "neg", "negative"), lambda z: z._same(torch.neg, form=MINUS_LOG_P) if z.form == LOG_P else None
    ),
    "log_softmax": lambda z, *args, **kwargs: z._normalised(LOG_P, torch.log_softmax, *args, **kwargs),
    "softmax": lambda z, *args, **kwargs: z._normalised(P, torch.softmax, *args, **kwargs),
    **_COMMUTE,
    **dict.fromkeys(("__truediv__", "div", "divide", "true_divide"), Deferred._divided),
    **dict.fromkeys(
        ("__itruediv__", "div_", "divide_", "true_divide_"), lambda z, other: z._scale_in_place(z._divided(other))
    ),
    **dict.fromkeys(
        ("__imul__", "mul_", "multiply_"),
        lambda z, other: None if isinstance(other, Deferred) else z._scale_in_place(z._times(other)),
    ),
}
# and by the functions of torch, since a compiled function has no name that Dynamo could compare
_COMMUTING, _KNOWN = (
    {getattr(home, name): found[name] for name in found for home in (torch, Tensor, F) if hasattr(home, name)}
    for found in (_COMMUTE, _RECORDERS | ANSWERS)
)


def _method(name: str) -> Callable[..., Any]:
    """What stands for a tensor's method: recorded, refused, or computed."""
    function = getattr(Tensor, name)
    return lambda self, *args, **kwargs: Deferred.__torch_function__(function, (), (self, *args), kwargs)


_OPERATORS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__", "__reduce_ex__")
_OF_OBJECTS = {*dir(Deferred), "__torch_dispatch__", "__setstate__", "dtype"}
for _name in (*_OPERATORS, *(name for name in dir(Tensor) if name not in _OF_OBJECTS)):
    if callable(getattr(Tensor, _name)):
        setattr(Deferred, _name, _method(_name))
    elif not _name.startswith("__"):
        setattr(Deferred, _name, property(lambda self, name=_name: getattr(self.real(name), name)))  # type: ignore[misc]
