"""One ALBERT, its layers shared in four ways with the same weights: times, work and memory.

python -m benchmarks.sharing [BATCH LENGTH WIDTH LAYERS TABLE VOCAB]
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import alternate, ratio, spread
from tiewise.boundary.sharing.share import share_layers
from tiewise.training.compare import environment
from tiewise.training.models import OpenAlbertConfig, OpenAlbertForPreTraining

SHARINGS = ("none", "attention", "ffn", "all")
SHAPES = ((4, 128, 256, 12, 64, 8192), (1, 16, 768, 12, 128, 8192))


@dataclass(frozen=True)
class Cost:
    """One way of sharing.

    Args:
        sharing: none, attention, ffn or all.
        parameters: each counted once.
        state: bytes of weights, gradients and AdamW's two moments, as found in memory after a step.
        kept: bytes kept for the backward pass, as found in memory; weights are not among them.
        flops: of one forward.
        forward: seconds of one forward in each round.
        step: seconds of forward and backward in each round.
    """

    sharing: str
    parameters: int
    state: int
    kept: int
    flops: int
    forward: list[float]
    step: list[float]


@dataclass(frozen=True)
class SharingCosts:
    """All ways of sharing one model's layers, at one size; the first of them is none.

    Args:
        where: processor and versions.
        threads: of torch.
        batch, length: B and T.
        width, layers, table, vocab: H, L, E and V of the model, an ALBERT.
        equal: whether all of them gave the same logits, bit for bit.
        costs: by sharing, measured in turn in one process.
    """

    where: str
    threads: int
    batch: int
    length: int
    width: int
    layers: int
    table: int
    vocab: int
    equal: bool
    costs: list[Cost]


def measure(batch: int, length: int, width: int, layers: int, table: int, vocab: int, rounds: int = 5) -> SharingCosts:
    """Times of all sharings alternate in one process; memory is measured one by one after them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab, "embedding_size": table, "hidden_size": width, "num_hidden_layers": layers}
    config = OpenAlbertConfig(**sizes, num_attention_heads=width // 64, max_position_embeddings=length, sharing="all")
    model = OpenAlbertForPreTraining(config)
    ids = torch.randint(0, vocab, (batch, length))
    models = {name: _shared(model, name) for name in SHARINGS}
    forward = alternate({name: (lambda one=one: logits(one, ids)) for name, one in models.items()}, rounds)
    step = alternate({name: (lambda one=one: _step(one, ids)) for name, one in models.items()}, rounds)
    made = [logits(one, ids) for one in models.values()]
    env = environment()
    return SharingCosts(
        where=f"{env['processor']}, torch {env['torch']}, Python {env['python']}",
        threads=torch.get_num_threads(),
        batch=batch,
        length=length,
        width=width,
        layers=layers,
        table=table,
        vocab=vocab,
        equal=all(torch.equal(made[0], other) for other in made[1:]),
        costs=[
            Cost(
                name,
                parameters=sum(p.numel() for p in one.parameters()),
                kept=kept_bytes(one, lambda one=one: loss(one, ids)),
                state=state_bytes(one, lambda one=one: loss(one, ids)),
                flops=_flops(one, ids),
                forward=forward[name],
                step=step[name],
            )
            for name, one in models.items()
        ],
    )


def _shared(model: nn.Module, sharing: str) -> nn.Module:
    """Return a copy with the same weights, its layers shared so."""
    copied = copy.deepcopy(model)
    share_layers(copied, sharing)
    return copied


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """One forward without a backward pass."""
    found: Tensor = model(ids).logits
    return found


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of all tokens and of pairs, by which every parameter gets a gradient."""
    found: Tensor = model(ids, labels=ids, pair_labels=torch.zeros(len(ids), dtype=torch.long)).loss
    return found


def _step(model: nn.Module, ids: Tensor) -> None:
    model.zero_grad()
    loss(model, ids).backward()


def kept_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd stores for the backward pass of `run`, without weights."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = run()
    found, own = _storages(kept), _storages(model.parameters())
    del held
    return sum(size for place, size in found.items() if place not in own)


def state_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes of weights, gradients and moments after one step of AdamW. It frees the gradients."""
    model.zero_grad()
    run().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = sum(_storages([*model.parameters(), *gradients, *moments]).values())
    model.zero_grad()
    return total


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Place and bytes of every storage, each once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _flops(model: nn.Module, ids: Tensor) -> int:
    with FlopCounterMode(display=False) as counted:
        logits(model, ids)
    return int(counted.get_total_flops())


def table(found: SharingCosts) -> str:
    """Return the Markdown table of one size."""
    forward, step = {c.sharing: c.forward for c in found.costs}, {c.sharing: c.step for c in found.costs}
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    lines = [
        f"B = {found.batch}, T = {found.length}, H = {found.width}, L = {found.layers}, E = {found.table}, "
        f"V = {found.vocab:,}, fp32, {threads}, {len(found.costs[0].forward)} rounds; the logits of all four are "
        f"{'the same bit for bit' if found.equal else 'not the same'}",
        "",
        "| shared | parameters | weights, gradients, moments: measured, MB | counted, MB "
        "| kept for the backward pass, MB | GFLOP of a forward | forward, ms (range) | × none "
        "| forward and backward, ms (range) | × none |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in found.costs:
        times = " | ".join(f"{spread(t[c.sharing])} | {ratio(t, c.sharing, 'none'):.2f}" for t in (forward, step))
        lines.append(
            f"| {c.sharing} | {c.parameters:,} | {c.state / 1e6:,.2f} | {16 * c.parameters / 1e6:,.2f} "
            f"| {c.kept / 1e6:,.2f} | {c.flops / 1e9:,.2f} | {times} |"
        )
    return "\n".join(lines)


def main() -> None:
    asked = tuple(map(int, sys.argv[1:7]))
    found = [measure(*shape) for shape in ([asked] if asked else SHAPES)]  # type: ignore[misc]
    print("\n\n".join(map(table, found)))


if __name__ == "__main__":
    main()
