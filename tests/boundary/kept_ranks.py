"""Gloo ranks train models whose tables are kept in rows under FSDP2; run by `test_sharded_training`.

    kept_ranks.py FOLDER WORLD CASE…

Each case is a model of one rank, in its family's own classes where these have the boundary, beside the same of many.
"""

import sys
from functools import partial

import tensor_parallel_ranks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensor_parallel_ranks import (
    HOW,
    KINDS,
    SIZES,
    Largest,
    batch,
    full,
    near,
    on_rank,
    paths_near,
    placed,
    refused,
    rows_of,
    saved,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tiewise.boundary.install import install
from tiewise.boundary.parallel_plan import keep_tables
from tiewise.boundary.sharded_tables import shard
from tiewise.checkpoint.audit import check
from tiewise.core.errors import InstallError, UnsupportedError
from tiewise.sharded.export import export_sharded
from tiewise.sharded.save_load import load_sharded, save_sharded


def models(folder, kind, v, tied, spec=None, replicas=1):
    """`placed` over all ranks."""
    sizes = (dist.get_world_size(),) if replicas == 1 else (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
    return placed(folder, kind, v, tied, spec, lambda many: shard(many, mesh, keep_tables(many, mesh)))


beside = partial(tensor_parallel_ranks.beside, rows_of)
steps = partial(tensor_parallel_ranks.steps, models, rows_of)
adamw = partial(steps, make=torch.optim.AdamW, rate=1e-3, bar=1e-4)


def both_paths(folder, kind, v, replicas):
    """Two micro-batches."""
    for tied in ("tied", "untied"):
        paths_near(tied, *models(folder, kind, v, tied, replicas=replicas), [rows_of(v, 3), rows_of(v, 4)])


def nothing_is_whole(folder, kind, v):
    """No rank makes a [V, D] or [n, V] tensor in a step: its rows, and everyone's states, are the largest."""
    _, many, _ = models(folder, kind, v, "tied")
    inputs = rows_of(v, 0)[1]
    many(**inputs).loss.backward()
    with Largest() as largest:
        many(**inputs).loss.backward()
    n, rows, ranks = inputs["input_ids"].numel(), -(-v // dist.get_world_size()), dist.get_world_size()
    assert largest.numbers == max(rows * SIZES["hidden_size"], rows * n * ranks)
    assert largest.numbers < v * SIZES["hidden_size"]


def logits_are_real(folder, kind, v):
    """Ranks that read logits of batches of unlike lengths have those of one rank, and gradients of them."""
    one, many, handle = models(folder, kind, v, "tied")
    long = [batch(v, seed)["input_ids"][:, : 12 - seed] for seed in range(dist.get_world_size())]

    def score(model, ids):
        p = torch.softmax(model(input_ids=ids).logits[..., 2:].float(), -1)  # of words, which no fused loss has
        return p.square().sum(-1).mean()

    scores = [score(one, ids) for ids in long]
    torch.stack(scores).mean().backward()
    got = score(many, long[dist.get_rank()])
    near("score", got, scores[dist.get_rank()], 1e-5)
    got.backward()
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        near(f"{kind}: gradient of {name}", b.grad, a.grad, 2e-5)
    assert handle.counts.materialised == 1
    with torch.no_grad():
        inputs = batch(v, dist.get_rank())
        near("logits", many.eval()(**inputs).logits + 0, one.eval()(**inputs).logits, 1e-5)


def bf16(folder, kind, v):
    """A policy that computes in bf16 is that of the tables too, and trains as well as when they are gathered."""
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(torch.bfloat16)
    curves = []
    for keep in (False, True):
        model = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "tied"), **HOW).train()
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=keep_tables(model, mesh) if keep else None)
        install(model)
        if keep:
            model(**rows_of(v, 0)[1]).loss.backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(**rows_of(v, step)[1]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        curves.append(loss.detach())
    near("bf16", curves[1], curves[0], 1e-2)


def told_apart(folder, kind, v):
    """What cannot be is refused in one line; the model stays as it was, and trains as one rank does."""
    where, mesh = saved(folder, kind, v, "tied"), init_device_mesh("cpu", (dist.get_world_size(),))
    model = KINDS[kind][0].from_pretrained(where, **HOW).train()
    deep = init_device_mesh("cpu", (1, 1, dist.get_world_size()))
    refused(
        (InstallError, "keep_tables of a int in place of a mesh", lambda: keep_tables(model, 2)),
        (InstallError, "over a mesh of 3 dimensions; give that of", lambda: keep_tables(model, deep)),
    )
    kept = keep_tables(model, mesh)
    refused(
        (InstallError, "spread over ranks already; call tiewise.install", lambda: keep_tables(model, mesh)),
        (UnsupportedError, "without a boundary; call tiewise.install", lambda: model(**batch(v))),
    )
    shard(model, mesh, kept)
    refused((InstallError, "untied would change them; install it before", lambda: install(model, "untied")))
    handle = install(model)
    refused(
        (UnsupportedError, "tied to untied: the tables of .* are sharded; do it before", handle.untie),
        (UnsupportedError, "exact_decoding: the tables", handle.exact_decoding),
    )
    one = KINDS[kind][0].from_pretrained(where, **HOW).train()
    beside("after refusals", v, one, model, handle)
    plain = KINDS[kind][0].from_pretrained(where, **HOW)
    shard(plain, mesh)
    refused((InstallError, "sharded by fully_shard already; call keep_tables on", lambda: keep_tables(plain, mesh)))


def still(folder, kind, v):
    """The watch of the first steps sees a kept table whose rows one rank never moves."""
    _, many, _ = models(folder, kind, v, "tied")
    optimizer = torch.optim.SGD(many.parameters(), lr=0.1)

    def train():
        for step in range(5):
            many(**rows_of(v, step)[1]).loss.backward()
            if dist.get_rank() == 1:
                many.lm_head.weight.grad.to_local().zero_()
            optimizer.step()
            optimizer.zero_grad()

    refused((UnsupportedError, "after 4 steps all rows of process 1 stand still", train))


def kept_on_disk(folder, kind, v):
    """Saved by all ranks, loaded by as many that gather, and exported: bit for bit, and tied stays tied."""
    _, many, _ = models(folder, kind, v, "tied")
    optimizer = torch.optim.AdamW(many.parameters(), lr=1e-3)
    many(**rows_of(v, 0)[1]).loss.backward()
    optimizer.step()
    place = f"{folder}/{kind}-{v}-saved"
    save_sharded(place, many, optimizer)
    other = KINDS[kind][0].from_pretrained(saved(folder, kind, v, "tied"), **HOW)
    shard(other)
    again = torch.optim.AdamW(other.parameters())
    load_sharded(place, other, again)
    for a, b in zip(many.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(a), full(b))
        assert all(torch.equal(full(optimizer.state[a][key]), full(again.state[b][key])) for key in again.state[b])
    table = full(many.lm_head.weight)
    if dist.get_rank() == 0:
        export_sharded(place, f"{place}-whole")
        assert not [finding for finding in check(f"{place}-whole").findings if finding.rule == "B013"]
        whole = KINDS[kind][0].from_pretrained(f"{place}-whole")
        assert whole.lm_head.weight is whole.get_input_embeddings().weight
        assert torch.equal(whole.lm_head.weight, table)


if __name__ == "__main__":
    folder, size, *cases = sys.argv[1:]
    mp.start_processes(on_rank, args=(globals(), folder, int(size), cases), nprocs=int(size), start_method="fork")
