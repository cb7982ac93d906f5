"""Norms of both gradient paths of a model's tables, which may be spread over ranks."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from tiewise.boundary.ops.path_gradient import PathRecord, PathSums, gather, path_sums
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.boundary.sharded_tables import FSDP_TABLE, is_row_parallel, local_gradient
from tiewise.core.errors import UnsupportedError


def sums_of_two_tables(table_in: Tensor, table_out: Tensor) -> PathSums:
    """Return the norms of untied tables' gradients. Each gradient is one path; the cosine is nan."""
    lookup, head = _squared_norm(table_in), _squared_norm(table_out).to(table_in.device)
    return PathSums(torch.stack([lookup, head, lookup + head, torch.full_like(lookup, math.nan)]))


def _squared_norm(table: Tensor) -> Tensor:
    """Return the squared norm of a table's gradient over all ranks; 0 without a gradient."""
    rows, shard = local_gradient(table.grad)
    if rows is None:
        return torch.zeros((), dtype=torch.float64, device=table.device)
    return path_sums(rows, PathRecord(), shard).numbers[2]


def sums_of_one_table(table: Tensor, head: nn.Module, record: PathRecord | None) -> PathSums:
    """Return the norms of both paths in a tied table's gradient.

    `record` has the rows of the lookup path.

    Raises:
        UnsupportedError: the cases that `Installed.path_norms` names.
    """
    rows, shard = local_gradient(table.grad)
    if record is not None:
        record = _average_over_ranks(record, table, head, shard)
    return path_sums(rows, record, shard)


def _average_over_ranks(
    record: PathRecord, table: Tensor, head: nn.Module, shard: VocabularyShard | None
) -> PathRecord:
    """Average the lookup path's rows over ranks in the same way as the gradient."""
    if not is_row_parallel(head):
        return gather(record, shard)
    # ranks of the mesh's last dimension see the same tokens
    mesh = cast("Any", table).device_mesh
    if mesh.size() < torch.distributed.get_world_size():
        remedy = "average the record's rows as the gradient was, and call tiewise.boundary.path_norms(…, shard)"
        raise UnsupportedError("path_norms where others hold the same rows and see other tokens", remedy)
    for dimension in range(mesh.ndim - 1):
        record = gather(record, group=mesh.get_group(dimension))
    if shard is None or FSDP_TABLE not in vars(head):
        return record
    # the record is a sum over all ranks' tokens, and the gradient is their mean
    return PathRecord([(ids, rows / shard.size) for ids, rows in record.pieces])
