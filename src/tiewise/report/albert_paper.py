"""Comparisons of ALBERTs beside the paper (Lan et al. 2020, arXiv:1909.11942): what layers share, and objectives.

Table 4 orders none, attention, ffn and all by the average of five tasks after fine-tuning, at two table widths; a
comparison orders them by the held-out nll of masked tokens, for each boundary. Table 5 judges models pretrained on nsp
and sop as both. The paper's models and texts are others, so directions are compared, not sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from tiewise.core.errors import RunError
from tiewise.core.found import Found, Quantity
from tiewise.core.ledger import ALBERT_AVERAGE, results
from tiewise.core.numerals import plain, signed
from tiewise.core.sharing_spec import KINDS
from tiewise.core.student import holm
from tiewise.report.comparison_found import CHANCE, share, share_over_rows
from tiewise.report.grid import Table
from tiewise.training.results import ALPHA, MASKED, Comparison, RunResult, interval, paired

PAPER = "ALBERT (arXiv:1909.11942)"
AGREES, DISAGREES, OPEN = VERDICTS = ("as in the paper", "the other way", "not told apart at this budget")
JUDGED = {MASKED: "masked tokens right", "nsp": "pairs right as nsp", "sop": "pairs right as sop"}


@cache
def table_4() -> Mapping[str, Mapping[str, float]]:
    """Width of the table ("E = 128") → strategy → average."""
    found: dict[str, dict[str, float]] = {}
    for result in results(ALBERT_AVERAGE):
        if result.source == f"{PAPER}, Table 4":
            width = result.model.removeprefix("ALBERT-base, ")
            found.setdefault(width, {})[result.choice.rpartition(" ")[2]] = result.value
    return found


@cache
def table_5() -> Mapping[str, Mapping[str, float]]:
    """Objective → share → percent."""
    found: dict[str, dict[str, float]] = {}
    for name, metric in JUDGED.items():
        for result in results(f"{metric}, %"):
            found.setdefault(result.setting.removeprefix("objective="), {})[name] = result.value
    return found


@dataclass(frozen=True)
class StrategyPair:
    """Two strategies with one boundary: held-out nll of `worse` minus that of `better`, as the paper orders them."""

    better: str
    worse: str
    difference: float
    interval: str
    p: float | None  # of Student's t, adjusted by Holm over all pairs that are judged; None for one seed

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if self.p is None or self.p >= ALPHA:
            return OPEN
        return AGREES if self.difference > 0 else DISAGREES


@dataclass(frozen=True)
class SharingOrder:
    """One boundary's strategies beside the paper's."""

    boundary: str
    nll: Mapping[str, float]  # strategy → mean held-out nll
    pairs: Sequence[StrategyPair]


def orders(comparison: Comparison) -> list[SharingOrder]:
    """One entry per boundary of which two or more of the paper's strategies were trained; all pairs judged together."""
    groups: dict[str, dict[str, list[RunResult]]] = {}
    for arm in comparison.arms:
        boundary, _, strategy = arm.partition("+share=")
        if strategy in KINDS and comparison.of(arm):
            groups.setdefault(boundary, {})[strategy] = comparison.of(arm)
    made = [
        SharingOrder(
            boundary,
            {name: statistics.fmean(run.heldout_nll for run in found) for name, found in runs.items()},
            list(_pairs(runs)),
        )
        for boundary, runs in groups.items()
        if len(runs) > 1
    ]
    judged = iter(holm([pair.p for order in made for pair in order.pairs if pair.p is not None]))
    return [
        replace(order, pairs=[pair if pair.p is None else replace(pair, p=next(judged)) for pair in order.pairs])
        for order in made
    ]


def _pairs(runs: Mapping[str, Sequence[RunResult]]) -> Iterator[StrategyPair]:
    """Each two strategies that the paper orders alike at both of its widths, over the seeds that both have."""
    for first, second in combinations([kind for kind in KINDS if kind in runs], 2):
        signs = {own[first] > own[second] for own in table_4().values()}
        better, worse = (first, second) if True in signs else (second, first)
        seeds = {run.seed: run.heldout_nll for run in runs[better]}
        values = [(seeds[run.seed], run.heldout_nll) for run in runs[worse] if run.seed in seeds]
        if len(signs) == 1 and values:
            d = paired(*zip(*values, strict=True))
            yield StrategyPair(better, worse, d.mean, interval(d), d.p)


def order_table(found: Sequence[SharingOrder]) -> Table:
    """One row per strategy: held-out nll of each boundary, and the paper's averages."""
    theirs = table_4()
    header = ["shared", *(f"{order.boundary}: nll" for order in found), *(f"paper, {name}" for name in theirs)]
    rows = [
        [kind, *(plain(order.nll.get(kind)) for order in found), *(plain(own[kind], 1) for own in theirs.values())]
        for kind in KINDS
        if any(kind in order.nll for order in found)
    ]
    return Table(header, rows)


def order_lines(found: Sequence[SharingOrder]) -> list[str]:
    """Say both orders, best first, and whether the directions agree."""
    if not found:
        return []
    theirs = (f"{name}: {', '.join(sorted(own, key=lambda kind: -own[kind]))}" for name, own in table_4().items())
    said = [
        f"{PAPER}, Table 4, orders what layers share by the average of five tasks after fine-tuning, best first: "
        f"{'; '.join(theirs)}. Here the order is by held-out nll of masked tokens, lowest first."
    ]
    for order in found:
        ours, pairs = ", ".join(sorted(order.nll, key=order.nll.__getitem__)), order.pairs
        line = f"{order.boundary}: {ours}. The paper orders no two of these alike at both widths."
        if pairs:
            counted = (f"{sum(pair.verdict == verdict for pair in pairs)} {verdict}" for verdict in VERDICTS)
            each = (f"{p.worse} − {p.better}: {signed(p.difference)} ({p.interval}), {p.verdict}" for p in pairs)
            many = f"{len(pairs)} pair{'' if len(pairs) == 1 else 's'} that the paper orders alike at both widths"
            line = f"{order.boundary}: {ours}. Of {many}: {', '.join(counted)}. {'; '.join(each)}."
        said.append(line)
    return said


def objectives(comparisons: Sequence[Comparison]) -> dict[str, Found]:
    """What models pretrained on each objective judge right, as nsp and as sop, here and in the paper.

    Args:
        comparisons: of ALBERTs, one for each objective (`--set objective=…`); the first arm of each is judged.

    Raises:
        RunError: one that is no ALBERT's, or an objective given twice.
    """
    found: dict[str, Found] = {}
    for one in comparisons:
        objective, runs = one.setting.get("objective"), one.of(one.reference)
        if objective is None or not any(run.shares for run in runs):
            fix = "give those of ALBERTs (--recipe albert-small)"
            raise RunError("a comparison without an objective of pairs", fix)
        label = "without pairs" if objective == "none" else f"on {objective}"
        if label in found:
            raise RunError(f"objective {objective} twice", "give one comparison for each objective")
        here, paper, said = [], [], []
        for name, words in JUDGED.items():
            seeds, rows = share(runs, name), share_over_rows(runs, name)
            if seeds is None or rows is None:
                continue
            of_pairs: dict[str, Any] = {} if name == MASKED else {"chance": CHANCE, "figure": "Pairs judged right"}
            q = replace(seeds, name=words, n=rows.count, of=label, **of_pairs)
            here.append(q)
            if objective in table_5():
                value = table_5()[objective][name] / 100
                paper.append(Quantity(words, value, of=f"{label}, the paper", unit="%", **of_pairs))
            if of_pairs:  # by both intervals: seeds that all guess alike agree on the same rows by chance
                told = "above chance" if min(seeds.low, rows.low) > CHANCE else "not told from chance"
                told = "below chance" if max(seeds.high, rows.high) < CHANCE else told
                said.append(f"{name} {q}, {told}")
        found[label] = Found("; ".join(said), tuple(here))
        if paper:
            found[f"{label}, the paper"] = Found("; ".join(f"{q.name} {q}" for q in paper), tuple(paper))
    return found
