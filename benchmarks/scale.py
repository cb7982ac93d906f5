"""Planned costs of input embedding and output head on many ranks, for `docs/distributed.md`.

    python -m benchmarks.scale [--vocab 128000] [--width 8192] [--tokens 1000000]

The model has one tied table in bf16 under AdamW, with an fp32 master copy. `tokens` counts one step of all ranks
together, so every layout does the same work: a rank has n = tokens / world, and a tp group of T ranks has T times as
many.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from itertools import count
from typing import Any

from tiewise.core.files import format_bytes
from tiewise.planning.costs import Setting
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes

WORLDS = (8, 64, 1000)
GROUP = 8  # ranks of a machine: size of a tp group, or of a group that keeps a table sharded
# (printed name, the planner's layout, tp, fsdp or None for all ranks)
LAYOUTS: list[tuple[str, str, int, int | None]] = [
    ("data parallel", "data parallel", 1, None),
    ("FSDP2, tables gathered", "fsdp", 1, None),
    ("tables kept sharded over all ranks", "fsdp, tables kept sharded", 1, None),
    (f"tables kept sharded over {GROUP}, averaged", "fsdp, tables kept sharded", 1, GROUP),
    (f"vocabulary parallel over {GROUP}, averaged", "vocabulary parallel", GROUP, None),
    (f"the same, sharded by FSDP2 over the rest × {GROUP}", "fsdp × vocabulary parallel", GROUP, 0),
    (f"stock tensor parallel over {GROUP}, averaged", "stock tensor parallel", GROUP, None),
]
Rank = dict[str, Any]


def plan_rank(sizes: Sizes, tokens: int, world: int, layout: str, tp: int = 1, fsdp: int | None = None) -> Rank | None:
    """Return the plan of one rank; None if there is no such layout.

    fsdp = 0 means world / tp.
    """
    fsdp = world // tp if fsdp == 0 else fsdp
    setting = Setting(1, tokens * tp // world, "bfloat16", world, tp, fsdp=fsdp)
    ranks = plan(sizes, ["tied"], setting=setting).choices[0]["ranks"]
    return next((plan_record for plan_record in ranks if plan_record["layout"] == layout), None)


def count_rank_bytes(rank: Rank) -> int:
    """Return the bytes of tables, their gathered copies, and the loss at its peak."""
    return rank["table_memory"]["total"] + rank["table_memory"]["gathered"] + rank["loss"]


def print_layouts(sizes: Sizes, tokens: int) -> None:
    """Print the bytes that a rank sends and holds, by layout and number of ranks."""
    print(f"| sent / held per rank | {' | '.join(f'{world:,} ranks' for world in WORLDS)} |")
    print("|---" * (len(WORLDS) + 1) + "|")
    for name, layout, tp, fsdp in LAYOUTS:
        ranks = (plan_rank(sizes, tokens, world, layout, tp, fsdp) for world in WORLDS)
        cells = [
            f"{format_bytes(rank['sent_for_tables'])} / {format_bytes(count_rank_bytes(rank))}" if rank else "–"
            for rank in ranks
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def print_limits(sizes: Sizes, tokens: int) -> None:
    """Print the sizes from which a layout loses its advantage."""
    world, sharded, split = WORLDS[-1], "fsdp, tables kept sharded", "vocabulary parallel"

    def plan_layout(layout: str, n: int, world: int, tp: int = 1, fsdp: int | None = None) -> Rank:
        """Return the plan for n tokens per group that shares tokens."""
        plan_record = plan_rank(sizes, n * world // tp, world, layout, tp, fsdp)
        assert plan_record is not None
        return plan_record

    def gathers_more(ranks: int) -> bool:
        """Return True if a rank gathers more bytes than it stores."""
        memory = plan_layout("fsdp", 1, ranks)["table_memory"]
        return bool(memory["gathered"] > memory["total"])

    def sharding_holds_more(n: int) -> bool:
        """Return True if sharded tables need more memory than gathered ones."""
        return count_rank_bytes(plan_layout(sharded, n, GROUP)) > count_rank_bytes(plan_layout("fsdp", n, GROUP))

    n = tokens // world
    sent = {g: plan_layout(sharded, n, world, fsdp=g)["sent_for_tables"] for g in range(2, world + 1) if world % g == 0}
    wire = plan_layout(sharded, n, world)["wire"]
    sent_vocabulary_parallel, sent_stock = (
        plan_layout(layout, n, GROUP, GROUP)["sent_for_tables"] for layout in (split, "stock tensor parallel")
    )
    limits = {g: g * plan_layout(sharded, n, g)["break_even_tokens"] for g in (GROUP, world)}
    most_tokens = 1 + bisect_left(range(1, tokens), True, key=sharding_holds_more)
    rows = [
        ("FSDP2, gathered", "ranks from which a rank gathers more than it keeps", next(filter(gathers_more, count(2)))),
        *(
            (f"kept sharded over {g:,}", "N from which it sends more than gathering", f"{n:,}")
            for g, n in limits.items()
        ),
        (f"kept sharded over {GROUP}", "N from which it also holds more", f"{GROUP * most_tokens:,}"),
        ("kept sharded, averaged", f"G that sends least, n = {n:,}", min(sent, key=lambda g: sent[g])),
        (
            f"kept sharded over {world:,}",
            "the loss's numbers, in parts of the states",
            f"{wire['loss'] / (wire['lookup'] + wire['hidden states']):.2f}",
        ),
        (
            f"vocabulary parallel over {GROUP}",
            "N from which it sends more than averaging",
            f"{plan_layout(split, n, world, GROUP)['break_even_tokens']:,}",
        ),
        (
            f"stock tensor parallel over {GROUP}",
            "times what vocabulary parallel sends",
            f"{sent_stock / sent_vocabulary_parallel:.1f}",
        ),
    ]
    print("| layout | where it stops | figure |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("vocab", 128_000), ("width", 8192), ("tokens", 1_000_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    sizes = Sizes(options.vocab, options.width, 1)
    print(f"V = {options.vocab:,}, E = {options.width:,}, bf16, tied; {options.tokens:,} tokens a step\n")
    print_layouts(sizes, options.tokens)
    print()
    print_limits(sizes, options.tokens)


if __name__ == "__main__":
    main()
