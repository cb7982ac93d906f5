"""Exact largest logits of one position: time against plain products, and answers against fp64.

python -m benchmarks.decoding [V E]
"""

from __future__ import annotations

import math
import sys
from itertools import cycle
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure import alternate, ratio, spread
from tiewise.boundary.ops.compiled_kernels import kernels_state
from tiewise.boundary.ops.exact_top import ExactTop, TopCounts

CHECKED = 20  # queries of each large table that are held against fp64


def table_of(name: str, v: int, e: int) -> tuple[Tensor, Tensor]:
    """A table [v, e] and hidden states [64, e] whose logits have the named spectrum.

    flat: independent Gaussians, no direction that a query and a row share. zipf: rows and queries share directions
    whose weights fall as 1/i, as trained tables' singular values do. peaked: each query is one row's, with noise.
    """
    g = torch.Generator().manual_seed(0)
    table, hidden = torch.empty(v, e).normal_(generator=g), torch.randn(64, e, generator=g)
    if name == "zipf":
        weights = torch.arange(1, e + 1).pow(-0.5)
        return table.mul_(weights), hidden * weights
    if name == "peaked":
        hidden = table[torch.randint(v, (64,), generator=g)] + hidden
    return table, hidden


def wrong(top: ExactTop, hidden: Tensor, k: int) -> int:
    """Return how many queries `top` answers otherwise than fp64 products. `math.fsum` decides close cases."""
    scores, tokens = top.top(hidden, k)
    rows = top.table.double()
    errors = 0
    for h, score, token in zip(hidden.double(), scores, tokens, strict=True):
        z = rows @ h
        near = (z >= z.topk(k).values[-1] - 1e-9 * h.norm() * rows[token[0]].norm()).nonzero()[:, 0]
        exact = {int(v): math.fsum((rows[v] * h).tolist()) for v in near}
        order = sorted(exact, key=lambda v: (-exact[v], v))[:k]
        true = torch.tensor([exact[v] for v in order], dtype=torch.float64).float()
        errors += order != token.tolist() or not torch.equal(true, score)
    return errors


def trained(queries: int) -> tuple[Tensor, Tensor]:
    """The table [4096, 128] and last hidden states [queries, 128] of a Llama after a few steps on Zipf's words."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chances = 1 / torch.arange(1, 4097)
    successor = torch.randperm(4096)  # of each word: what can be learnt

    def text(rows: int, length: int) -> Tensor:
        ids = torch.multinomial(chances, rows * length, replacement=True).view(rows, length)
        ids[:, 1::2] = successor[ids[:, ::2]]
        return ids

    for _ in range(40):
        ids = text(8, 64)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        hidden = model.model(input_ids=text(-(-queries // 100), 100)).last_hidden_state
    return model.lm_head.weight.detach(), hidden.reshape(-1, 128)[:queries]


def row(name: str, table: Tensor, hidden: Tensor, top: ExactTop, k: int) -> str:
    """Return one row of the results: the times for `k` logits of one hidden state after another.

    They are compared with the faster of two bf16 products.
    """
    narrow, turn, top.counts = table.bfloat16(), cycle(hidden), TopCounts()
    times = alternate(
        {
            "fp32": lambda: torch.mv(table, next(turn)),
            "bf16": lambda: torch.mv(narrow, next(turn).bfloat16()),
            "bf16 as a head": lambda: F.linear(next(turn).bfloat16(), narrow),
            "exact": lambda: top.top(next(turn), k),
        }
    )
    times["bf16"] = min(times["bf16"], times.pop("bf16 as a head"), key=median)
    counts = top.counts
    rows = f"{counts.rows / max(1, counts.queries - counts.full_scans):,.0f}"
    rows += f" (all, {counts.full_scans} times)" if counts.full_scans else ""
    cells = [name, str(k), *(spread(each) for each in times.values())]
    cells += [f"{ratio(times, 'exact', 'fp32'):.2f}", f"{ratio(times, 'exact', 'bf16'):.2f}", rows]
    return f"| {' | '.join(cells)} | {wrong(top, hidden[:CHECKED], k)} of {CHECKED} |"


def main() -> None:
    v, e = (int(x) for x in sys.argv[1:] or (128_256, 2048))
    print(f"Kernels {kernels_state()}; {torch.get_num_threads()} threads.\n")
    print(f"One hidden state, a table of {v:,} x {e:,}; medians of 7 alternated rounds, ms (range).\n")
    print("| spectrum | k | fp32 product | bf16 product | exact, fp32 table | / fp32 | / bf16 | rows in fp64 | wrong |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in ("flat", "zipf", "peaked"):
        table, hidden = table_of(name, v, e)
        top = ExactTop(table)
        for k in (1, 50):
            print(row(name, table, hidden, top, k), flush=True)
    table, hidden = trained(10_000)
    for k in (1, 10):
        top = ExactTop(table)
        missed = f"{wrong(top, hidden, k)} wrong; {top.counts.rows / len(hidden):,.0f} rows in fp64 each"
        print(f"\nA trained Llama's table of 4,096 x 128, 10,000 of its hidden states, k = {k}: {missed}.", flush=True)


if __name__ == "__main__":
    main()
