"""A whole training step of a small decoder: plain transformers, installed, and installed with both paths tracked.

python -m benchmarks.step [BATCH LENGTH WIDTH LAYERS VOCAB]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measure import alternate, ratio, spread
from tiewise.boundary.install import install
from tiewise.ops.path_gradient import path_norms

SHAPES = ((8, 64, 128, 2, 4096), (8, 256, 512, 4, 32000))


def table(batch: int, length: int, width: int, layers: int, vocab: int, rounds: int) -> str:
    """Return the Markdown table of one shape; every round takes five steps of each candidate."""
    ids = torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    steps = {
        "plain transformers": _stepper(config, ids, installed=False, track=False),
        "installed": _stepper(config, ids, installed=True, track=False),
        "installed, paths tracked": _stepper(config, ids, installed=True, track=True),
    }
    times = alternate({name: (lambda step=step: [step() for _ in range(5)]) for name, step in steps.items()}, rounds)
    lines = [
        f"B = {batch}, T = {length}, D = {width}, L = {layers}, V = {vocab}, tied, AdamW, {rounds} rounds",
        "",
        "| step | ms for five, median (range) | × plain |",
        "|---|---|---|",
    ]
    for name, values in times.items():
        lines.append(f"| {name} | {spread(values)} | {ratio(times, name, 'plain transformers'):.2f} |")
    cost = ratio(times, "installed, paths tracked", "installed") - 1
    return "\n".join([*lines, "", f"- tracking both paths: {100 * cost:+.1f} % of a step"])


def _stepper(config: LlamaConfig, ids: torch.Tensor, *, installed: bool, track: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    boundary = install(model) if installed else None
    record = boundary.track() if boundary is not None and track else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        if record is not None and boundary is not None:
            path_norms(boundary.tables()[0].grad, record)  # type: ignore[arg-type]
            record.clear()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    chosen = [tuple(map(int, sys.argv[1:6]))] if len(sys.argv) > 1 else SHAPES
    print("\n\n".join(table(*shape, rounds=9) for shape in chosen))  # type: ignore[misc]
