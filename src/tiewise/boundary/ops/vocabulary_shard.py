"""One table over several ranks: whose rows are where, and what the ranks tell each other.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

Map = Callable[[Tensor], Tensor]
LOWEST = -1e30  # stands for the lse of nothing, −inf: two of these have a difference


class VocabularyShard:
    """Which rows of a table of `total` rows this rank of `group` holds (None: of all ranks).

    With `own_tokens` each rank brings tokens of its own, any number of them, and gets its own rows and losses.
    """

    def __init__(self, total: int, group: Any = None, *, own_tokens: bool = False) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            fix = "call torch.distributed.init_process_group first, or leave shard out"
            raise UnsupportedError("a VocabularyShard without ranks", fix)
        self.total, self.group, self.own_tokens = total, group, own_tokens
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.rows = -(-total // self.size)  # of every rank but the last ones
        self.start, self.stop = (min(rank * self.rows, total) for rank in (self.rank, self.rank + 1))

    def __repr__(self) -> str:
        return f"VocabularyShard(rows {self.start}:{self.stop} of {self.total}, rank {self.rank} of {self.size})"

    def check(self, table: Tensor) -> None:
        """Refuse, with a ValueError, a table that is not this rank's part."""
        if len(table) != self.stop - self.start:
            wanted = f"rank {self.rank} of {self.size} holds rows {self.start}:{self.stop} of {self.total}"
            raise ValueError(f"{wanted}, and its table has {len(table)}")

    def own_options(self, weight: Tensor, o: LossOptions) -> LossOptions:
        """Refuse what a loss over ranks has not (ValueError, UnsupportedError); its options for the rows here alone."""
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
        """Local row of one word of the vocabulary; None where it is not here."""
        return word - self.start if word is not None and self.start <= word < self.stop else None

    def own(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """(positions in `words` [N] of those that are here, their local rows)."""
        at = ((words >= self.start) & (words < self.stop)).nonzero()[:, 0]
        return at, words[at] - self.start

    def columns(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """(local rows [n, 1], 0 for what is elsewhere and [n, 0] where there are none; which are here [n])."""
        here = (words >= self.start) & (words < self.stop)
        return (words - self.start).where(here, 0)[:, None][:, : self.stop - self.start], here

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[W, ...] of every rank's x [...]."""
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(found), x.contiguous(), group=self.group)
        return found

    def scatter(self, x: Tensor) -> Tensor:
        """Sum over ranks of their x [W, ...], of which this rank gets its own [...]."""
        found = x.new_empty(x.shape[1:])
        dist.reduce_scatter(found, list(x.contiguous()), group=self.group)
        return found

    # tokens: where all ranks have the same, there is no room, and everyone's are those that are here

    def room(self, tokens: Tensor) -> int | None:
        """How many tokens the rank that has most of them has; `tokens` [n, ...] are here."""
        if not self.own_tokens:
            return None
        most = torch.tensor(len(tokens), device=tokens.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def everyone(self, x: Tensor, room: int | None, fill: int = 0) -> Tensor:
        """[W · room, ...] of every rank's x [n, ...], filled up; x itself without room."""
        if room is None:
            return x
        return self.gather(torch.cat([x, x.new_full((room - len(x), *x.shape[1:]), fill)])).flatten(0, 1)

    def own_part(self, x: Tensor, room: int | None, n: int) -> Tensor:
        """What of everyone's x is of the n tokens here."""
        return x if room is None else x.unflatten(0, (self.size, room))[self.rank, :n]

    def summed_part(self, x: Tensor, room: int | None, n: int) -> Tensor:
        """The same of the sum over ranks of everyone's x; in place without room."""
        return self.sum(x) if room is None else self.scatter(x.unflatten(0, (self.size, room)))[:n]

    def owners(self, lse: Tensor, words: Tensor) -> Tensor:
        """Of every rank's lse [W, n], that of the rank which has each of `words` [n]."""
        return lse.gather(0, (words.clamp(0, self.total - 1) // self.rows)[None])[0]

    def softmax(self, z: Tensor, words: Tensor, spread: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Softmax over all ranks of the logits z [n, V_r], in place, for the targets `words` [n].

        Returns:
            its part [n, V_r]; and over the whole vocabulary the nll of the targets (inf where a logit is −inf), lse,
            and the sum of `spread` (None without), each [n]. What it says of an ignored target means nothing.
        """
        column, here = self.columns(words)
        top = z.amax(1) if z.shape[1] else z.new_full(z.shape[:1], LOWEST)
        top.clamp_(min=LOWEST)  # of rows that are −inf throughout
        nll = top - z.gather(1, column).sum(1)
        total = z.sub_(top[:, None]).exp_().sum(1).clamp_(min=1)  # less only where nothing is finite
        rest = total.log()
        told = [top + rest, (nll + rest).where(here, 0), *([] if spread is None else [spread])]
        lse, nlls, *spreads = self.gather(torch.stack(told)).unbind(1)
        nll = nlls.sum(0) + beyond(lse, self.owners(lse, words))
        z.mul_((beyond(lse, told[0]).neg_().exp_() / total)[:, None])
        return z, nll, lse.logsumexp(0), spreads[0].sum(0) if spreads else None


def beyond(lse: Tensor, one: Tensor) -> Tensor:
    """log Σ_r exp lse_r − `one` [n], which is one of the ranks' lse [W, n], rounded as their difference is small."""
    return (lse - one).logsumexp(0)


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back, found = back, there(x)
        if found is x:
            ctx.mark_dirty(x)
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(upstream), None, None


def mapped(x: Tensor, there: Map, back: Map) -> Tensor:
    """there(x), whose gradient is `back` of the one that comes; x itself where `there` works in place."""
    return _Mapped.apply(x, there, back)


def brought(x: Tensor, shard: VocabularyShard, room: int | None) -> Tensor:
    """Everyone's x, to meet the rows here; its gradient is the sum of what the ranks find, of x [n, ...]."""
    n = len(x)

    def back(upstream: Tensor) -> Tensor:
        own = upstream.clone(memory_format=torch.contiguous_format) if room is None else upstream
        return shard.summed_part(own, room, n)

    return mapped(x, lambda x: shard.everyone(x.view_as(x), room), back)


def returned(x: Tensor, shard: VocabularyShard, room: int | None = None, n: int = 0) -> Tensor:
    """Sum over ranks of everyone's x, of the n tokens here; in place without room, of an x that nobody else needs."""
    return mapped(x, lambda x: shard.summed_part(x, room, n), lambda upstream: shard.everyone(upstream, room))


def gathered(x: Tensor, shard: VocabularyShard) -> Tensor:
    """[W, ...] of every rank's x [...]; what is upstream is the same on all ranks, or of tokens of their own."""
    return mapped(x, shard.gather, lambda up: shard.scatter(up) if shard.own_tokens else up[shard.rank])


def exchanged(x: Tensor, shard: VocabularyShard) -> Tensor:
    """[W, ...] of what every rank has for this one, of its x [W, ...] by rank."""

    def exchange(x: Tensor) -> Tensor:
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(found, x.contiguous(), group=shard.group)
        return found

    return mapped(x, exchange, exchange)
