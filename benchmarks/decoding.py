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

from benchmarks.measure import alternate, format_spread, median_ratio
from tiewise.boundary.ops.compiled_kernels import kernels_state
from tiewise.boundary.ops.exact_top import ExactTop, TopCounts

CHECKED_QUERIES = 20  # queries of each large table that are compared with fp64


def draw_table(name: str, v: int, e: int) -> tuple[Tensor, Tensor]:
    """Draw a table [v, e] and hidden states [64, e] with the named spectrum of logits.

    flat: independent Gaussians; queries and rows share no direction. zipf: rows and queries share directions whose
    weights fall as 1/i, as singular values of trained tables do. peaked: each query is a row of the table plus noise.
    """
    generator = torch.Generator().manual_seed(0)
    table, hidden = torch.empty(v, e).normal_(generator=generator), torch.randn(64, e, generator=generator)
    if name == "zipf":
        weights = torch.arange(1, e + 1).pow(-0.5)
        return table.mul_(weights), hidden * weights
    if name == "peaked":
        hidden = table[torch.randint(v, (64,), generator=generator)] + hidden
    return table, hidden


def count_wrong(top: ExactTop, hidden: Tensor, k: int) -> int:
    """Return the number of queries whose answers differ from fp64 products.

    `math.fsum` decides close cases.
    """
    scores, tokens = top.top(hidden, k)
    rows = top.table.double()
    errors = 0
    for h, score, token in zip(hidden.double(), scores, tokens, strict=True):
        z = rows @ h
        candidates = (z >= z.topk(k).values[-1] - 1e-9 * h.norm() * rows[token[0]].norm()).nonzero()[:, 0]
        exact = {int(v): math.fsum((rows[v] * h).tolist()) for v in candidates}
        order = sorted(exact, key=lambda v: (-exact[v], v))[:k]
        true = torch.tensor([exact[v] for v in order], dtype=torch.float64).float()
        errors += order != token.tolist() or not torch.equal(true, score)
    return errors


def train_llama(queries: int) -> tuple[Tensor, Tensor]:
    """Train a small Llama for 40 steps on words that follow Zipf's law.

    Return its table [4096, 128] and last hidden states [queries, 128].
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chances = 1 / torch.arange(1, 4097)
    successor = torch.randperm(4096)  # of each word: the pattern to learn

    def draw_text(rows: int, length: int) -> Tensor:
        """Draw ids [rows, length] in which every second word is the successor of the word before."""
        ids = torch.multinomial(chances, rows * length, replacement=True).view(rows, length)
        ids[:, 1::2] = successor[ids[:, ::2]]
        return ids

    for _ in range(40):
        ids = draw_text(8, 64)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        hidden = model.model(input_ids=draw_text(-(-queries // 100), 100)).last_hidden_state
    return model.lm_head.weight.detach(), hidden.reshape(-1, 128)[:queries]


def render_row(name: str, table: Tensor, hidden: Tensor, top: ExactTop, k: int) -> str:
    """Return the row of one table: times for the `k` largest logits of a hidden state.

    They are compared with products in fp32, and with the faster of two products in bf16.
    """
    table_bf16, queries, top.counts = table.bfloat16(), cycle(hidden), TopCounts()
    times = alternate(
        {
            "fp32": lambda: torch.mv(table, next(queries)),
            "bf16": lambda: torch.mv(table_bf16, next(queries).bfloat16()),
            "bf16 as a head": lambda: F.linear(next(queries).bfloat16(), table_bf16),
            "exact": lambda: top.top(next(queries), k),
        }
    )
    times["bf16"] = min(times["bf16"], times.pop("bf16 as a head"), key=median)
    counts = top.counts
    rows = f"{counts.rows / max(1, counts.queries - counts.full_scans):,.0f}"
    rows += f" (all, {counts.full_scans} times)" if counts.full_scans else ""
    cells = [name, str(k), *(format_spread(seconds) for seconds in times.values())]
    cells += [f"{median_ratio(times, 'exact', 'fp32'):.2f}", f"{median_ratio(times, 'exact', 'bf16'):.2f}", rows]
    return f"| {' | '.join(cells)} | {count_wrong(top, hidden[:CHECKED_QUERIES], k)} of {CHECKED_QUERIES} |"


def main() -> None:
    """Print the times for three spectra and the errors of a trained table."""
    v, e = (int(x) for x in sys.argv[1:] or (128_256, 2048))
    print(f"Kernels {kernels_state()}; {torch.get_num_threads()} threads.\n")
    print(f"One hidden state, a table of {v:,} x {e:,}; medians of 7 alternated rounds, ms (range).\n")
    print("| spectrum | k | fp32 product | bf16 product | exact, fp32 table | / fp32 | / bf16 | rows in fp64 | wrong |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in ("flat", "zipf", "peaked"):
        table, hidden = draw_table(name, v, e)
        top = ExactTop(table)
        for k in (1, 50):
            print(render_row(name, table, hidden, top, k), flush=True)
    table, hidden = train_llama(10_000)
    for k in (1, 10):
        top = ExactTop(table)
        missed = f"{count_wrong(top, hidden, k)} wrong; {top.counts.rows / len(hidden):,.0f} rows in fp64 each"
        print(f"\nA trained Llama's table of 4,096 x 128, 10,000 of its hidden states, k = {k}: {missed}.", flush=True)


if __name__ == "__main__":
    main()
