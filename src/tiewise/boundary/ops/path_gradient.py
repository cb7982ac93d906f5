"""One table, two gradients, one buffer.

A tied table W has two gradients: the lookup path's (A, a few rows) and the head path's (B, every row).
Plain autograd builds a dense [V, E] tensor for each and a third for their sum. Here the lookup hands the table on:

    rows, W' = tied_lookup(W, ids)      # forward: rows = W[ids], W' = W (a view)
    loss = head(body(rows), W')         # the head uses W', so the graph orders the backward: head first, lookup last

    backward of `tied_lookup`, called once with both gradients complete:
        gradient of W = gradient of W'          (head path: the loss's own buffer)
        gradient of W[ids] += gradient of rows  (lookup path: in place, distinct rows only)

Nothing is shared on the side: if the rows are detached, or the head is not used, the other path still arrives.
Several lookups of one table chain (`tied_lookup(W', more_ids)`). The method orders nodes by the autograd graph alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard, has_ranks, returned
from tiewise.core.backends import PathNorms
from tiewise.core.errors import UnsupportedError


@dataclass
class PathRecord:
    """The lookup path's rows since the last `clear`: kept apart until the optimizer step.

    Each piece has the tokens of a backward pass and their rows: on a CPU one per distinct token; elsewhere, where
    finding these takes a synchronisation, one per token until pieces are merged.
    """

    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, ids: Tensor, rows: Tensor) -> None:
        """Add the gradient rows [n, E] of the tokens `ids` [n].

        Pieces merge so that memory stays bounded.
        """
        self.pieces.append((ids, rows))
        if len(self.pieces) > 8:
            self.pieces = [self.merged()]

    def merged(self) -> tuple[Tensor, Tensor]:
        """Return (distinct tokens [U], their summed rows of the lookup path [U, E])."""
        ids, rows = zip(*self.pieces, strict=True)
        return _distinct(torch.cat(ids), torch.cat(rows))

    def clear(self) -> None:
        """Forget everything, as `zero_grad` does for gradients."""
        self.pieces.clear()


@dataclass(frozen=True)
class LookupOptions:
    """Options of the gradient of a lookup."""

    stop_lookup: int | None = None  # row whose lookup path alone is stopped: `padding_idx` of torch
    stop_both: int | None = None  # row that receives no gradient from either path
    alpha: float = 1.0  # factor on the lookup path
    record: PathRecord | None = None  # where the lookup path's rows are kept for `path_norms`
    into: Tensor | None = None  # [V, E] that the rows are added to; the `into` of the loss, and without `stop_both`


_NONE = LookupOptions()


def tied_lookup(
    table: Tensor, ids: Tensor, options: LookupOptions = _NONE, *, shard: VocabularyShard | None = None
) -> tuple[Tensor, Tensor]:
    """Look up `ids` [...] in `table` [V, E] and hand the table on.

    With a `shard` the table is this rank's rows [V_r, E]; ids, and the rows that `options` stop, are those of the whole
    vocabulary, and every rank gets all rows [..., E]. A record then holds local rows, for `path_norms` with the shard;
    where ranks have `own_tokens`, the sum of all of theirs.

    Returns:
        rows [..., E] and the table to use from here on. The second may feed only lookups through `tied_lookup`, matrix
        products and `linear_cross_entropy`: their gradients are written once and owned by nobody else, which is
        what makes adding the lookup path in place safe. A regulariser takes the original `table`.

    Raises:
        UnsupportedError: no tensors, ids that are no whole numbers, a table that is no matrix or on another device,
            inside `torch.func` transforms, and (in backward) when asked for a second derivative; with a shard also
            under `torch.compile`.
        ValueError: a table that is not the shard's.
        IndexError: an id outside [0, V) (checked on CPU only), or a table without rows.
    """
    _check_types(table, ids, options)
    if shard is not None:
        return _of_shard(table, ids, options, shard)
    is_compiling = torch.compiler.is_compiling()
    if ids.device != table.device:
        where = f"token ids on {ids.device} and a table on {table.device}"
        raise UnsupportedError(f"tied_lookup() of {where}", "move the ids to the table's device")
    if options.into is not None and (options.stop_both is not None or is_compiling):
        fix = "leave into out, here and of the loss"
        raise UnsupportedError("tied_lookup() with into beside stop_both or under torch.compile", fix)
    if is_compiling:
        return _traceable(table, ids, options)
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError("tied_lookup() inside a torch.func transform", "use torch.nn.functional.embedding there")
    _check_ids(ids, len(table))
    if not (torch.is_grad_enabled() and table.requires_grad):
        return F.embedding(ids, table), table
    apply: Callable[..., tuple[Tensor, Tensor]] = _TiedLookup.apply
    return apply(table, ids, options)


def _check_types(table: Any, ids: Any, options: LookupOptions) -> None:
    """Refuse arguments that are no table and token ids, and an alpha that is not finite."""
    if not (isinstance(table, Tensor) and isinstance(ids, Tensor)):
        what = f"tied_lookup() of a {type(table).__name__} and a {type(ids).__name__}"
        raise UnsupportedError(what, "give the table [V, E] (a module's weight) and token ids, both as tensors")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise UnsupportedError(f"tied_lookup() of token ids of type {ids.dtype}", "cast them to torch.long")
    if table.dim() != 2:
        raise UnsupportedError(f"tied_lookup() in a table of shape {tuple(table.shape)}", "give a table [V, E]")
    if not -math.inf < options.alpha < math.inf:
        raise UnsupportedError(f"tied_lookup() with alpha = {options.alpha}", "give a finite number")


def _check_ids(ids: Tensor, rows: int) -> None:
    """Refuse ids outside [0, rows) with an IndexError.

    They are checked on a CPU, and on any device if there are no rows.
    """
    if not ids.numel():
        return
    if not rows:
        raise IndexError(f"{ids.numel()} token ids for a table that has no rows")
    if ids.device.type == "cpu":  # elsewhere the lookup asserts, without a synchronisation
        low, high = ids.aminmax()
        if low < 0:
            raise IndexError(f"token {int(low)} is outside the table of {rows} rows")
        if high >= rows:
            raise IndexError(f"token {int(high)} is outside the table of {rows} rows")


def _of_shard(table: Tensor, ids: Tensor, o: LookupOptions, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Look up everyone's ids in the rows here, and sum over ranks."""
    if torch.compiler.is_compiling():
        raise UnsupportedError("a vocabulary over several ranks under torch.compile", "look up eagerly")
    shard.check(table)
    flat, n = ids.reshape(-1), ids.numel()
    room = shard.room(flat)
    flat = shard.everyone(flat, room)
    if flat.device.type == "cpu" and len(flat):
        _check_vocabulary(flat, shard.total)
    at, local_ids = shard.own(flat)
    local = replace(o, stop_lookup=shard.row(o.stop_lookup), stop_both=shard.row(o.stop_both))
    rows, table = tied_lookup(table, local_ids, local)
    all_rows = rows.new_zeros(len(flat), rows.shape[1]).index_copy(0, at, rows)
    return returned(all_rows, shard, room, n).view(*ids.shape, all_rows.shape[1]), table


def _check_vocabulary(ids: Tensor, vocab: int) -> None:
    """Refuse ids [n] outside [0, vocab) with an IndexError, on all ranks alike."""
    low, high = ids.aminmax()
    if low < 0 or high >= vocab:
        raise IndexError(f"an id is outside the vocabulary of {vocab}")


def without_row(table: Tensor, row: int | None) -> Tensor:
    """Hand the table on as `tied_lookup` does, with no gradient for `row`."""
    needs_gradient = torch.is_grad_enabled() and table.requires_grad
    if row is None or not needs_gradient:
        return table
    no_ids = torch.empty(0, dtype=torch.long, device=table.device)
    _, table = tied_lookup(table, no_ids, LookupOptions(stop_both=row))
    return table


def path_norms(gradient: Tensor | None, record: PathRecord | None, shard: VocabularyShard | None = None) -> PathNorms:
    """Return the norms of both paths and their cosine.

    They follow from the summed gradient [V, E] and the recorded rows of the lookup path. B equals the gradient outside
    the recorded rows, and the gradient minus A on them, so nothing cancels. Call it after the last backward of a step
    and before clipping; under a GradScaler all norms carry its scale. With several processes, `gather(record)` first;
    with a `shard`, whose rows' both are, every rank gets the norms of the whole.

    Raises:
        UnsupportedError: no gradient yet, no record, or a gradient that is sharded.
    """
    gradient, record = _checked(gradient, record)
    sums = _sums_of_squares(gradient, record)
    if shard is not None:
        sums = shard.sum(sums)
    a_squared, b_squared, total_squared, product = sums.tolist()
    a, b = math.sqrt(a_squared), math.sqrt(b_squared)
    cosine = math.nan
    if a and b:
        cosine = product / (a * b)
    return PathNorms(a, b, math.sqrt(total_squared), cosine)


def _checked(gradient: Any, record: Any) -> tuple[Tensor, PathRecord]:
    """Return the arguments of `path_norms`; raises as it does."""
    if not isinstance(gradient, Tensor):
        raise UnsupportedError(f"path_norms of a {type(gradient).__name__}", "give table.grad, after backward()")
    if not isinstance(record, PathRecord):
        fix = "turn recording on before the forward: record = installed.track()"
        raise UnsupportedError(f"path_norms with a {type(record).__name__} for the lookup path's record", fix)
    if hasattr(gradient, "full_tensor"):
        fix = "give gradient.full_tensor(), on every process, and gather(record)"
        raise UnsupportedError(f"path_norms of a sharded gradient ({type(gradient).__name__})", fix)
    if gradient.is_meta:
        raise UnsupportedError("path_norms of a gradient on the meta device", "give a gradient that has numbers")
    return gradient, record


def _sums_of_squares(gradient: Tensor, record: PathRecord) -> Tensor:
    """Return ‖A‖², ‖B‖², ‖A + B‖² and A·B [4]: sums over rows, which ranks add."""
    squares = _row_squares(gradient)
    total = squares.sum()
    a_squared, b_squared, product = torch.zeros_like(total), total, torch.zeros_like(total)
    if record.pieces:
        ids, rows = record.merged()
        ids, rows = ids.to(gradient.device), rows.to(gradient.device, _norm_type(gradient))
        rest = gradient[ids].to(rows.dtype).sub_(rows)
        squares[ids] = 0
        a_squared = _row_squares(rows).sum()
        b_squared = squares.sum() + _row_squares(rest).sum()
        product = torch.linalg.vecdot(rows, rest).double().sum()
    return torch.stack([a_squared, b_squared, total, product])


def _norm_type(x: Tensor) -> torch.dtype:
    """Return the type in which a row's norm is computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_squares(x: Tensor) -> Tensor:
    """Return the squared norm of each row in fp64.

    No whole table is converted to fp64, which would take longer.
    """
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=_norm_type(x))
    return norms.double().square_()


def several(group: Any = None) -> bool:
    """Return whether several processes train together, as a group of torch or all of them."""
    return has_ranks() and dist.get_world_size(group) > 1


def gather(record: PathRecord, shard: VocabularyShard | None = None, *, group: Any = None) -> PathRecord:
    """Average the lookup path's rows over the processes of a group, as DDP averages gradients.

    With a `shard` only its rows are returned.
    """
    if not several(group):
        return record
    rows, summary = None, None
    if record.pieces:
        rows = _PathRows(*record.merged())
        summary = rows.summary()
    summaries: list[_RowSummary | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(summaries, summary, group=group)
    pieces = _exchanged(rows, summaries, group)
    if shard is not None:
        pieces = [_rows_of_shard(piece, shard) for piece in pieces]
    return PathRecord([(piece.ids, piece.rows) for piece in pieces])


class _RowSummary(NamedTuple):
    """Sizes and types of one process's rows, by which another makes room for them."""

    rows: int
    width: int
    dtype: torch.dtype
    device: str  # its kind


class _PathRows(NamedTuple):
    """Tokens [n] and their rows [n, E]."""

    ids: Tensor
    rows: Tensor

    def summary(self) -> _RowSummary:
        """Return sizes and types."""
        count, width = self.rows.shape
        return _RowSummary(count, width, self.rows.dtype, self.rows.device.type)


def _rows_of_shard(piece: _PathRows, shard: VocabularyShard) -> _PathRows:
    """Return the rows of tokens that this rank has, by their local rows."""
    at, local_ids = shard.own(piece.ids)
    return _PathRows(local_ids, piece.rows[at])


def _exchanged(mine: _PathRows | None, summaries: list[_RowSummary | None], group: Any) -> list[_PathRows]:
    """Return the rows of every process, divided by the number of processes.

    They are on the device of this process's rows. `summaries` has an entry for each process: None if it recorded no
    step, and no rows if it recorded steps without a token.
    """
    filled = [summary for summary in summaries if summary is not None]
    if not filled:
        return []
    home = _device_of_rank(filled[0].device) if mine is None else mine.rows.device
    carrier = _carrier(home, str(dist.get_backend(group)))
    # all processes send tensors of one size, which the largest record fills
    most = max(summary.rows for summary in filled)
    ids = torch.zeros(most, dtype=torch.long, device=carrier)
    rows = torch.zeros(most, filled[0].width, dtype=filled[0].dtype, device=carrier)
    if mine is not None:
        ids[: len(mine.ids)], rows[: len(mine.rows)] = mine
    all_ids, all_rows = _gathered(ids, group), _gathered(rows, group)
    pieces = []
    for sent_ids, sent_rows, summary in zip(all_ids, all_rows, summaries, strict=True):
        if summary is not None and summary.rows:
            mean = sent_rows[: summary.rows].to(home) / len(summaries)
            pieces.append(_PathRows(sent_ids[: summary.rows].to(home), mean))
    return pieces


def _gathered(x: Tensor, group: Any) -> list[Tensor]:
    """Return every process's tensor of this size."""
    tensors = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, x, group=group)
    return tensors


def _device_of_rank(kind: str) -> torch.device:
    """Return this process's device of a kind, for gradients of one that has recorded nothing."""
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)


def _carrier(home: torch.device, backend: str) -> torch.device:
    """Return the device whose tensors the collectives of this backend take."""
    if backend == "gloo":
        return torch.device("cpu")
    if backend == "nccl":
        return _device_of_rank("cuda")
    return home


class _TiedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, options: LookupOptions) -> tuple[Tensor, Tensor]:
        """Return the rows, and a view of the table."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.shape, ctx.options = table.shape, options
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    def backward(ctx: Any, row_grad: Tensor | None, table_grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Return the table's gradient: that of the head path, with the lookup path added in place."""
        if torch.is_grad_enabled():
            fix = "look up with torch.nn.functional.embedding where create_graph=True is needed"
            raise UnsupportedError("the one-buffer lookup has no second derivative", fix)
        options: LookupOptions = ctx.options
        if row_grad is not None:
            ids = ctx.saved_tensors[0].reshape(-1)
            ids, rows = _lookup_rows(ids, row_grad.reshape(len(ids), ctx.shape[1]), options)
            into = options.into
            if into is None:
                if table_grad is None:
                    table_grad = row_grad.new_zeros(ctx.shape)
                into = table_grad = table_grad.contiguous()  # an expanded gradient has no separate memory to add to
            into.index_add_(0, ids, rows.to(into.dtype))
        if options.stop_both is not None and table_grad is not None:
            table_grad[options.stop_both] = 0
        return table_grad, None, None


def _lookup_rows(ids: Tensor, rows: Tensor, options: LookupOptions) -> tuple[Tensor, Tensor]:
    """Return the tokens and gradient rows of the lookup path that `options` leave, and record them."""
    if options.alpha != 1.0:
        rows = rows * options.alpha
    for stopped in (options.stop_lookup, options.stop_both):
        if stopped is not None:
            rows = rows.masked_fill((ids == stopped)[:, None], 0)
    if options.record is not None:
        if devices.is_cpu(rows):
            ids, rows = _distinct(ids, rows)
        options.record.add(ids, rows)
    return ids, rows


def _distinct(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens, and their rows summed in fp32 or wider."""
    distinct, place = torch.unique(ids, return_inverse=True)
    rows = rows.to(_norm_type(rows))
    return distinct, rows.new_zeros(len(distinct), rows.shape[1]).index_add_(0, place, rows)


def _traceable(table: Tensor, ids: Tensor, options: LookupOptions) -> tuple[Tensor, Tensor]:
    """Compute the same gradients in ops that Dynamo traces: two buffers, and nothing recorded."""
    if options.stop_both is not None:
        stopped = torch.arange(table.shape[0], device=table.device) == options.stop_both
        table = torch.where(stopped[:, None], table.detach(), table)
    rows = F.embedding(ids, table, padding_idx=options.stop_lookup)
    if options.alpha != 1.0:
        rows = options.alpha * rows + (1 - options.alpha) * rows.detach()
    return rows, table
