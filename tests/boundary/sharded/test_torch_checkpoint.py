"""Promises of a sharded save that torch.distributed.checkpoint with Hugging Face storage breaks.

Each test checks one promise. tiewise's format keeps it; torch's is expected to break it. If a later torch keeps a
promise, its test passes unexpectedly, which pytest reports as a failure. Then reconsider the choice that
`tiewise.boundary.sharded.shard_files` explains. Two tests at the top show that the helpers work, because torch keeps
their promises.
"""

import json
import os
import tracemalloc
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from sharded_ranks import limit_file_size
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tiewise
from tiewise.boundary.sharded.shard_files import ShardedSave

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TABLE = torch.arange(97 * 4, dtype=torch.float32).view(97, 4)
GATE_AND_UP = TABLE[:12]  # two fused matrices of six rows
GATE_AND_UP_OF_SECOND = [3, 4, 5, 9, 10, 11]  # rows on the second of two processes: half of each matrix


class TiewiseFormat:
    """Save and load a module and its optimizer as tiewise does."""

    @staticmethod
    def refused(says):
        return pytest.raises(tiewise.TiewiseError, match=says)

    @staticmethod
    def save(folder, module, optimizer=None):
        tiewise.boundary.save_sharded(folder, module, optimizer)

    @staticmethod
    def load(folder, module, optimizer=None):
        tiewise.boundary.load_sharded(folder, module, optimizer)

    @staticmethod
    def load_tensor(folder, tensor):
        ShardedSave(folder).fill("model/weight", tensor)


class TorchFormat:
    """The same by torch.distributed.checkpoint, its state dicts and its Hugging Face storage."""

    @staticmethod
    def refused(_):
        return pytest.raises(CheckpointException)  # a BaseException; any message would do

    @staticmethod
    def save(folder, module, optimizer=None):
        state = module.state_dict()
        if optimizer is not None:
            state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
        dcp.save(state, storage_writer=writer(folder), no_dist=True)

    @staticmethod
    def load(folder, module, optimizer=None):
        if optimizer is None:
            state = module.state_dict()
            TorchFormat.load_state(folder, state)
            module.load_state_dict(state)
            return
        model_state, optimizer_state = get_state_dict(module, optimizer)
        TorchFormat.load_state(folder, {"model": model_state, "optimizer": optimizer_state})
        set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    @staticmethod
    def load_tensor(folder, tensor):
        TorchFormat.load_state(folder, {"weight": tensor})

    @staticmethod
    def load_state(folder, state):
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def writer(folder):
    return HuggingFaceStorageWriter(str(folder), save_distributed=True)


NOT_REFUSED = pytest.fail.Exception  # the error of `pytest.raises` if nothing is raised


def broken(raises):
    """Expect a test of torch's format alone to end in an error of this type."""
    return pytest.mark.xfail(strict=True, raises=raises, reason="torch.distributed.checkpoint breaks this promise")


def broken_by_torch(raises):
    """Run a test with both formats; torch's is expected to end in an error of this type."""
    return pytest.mark.parametrize(
        "form", [pytest.param(TiewiseFormat, id="tiewise"), pytest.param(TorchFormat, id="torch", marks=broken(raises))]
    )


@contextmanager
def mesh_of(rank, world):
    """Make a mesh of fake processes, of which this process is one."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def save_by_torch(folder, whole, placement, world):
    """Save a tensor as `world` processes with `dcp.save` do, by running their planners and writers in turn."""
    planners, writers, plans = [], [], []
    for rank in range(world):
        with mesh_of(rank, world) as mesh:
            shard = distribute_tensor(whole.clone(), mesh, [placement], src_data_rank=None)
            planner, storage = DefaultSavePlanner(), writer(folder)
            planner.set_up_planner({"weight": shard}, storage.storage_meta(), rank == 0)
            storage.set_up_storage_writer(rank == 0)
            plans.append(storage.prepare_local_plan(planner.create_local_plan()))
        planners.append(planner)
        writers.append(storage)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for planner, storage, plan in zip(planners, writers, plans, strict=True):
        results.append(storage.write_data(planner.finish_plan(plan), planner).wait())
    writers[0].finish(metadata, results)


def load_by_torch(folder, shape):
    tensor = torch.full(shape, -1.0)
    TorchFormat.load_tensor(folder, tensor)
    return tensor


def linear(bias=False):
    """A layer whose weight is TABLE."""
    layer = nn.Linear(4, 97, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(TABLE)
    return layer


def tied(number):
    """Return two linear modules [4, 4] that share one weight or have two, by `number`."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    if number == 1:
        second.weight = first.weight
    return nn.ModuleList([first, second])


def tensor_files(folder):
    return sorted(folder.glob("*.safetensors"))


# the helpers: torch keeps these promises


@pytest.mark.parametrize(("rows", "placement"), [(97, Shard(0)), (3, Shard(0)), (97, Shard(1))], ids=repr)
@pytest.mark.parametrize("world", [2, 4])
def test_torch_reassembles_uneven_and_empty_parts(tmp_path, rows, placement, world):
    save_by_torch(tmp_path, TABLE[:rows], placement, world)
    assert torch.equal(load_by_torch(tmp_path, (rows, 4)), TABLE[:rows])


@pytest.mark.parametrize("form", [TiewiseFormat, TorchFormat], ids=["tiewise", "torch"])
def test_both_formats_keep_a_plain_layer(tmp_path, form):
    form.save(tmp_path, linear(bias=True))
    other = nn.Linear(4, 97)
    form.load(tmp_path, other)
    assert torch.equal(other.weight, TABLE)


# values are restored for every layout and storage of a tensor


@broken(ValueError)
def test_fused_matrices_are_saved(tmp_path):
    """`test_load_and_export_reassemble_fused_expert_matrices` is the same test of tiewise's format."""
    save_by_torch(tmp_path, GATE_AND_UP, _StridedShard(0, split_factor=2), world=2)
    assert torch.equal(load_by_torch(tmp_path, (12, 4)), GATE_AND_UP)


@broken_by_torch(AssertionError)
def test_fused_matrices_are_filled_with_their_own_rows(tmp_path, form):
    layer = nn.Linear(4, 12, bias=False)
    with torch.no_grad():
        layer.weight.copy_(GATE_AND_UP)
    form.save(tmp_path, layer)
    with mesh_of(1, 2) as mesh, torch.no_grad():
        placement = [_StridedShard(0, split_factor=2)]
        shard = distribute_tensor(torch.full((12, 4), -1.0), mesh, placement, src_data_rank=None)
        form.load_tensor(tmp_path, shard)
        assert torch.equal(shard.to_local(), GATE_AND_UP[GATE_AND_UP_OF_SECOND])


@broken_by_torch(CheckpointException)
def test_a_transposed_parameter_is_saved(tmp_path, form):
    one, other = linear(), linear()
    one.weight = nn.Parameter(TABLE.T.contiguous().T)
    assert not one.weight.is_contiguous()
    form.save(tmp_path, one)
    with torch.no_grad():
        other.weight.fill_(-1)
    form.load(tmp_path, other)
    assert torch.equal(other.weight, TABLE)


@broken_by_torch(CheckpointException)
def test_optimizer_state_and_options_are_restored(tmp_path, form):
    """torch writes a pickle of each option before the safetensors data, which makes the file invalid."""
    one, other = linear(), linear()
    kept, fresh = torch.optim.AdamW(one.parameters(), lr=0.3), torch.optim.AdamW(other.parameters(), lr=0.1)
    one(torch.ones(2, 4)).sum().backward()
    kept.step()
    form.save(tmp_path, one, kept)
    form.load(tmp_path, other, fresh)
    torch.testing.assert_close(fresh.state_dict(), kept.state_dict(), rtol=0, atol=0)


@broken_by_torch(SafetensorError)
def test_save_writes_no_pickle(tmp_path, form):
    layer = linear()
    form.save(tmp_path, layer, torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.9))
    for path in tmp_path.iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, framework="pt"):
                pass


# a tie is kept


@broken_by_torch(CheckpointException)
def test_a_tied_table_is_stored_once(tmp_path, form):
    form.save(tmp_path, tied(1))
    (path,) = tensor_files(tmp_path)
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 1


@broken_by_torch(NOT_REFUSED)
def test_load_refuses_two_tables_for_one_tied_parameter(tmp_path, form):
    form.save(tmp_path, tied(2))
    with form.refused("two parameters"):
        form.load(tmp_path, tied(1))


# only complete saves are loaded


@broken_by_torch(CheckpointException)
def test_full_disk_keeps_the_previous_save(tmp_path, form):
    form.save(tmp_path, linear())
    later, found = linear(), nn.Linear(4, 97, bias=False)
    with torch.no_grad():
        later.weight.add_(1)
    with limit_file_size(900), suppress(tiewise.TiewiseError, CheckpointException):
        form.save(tmp_path, later)
    form.load(tmp_path, found)
    assert torch.equal(found.weight, TABLE)


@broken(NOT_REFUSED)
def test_load_refuses_a_save_that_lacks_a_file(tmp_path):
    """`test_failed_save_keeps_the_previous_save` is the same test of tiewise's format."""
    save_by_torch(tmp_path, TABLE, Shard(0), world=2)
    os.unlink(tensor_files(tmp_path)[0])
    with pytest.raises(CheckpointException):
        load_by_torch(tmp_path, (97, 4))


@broken(NOT_REFUSED)
def test_load_refuses_parts_that_leave_a_gap(tmp_path):
    """`test_load_sharded_refuses_an_inconsistent_index` is the same test of tiewise's format."""
    save_by_torch(tmp_path, TABLE, Shard(0), world=2)
    second = tensor_files(tmp_path)[1]
    data = second.read_bytes()
    true, other = rb"\"saved_offsets\": [49, 0]", rb"\"saved_offsets\": [59, 0]"
    assert true in data
    second.write_bytes(data.replace(true, other))
    with pytest.raises(CheckpointException):
        load_by_torch(tmp_path, (107, 4))  # no file holds rows 49 to 58


@broken(AssertionError)
def test_save_by_fewer_processes_removes_files_of_the_previous_save(tmp_path):
    """`test_failed_save_keeps_the_previous_save` is the same test of tiewise's format."""
    save_by_torch(tmp_path, TABLE, Shard(0), world=2)
    save_by_torch(tmp_path, TABLE, Shard(0), world=1)
    assert len(tensor_files(tmp_path)) == 1


# a changed save or another model is refused in one line


@broken_by_torch(NOT_REFUSED)
def test_load_refuses_an_altered_byte(tmp_path, form):
    form.save(tmp_path, linear())
    (path,) = tensor_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with form.refused("not what was written"):
        form.load(tmp_path, linear())


@broken_by_torch(NOT_REFUSED)
def test_load_refuses_a_file_outside_the_folder(tmp_path, form):
    place = tmp_path / "save"
    form.save(place, linear())
    (path,) = tensor_files(place)
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    with form.refused("outside the folder"):
        form.load(place, linear())


@broken_by_torch(NOT_REFUSED)
def test_load_refuses_a_parameter_of_another_dtype(tmp_path, form):
    form.save(tmp_path, linear())
    with form.refused("saved as F32"):
        form.load(tmp_path, linear().to(torch.bfloat16))


@broken_by_torch(NOT_REFUSED)
def test_load_refuses_a_tensor_that_the_model_lacks(tmp_path, form):
    form.save(tmp_path, linear(bias=True))
    with form.refused("bias is in the save"):
        form.load(tmp_path, linear(bias=False))


@broken_by_torch(AssertionError)
def test_load_refuses_in_one_line(tmp_path, form):
    form.save(tmp_path, linear(bias=False))
    with form.refused("bias") as caught:
        form.load(tmp_path, linear(bias=True))
    assert "\n" not in str(caught.value)


# memory


@broken(AssertionError)
def test_a_save_holds_no_copy_of_the_tensors(tmp_path):
    """torch serialises all tensors of a process into one bytes object, which Python's allocator counts."""
    layer = nn.Linear(1024, 5 * 1024, bias=False)  # 20 MiB
    tracemalloc.start()
    try:
        TorchFormat.save(tmp_path, layer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < layer.weight.nbytes / 2
