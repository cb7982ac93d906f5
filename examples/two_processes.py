"""Train a tied model that two processes share by FSDP: torchrun --nproc_per_node 2 examples/two_processes.py"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import tiewise

dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained("model")
tiewise.install(model)  # before sharding: install checks the model with full tables
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 2000, (4, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
for _ in range(6):  # the first step also checks replicas, optimizer and shards
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
tiewise.boundary.save_sharded("sharded", model, optimizer)
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}; saved by {dist.get_world_size()} processes")
    tiewise.boundary.export_sharded("sharded", "exported")  # a tied model in transformers' format
dist.barrier()
dist.destroy_process_group()
