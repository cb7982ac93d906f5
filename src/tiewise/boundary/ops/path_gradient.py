"""Lookup in a tied table whose two gradients share one buffer.

A tied table W has two gradients: the lookup path's (A, a few rows) and the head path's (B, every row). Plain autograd
builds a dense [V, E] tensor for each and a third for their sum. `tied_lookup` instead returns the table, and the head
uses the returned one:

    rows, W' = tied_lookup(W, ids)      # forward: rows = W[ids], W' = W (a view)
    loss = head(body(rows), W')         # the head uses W', so the graph orders the backward: head first, lookup last

    backward of `tied_lookup`, called once with both gradients complete:
        gradient of W = gradient of W'          (head path: the loss's gradient buffer)
        gradient of W[ids] += gradient of rows  (lookup path: in place, distinct rows only)

There is no shared state outside the graph: if the rows are detached, or the head is not used, the other path's gradient
still arrives. Several lookups of one table chain (`tied_lookup(W', more_ids)`). The autograd graph alone orders the
nodes.
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
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard, has_ranks, sum_outputs
from tiewise.core.backends import PathNorms
from tiewise.core.errors import UnsupportedError


class MergedRows(NamedTuple):
    """Summed rows of distinct tokens, in as many slots as there can be distinct tokens.

    Attributes:
        ids: [U] tokens. Used slots come first and have distinct tokens; unused slots repeat the first token.
        rows: [U, E], zero in unused slots.
        is_used: [U], True in used slots.
    """

    ids: Tensor
    rows: Tensor
    is_used: Tensor


@dataclass
class PathRecord:
    """Gradient rows of the lookup path since the last `clear`, stored until the optimizer step.

    Each piece holds the tokens of one backward pass and their rows. On a CPU a piece has one row per distinct token. On
    other devices, where counting distinct tokens costs a synchronisation, it has one row per token.

    >>> import torch
    >>> record = PathRecord()
    >>> record.add(torch.tensor([3, 3]), torch.ones(2, 1))
    >>> record.merged()
    (tensor([3]), tensor([[2.]]))

    Attributes:
        pieces: pairs of tokens [n] and rows [n, E].
    """

    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, ids: Tensor, rows: Tensor, vocab: int | None = None) -> None:
        """Add the gradient rows [n, E] of the tokens `ids` [n], which are below `vocab`.

        More than eight pieces are merged into one, so that memory stays bounded. Outside a CPU the merged piece has at
        most `vocab` rows, and nothing waits for the device; without `vocab` it has a row per distinct token.
        """
        self.pieces.append((ids, rows))
        if len(self.pieces) <= 8:
            return
        if vocab is None or devices.is_cpu(rows):
            self.pieces = [self.merged()]
        else:
            merged = self.merged_rows(vocab)
            self.pieces = [(merged.ids, merged.rows)]

    def merged(self) -> tuple[Tensor, Tensor]:
        """Return (distinct tokens [U], their summed rows of the lookup path [U, E]).

        It waits for the device, because U depends on the tokens.
        """
        ids, rows = zip(*self.pieces, strict=True)
        return _sum_by_token(torch.cat(ids), torch.cat(rows))

    def merged_rows(self, vocab: int) -> MergedRows:
        """Return the summed rows without waiting for the device. All tokens are below `vocab`."""
        ids, rows = zip(*self.pieces, strict=True)
        return _sum_into_slots(torch.cat(ids), torch.cat(rows), vocab)

    def clear(self) -> None:
        """Remove all rows, as `zero_grad` does for gradients."""
        self.pieces.clear()


@dataclass(frozen=True)
class LookupOptions:
    """Options of the gradient of a lookup.

    >>> LookupOptions(alpha=0.5).alpha
    0.5

    Attributes:
        stop_lookup: row that gets no gradient from the lookup path: `padding_idx` of torch.
        stop_both: row that gets no gradient from either path.
        alpha: factor on the lookup path.
        record: where the lookup path's rows are stored for `path_norms`.
        into: [V, E] to which the rows are added: the `into` of the loss; excludes `stop_both`.
    """

    stop_lookup: int | None = None
    stop_both: int | None = None
    alpha: float = 1.0
    record: PathRecord | None = None
    into: Tensor | None = None


_DEFAULT = LookupOptions()


def tied_lookup(
    table: Tensor, ids: Tensor, options: LookupOptions = _DEFAULT, *, shard: VocabularyShard | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows of `ids` [...] in `table` [V, E], and the table to use next.

    >>> import torch
    >>> table = torch.tensor([[1.0], [2.0]], requires_grad=True)
    >>> rows, table_for_head = tied_lookup(table, torch.tensor([1]))
    >>> (rows.sum() + table_for_head.sum()).backward()
    >>> table.grad  # one buffer: 1 for the head path, and 1 more where token 1 was looked up
    tensor([[1.],
            [2.]])

    Args:
        table: [V, E]; with a `shard`, this rank's rows [V_r, E].
        ids: [...] token ids of the full vocabulary.
        options: see `LookupOptions`; its rows are numbered in the full vocabulary.
        shard: if given, every rank gets all rows [..., E], and a record holds local rows, for `path_norms` with the
            shard. If the shard has `own_tokens`, the record holds the sum over all ranks' tokens.

    Returns:
        rows [..., E] and the table to use next. That table may feed only lookups through `tied_lookup`, matrix products
        and `linear_cross_entropy`: their gradients are written once and no other code owns them, so it is safe to add
        the lookup path in place. A regulariser takes the original `table`.

    Raises:
        UnsupportedError: the arguments are not tensors, the ids are not integers, the table is not a matrix or is on
            another device, the call is inside a `torch.func` transform, or (in backward) a second derivative is taken;
            with a shard also under `torch.compile`.
        ValueError: the table is not the shard's.
        IndexError: an id is outside [0, V) (checked on a CPU only), or the table has no rows.
    """
    _check_types(table, ids, options)
    if shard is not None:
        return _look_up_over_ranks(table, ids, options, shard)
    is_compiling = torch.compiler.is_compiling()
    if ids.device != table.device:
        where = f"token ids on {ids.device} and a table on {table.device}"
        raise UnsupportedError(f"tied_lookup() of {where}", "move the ids to the table's device")
    if options.into is not None and (options.stop_both is not None or is_compiling):
        fix = "leave into out, here and of the loss"
        raise UnsupportedError("tied_lookup() with into beside stop_both or under torch.compile", fix)
    if is_compiling:
        return _traceable_lookup(table, ids, options)
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError("tied_lookup() inside a torch.func transform", "use torch.nn.functional.embedding there")
    _check_ids(ids, len(table))
    if not (torch.is_grad_enabled() and table.requires_grad):
        return F.embedding(ids, table), table
    apply: Callable[..., tuple[Tensor, Tensor]] = _TiedLookup.apply
    return apply(table, ids, options)


def _check_types(table: Any, ids: Any, options: LookupOptions) -> None:
    """Refuse arguments that are not a table and token ids, or an infinite alpha."""
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


def _look_up_over_ranks(
    table: Tensor, ids: Tensor, options: LookupOptions, shard: VocabularyShard
) -> tuple[Tensor, Tensor]:
    """Look up all ranks' ids in the local rows, and sum over ranks."""
    if torch.compiler.is_compiling():
        raise UnsupportedError("a vocabulary over several ranks under torch.compile", "look up eagerly")
    shard.check(table)
    flat, n = ids.reshape(-1), ids.numel()
    max_tokens = shard.max_tokens(flat)
    flat = shard.gather_tokens(flat, max_tokens)
    if flat.device.type == "cpu" and len(flat):
        _check_vocabulary(flat, shard.total)
    positions, local_ids = shard.local_rows(flat)
    local = replace(options, stop_lookup=shard.row(options.stop_lookup), stop_both=shard.row(options.stop_both))
    rows, table = tied_lookup(table, local_ids, local)
    all_rows = rows.new_zeros(len(flat), rows.shape[1]).index_copy(0, positions, rows)
    return sum_outputs(all_rows, shard, max_tokens, n).view(*ids.shape, all_rows.shape[1]), table


def _check_vocabulary(ids: Tensor, vocab: int) -> None:
    """Refuse ids [n] outside [0, vocab) with an IndexError, on all ranks alike."""
    low, high = ids.aminmax()
    if low < 0 or high >= vocab:
        raise IndexError(f"an id is outside the vocabulary of {vocab}")


def without_row(table: Tensor, row: int | None) -> Tensor:
    """Return the table to use next, as `tied_lookup` does, with no gradient for `row`."""
    needs_gradient = torch.is_grad_enabled() and table.requires_grad
    if row is None or not needs_gradient:
        return table
    no_ids = torch.empty(0, dtype=torch.long, device=table.device)
    _, table = tied_lookup(table, no_ids, LookupOptions(stop_both=row))
    return table


def path_norms(gradient: Tensor | None, record: PathRecord | None, shard: VocabularyShard | None = None) -> PathNorms:
    """Return the norms of both paths' gradients and their cosine.

    They follow from the summed gradient [V, E] and the recorded rows of the lookup path. B equals the gradient outside
    the recorded rows, and the gradient minus A on them, so nothing cancels. Call it after the last backward pass of a
    step and before clipping; under a GradScaler all norms carry its scale. With several processes, call
    `gather(record)` first. It waits for the device once; `path_sums` does not.

    >>> import torch
    >>> record = PathRecord([(torch.tensor([0]), torch.tensor([[3.0]]))])
    >>> norms = path_norms(torch.tensor([[7.0], [0.0]]), record)
    >>> norms.a, norms.b, norms.total, norms.cosine
    (3.0, 4.0, 7.0, 1.0)

    Args:
        gradient: [V, E], the table's summed gradient.
        record: the rows of the lookup path in the same step.
        shard: if given, gradient and record are this rank's rows, and every rank gets the norms of the full table.

    Returns:
        norms of A (`a`), B (`b`) and A + B (`total`), and the cosine of A and B; the cosine is nan if a norm is 0.

    Raises:
        UnsupportedError: there is no gradient yet or no record, or the gradient is sharded or on the meta device.
    """
    if isinstance(gradient, Tensor):
        _require_numbers(gradient)
    return path_sums(gradient, record, shard).norms()


@dataclass(frozen=True)
class PathSums:
    """Norms of both paths as tensors on the gradient's device.

    Reading a value waits for the device.

    >>> import torch
    >>> sums = PathSums(torch.tensor([9.0, 16.0, 49.0, 12.0]))
    >>> sums.a, sums.b, sums.cosine
    (tensor(3.), tensor(4.), tensor(1.))

    Attributes:
        numbers: [4], fp64: ‖A‖², ‖B‖², ‖A + B‖² and A·B.
    """

    numbers: Tensor

    @property
    def a(self) -> Tensor:
        """‖A‖, the norm of the lookup path."""
        return self.numbers[0].sqrt()

    @property
    def b(self) -> Tensor:
        """‖B‖, the norm of the head path."""
        return self.numbers[1].sqrt()

    @property
    def total(self) -> Tensor:
        """‖A + B‖, the norm of the gradient."""
        return self.numbers[2].sqrt()

    @property
    def cosine(self) -> Tensor:
        """Cosine of the angle between A and B; nan if a norm is 0."""
        norms = self.a * self.b
        return (self.numbers[3] / norms).where(norms > 0, math.nan)

    def norms(self) -> PathNorms:
        """Read the norms from the device. Raises UnsupportedError on the meta device."""
        _require_numbers(self.numbers)
        return PathNorms(*torch.stack([self.a, self.b, self.total, self.cosine]).tolist())


def path_sums(gradient: Tensor | None, record: PathRecord | None, shard: VocabularyShard | None = None) -> PathSums:
    """Return the norms that `path_norms` reads, as tensors, without waiting for the device.

    So a training loop can collect them at every step, and read their mean at the next log.

    Args:
        gradient: [V, E], as in `path_norms`.
        record: as in `path_norms`.
        shard: as in `path_norms`.

    Raises:
        UnsupportedError: there is no gradient yet or no record, or the gradient is sharded.
    """
    gradient, record = _require_gradient_and_record(gradient, record)
    sums = _sums_of_squares(gradient, record)
    if shard is not None:
        sums = shard.sum(sums)
    return PathSums(sums)


def _require_numbers(x: Tensor) -> None:
    """Refuse a tensor on the meta device."""
    if x.is_meta:
        raise UnsupportedError("path_norms of a gradient on the meta device", "give a gradient that has numbers")


def _require_gradient_and_record(gradient: Any, record: Any) -> tuple[Tensor, PathRecord]:
    """Return the arguments of `path_norms`; raise as it does."""
    if not isinstance(gradient, Tensor):
        raise UnsupportedError(f"path_norms of a {type(gradient).__name__}", "give table.grad, after loss.backward()")
    if not isinstance(record, PathRecord):
        fix = "turn recording on before the forward: record = installed.track()"
        raise UnsupportedError(f"path_norms with a {type(record).__name__} for the lookup path's record", fix)
    if hasattr(gradient, "full_tensor"):
        fix = "give gradient.full_tensor(), on every process, and gather(record)"
        raise UnsupportedError(f"path_norms of a sharded gradient ({type(gradient).__name__})", fix)
    return gradient, record


def _sums_of_squares(gradient: Tensor, record: PathRecord) -> Tensor:
    """Return ‖A‖², ‖B‖², ‖A + B‖² and A·B [4]: sums over rows, which ranks add."""
    squares = _row_squares(gradient)
    total = squares.sum()
    a_squared, b_squared, product = torch.zeros_like(total), total, torch.zeros_like(total)
    if record.pieces:
        ids, rows, is_used = record.merged_rows(len(gradient))
        ids, rows = ids.to(gradient.device), rows.to(gradient.device, _norm_type(gradient))
        rest = gradient.index_select(0, ids).to(rows.dtype).sub_(rows)
        rest.masked_fill_(~is_used.to(gradient.device)[:, None], 0)
        squares.index_fill_(0, ids, 0)
        a_squared = _row_squares(rows).sum()
        b_squared = squares.sum() + _row_squares(rest).sum()
        product = torch.linalg.vecdot(rows, rest).double().sum()
    return torch.stack([a_squared, b_squared, total, product])


def _norm_type(x: Tensor) -> torch.dtype:
    """Return the type in which a row's norm is computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_squares(x: Tensor) -> Tensor:
    """Return the squared norm of each row in fp64.

    Converting the full table to fp64 would take longer.
    """
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=_norm_type(x))
    return norms.double().square_()


def several(group: Any = None) -> bool:
    """Return whether several processes train together, in a group of torch or in all."""
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
    pieces = _exchange_rows(rows, summaries, group)
    if shard is not None:
        pieces = [_select_shard_rows(piece, shard) for piece in pieces]
    return PathRecord([(piece.ids, piece.rows) for piece in pieces])


class _RowSummary(NamedTuple):
    """Sizes and types of one process's rows, by which the others allocate memory for them."""

    rows: int
    width: int
    dtype: torch.dtype
    device: str  # type of the device: "cpu" or "cuda"


class _PathRows(NamedTuple):
    """Tokens [n] and their rows [n, E]."""

    ids: Tensor
    rows: Tensor

    def summary(self) -> _RowSummary:
        """Return the sizes and types."""
        count, width = self.rows.shape
        return _RowSummary(count, width, self.rows.dtype, self.rows.device.type)


def _select_shard_rows(piece: _PathRows, shard: VocabularyShard) -> _PathRows:
    """Return the rows of this rank's tokens, with local row numbers instead of tokens."""
    positions, local_ids = shard.local_rows(piece.ids)
    return _PathRows(local_ids, piece.rows[positions])


def _exchange_rows(local_rows: _PathRows | None, summaries: list[_RowSummary | None], group: Any) -> list[_PathRows]:
    """Return the rows of every process, divided by the number of processes.

    They are on the device of this process's rows. `summaries` has an entry for each process: None if it recorded no
    step, and 0 rows if it recorded steps without a token.
    """
    filled = [summary for summary in summaries if summary is not None]
    if not filled:
        return []
    row_device = _device_of_rank(filled[0].device) if local_rows is None else local_rows.rows.device
    send_device = _collective_device(row_device, str(dist.get_backend(group)))
    # all processes send tensors of one size: that of the largest record
    most = max(summary.rows for summary in filled)
    ids = torch.zeros(most, dtype=torch.long, device=send_device)
    rows = torch.zeros(most, filled[0].width, dtype=filled[0].dtype, device=send_device)
    if local_rows is not None:
        ids[: len(local_rows.ids)], rows[: len(local_rows.rows)] = local_rows
    all_ids, all_rows = _gather_tensors(ids, group), _gather_tensors(rows, group)
    pieces = []
    for sent_ids, sent_rows, summary in zip(all_ids, all_rows, summaries, strict=True):
        if summary is not None and summary.rows:
            mean = sent_rows[: summary.rows].to(row_device) / len(summaries)
            pieces.append(_PathRows(sent_ids[: summary.rows].to(row_device), mean))
    return pieces


def _gather_tensors(x: Tensor, group: Any) -> list[Tensor]:
    """Return every process's tensor, each of the size of `x`."""
    tensors = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, x, group=group)
    return tensors


def _device_of_rank(device_type: str) -> torch.device:
    """Return this process's device of a type, for gradients of one that has recorded nothing."""
    if device_type == "cuda":
        return torch.device(device_type, torch.cuda.current_device())
    return torch.device(device_type)


def _collective_device(row_device: torch.device, backend: str) -> torch.device:
    """Return the device whose tensors the collectives of this backend take."""
    if backend == "gloo":
        return torch.device("cpu")
    if backend == "nccl":
        return _device_of_rank("cuda")
    return row_device


class _TiedLookup(torch.autograd.Function):
    """Lookup that returns the table too, with one gradient buffer for both paths."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, options: LookupOptions) -> tuple[Tensor, Tensor]:
        """Return the rows, and a view of the table."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.shape, ctx.options = table.shape, options
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    def backward(ctx: Any, row_grad: Tensor | None, table_grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Return the table's gradient: the head path's, with the lookup path added in place."""
        if torch.is_grad_enabled():
            fix = "look up with torch.nn.functional.embedding where create_graph=True is needed"
            raise UnsupportedError("the one-buffer lookup has no second derivative", fix)
        options: LookupOptions = ctx.options
        if row_grad is not None:
            ids = ctx.saved_tensors[0].reshape(-1)
            vocab, width = ctx.shape
            ids, rows = _apply_options(ids, row_grad.reshape(len(ids), width), options, vocab)
            into = options.into
            if into is None:
                if table_grad is None:
                    table_grad = row_grad.new_zeros(ctx.shape)
                into = table_grad = table_grad.contiguous()  # an expanded gradient has no memory for each element
            into.index_add_(0, ids, rows.to(into.dtype))
        if options.stop_both is not None and table_grad is not None:
            table_grad[options.stop_both] = 0
        return table_grad, None, None


def _apply_options(ids: Tensor, rows: Tensor, options: LookupOptions, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the lookup path's tokens and gradient rows under `options`, and record them.

    The table has `vocab` rows.
    """
    if options.alpha != 1.0:
        rows = rows * options.alpha
    for stopped in (options.stop_lookup, options.stop_both):
        if stopped is not None:
            rows = rows.masked_fill((ids == stopped)[:, None], 0)
    if options.record is not None:
        if devices.is_cpu(rows):
            ids, rows = _sum_by_token(ids, rows)
        options.record.add(ids, rows, vocab)
    return ids, rows


def _sum_by_token(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens, and their rows summed in fp32 or wider."""
    distinct, inverse = torch.unique(ids, return_inverse=True)
    rows = rows.to(_norm_type(rows))
    return distinct, rows.new_zeros(len(distinct), rows.shape[1]).index_add_(0, inverse, rows)


def _sum_into_slots(ids: Tensor, rows: Tensor, vocab: int) -> MergedRows:
    """Sum rows by token, in a number of slots that does not depend on the tokens.

    Unlike `_sum_by_token` it does not wait for the device.
    """
    rows = rows.to(_norm_type(rows))
    if not len(ids):
        return MergedRows(ids, rows, torch.ones_like(ids, dtype=torch.bool))
    slots = min(len(ids), vocab)
    sorted_ids, order = ids.sort()
    is_new = sorted_ids[1:] != sorted_ids[:-1]
    sorted_slots = torch.cat([is_new.new_zeros(1), is_new]).cumsum(0)
    slot = torch.empty_like(sorted_slots).scatter_(0, order, sorted_slots)  # of each row, in the order of `ids`
    sums = rows.new_zeros(slots, rows.shape[1]).index_add_(0, slot, rows)
    tokens = sorted_ids[:1].repeat(slots).scatter_(0, slot, ids)
    is_used = torch.arange(slots, device=ids.device) <= sorted_slots[-1]
    return MergedRows(tokens, sums, is_used)


def _traceable_lookup(table: Tensor, ids: Tensor, options: LookupOptions) -> tuple[Tensor, Tensor]:
    """Compute the same gradients in operations that Dynamo traces: two buffers, no record."""
    if options.stop_both is not None:
        stopped = torch.arange(table.shape[0], device=table.device) == options.stop_both
        table = torch.where(stopped[:, None], table.detach(), table)
    rows = F.embedding(ids, table, padding_idx=options.stop_lookup)
    if options.alpha != 1.0:
        rows = options.alpha * rows + (1 - options.alpha) * rows.detach()
    return rows, table
