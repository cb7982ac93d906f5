"""Per-rank pictures, against sums done by hand and against tensors that are really split."""

import pytest

from tiewise.core.errors import PlanError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.budget import budget
from tiewise.planning.memory import Tokens
from tiewise.planning.read_config import Sizes, from_sizes
from tiewise.planning.world import World, all_reduce, padded_rows, pipeline_tie_bytes, ranks

V, D, L = 1001, 64, 2
BODY = 12 * L * D**2


def pictures(kind, world, dtype="float32", tokens=None):
    counted = budget(from_sizes(Sizes(V, D, L)), BoundarySpec.parse(kind), SharingSpec())
    return {rank.layout: rank for rank in ranks(counted, world, tokens or Tokens(2, 8), dtype, V)}


@pytest.mark.parametrize(("kind", "tables"), [("tied", 1), ("untied", 2)])
def test_replicated_and_sharded(kind, tables):
    found = pictures(kind, World(8))
    whole = tables * V * D + BODY
    assert set(found) == {"data parallel", "fsdp"}
    assert found["data parallel"].memory == 16 * whole
    assert found["data parallel"].sent == 2 * 7 * 4 * whole // 8
    assert found["data parallel"].sent_for_tables == 2 * 7 * 4 * tables * V * D // 8
    assert found["fsdp"].memory == 16 * -(-whole // 8)
    assert found["fsdp"].sent == 3 * 7 * 4 * whole // 8


@pytest.mark.parametrize(("kind", "tables"), [("tied", 1), ("untied", 2)])
def test_vocabulary_parallel(kind, tables):
    found = pictures(kind, World(8, tp=4), "bfloat16")["vocabulary parallel"]
    rows = 251  # 1001 rows over four ranks: three of padding
    assert padded_rows(V, 4) == 3
    assert found.tables == tables * rows * D * 2
    assert found.memory == 16 * (BODY + tables * rows * D)
    n = 16
    looked_up = 2 * 3 * (n * D * 2) // 4
    statistics = 2 * 3 * (3 * n * 4) // 4
    gradients = 2 * 1 * (tables * rows * D * 2) // 2
    assert found.sent_for_tables == 2 * looked_up + statistics + gradients
    assert found.sent == found.sent_for_tables + BODY * 2


def test_one_rank_sends_nothing():
    assert all(rank.sent == 0 for rank in pictures("tied", World()).values())
    assert all_reduce(1000, 1) == 0


def test_a_frozen_table_sends_no_gradient():
    found = pictures("tied+vectors=rows.txt+freeze", World(4, 2))
    assert found["data parallel"].sent_for_tables == 0
    assert found["data parallel"].memory == 4 * V * D + 16 * BODY
    assert found["vocabulary parallel"].memory == 4 * 501 * D + 16 * BODY


def test_tied_ends_of_a_pipeline_exchange_the_table():
    tied, untied = (
        budget(from_sizes(Sizes(V, D, L)), BoundarySpec(kind), SharingSpec()) for kind in ("tied", "untied")
    )
    assert pipeline_tie_bytes(tied, "bfloat16") == V * D * 2
    assert pipeline_tie_bytes(untied, "bfloat16") == 0


@pytest.mark.parametrize("sizes", [(0, 1), (8, 0), (8, 3), (4, 8)])
def test_impossible_worlds_are_refused(sizes):
    with pytest.raises(PlanError):
        World(*sizes)
