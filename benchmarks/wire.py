"""Bytes that ranks send per step for the tables, measured with gloo and planned.

    python -m benchmarks.wire [RANKS …]           2 and 4 ranks of one CPU; a minute

"planned" is `tiewise plan`'s figure for the same shape. "counted" comes from torch's dispatcher: the bytes of the full
tensor of each collective times the share that a ring sends. "TCP" is the number of bytes that the kernel sent for the
rank, headers included. Gloo lacks a reduce-scatter and sends an all-reduce, which has twice the bytes: "gloo" is the
count with all-reduces.

The first rows are steps of one tied table without a body, in every layout of `planning/costs.py`, with torch's
wrappers and the package's lookup and loss. The other rows are steps of a Llama, installed and, where possible, plain:
complete steps under DDP and FSDP2, with tables gathered and kept sharded, and the ends of a tensor-parallel one. The
bytes of its ends are 2·(step with one layer) − (step with two layers).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers as tr
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiewise.boundary.installation import install
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.path_gradient import tied_lookup
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.boundary.parallel_plans import keep_tables, spread_over
from tiewise.boundary.sharded_tables import shard
from tiewise.planning.costs import BOTH, FSDP_SHARDED, SPLIT, Setting, WorldLayout, layouts
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes

BATCH, LENGTH, WIDTH = 2, 64, 64
# No number of ranks divides these: four ranks pad 97 rows by three. With so few rows, headers are much of TCP's bytes.
VOCABULARIES = {2: (5003,), 4: (5003, 97)}
Step = Callable[[], Tensor]
Row = tuple[str, int, int, int, int]  # label; bytes planned, counted, as gloo sends them, sent by TCP


class ByteCounter(TorchDispatchMode):
    """Counter of the bytes that each kind of collective sends.

    Ring algorithms among p ranks send 2(p−1)/p·n for an all-reduce and (p−1)/p·n for a gather or scatter, where n is
    the size of the full tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space not in ("c10d", "_c10d_functional") or name.startswith(("wait", "_wrap")):
            return out
        passes = 2 if "reduce" in name and "scatter" not in name else 1
        if not ("gather" in name or "reduce" in name):
            raise RuntimeError(f"{name} is not counted: say what it sends")
        size = _group_size(args)
        # n is the largest input or output; a list counts as the sum of its tensors
        full_bytes = max(sum(t.nbytes for t in tree_leaves(x) if isinstance(t, Tensor)) for x in (*args, out))
        self.sent[name.strip("_")] += passes * full_bytes * (size - 1) // size
        return out


def _group_size(args: Any) -> int:
    """Return the number of ranks of a collective, from its arguments."""
    for x in args:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return dist.ProcessGroup.unbox(x).size()
    return dist.distributed_c10d._resolve_process_group(args[-1]).size()


def count_bytes_sent_by_tcp() -> int:
    """Return the bytes that this process's TCP sockets sent so far, each once.

    Linux counts them (tcpi_bytes_sent), and those that it sent again on a busy machine (tcpi_bytes_retrans).
    """
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                sent, again = struct.unpack_from("QQ", info, 200)
                total += sent - again
        except OSError:  # closed in the meantime, or not a TCP socket
            continue
    return total


def draw_table(vocab: int) -> Tensor:
    """Return the full table [V, E], the same on every rank."""
    return torch.randn(vocab, WIDTH, generator=torch.Generator().manual_seed(vocab))


class Ends(nn.Module):
    """Lookup and loss with one table, or with one shard of it.

    With a shard, the other rows are on the other ranks of its group.
    """

    def __init__(self, vocab: int, shard: VocabularyShard | None) -> None:
        super().__init__()
        self.rows = slice(0, vocab) if shard is None else slice(shard.start, shard.stop)
        self.table, self.shard = nn.Parameter(draw_table(vocab)[self.rows]), shard

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the rows of `ids` [N] as hidden states."""
        rows, table = tied_lookup(self.table, ids, shard=self.shard)
        return linear_cross_entropy(rows, table, targets, shard=self.shard)


def make_ends_step(layout: WorldLayout, vocab: int) -> Step:
    """Return a step of both ends in a layout, on all ranks."""
    mesh = init_device_mesh("cpu", (layout.replicas, layout.fsdp, layout.tp), mesh_dim_names=("replicas", "fsdp", "tp"))
    torch.manual_seed(dist.get_rank() // layout.tp)  # the ranks of tp have the same tokens
    ids, targets = torch.randint(0, vocab, (2, BATCH * LENGTH))
    group = "fsdp" if layout.keeps_shards else "tp"
    has_shard = layout.keeps_shards or layout.tp > 1
    ends = Ends(
        vocab, VocabularyShard(vocab, mesh[group].get_group(), own_tokens=layout.keeps_shards) if has_shard else None
    )
    model: nn.Module = ends
    if layout.fsdp > 1 and not layout.keeps_shards:
        fully_shard(model, mesh=mesh["replicas", "fsdp"] if layout.replicas > 1 else mesh["fsdp"])
    elif layout.replicas > 1:
        model = DistributedDataParallel(model, process_group=mesh["replicas"].get_group())
    model(ids, targets).backward()
    if layout.keeps_shards:  # the loss was summed over ranks, the reference is a mean
        ends.table.grad /= layout.fsdp  # type: ignore[operator]
    _check_step(ends, layout.rows(vocab), vocab, ids, targets)
    return lambda: model(ids, targets)


def _check_step(ends: Ends, rows: int, vocab: int, ids: Tensor, targets: Tensor) -> None:
    """Assert that a step is right, because the bytes of a wrong step mean nothing.

    The gradient equals that of the mean over all ranks' tokens on one rank. The fullest rank holds as many rows as
    planned.
    """
    most_rows = torch.tensor(len(ends.table.to_local() if isinstance(ends.table, DTensor) else ends.table))
    dist.all_reduce(most_rows, dist.ReduceOp.MAX)
    if most_rows != rows:
        raise AssertionError(f"the fullest rank holds {most_rows} rows, not {rows}")
    tokens = [torch.empty(2, len(ids), dtype=ids.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(tokens, torch.stack([ids, targets]))
    all_ids, all_targets = torch.cat(tokens, 1)
    full_table = draw_table(vocab).requires_grad_()
    nn.functional.cross_entropy(full_table[all_ids] @ full_table.T, all_targets).backward()
    gradient = ends.table.grad.full_tensor() if isinstance(ends.table.grad, DTensor) else ends.table.grad
    torch.testing.assert_close(gradient, full_table.grad[ends.rows], rtol=1e-4, atol=1e-6)


def llama_config(vocab: int, layers: int = 2, tied: bool = True) -> tr.LlamaConfig:
    """Return the config of a small Llama."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4}
    return tr.LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, tie_word_embeddings=tied, **sizes)


def make_step(model: Any, vocab: int, seed: int) -> Step:
    """Return a complete step of a model on random ids."""
    ids = torch.randint(0, vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    return lambda: model(input_ids=ids, labels=ids).loss


def make_ddp_step(vocab: int, tied: bool, installed: bool) -> Step:
    """Return a step of a Llama under DDP."""
    model = tr.LlamaForCausalLM(llama_config(vocab, tied=tied))  # its only buffers are constant position encodings
    if installed:
        install(model)
    return make_step(DistributedDataParallel(model, broadcast_buffers=False), vocab, dist.get_rank())


def make_fsdp_step(vocab: int, tied: bool, installed: bool, sharded: bool = False) -> Step:
    """Return a step of a Llama under FSDP2, with tables gathered or kept sharded."""
    model = tr.LlamaForCausalLM(llama_config(vocab, tied=tied))
    if installed:
        install(model)
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(model, mesh, keep_tables(model, mesh) if sharded else None)
    return make_step(model, vocab, dist.get_rank())


def make_fsdp_tp_step(vocab: int, layers: int) -> Step:
    """Return a step of an installed Llama under FSDP over 2 × tensor parallelism over 2."""
    torch.manual_seed(0)
    model = tr.LlamaForCausalLM(llama_config(vocab, layers))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    spread_over(model, mesh["tp"])
    shard(model, mesh["fsdp"])
    install(model)
    return make_step(model, vocab, dist.get_rank() // 2)


def make_tp_step(vocab: int, layers: int, installed: bool, folder: Path) -> Step:
    """Return a step of a Llama under tensor parallelism over all ranks."""
    checkpoint = folder / f"{vocab}-{layers}-{installed}"
    if dist.get_rank() == 0:
        tr.LlamaForCausalLM(llama_config(vocab, layers)).save_pretrained(checkpoint)
    dist.barrier()
    split = tr.distributed.DistributedConfig(tp_size=dist.get_world_size())
    model = tr.LlamaForCausalLM.from_pretrained(checkpoint, distributed_config=split)
    if installed:
        install(model)
    return make_step(model, vocab, 0)


def measure_step(make: Step) -> tuple[int, int, int]:
    """Return the mean over ranks of one step's bytes.

    They are (counted, as gloo sends them, sent by TCP).
    """
    for _ in range(2):  # one-time work: groups connect, DDP sends its buckets at the second step
        make().backward()
    dist.barrier()
    before = count_bytes_sent_by_tcp()
    with ByteCounter() as counter:
        make().backward()
    dist.barrier()
    counted, scattered = (sum(n for name, n in counter.sent.items() if part in name) for part in ("", "scatter"))
    sent = torch.tensor([counted, counted + scattered, count_bytes_sent_by_tcp() - before])
    dist.all_reduce(sent)
    return tuple((sent // dist.get_world_size()).tolist())


def measure_cases(world: int, vocab: int, folder: Path) -> list[Row]:
    """Measure every case on this number of ranks."""
    rows: list[Row] = []

    def plan_ranks(tp: int = 1, fsdp: int | None = None, spec: str = "tied", model: Any = None) -> dict[str, Any]:
        """Return the planned record of a rank, by layout."""
        setting = Setting(BATCH, LENGTH, world=world, tp=tp, fsdp=fsdp)
        result = plan(model or Sizes(vocab, WIDTH, 1), [spec], setting=setting)
        return {rank["layout"]: rank for rank in result.choices[0]["ranks"]}

    cuts = [(1, None), (world, None)] + ([(1, 2), (2, None), (2, 2)] if world == 4 else [])
    seen = set()
    for tp, fsdp in cuts:
        for layout in layouts(Setting(BATCH, LENGTH, world=world, tp=tp, fsdp=fsdp)):
            if layout.is_stock or layout in seen or (layout.keeps_shards and layout.replicas > 1):
                continue
            seen.add(layout)
            shape = f"{layout.replicas} × {layout.fsdp} × {layout.tp}"
            bytes_ = plan_ranks(tp, fsdp)[layout.name]["sent_for_tables"]
            rows.append((f"{layout.name}, {shape}", bytes_, *measure_step(make_ends_step(layout, vocab))))
    for tied, installed in ((True, False), (False, False), (True, True)):
        spec, config = "tied" if tied else "untied", llama_config(vocab, tied=tied).to_dict()
        for name, make in (("data parallel", make_ddp_step), ("fsdp", make_fsdp_step)):
            bytes_ = plan_ranks(spec=spec, model=config)[name]["sent"]
            label = f"Llama, {spec}{', installed' * installed}, {name}, whole step"
            rows.append((label, bytes_, *measure_step(make(vocab, tied, installed))))
    for tied in (True, False):
        spec = "tied" if tied else "untied"
        bytes_ = plan_ranks(spec=spec, model=llama_config(vocab, tied=tied).to_dict())[FSDP_SHARDED]["sent"]
        label = f"Llama, {spec}, installed, {FSDP_SHARDED}, whole step"
        rows.append((label, bytes_, *measure_step(make_fsdp_step(vocab, tied, True, sharded=True))))
    split: list[tuple[str, bool, int | None]] = [("stock tensor parallel", False, None), (SPLIT, True, None)]
    for name, installed, fsdp in [*split, (BOTH, True, 2)] if world == 4 else split:
        steps = (make_fsdp_tp_step(vocab, n) if fsdp else make_tp_step(vocab, n, installed, folder) for n in (1, 2))
        one_layer, two_layers = map(measure_step, steps)
        bytes_ = plan_ranks(fsdp or world, fsdp)[name]["sent_for_tables"]
        counted, gloo, tcp = (2 * one - two for one, two in zip(one_layer, two_layers, strict=True))
        rows.append((f"Llama, tied{', installed' * installed}, {name}, its ends", bytes_, counted, gloo, tcp))
    return rows


def _run_rank(rank: int, world: int, folder: str) -> None:
    """Measure all cases as one rank; rank 0 writes them to the folder."""
    torch.set_num_threads(1)
    tr.utils.logging.disable_progress_bar()
    tr.utils.logging.set_verbosity_error()
    store, wait = f"file://{folder}/store", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=wait)
    rows_by_vocab = {str(vocab): measure_cases(world, vocab, Path(folder)) for vocab in VOCABULARIES[world]}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(rows_by_vocab), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world: int) -> dict[int, list[Row]]:
    """Return {V: rows} measured on `world` forked ranks.

    If a rank fails, its error is raised with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run_rank, args=(world, folder), nprocs=world, start_method="fork")
        rows_by_vocab = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return {int(vocab): rows for vocab, rows in rows_by_vocab.items()}


def main() -> None:
    """Print the table for each number of ranks."""
    tokens = f"N = {BATCH * LENGTH} tokens of a rank, D = {WIDTH}, fp32"
    print(f"Bytes per rank and step, {tokens}; a cut is replicas × fsdp × tp.\n")
    print("| ranks | V | layout | planned | counted | gloo | TCP |\n|---|---|---|---|---|---|---|")
    for world in map(int, sys.argv[1:] or VOCABULARIES):
        for vocab, rows in run_ranks(world).items():
            for name, *bytes_ in rows:
                print(f"| {world} | {vocab:,} | {name} | {' | '.join(f'{count:,}' for count in bytes_)} |")


if __name__ == "__main__":
    main()
