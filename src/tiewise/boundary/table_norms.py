"""Norms of both gradient paths of a model's tables, which may be spread over ranks."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from tiewise.boundary.ops.path_gradient import PathRecord, gather, path_norms
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.boundary.sharded_tables import FSDP_TABLE, is_row_parallel, local_gradient
from tiewise.core.backends import PathNorms
from tiewise.core.errors import UnsupportedError


def norms_of_two_tables(table_in: Tensor, table_out: Tensor) -> PathNorms:
    """Return the norms of untied tables' gradients. Each gradient is one path; the cosine is nan."""
    lookup, head = _norm(table_in), _norm(table_out)
    return PathNorms(lookup, head, math.hypot(lookup, head), math.nan)


def _norm(table: Tensor) -> float:
    """Return the Frobenius norm of a table's gradient over all ranks; 0 without a gradient."""
    rows, shard = local_gradient(table.grad)
    if rows is None:
        return 0.0
    return path_norms(rows, PathRecord(), shard).total


def norms_of_one_table(table: Tensor, head: nn.Module, record: PathRecord | None) -> PathNorms:
    """Return the norms of both paths in a tied table's gradient.

    `record` has the rows of the lookup path.

    Raises:
        UnsupportedError: the cases that `Installed.path_norms` names.
    """
    rows, shard = local_gradient(table.grad)
    if record is not None:
        record = _average_over_ranks(record, table, head, shard)
    return path_norms(rows, record, shard)


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
