"""Times, work and memory of one ALBERT with four sharings and the same weights.

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

from benchmarks.measure import alternate, format_spread, median_ratio
from tiewise.boundary.sharing.share import share_layers
from tiewise.training.compare import environment
from tiewise.training.models import OpenAlbertConfig, OpenAlbertForPreTraining

SHARINGS = ("none", "attention", "ffn", "all")
SHAPES = ((4, 128, 256, 12, 64, 8192), (1, 16, 768, 12, 128, 8192))


@dataclass(frozen=True)
class Cost:
    """Costs of one sharing.

    Args:
        sharing: none, attention, ffn or all.
        parameters: number of parameters, a shared one counted once.
        state: bytes of weights, gradients and AdamW's two moments, measured after a step.
        activations: bytes that autograd stores for the backward pass, measured, without weights.
        flops: floating-point operations of one forward.
        forward: seconds of one forward in each round.
        step: seconds of forward and backward in each round.
    """

    sharing: str
    parameters: int
    state: int
    activations: int
    flops: int
    forward: list[float]
    step: list[float]


@dataclass(frozen=True)
class SharingCosts:
    """Costs of all sharings of one model at one size; the first is none.

    Args:
        where: processor and versions.
        threads: threads of torch.
        batch, length: B and T.
        width, layers, table, vocab: H, L, E and V of the model, an ALBERT.
        equal: True if all sharings gave the same logits, bit for bit.
        costs: one entry for each sharing, from alternated rounds in one process.
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
    """Measure all sharings: times in alternated rounds, then memory one by one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab, "embedding_size": table, "hidden_size": width, "num_hidden_layers": layers}
    config = OpenAlbertConfig(**sizes, num_attention_heads=width // 64, max_position_embeddings=length, sharing="all")
    model = OpenAlbertForPreTraining(config)
    ids = torch.randint(0, vocab, (batch, length))
    models = {name: _copy_with_sharing(model, name) for name in SHARINGS}
    forward = alternate({name: (lambda shared=shared: logits(shared, ids)) for name, shared in models.items()}, rounds)
    step = alternate({name: (lambda shared=shared: _step(shared, ids)) for name, shared in models.items()}, rounds)
    results = [logits(shared, ids) for shared in models.values()]
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
        equal=all(torch.equal(results[0], other) for other in results[1:]),
        costs=[
            Cost(
                name,
                parameters=sum(p.numel() for p in shared.parameters()),
                activations=measure_activation_bytes(shared, lambda shared=shared: loss(shared, ids)),
                state=measure_state_bytes(shared, lambda shared=shared: loss(shared, ids)),
                flops=_count_flops(shared, ids),
                forward=forward[name],
                step=step[name],
            )
            for name, shared in models.items()
        ],
    )


def _copy_with_sharing(model: nn.Module, sharing: str) -> nn.Module:
    """Return a copy with the same weights and the given sharing."""
    copied = copy.deepcopy(model)
    share_layers(copied, sharing)
    return copied


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of one forward without gradients."""
    logits: Tensor = model(ids).logits
    return logits


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of tokens and pairs, which gives every parameter a gradient."""
    loss: Tensor = model(ids, labels=ids, pair_labels=torch.zeros(len(ids), dtype=torch.long)).loss
    return loss


def _step(model: nn.Module, ids: Tensor) -> None:
    """Run forward and backward once."""
    model.zero_grad()
    loss(model, ids).backward()


def measure_activation_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd stores for the backward pass of `run`, without weights."""
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        """Remember a tensor that autograd stores."""
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = run()
    storages, weights = _storage_sizes(saved), _storage_sizes(model.parameters())
    del loss
    return sum(size for address, size in storages.items() if address not in weights)


def measure_state_bytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes of weights, gradients and moments after one step of AdamW.

    It frees the gradients.
    """
    model.zero_grad()
    run().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = sum(_storage_sizes([*model.parameters(), *gradients, *moments]).values())
    model.zero_grad()
    return total


def _storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return {address: bytes} of the tensors' storages."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _count_flops(model: nn.Module, ids: Tensor) -> int:
    """Return the floating-point operations of one forward."""
    with FlopCounterMode(display=False) as counted:
        logits(model, ids)
    return int(counted.get_total_flops())


def render_table(result: SharingCosts) -> str:
    """Return the Markdown table of one size."""
    forward, step = (
        {cost.sharing: cost.forward for cost in result.costs},
        {cost.sharing: cost.step for cost in result.costs},
    )
    threads = f"{result.threads} thread{'s' if result.threads > 1 else ''}"
    lines = [
        f"B = {result.batch}, T = {result.length}, H = {result.width}, L = {result.layers}, E = {result.table}, "
        f"V = {result.vocab:,}, fp32, {threads}, {len(result.costs[0].forward)} rounds; the logits of all four are "
        f"{'the same bit for bit' if result.equal else 'not the same'}",
        "",
        "| shared | parameters | weights, gradients, moments: measured, MB | counted, MB "
        "| kept for the backward pass, MB | GFLOP of a forward | forward, ms (range) | × none "
        "| forward and backward, ms (range) | × none |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cost in result.costs:
        times = " | ".join(
            f"{format_spread(seconds[cost.sharing])} | {median_ratio(seconds, cost.sharing, 'none'):.2f}"
            for seconds in (forward, step)
        )
        lines.append(
            f"| {cost.sharing} | {cost.parameters:,} | {cost.state / 1e6:,.2f} | {16 * cost.parameters / 1e6:,.2f} "
            f"| {cost.activations / 1e6:,.2f} | {cost.flops / 1e9:,.2f} | {times} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the tables of the requested shape, or of all shapes."""
    shape = tuple(map(int, sys.argv[1:7]))
    results = [measure(*sizes) for sizes in ([shape] if shape else SHAPES)]  # type: ignore[misc]
    print("\n\n".join(map(render_table, results)))


if __name__ == "__main__":
    main()
