"""Planned costs of input embedding and output head on many ranks, for `docs/scale.md`.

    python -m benchmarks.scale [--vocab 128000] [--width 8192] [--tokens 1000000]

One tied table in bf16 under AdamW with an fp32 master copy; `tokens` are of one step of all ranks together, so that
every layout does the same work: n of a rank is tokens / world, and a tp group of T ranks has T times as many.
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
GROUP = 8  # ranks of a machine: of tp, or of a group that keeps a table sharded
# (how it is called, the planner's layout, tp, fsdp or None for the whole world)
SHOWN: list[tuple[str, str, int, int | None]] = [
    ("data parallel", "data parallel", 1, None),
    ("FSDP2, tables gathered", "fsdp", 1, None),
    ("tables kept sharded over all ranks", "fsdp, tables kept sharded", 1, None),
    (f"tables kept sharded over {GROUP}, averaged", "fsdp, tables kept sharded", 1, GROUP),
    (f"vocabulary parallel over {GROUP}, averaged", "vocabulary parallel", GROUP, None),
    (f"the same, sharded by FSDP2 over the rest × {GROUP}", "fsdp × vocabulary parallel", GROUP, 0),
    (f"stock tensor parallel over {GROUP}, averaged", "stock tensor parallel", GROUP, None),
]
Rank = dict[str, Any]


def rank(sizes: Sizes, tokens: int, world: int, layout: str, tp: int = 1, fsdp: int | None = None) -> Rank | None:
    """Return the plan of one rank; None if there is no such layout.

    With fsdp 0, FSDP spans all ranks but those of tp.
    """
    fsdp = world // tp if fsdp == 0 else fsdp
    setting = Setting(1, tokens * tp // world, "bfloat16", world, tp, fsdp=fsdp)
    ranks = plan(sizes, ["tied"], setting=setting).choices[0]["ranks"]
    return next((found for found in ranks if found["layout"] == layout), None)


def held(of: Rank) -> int:
    """Bytes of the tables, of what is gathered for them, and of the loss at its peak."""
    return of["table_memory"]["total"] + of["table_memory"]["gathered"] + of["loss"]


def by_layout(sizes: Sizes, tokens: int) -> None:
    print(f"| sent / held per rank | {' | '.join(f'{world:,} ranks' for world in WORLDS)} |")
    print("|---" * (len(WORLDS) + 1) + "|")
    for name, layout, tp, fsdp in SHOWN:
        found = (rank(sizes, tokens, world, layout, tp, fsdp) for world in WORLDS)
        cells = [f"{format_bytes(of['sent_for_tables'])} / {format_bytes(held(of))}" if of else "–" for of in found]
        print(f"| {name} | {' | '.join(cells)} |")


def where_it_stops(sizes: Sizes, tokens: int) -> None:
    world, kept, split = WORLDS[-1], "fsdp, tables kept sharded", "vocabulary parallel"

    def of(layout: str, n: int, world: int, tp: int = 1, fsdp: int | None = None) -> Rank:
        """The same, for n tokens of every group that has the same tokens."""
        found = rank(sizes, n * world // tp, world, layout, tp, fsdp)
        assert found is not None
        return found

    def gathers_more(ranks: int) -> bool:
        found = of("fsdp", 1, ranks)["table_memory"]
        return bool(found["gathered"] > found["total"])

    def keeping_holds_more(n: int) -> bool:
        return held(of(kept, n, GROUP)) > held(of("fsdp", n, GROUP))

    n = tokens // world
    sent = {g: of(kept, n, world, fsdp=g)["sent_for_tables"] for g in range(2, world + 1) if world % g == 0}
    wire = of(kept, n, world)["wire"]
    ours, theirs = (of(layout, n, GROUP, GROUP)["sent_for_tables"] for layout in (split, "stock tensor parallel"))
    limits = {g: g * of(kept, n, g)["break_even_tokens"] for g in (GROUP, world)}
    most = 1 + bisect_left(range(1, tokens), True, key=keeping_holds_more)
    rows = [
        ("FSDP2, gathered", "ranks from which a rank gathers more than it keeps", next(filter(gathers_more, count(2)))),
        *(
            (f"kept sharded over {g:,}", "N from which it sends more than gathering", f"{n:,}")
            for g, n in limits.items()
        ),
        (f"kept sharded over {GROUP}", "N from which it also holds more", f"{GROUP * most:,}"),
        ("kept sharded, averaged", f"G that sends least, n = {n:,}", min(sent, key=lambda g: sent[g])),
        (
            f"kept sharded over {world:,}",
            "the loss's numbers, in parts of the states",
            f"{wire['loss'] / (wire['lookup'] + wire['hidden states']):.2f}",
        ),
        (
            f"vocabulary parallel over {GROUP}",
            "N from which it sends more than averaging",
            f"{of(split, n, world, GROUP)['break_even_tokens']:,}",
        ),
        (f"stock tensor parallel over {GROUP}", "times what vocabulary parallel sends", f"{theirs / ours:.1f}"),
    ]
    print("| layout | where it stops | figure |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("vocab", 128_000), ("width", 8192), ("tokens", 1_000_000)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    sizes = Sizes(asked.vocab, asked.width, 1)
    print(f"V = {asked.vocab:,}, E = {asked.width:,}, bf16, tied; {asked.tokens:,} tokens a step\n")
    by_layout(sizes, asked.tokens)
    print()
    where_it_stops(sizes, asked.tokens)


if __name__ == "__main__":
    main()
