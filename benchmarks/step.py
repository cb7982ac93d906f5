"""Time of a small decoder's training step, plain and installed, in fp32 and bf16.

It uses torch's own matrix products, and the fastest ones.

python -m benchmarks.step [BATCH LENGTH WIDTH LAYERS VOCAB [ROUNDS]]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.measure import alternate, format_spread, median_ratio
from tiewise.boundary.installation import install
from tiewise.boundary.ops.compiled_kernels import kernels_state
from tiewise.boundary.ops.fast_products import choose_products, fast_products
from tiewise.boundary.ops.path_gradient import path_norms

SHAPES = ((8, 64, 128, 2, 4096), (4, 512, 512, 4, 32000))


def render_table(batch: int, length: int, width: int, layers: int, vocab: int, rounds: int) -> str:
    """Return the Markdown table of one shape.

    A round is 2,048 tokens of each candidate, or one step if a step has more.
    """
    ids = torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    fastest, bf16 = fast_products(), torch.autocast("cpu", torch.bfloat16)
    plain, installed, tracked = (
        _make_step(config, ids, installed=installed, track=track)
        for installed, track in ((False, False), (True, False), (True, True))
    )
    steps = {
        "plain transformers": plain,
        "installed": installed,
        "installed, fastest products": fastest(installed),
        "installed, fastest products, paths tracked": fastest(tracked),
        "plain transformers, bf16": bf16(plain),
        "installed, bf16": bf16(installed),
    }
    count = max(1, 2048 // ids.numel())
    times = alternate(
        {name: (lambda step=step: [step() for _ in range(count)]) for name, step in steps.items()}, rounds
    )
    lines = [
        f"B = {batch}, T = {length}, D = {width}, L = {layers}, V = {vocab}, tied, clipping, AdamW, {rounds} rounds",
        "",
        f"| {count} step{'s' * (count > 1)} | ms, median (range) | × plain | × plain of its type |",
        "|---|---|---|---|",
    ]
    for name, values in times.items():
        baseline = "plain transformers, bf16" if "bf16" in name else "plain transformers"
        ratios = " | ".join(f"{median_ratio(times, name, other):.2f}" for other in ("plain transformers", baseline))
        lines.append(f"| {name} | {format_spread(values)} | {ratios} |")
    cost = median_ratio(times, "installed, fastest products, paths tracked", "installed, fastest products") - 1
    notes = [
        str(choose_products()),
        f"compiled kernels {kernels_state(full=False)}",
        f"tracking both paths: {100 * cost:+.1f} % of a step",
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)])


def _make_step(config: LlamaConfig, ids: torch.Tensor, *, installed: bool, track: bool) -> Callable[[], None]:
    """Return a training step of a Llama, plain or installed, with or without path norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    boundary = install(model) if installed else None
    record = boundary.track() if boundary is not None and track else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        """Train on the batch once."""
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        if record is not None and boundary is not None:
            path_norms(boundary.tables()[0].grad, record)  # type: ignore[arg-type]
            record.clear()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    shapes = [tuple(map(int, sys.argv[1:6]))] if len(sys.argv) > 1 else SHAPES
    rounds = int(sys.argv[6]) if len(sys.argv) > 6 else 7
    print("\n\n".join(render_table(*shape, rounds=rounds) for shape in shapes))  # type: ignore[misc]
