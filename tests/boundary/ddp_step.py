"""Two gloo processes train installed models under DDP; run by `test_install_training`, exits 0 where all agree."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_models import Gradients, assert_same_gradients, batch, build, trainer
from torch.nn.parallel import DistributedDataParallel

from tiewise.boundary.install import install
from tiewise.boundary.saved import link_of

MODES = [{}, *({mode: True} for mode in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph"))]


def _train(model, rank, mode):
    wrapped = DistributedDataParallel(model.train(), **mode)
    for seed in (0, 1):
        inputs = batch(model, rows=2, seed=10 * seed + rank)
        with wrapped.no_sync() if seed == 0 and mode == {} else torch.enable_grad():
            wrapped(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def process(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, modes in (("llama", MODES), ("bart", MODES[:1])):
        for mode in modes:
            plain = build(name)
            model = copy.deepcopy(plain)
            install(model)
            torch.manual_seed(rank)
            wanted = _train(plain, rank, mode)
            torch.manual_seed(rank)
            got = _train(model, rank, mode)
            assert_same_gradients(got, wanted, 1e-5)
            assert link_of(model).counts.materialised == 0
    _accumulate(rank, store)
    dist.destroy_process_group()


def _accumulate(rank, store):
    """The Trainer of two processes, four micro-batches each: the gradient is that of all sixteen rows at once."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # asked for, and not used: the group stands
    model = build("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    plain = copy.deepcopy(model)
    rows = batch(model, rows=16)
    rows["labels"][torch.rand(rows["labels"].shape, generator=torch.Generator().manual_seed(0)) > 0.3] = -100
    plain.train()(**rows).loss.backward()
    install(model)
    data = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    seen, sizes = Gradients(), {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    made = trainer(model, f"{store}-{rank}", data, [seen], **sizes)
    assert made.args.world_size == 2
    made.train()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_same_gradients(seen.of, wanted, 1e-5)
    assert link_of(model).counts.fused == 4


if __name__ == "__main__":
    mp.start_processes(process, args=(sys.argv[1],), nprocs=2, start_method="fork")  # imports once
