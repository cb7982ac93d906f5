"""Bytes that ranks send per step for the tables, measured with gloo and planned.

    python -m benchmarks.wire [RANKS …]           2 and 4 ranks of one CPU; a minute

Planned is `tiewise plan`'s figure for the same shape. Counted is what the dispatcher sees: the size of every
collective's whole tensor times what a ring sends of it. TCP is what the kernel sent for the rank, headers and all. Gloo
has no reduce-scatter of its own and sends an all-reduce, twice the bytes: "gloo" is the count with that.

One table at both ends, and nothing between them, in every layout of `planning/costs.py`, by torch's own wrappers and
the package's own lookup and loss. Besides, whole steps of a Llama under DDP and FSDP2, with tables gathered and kept
sharded, and of one that is split: its ends, 2·(one layer) − (two layers). Each is installed, and as it is where it can.
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

from tiewise.boundary.install import install
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.path_gradient import tied_lookup
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.boundary.parallel_plan import keep_tables, spread_over
from tiewise.boundary.sharded_tables import shard
from tiewise.planning.costs import BOTH, FSDP_SHARDED, SPLIT, Setting, WorldLayout, layouts
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes

BATCH, LENGTH, WIDTH = 2, 64, 64
# Neither divides: four ranks pad 97 rows by three. Of so few headers are much of what TCP sends.
VOCABULARIES = {2: (5003,), 4: (5003, 97)}
Step = Callable[[], Tensor]
Row = tuple[str, int, int, int, int]  # what, bytes planned, counted, as gloo sends them, sent by TCP


class Wire(TorchDispatchMode):
    """`sent` by collective: ring algorithms, all-reduce 2(p−1)/p·n, gather and scatter (p−1)/p·n of the whole n."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space not in ("c10d", "_c10d_functional") or name.startswith(("wait", "_wrap")):
            return out
        ways = 2 if "reduce" in name and "scatter" not in name else 1
        if not ("gather" in name or "reduce" in name):
            raise RuntimeError(f"{name} is not counted: say what it sends")
        size = _size_of_group(args)
        # the whole is what is largest of what goes in and what comes out; a list is as large as its parts together
        whole = max(sum(t.nbytes for t in tree_leaves(x) if isinstance(t, Tensor)) for x in (*args, out))
        self.sent[name.strip("_")] += ways * whole * (size - 1) // size
        return out


def _size_of_group(args: Any) -> int:
    for x in args:
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
            return dist.ProcessGroup.unbox(x).size()
    return dist.distributed_c10d._resolve_process_group(args[-1]).size()


def sent_by_tcp() -> int:
    """Bytes that this process's TCP sockets have sent so far (Linux: tcpi_bytes_sent)."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as of:
                total += struct.unpack_from("Q", of.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232), 200)[0]
        except OSError:  # closed meanwhile, or no TCP
            continue
    return total


def table(vocab: int) -> Tensor:
    """The same whole table on every rank."""
    return torch.randn(vocab, WIDTH, generator=torch.Generator().manual_seed(vocab))


class Ends(nn.Module):
    """A lookup, and the loss over the same table; with a shard, over the ranks that have its other rows."""

    def __init__(self, vocab: int, shard: VocabularyShard | None) -> None:
        super().__init__()
        self.rows = slice(0, vocab) if shard is None else slice(shard.start, shard.stop)
        self.table, self.shard = nn.Parameter(table(vocab)[self.rows]), shard

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        rows, table = tied_lookup(self.table, ids, shard=self.shard)
        return linear_cross_entropy(rows, table, targets, shard=self.shard)


def ends(layout: WorldLayout, vocab: int) -> Step:
    """A step of both ends in a layout, on the ranks that there are."""
    mesh = init_device_mesh("cpu", (layout.replicas, layout.fsdp, layout.tp), mesh_dim_names=("replicas", "fsdp", "tp"))
    torch.manual_seed(dist.get_rank() // layout.tp)  # the ranks of tp have the same tokens
    ids, targets = torch.randint(0, vocab, (2, BATCH * LENGTH))
    group = "fsdp" if layout.keeps_shards else "tp"
    held = layout.keeps_shards or layout.tp > 1
    made = Ends(
        vocab, VocabularyShard(vocab, mesh[group].get_group(), own_tokens=layout.keeps_shards) if held else None
    )
    model: nn.Module = made
    if layout.fsdp > 1 and not layout.keeps_shards:
        fully_shard(model, mesh=mesh["replicas", "fsdp"] if layout.replicas > 1 else mesh["fsdp"])
    elif layout.replicas > 1:
        model = DistributedDataParallel(model, process_group=mesh["replicas"].get_group())
    model(ids, targets).backward()
    if layout.keeps_shards:  # the gradient is of the sum of all ranks' losses
        made.table.grad /= layout.fsdp  # type: ignore[operator]
    _assert_right(made, layout.rows(vocab), vocab, ids, targets)
    return lambda: model(ids, targets)


def _assert_right(made: Ends, rows: int, vocab: int, ids: Tensor, targets: Tensor) -> None:
    """The bytes of a wrong step mean nothing: the gradient is that of the mean over all ranks' tokens on one rank.

    The fullest rank holds as many rows as is planned.
    """
    most = torch.tensor(len(made.table.to_local() if isinstance(made.table, DTensor) else made.table))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if most != rows:
        raise AssertionError(f"the fullest rank holds {most} rows, not {rows}")
    tokens = [torch.empty(2, len(ids), dtype=ids.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(tokens, torch.stack([ids, targets]))
    everyone, words = torch.cat(tokens, 1)
    whole = table(vocab).requires_grad_()
    nn.functional.cross_entropy(whole[everyone] @ whole.T, words).backward()
    got = made.table.grad.full_tensor() if isinstance(made.table.grad, DTensor) else made.table.grad
    torch.testing.assert_close(got, whole.grad[made.rows], rtol=1e-4, atol=1e-6)


def llama(vocab: int, layers: int = 2, tied: bool = True) -> tr.LlamaConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4}
    return tr.LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, tie_word_embeddings=tied, **sizes)


def whole(model: Any, vocab: int, seed: int) -> Step:
    ids = torch.randint(0, vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    return lambda: model(input_ids=ids, labels=ids).loss


def data_parallel(vocab: int, tied: bool, installed: bool) -> Step:
    model = tr.LlamaForCausalLM(llama(vocab, tied=tied))  # its only buffers are the constants of its positions
    if installed:
        install(model)
    return whole(DistributedDataParallel(model, broadcast_buffers=False), vocab, dist.get_rank())


def fsdp2(vocab: int, tied: bool, installed: bool, kept: bool = False) -> Step:
    model = tr.LlamaForCausalLM(llama(vocab, tied=tied))
    if installed:
        install(model)
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(model, mesh, keep_tables(model, mesh) if kept else None)
    return whole(model, vocab, dist.get_rank())


def both(vocab: int, layers: int) -> Step:
    """fsdp over 2 × tp over 2 of an installed Llama."""
    torch.manual_seed(0)
    model = tr.LlamaForCausalLM(llama(vocab, layers))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    spread_over(model, mesh["tp"])
    shard(model, mesh["fsdp"])
    install(model)
    return whole(model, vocab, dist.get_rank() // 2)


def tensor_parallel(vocab: int, layers: int, installed: bool, folder: Path) -> Step:
    place = folder / f"{vocab}-{layers}-{installed}"
    if dist.get_rank() == 0:
        tr.LlamaForCausalLM(llama(vocab, layers)).save_pretrained(place)
    dist.barrier()
    split = tr.distributed.DistributedConfig(tp_size=dist.get_world_size())
    model = tr.LlamaForCausalLM.from_pretrained(place, distributed_config=split)
    if installed:
        install(model)
    return whole(model, vocab, 0)


def measured(make: Step) -> tuple[int, int, int]:
    """Return the mean bytes of one step over ranks: (counted, as gloo sends it, sent by TCP)."""
    for _ in range(2):  # what is done once: groups connect, DDP tells its buckets at the second step
        make().backward()
    dist.barrier()
    before = sent_by_tcp()
    with Wire() as wire:
        make().backward()
    dist.barrier()
    counted, again = (sum(n for name, n in wire.sent.items() if part in name) for part in ("", "scatter"))
    found = torch.tensor([counted, counted + again, sent_by_tcp() - before])
    dist.all_reduce(found)
    return tuple((found // dist.get_world_size()).tolist())


def cases(world: int, vocab: int, folder: Path) -> list[Row]:
    """Every case on this many ranks."""
    found: list[Row] = []

    def planned(tp: int = 1, fsdp: int | None = None, tied: str = "tied", model: Any = None) -> dict[str, Any]:
        setting = Setting(BATCH, LENGTH, world=world, tp=tp, fsdp=fsdp)
        made = plan(model or Sizes(vocab, WIDTH, 1), [tied], setting=setting)
        return {rank["layout"]: rank for rank in made.choices[0]["ranks"]}

    cuts = [(1, None), (world, None)] + ([(1, 2), (2, None), (2, 2)] if world == 4 else [])
    seen = set()
    for tp, fsdp in cuts:
        for layout in layouts(Setting(BATCH, LENGTH, world=world, tp=tp, fsdp=fsdp)):
            if layout.is_stock or layout in seen or (layout.keeps_shards and layout.replicas > 1):
                continue
            seen.add(layout)
            cut = f"{layout.replicas} × {layout.fsdp} × {layout.tp}"
            bytes_ = planned(tp, fsdp)[layout.name]["sent_for_tables"]
            found.append((f"{layout.name}, {cut}", bytes_, *measured(ends(layout, vocab))))
    for tied, installed in ((True, False), (False, False), (True, True)):
        named, config = "tied" if tied else "untied", llama(vocab, tied=tied).to_dict()
        for name, make in (("data parallel", data_parallel), ("fsdp", fsdp2)):
            bytes_ = planned(tied=named, model=config)[name]["sent"]
            label = f"Llama, {named}{', installed' * installed}, {name}, whole step"
            found.append((label, bytes_, *measured(make(vocab, tied, installed))))
    for tied in (True, False):
        named = "tied" if tied else "untied"
        bytes_ = planned(tied=named, model=llama(vocab, tied=tied).to_dict())[FSDP_SHARDED]["sent"]
        label = f"Llama, {named}, installed, {FSDP_SHARDED}, whole step"
        found.append((label, bytes_, *measured(fsdp2(vocab, tied, True, kept=True))))
    split: list[tuple[str, bool, int | None]] = [("stock tensor parallel", False, None), (SPLIT, True, None)]
    for name, installed, fsdp in [*split, (BOTH, True, 2)] if world == 4 else split:
        steps = (both(vocab, n) if fsdp else tensor_parallel(vocab, n, installed, folder) for n in (1, 2))
        one, two = map(measured, steps)
        bytes_ = planned(fsdp or world, fsdp)[name]["sent_for_tables"]
        counted, gloo, tcp = (2 * a - b for a, b in zip(one, two, strict=True))
        found.append((f"Llama, tied{', installed' * installed}, {name}, its ends", bytes_, counted, gloo, tcp))
    return found


def _process(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    tr.utils.logging.disable_progress_bar()
    tr.utils.logging.set_verbosity_error()
    store, wait = f"file://{folder}/store", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=wait)
    found = {str(vocab): cases(world, vocab, Path(folder)) for vocab in VOCABULARIES[world]}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world: int) -> dict[int, list[Row]]:
    """{V: cases} of `world` forked ranks; a rank that fails is raised here with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_process, args=(world, folder), nprocs=world, start_method="fork")
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    return {int(vocab): rows for vocab, rows in found.items()}


def main() -> None:
    tokens = f"N = {BATCH * LENGTH} tokens of a rank, D = {WIDTH}, fp32"
    print(f"Bytes per rank and step, {tokens}; a cut is replicas × fsdp × tp.\n")
    print("| ranks | V | layout | planned | counted | gloo | TCP |\n|---|---|---|---|---|---|---|")
    for world in map(int, sys.argv[1:] or VOCABULARIES):
        for vocab, rows in on_ranks(world).items():
            for name, *bytes_ in rows:
                print(f"| {world} | {vocab:,} | {name} | {' | '.join(f'{each:,}' for each in bytes_)} |")


if __name__ == "__main__":
    main()
