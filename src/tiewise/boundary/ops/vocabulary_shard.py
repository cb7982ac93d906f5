"""Rows of one table on several ranks, and the exchanges between the ranks.

Rank r of W holds the rows [r·m, (r+1)·m) of a table [V, E], with m = ceil(V / W), as DTensor's `Shard(0)` does. The
last ranks hold fewer rows, or none. Token ids, targets, class weights and a padding row are those of the full
vocabulary on every rank. Features and targets are the same on all ranks, unless the shard has `own_tokens`.

    shard = VocabularyShard(V)                                # this rank has the rows shard.start … shard.stop
    rows, table = tied_lookup(mine, ids, shard=shard)         # one sum over ranks, of [N, E]
    loss = linear_cross_entropy(body(rows), table, targets, shard=shard)

Both gradients of the local rows end in one buffer of their size. For the softmax of a chunk of n tokens, the ranks
exchange two or three numbers a token, from which every rank computes the same result:

    lse_r, nll of the target among the rows of its owner, and with label smoothing (1/V) Σ_j w_j z_j
    lse = log Σ_r exp lse_r        nll = nll_owner + (lse − lse_owner)        P = P_r · exp(lse_r − lse)

Each difference of lse is computed as one sum, so that an nll near 0 keeps its digits. The gradient of the features is
summed over ranks once. Source of the method: Shoeybi et al. 2019 (Megatron-LM) §3.

If each rank has separate tokens (`own_tokens`, as under FSDP), the ranks first gather the ids, features and targets of
all ranks, padded to the token count of the largest rank: [W · max_tokens]. The steps above run on those. Then each rank
gets the rows, losses and feature gradients of its tokens. The gradient of the local rows sums the losses of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tiewise.core.backends import PACKAGE_BACKENDS, LossOptions
from tiewise.core.errors import UnsupportedError

Map = Callable[[Tensor], Tensor]
LOWEST = -1e30  # lse of no logits, instead of −inf: the difference of two of these is not nan


def has_ranks() -> bool:
    """Return whether this process is one of torch.distributed's ranks."""
    return dist.is_available() and dist.is_initialized()


class ShardSoftmax(NamedTuple):
    """Softmax of a chunk over all ranks; values of an ignored target have no meaning."""

    p: Tensor  # [n, V_r] probabilities of the local rows
    nll: Tensor  # [n] of the targets over the whole vocabulary, inf where a logit is −inf
    lse: Tensor  # [n] over the whole vocabulary
    spread: Tensor | None  # [n] (1/V) Σ_j w_j z_j, summed over ranks


class ShardRows(NamedTuple):
    """Sums of a chunk's rows over all ranks; each is [n], as in `ShardSoftmax`."""

    share: Tensor  # factor that turns exp(z − top) of the local rows into probabilities
    nll: Tensor
    lse: Tensor
    spread: Tensor | None


class VocabularyShard:
    """Rows of a table of `total` rows that this rank of `group` holds.

    Args:
        total: V, rows of the full table.
        group: process group of the ranks; None: all ranks.
        own_tokens: whether each rank has separate tokens, any number of them, and gets their rows and losses.

    Raises:
        UnsupportedError: torch.distributed is not initialised.

    Attributes:
        rank, size: number of this rank, and number of ranks W.
        rows: rows of every rank but the last ones, ceil(V / W).
        start, stop: first row of this rank, and the row after its last.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> VocabularyShard(10)
    VocabularyShard(rows 0:10 of 10, rank 0 of 1)
    >>> dist.destroy_process_group()
    """

    def __init__(self, total: int, group: Any = None, *, own_tokens: bool = False) -> None:
        if not has_ranks():
            fix = "call torch.distributed.init_process_group first, or leave shard out"
            raise UnsupportedError("a VocabularyShard without ranks", fix)
        self.total, self.group, self.own_tokens = total, group, own_tokens
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.rows = -(-total // self.size)  # rows of every rank but the last ones
        self.start = min(self.rank * self.rows, total)
        self.stop = min(self.start + self.rows, total)

    def __repr__(self) -> str:
        return f"VocabularyShard(rows {self.start}:{self.stop} of {self.total}, rank {self.rank} of {self.size})"

    def check(self, table: Tensor) -> None:
        """Raise a ValueError if a table is not this rank's part."""
        if len(table) != self.stop - self.start:
            rows = f"rank {self.rank} of {self.size} holds rows {self.start}:{self.stop} of {self.total}"
            raise ValueError(f"{rows}, and its table has {len(table)}")

    def local_options(self, weight: Tensor, options: LossOptions) -> LossOptions:
        """Return the options of a loss for the local rows.

        Raises:
            ValueError: the weight is not this rank's part, or the class weights are not [V].
            UnsupportedError: an option is not available over ranks.
        """
        self.check(weight)
        if torch.compiler.is_compiling():
            raise UnsupportedError("a vocabulary over several ranks under torch.compile", "compute this loss eagerly")
        if options.backend in ("compile", *PACKAGE_BACKENDS):
            raise UnsupportedError(
                f"a vocabulary over several ranks by backend={options.backend!r}", "leave backend out"
            )
        if options.class_weight is None:
            return options
        if options.class_weight.shape != (self.total,):
            raise ValueError(f"class_weight has shape {tuple(options.class_weight.shape)}; need [V] = [{self.total}]")
        return replace(options, class_weight=options.class_weight[self.start : self.stop])

    def row(self, word: int | None) -> int | None:
        """Return the local row of one word of the vocabulary; None if another rank has it."""
        if word is None or not self.start <= word < self.stop:
            return None
        return word - self.start

    def local_rows(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions in `words` [N] of this rank's words, and their local rows."""
        at = ((words >= self.start) & (words < self.stop)).nonzero()[:, 0]
        return at, words[at] - self.start

    def columns(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return the local rows [n, 1] of words [n], and whether each is local [n].

        The row of a word on another rank is 0. On a rank without rows the first tensor is [n, 0].
        """
        is_here = (words >= self.start) & (words < self.stop)
        rows = (words - self.start).where(is_here, 0)
        return rows[:, None][:, : self.stop - self.start], is_here

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's x [...] as [W, ...]."""
        gathered_x = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(gathered_x), x.contiguous(), group=self.group)
        return gathered_x

    def scatter(self, x: Tensor) -> Tensor:
        """Sum the ranks' x [W, ...], and return this rank's part [...]."""
        part = x.new_empty(x.shape[1:])
        dist.reduce_scatter(part, list(x.contiguous()), group=self.group)
        return part

    # tokens: if all ranks have the same tokens, `max_tokens` is None and nothing is gathered or split

    def max_tokens(self, tokens: Tensor) -> int | None:
        """Return the number of tokens of the rank with most; None if ranks share their tokens.

        `tokens` [n, ...] are this rank's.
        """
        if not self.own_tokens:
            return None
        most = torch.tensor(len(tokens), device=tokens.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def gather_tokens(self, x: Tensor, max_tokens: int | None, fill: int = 0) -> Tensor:
        """Return every rank's x [n, ...], padded with `fill`, as [W · max_tokens, ...].

        If `max_tokens` is None, it is x itself.
        """
        if max_tokens is None:
            return x
        filling = x.new_full((max_tokens - len(x), *x.shape[1:]), fill)
        return self.gather(torch.cat([x, filling])).flatten(0, 1)

    def local_part(self, x: Tensor, max_tokens: int | None, n: int) -> Tensor:
        """Return the part of gathered tokens' x that belongs to the n tokens of this rank."""
        if max_tokens is None:
            return x
        return torch.unflatten(x, 0, (self.size, max_tokens))[self.rank, :n]

    def sum_tokens(self, x: Tensor, max_tokens: int | None, n: int) -> Tensor:
        """Sum gathered tokens' x over ranks, and return the part of this rank's n tokens.

        If `max_tokens` is None, the sum is in place.
        """
        if max_tokens is None:
            return self.sum(x)
        return self.scatter(torch.unflatten(x, 0, (self.size, max_tokens)))[:n]

    def owner_lse(self, lse: Tensor, words: Tensor) -> Tensor:
        """Return from every rank's lse [W, n] that of the rank with each of `words` [n]."""
        owner = words.clamp(0, self.total - 1) // self.rows
        return lse.gather(0, owner[None])[0]

    def softmax(self, z: Tensor, words: Tensor, spread: Tensor | None) -> ShardSoftmax:
        """Compute the softmax over all ranks of the logits z [n, V_r], in place.

        `words` [n] are the targets; `spread` [n] is the local part of label smoothing's sum.
        """
        column, is_here = self.columns(words)
        top = _row_maxima(z)
        nll = top - z.gather(1, column).sum(1)
        total = z.sub_(top[:, None]).exp_().sum(1).clamp_(min=1)  # below 1 only if no logit is finite
        rows = self.combine(top, total, nll.where(is_here, 0), words, spread)
        z.mul_(rows.share[:, None])
        return ShardSoftmax(z, rows.nll, rows.lse, rows.spread)

    def combine(self, top: Tensor, total: Tensor, below_top: Tensor, words: Tensor, spread: Tensor | None) -> ShardRows:
        """Combine the ranks' sums over their columns: each [n], of the tokens with targets `words`.

        `top` is the largest logit, `total` is Σ exp(z − top), and `below_top` is top − z_t on the rank with the
        target, 0 on others.
        """
        _, is_here = self.columns(words)
        rest = total.log()
        lse_here = top + rest
        to_send = [lse_here, (below_top + rest).where(is_here, 0)]
        if spread is not None:
            to_send.append(spread)
        lse, nlls, *spreads = self.gather(torch.stack(to_send)).unbind(1)
        nll = nlls.sum(0) + logsumexp_minus(lse, self.owner_lse(lse, words))
        share = logsumexp_minus(lse, lse_here).neg_().exp_() / total
        return ShardRows(share, nll, lse.logsumexp(0), spreads[0].sum(0) if spreads else None)


def _row_maxima(z: Tensor) -> Tensor:
    """Return the largest logit of each row [n]; LOWEST if none is finite."""
    if not z.shape[1]:
        return z.new_full(z.shape[:1], LOWEST)
    return z.amax(1).clamp_(min=LOWEST)


def logsumexp_minus(lse: Tensor, reference: Tensor) -> Tensor:
    """Return log Σ_r exp lse_r − `reference` [n], from the ranks' lse [W, n].

    `reference` is one rank's lse. The rounding error is relative to the result, which may be small.
    """
    return (lse - reference).logsumexp(0)


class _ApplyMap(torch.autograd.Function):
    """Autograd function of a map and of the map of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
        """Return there(x)."""
        ctx.backward_map, result = backward_map, forward_map(x)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Return back(upstream)."""
        return ctx.backward_map(upstream), None, None


def apply_map(x: Tensor, forward_map: Map, backward_map: Map) -> Tensor:
    """Return there(x), with back(upstream) as the gradient of x.

    It is x itself if `forward_map` works in place.
    """
    apply: Callable[..., Tensor] = _ApplyMap.apply
    return apply(x, forward_map, backward_map)


def gather_inputs(x: Tensor, shard: VocabularyShard, max_tokens: int | None) -> Tensor:
    """Return all ranks' x for the local rows.

    The gradient of x [n, ...] is summed over ranks.
    """
    n = len(x)

    def backward_map(upstream: Tensor) -> Tensor:
        """Sum the gradients of all ranks' x."""
        if max_tokens is None:  # the sum is in place, and other nodes may read the upstream gradient
            upstream = upstream.clone(memory_format=torch.contiguous_format)
        return shard.sum_tokens(upstream, max_tokens, n)

    return apply_map(x, lambda x: shard.gather_tokens(x.view_as(x), max_tokens), backward_map)


def sum_outputs(x: Tensor, shard: VocabularyShard, max_tokens: int | None = None, n: int = 0) -> Tensor:
    """Sum all ranks' x over ranks, and return the part of this rank's n tokens.

    If `max_tokens` is None, the sum is in place, so no other code may need x.
    """
    return apply_map(
        x, lambda x: shard.sum_tokens(x, max_tokens, n), lambda upstream: shard.gather_tokens(upstream, max_tokens)
    )


def gather_ranks(x: Tensor, shard: VocabularyShard) -> Tensor:
    """Return every rank's x [...] as [W, ...], differentiably.

    The upstream gradient is the same on all ranks, unless they have `own_tokens`.
    """

    def backward_map(upstream: Tensor) -> Tensor:
        """Return the gradient of this rank's x."""
        return shard.scatter(upstream) if shard.own_tokens else upstream[shard.rank]

    return apply_map(x, shard.gather, backward_map)


def exchange_rows(x: Tensor, shard: VocabularyShard) -> Tensor:
    """Exchange x [W, ...] all-to-all: `x[r]` goes to rank r.

    Row r of the result came from rank r.
    """

    def exchange(x: Tensor) -> Tensor:
        """Send and receive one row for each rank."""
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=shard.group)
        return received

    return apply_map(x, exchange, exchange)
