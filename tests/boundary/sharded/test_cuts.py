"""The rows that a process holds, compared with torch's sharding; overlaps and coverage, with sets of indices."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tiewise.boundary.sharded.cuts import local_indices, overlaps, parts_cover, shape_of
from tiewise.core.errors import UnsupportedError


@pytest.fixture
def mesh_of():
    """Return a function that makes a mesh of fake processes, of which this process is one."""

    def make_mesh(rank, *shape):
        if dist.is_initialized():
            dist.destroy_process_group()
        world = torch.Size(shape).numel()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        return init_device_mesh("cpu", shape)

    yield make_mesh
    if dist.is_initialized():
        dist.destroy_process_group()


def rows(part):
    return [row for start, stop in part[0] for row in range(start, stop)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_local_indices_match_the_rows_that_torch_assigns(mesh_of, world):
    parts = {}
    for rank in range(world):
        mesh = mesh_of(rank, world)
        for size in (1, 3, 7, 12, 97):
            table = torch.arange(size)[:, None].expand(size, 8).contiguous()
            tensor = distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None)
            part = local_indices(tensor)
            assert rows(part) == tensor.to_local()[:, 0].tolist()
            assert shape_of(part) == tuple(tensor.to_local().shape) or not rows(part)
            parts.setdefault(size, []).append(part)
            columns = distribute_tensor(table.T.contiguous(), mesh, [Shard(1)], src_data_rank=None)
            assert local_indices(columns)[::-1] == part
    for size, found in parts.items():
        assert parts_cover((size, 8), [part for part in found if rows(part)])


def test_local_indices_cut_fused_matrices_separately(mesh_of):
    gate_and_up = torch.arange(12)
    for rank, wanted in enumerate(([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11])):
        placement = [_StridedShard(0, split_factor=2)]
        tensor = distribute_tensor(gate_and_up, mesh_of(rank, 2), placement, src_data_rank=None)
        assert rows(local_indices(tensor)) == tensor.to_local().tolist() == wanted


def test_fsdp_cuts_the_rows_left_by_tensor_parallelism(mesh_of):
    wanted = ([0, 25], [49, 73], [25, 49], [73, 97])  # by hand: 49 and 48 rows, then 25 and 24, 24 and 24
    for rank, (start, stop) in enumerate(wanted):
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        local = torch.empty(stop - start)
        tensor = DTensor.from_local(local, mesh_of(rank, 2, 2), placements, run_check=False, shape=(97,), stride=(1,))
        assert local_indices(tensor) == (((start, stop),),)


def test_local_indices_cover_replicas_and_refuse_partial_sums(mesh_of):
    mesh = mesh_of(1, 2, 2)
    tensor = distribute_tensor(torch.arange(5), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    assert local_indices(tensor) == (((3, 5),),)
    assert local_indices(torch.zeros(5, 2)) == (((0, 5),), ((0, 2),))
    assert local_indices(torch.tensor(1.0)) == ()
    partial = DTensor.from_local(torch.zeros(4), mesh, [Replicate(), Partial()], run_check=False)
    with pytest.raises(UnsupportedError, match="partial sum"):
        local_indices(partial)


def _random_runs(choose, size):
    marks = sorted(choose.sample(range(size + 1), 2 * choose.randint(1, 3)))
    return tuple(zip(marks[::2], marks[1::2], strict=True))


def test_overlaps_match_index_sets():
    choose = random.Random(0)
    for _ in range(300):
        source, target = _random_runs(choose, 20), _random_runs(choose, 20)
        have, want = rows([source]), rows([target])
        copied = {}
        for at, to, count in overlaps(source, target):
            copied |= {to + i: have[at + i] for i in range(count)}
        assert copied == {to: row for to, row in enumerate(want) if row in have}


def test_parts_cover_a_tensor_if_every_index_occurs_once():
    choose, seen = random.Random(0), set()
    for _ in range(2000):
        shape = (choose.randint(1, 4), choose.randint(1, 3))
        axes = [[((a, b),) for a, b in itertools.combinations(range(size + 1), 2)] for size in shape]
        some = list(itertools.product(*axes))
        parts = choose.sample(some, min(len(some), choose.randint(1, 4)))
        count = torch.zeros(shape)
        for ((top, bottom),), ((left, right),) in parts:
            count[top:bottom, left:right] += 1
        grid = len(parts) == len({p[0] for p in parts}) * len({p[1] for p in parts})  # each cut crosses the full tensor
        wanted = bool((count == 1).all()) and grid
        assert parts_cover(shape, parts) == wanted
        seen.add(wanted)
    assert seen == {True, False}
    assert parts_cover((), [()])
    assert not parts_cover((), [])
    assert parts_cover((0, 4), [])
    assert not parts_cover((5,), [])
    assert not parts_cover((0, -4), [])
    assert not parts_cover((0, 4), [((), ((0, 4),))])


@pytest.mark.parametrize("runs", [((0, 2, 4),), ((2, 0),), ((-1, 4),), ((0, 5),), ((0, 2), (1, 4)), ((0, 0), (0, 4))])
def test_invalid_runs_cover_nothing(runs):
    assert not parts_cover((4,), [(runs,)])
    assert not parts_cover((4,), [((), ())])
