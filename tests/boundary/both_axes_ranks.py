"""Gloo ranks train models that tensor parallelism and `fully_shard` both cut; run by `test_sharded_training`.

    both_axes_ranks.py FOLDER CASE…        four ranks, a mesh of 2 × 2

Each case is a model of one rank, in its family's own classes where these have the boundary, beside the same of four.
"""

import sys
from functools import partial

import pytest
import tensor_parallel_ranks
import torch
import torch.multiprocessing as mp
from tensor_parallel_ranks import (
    HOW,
    KINDS,
    SIZES,
    Largest,
    on_rank,
    paths_near,
    placed,
    refused,
    saved,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig

from tiewise.boundary.install import install, installed
from tiewise.boundary.parallel_plan import parallel_plan
from tiewise.boundary.sharded_tables import shard
from tiewise.core.errors import InstallError, UnsupportedError

BODY = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel())
BODY |= dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())
rows_of = partial(tensor_parallel_ranks.rows_of, alike=2)


def cut(model, mesh, *, body=False):
    """Spread the ends, and the body by torch's own styles or not at all; then shard all that over the other axis."""
    plan = parallel_plan(model, mesh)
    if body:
        modules = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        plan |= {name: BODY[last] for name in modules if (last := name.rpartition(".")[2]) in BODY}
    parallelize_module(model, mesh["tp"], plan)
    shard(model, mesh["dp" if mesh.ndim == 2 else ("replicas", "dp")])


def models(folder, kind, v, tied, spec=None, axes=2):
    """`placed` over four ranks."""
    sizes, names = ((2, 2), ("dp", "tp")) if axes == 2 else ((2, 1, 2), ("replicas", "dp", "tp"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return placed(folder, kind, v, tied, spec, partial(cut, mesh=mesh, body=kind == "llama"))


beside = partial(tensor_parallel_ranks.beside, rows_of)
steps = partial(tensor_parallel_ranks.steps, models, rows_of)
adamw = partial(steps, make=torch.optim.AdamW, rate=1e-3, bar=1e-4)


def both_paths(folder, kind, v, axes):
    """One batch."""
    for tied in ("tied", "untied"):
        paths_near(tied, *models(folder, kind, v, tied, axes=axes), [rows_of(v, 3)])


def stock(folder, kind, v):
    """transformers' own: exact where untied; of tied tables two units keep one Parameter, which is refused."""
    how = {**HOW, "distributed_config": DistributedConfig(tp_size=2, fsdp_size=2)}
    many = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "untied"), **how).train()
    handle = install(many)
    one = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "untied"), **HOW).train()
    beside(f"stock {kind} {v}", v, one, many, handle)
    tied = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "tied"), **how)
    with pytest.raises(InstallError, match="are one Parameter that two units of fully_shard keep") as caught:
        install(tied)
    assert "\n" not in str(caught.value)


def refusals(folder, kind, v):
    """What would change or read a whole table is refused, and the model trains on as it was."""
    one, many, handle = models(folder, kind, v, "tied")
    refused(
        (
            InstallError,
            "tied tables that are sharded, and factored:8 would change",
            lambda: install(many, "factored:8"),
        ),
        (InstallError, "and untied would change them; install it before", lambda: install(many, "untied")),
        (UnsupportedError, "tied to untied: the tables of .* are sharded; do it before", handle.untie),
        (UnsupportedError, "exact_decoding: the tables", handle.exact_decoding),
    )
    assert install(many).tables()[0] is handle.tables()[0]
    beside("after refusals", v, one, many, installed(many))


def nothing_is_whole(folder, kind, v):
    """A forward gathers the rows of one rank of tensor parallelism, no [V, D] and no [N, V]."""
    _, many, _ = models(folder, kind, v, "tied")
    inputs = rows_of(v, 0)[1]
    many(**inputs).loss.backward()
    with Largest() as largest:
        many(**inputs).loss.backward()
    rows = -(-v // 2) * SIZES["hidden_size"]
    assert rows <= largest.numbers < min(1.1 * rows, v * inputs["input_ids"].numel())


if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    mp.start_processes(on_rank, args=(globals(), folder, 4, cases), nprocs=4, start_method="fork")  # imports once
