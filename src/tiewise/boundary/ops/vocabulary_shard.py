"""One table over several ranks: the rows of each rank, and what the ranks send to each other.

Of a table [V, E] rank r of W holds the rows [r·k, (r+1)·k) with k = ceil(V / W), as DTensor's `Shard(0)` cuts: the last
ranks hold fewer, or none. Token ids and targets are those of the whole vocabulary everywhere, and so are class weights
and a padding row; features and targets are the same on all ranks, unless each has `own_tokens`.

    shard = VocabularyShard(V)                                # rows shard.start … shard.stop of the table are here
    rows, table = tied_lookup(mine, ids, shard=shard)         # one sum over ranks, of [N, E]
    loss = linear_cross_entropy(body(rows), table, targets, shard=shard)

Both gradients of the rows that are here end in one buffer of their size, without the others. For its softmax a chunk
of n tokens costs one exchange of two or three numbers a token, from which every rank computes the same:

    lse_r, nll of the target among the rows of its owner, and with label smoothing (1/V) Σ_j w_j z_j
    lse = log Σ_r exp lse_r        nll = nll_owner + (lse − lse_owner)        P = P_r · exp(lse_r − lse)

where the differences of lse are computed as one sum: a sure token's nll near 0 keeps its digits. The gradient of the
features is summed over ranks once. Source of the method: Shoeybi et al. 2019 (Megatron-LM) §3.

Where ranks have `own_tokens`, as under FSDP, ids, features and targets of all come here first, filled up to the *room*
[W · room] that the rank with most tokens takes, and everything above runs on those. Rows, losses and the gradient of
features go back, each to the rank whose tokens they are of; the gradient of the rows here is that of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

Map = Callable[[Tensor], Tensor]
LOWEST = -1e30  # stands for the lse of nothing, −inf: two of these have a difference


def has_ranks() -> bool:
    """Return whether this process is one of torch.distributed's ranks."""
    return dist.is_available() and dist.is_initialized()


class ShardSoftmax(NamedTuple):
    """Softmax of a chunk over all ranks; a value of an ignored target means nothing."""

    p: Tensor  # [n, V_r], the part of the rows here
    nll: Tensor  # [n] of the targets over the whole vocabulary, inf where a logit is −inf
    lse: Tensor  # [n] over the whole vocabulary
    spread: Tensor | None  # [n], the sum over ranks of what each gave


class VocabularyShard:
    """Rows of a table of `total` rows that this rank of `group` holds (None: of all ranks).

    With `own_tokens` each rank brings separate tokens, any number of them, and gets its own rows and losses.
    """

    def __init__(self, total: int, group: Any = None, *, own_tokens: bool = False) -> None:
        if not has_ranks():
            fix = "call torch.distributed.init_process_group first, or leave shard out"
            raise UnsupportedError("a VocabularyShard without ranks", fix)
        self.total, self.group, self.own_tokens = total, group, own_tokens
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.rows = -(-total // self.size)  # of every rank but the last ones
        self.start = min(self.rank * self.rows, total)
        self.stop = min(self.start + self.rows, total)

    def __repr__(self) -> str:
        return f"VocabularyShard(rows {self.start}:{self.stop} of {self.total}, rank {self.rank} of {self.size})"

    def check(self, table: Tensor) -> None:
        """Refuse, with a ValueError, a table that is not this rank's part."""
        if len(table) != self.stop - self.start:
            rows = f"rank {self.rank} of {self.size} holds rows {self.start}:{self.stop} of {self.total}"
            raise ValueError(f"{rows}, and its table has {len(table)}")

    def own_options(self, weight: Tensor, o: LossOptions) -> LossOptions:
        """Return the options of a loss for the rows here alone.

        Options that a loss over ranks lacks are refused (ValueError, UnsupportedError).
        """
        self.check(weight)
        if torch.compiler.is_compiling():
            raise UnsupportedError("a vocabulary over several ranks under torch.compile", "compute this loss eagerly")
        if o.backend in ("liger", "cce"):
            raise UnsupportedError(f"a vocabulary over several ranks by backend={o.backend!r}", "leave backend out")
        if o.class_weight is None:
            return o
        if o.class_weight.shape != (self.total,):
            raise ValueError(f"class_weight has shape {tuple(o.class_weight.shape)}; need [V] = [{self.total}]")
        return replace(o, class_weight=o.class_weight[self.start : self.stop])

    def row(self, word: int | None) -> int | None:
        """Return the local row of one word of the vocabulary; None where it is not here."""
        if word is None or not self.start <= word < self.stop:
            return None
        return word - self.start

    def own(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions in `words` [N] of those that are here, and their local rows."""
        at = ((words >= self.start) & (words < self.stop)).nonzero()[:, 0]
        return at, words[at] - self.start

    def columns(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local rows [n, 1] of words [n], and which words are here [n].

        The row of a word elsewhere is 0; without rows here they are [n, 0].
        """
        is_here = (words >= self.start) & (words < self.stop)
        rows = (words - self.start).where(is_here, 0)
        return rows[:, None][:, : self.stop - self.start], is_here

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's x [...] as [W, ...]."""
        everyones = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(everyones), x.contiguous(), group=self.group)
        return everyones

    def scatter(self, x: Tensor) -> Tensor:
        """Sum over ranks of their x [W, ...], and return this rank's part [...]."""
        part = x.new_empty(x.shape[1:])
        dist.reduce_scatter(part, list(x.contiguous()), group=self.group)
        return part

    # tokens: where all ranks have the same, there is no room, and everyone's are those that are here

    def room(self, tokens: Tensor) -> int | None:
        """Return the number of tokens of the rank with most; `tokens` [n, ...] are here."""
        if not self.own_tokens:
            return None
        most = torch.tensor(len(tokens), device=tokens.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def everyone(self, x: Tensor, room: int | None, fill: int = 0) -> Tensor:
        """Return every rank's x [n, ...], filled up, as [W · room, ...]; x itself without room."""
        if room is None:
            return x
        filling = x.new_full((room - len(x), *x.shape[1:]), fill)
        return self.gather(torch.cat([x, filling])).flatten(0, 1)

    def own_part(self, x: Tensor, room: int | None, n: int) -> Tensor:
        """Return the part of everyone's x that is of the n tokens here."""
        if room is None:
            return x
        return torch.unflatten(x, 0, (self.size, room))[self.rank, :n]

    def summed_part(self, x: Tensor, room: int | None, n: int) -> Tensor:
        """Return the same of the sum over ranks of everyone's x; in place without room."""
        if room is None:
            return self.sum(x)
        return self.scatter(torch.unflatten(x, 0, (self.size, room)))[:n]

    def owners(self, lse: Tensor, words: Tensor) -> Tensor:
        """Return from every rank's lse [W, n] that of the rank with each of `words` [n]."""
        owner = words.clamp(0, self.total - 1) // self.rows
        return lse.gather(0, owner[None])[0]

    def softmax(self, z: Tensor, words: Tensor, spread: Tensor | None) -> ShardSoftmax:
        """Compute the softmax over all ranks of the logits z [n, V_r], in place, for the targets `words` [n]."""
        column, is_here = self.columns(words)
        top = _row_maxima(z)
        nll = top - z.gather(1, column).sum(1)
        total = z.sub_(top[:, None]).exp_().sum(1).clamp_(min=1)  # less only where nothing is finite
        rest = total.log()
        lse_here = top + rest
        to_send = [lse_here, (nll + rest).where(is_here, 0)]
        if spread is not None:
            to_send.append(spread)
        lse, nlls, *spreads = self.gather(torch.stack(to_send)).unbind(1)
        nll = nlls.sum(0) + beyond(lse, self.owners(lse, words))
        z.mul_((beyond(lse, lse_here).neg_().exp_() / total)[:, None])
        return ShardSoftmax(z, nll, lse.logsumexp(0), spreads[0].sum(0) if spreads else None)


def _row_maxima(z: Tensor) -> Tensor:
    """Return the largest logit of each row [n].

    It is LOWEST where a row has none or is −inf throughout.
    """
    if not z.shape[1]:
        return z.new_full(z.shape[:1], LOWEST)
    return z.amax(1).clamp_(min=LOWEST)


def beyond(lse: Tensor, one: Tensor) -> Tensor:
    """Return log Σ_r exp lse_r − `one` [n], which is one of the ranks' lse [W, n].

    It is rounded as their difference is small.
    """
    return (lse - one).logsumexp(0)


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        """Return there(x)."""
        ctx.back, result = back, there(x)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Return back(upstream)."""
        return ctx.back(upstream), None, None


def mapped(x: Tensor, there: Map, back: Map) -> Tensor:
    """Return there(x), with `back` of the upstream gradient as its gradient.

    It is x itself if `there` works in place.
    """
    apply: Callable[..., Tensor] = _Mapped.apply
    return apply(x, there, back)


def brought(x: Tensor, shard: VocabularyShard, room: int | None) -> Tensor:
    """Return everyone's x for the rows here.

    Its gradient, of x [n, ...], is summed over ranks.
    """
    n = len(x)

    def back(upstream: Tensor) -> Tensor:
        """Sum the gradients of everyone's x."""
        if room is None:  # the sum is in place, and others may read the upstream gradient
            upstream = upstream.clone(memory_format=torch.contiguous_format)
        return shard.summed_part(upstream, room, n)

    return mapped(x, lambda x: shard.everyone(x.view_as(x), room), back)


def returned(x: Tensor, shard: VocabularyShard, room: int | None = None, n: int = 0) -> Tensor:
    """Sum everyone's x over ranks, and return the part of the n tokens here.

    It is in place without room, of an x that nobody else needs.
    """
    return mapped(x, lambda x: shard.summed_part(x, room, n), lambda upstream: shard.everyone(upstream, room))


def gathered(x: Tensor, shard: VocabularyShard) -> Tensor:
    """Return every rank's x [...] as [W, ...].

    The upstream gradient is the same on all ranks, unless they have `own_tokens`.
    """

    def back(upstream: Tensor) -> Tensor:
        """Return the gradient of x here."""
        return shard.scatter(upstream) if shard.own_tokens else upstream[shard.rank]

    return mapped(x, shard.gather, back)


def exchanged(x: Tensor, shard: VocabularyShard) -> Tensor:
    """Exchange x [W, ...] all-to-all: `x[r]` goes to rank r; row r of the result came from rank r."""

    def exchange(x: Tensor) -> Tensor:
        """Send and receive one row a rank."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=shard.group)
        return received

    return mapped(x, exchange, exchange)
