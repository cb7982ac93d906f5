"""Two gloo processes train installed models under DDP; run by `test_install_training`, exits 0 where all agree."""

import copy
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_models import assert_same_gradients, batch, build
from torch.nn.parallel import DistributedDataParallel

from tiewise.boundary.install import install
from tiewise.boundary.link import link_of

MODES = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


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
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(process, args=(sys.argv[1],), nprocs=2, start_method="fork")  # imports once
