"""The loss and a training step by torch's own products, on oneDNN, and as `fast_products()` chooses; errors beside.

python -m benchmarks.products [N V D]      the fused loss, forward and backward
python -m benchmarks.products step         a Llama step (benchmarks/step.py), whole
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks.measure import alternate, ratio, spread
from benchmarks.step import _stepper
from tiewise.ops.cross_entropy import linear_cross_entropy
from tiewise.ops.fast_products import PRODUCTS, fast_products, product_choice

SHAPE = (2048, 50304, 768)
ROWS = 512  # tokens that the errors are taken over


def loss_table(n: int, v: int, d: int, rounds: int = 5) -> str:
    """Return the Markdown table of one shape."""
    draw = torch.Generator().manual_seed(0)
    h, w = torch.randn(n, d, generator=draw), torch.randn(v, d, generator=draw) * 0.02
    t = torch.randint(0, v, (n,), generator=draw)

    def step(product: str, rows: int = n, kind: torch.dtype = torch.float32) -> tuple[Any, ...]:
        features, weight = h[:rows].to(kind).requires_grad_(), w.detach().to(kind).requires_grad_()
        with fast_products(product):
            linear_cross_entropy(features, weight, t[:rows]).backward()
        return features.grad, weight.grad

    truth = step("default", ROWS, torch.float64)
    errors = {
        p: max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(step(p, ROWS), truth, strict=True))
        for p in PRODUCTS
    }
    del truth
    times = alternate({p: partial(step, p) for p in PRODUCTS}, rounds)
    lines = [f"N = {n}, V = {v}, D = {d}, fp32, {rounds} rounds", ""]
    lines += ["| products | ms, median (range) | × default | gradient error |", "|---|---|---|---|"]
    return "\n".join(
        lines + [f"| {p} | {spread(times[p])} | {ratio(times, p, 'default'):.2f} | {errors[p]:.1e} |" for p in PRODUCTS]
    )


def step_table(rounds: int) -> str:
    """Return the Markdown table of a whole step: body, loss, clipping, optimizer."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1365,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    ids = torch.randint(0, 32000, (4, 512), generator=torch.Generator().manual_seed(0))
    step = _stepper(config, ids, installed=True, track=False)
    times = alternate({p: fast_products(p)(step) for p in PRODUCTS}, rounds)
    lines = ["Llama, D = 512, L = 4, V = 32000, 4 × 512 tokens", "", "| products | ms, median (range) | × default |"]
    rows = [f"| {p} | {spread(times[p])} | {ratio(times, p, 'default'):.2f} |" for p in PRODUCTS]
    return "\n".join([*lines, "|---|---|---|", *rows])


if __name__ == "__main__":
    print(f"{product_choice()}\n")
    print(step_table(5) if sys.argv[1:] == ["step"] else loss_table(*map(int, sys.argv[1:4] or SHAPE)))
