"""What layers share, in a comparison's order and in that of the paper's Table 4 (Lan et al. 2020, arXiv:1909.11942).

The paper orders none, attention, ffn and all by the average of five tasks after fine-tuning, at two table widths; a
comparison orders them by the held-out nll of masked tokens, for each boundary. So directions are compared, not sizes:
for each two strategies on which the paper's own two widths agree, whether the difference here has the same direction.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from tiewise.core.ledger import ALBERT_AVERAGE, results
from tiewise.core.numerals import plain, signed
from tiewise.core.sharing_spec import KINDS
from tiewise.core.student import holm
from tiewise.report.grid import Table
from tiewise.training.results import Comparison, RunResult
from tiewise.training.statistics import ALPHA, paired
from tiewise.training.wording import interval

SOURCE = "ALBERT (arXiv:1909.11942), Table 4"
AGREES, DISAGREES, OPEN = VERDICTS = ("as in the paper", "the other way", "not told apart at this budget")
_SHARE = "+share="
_MODEL = "ALBERT-base, "


@dataclass(frozen=True)
class Pair:
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
class Order:
    """One boundary's strategies beside the paper's."""

    boundary: str
    nll: Mapping[str, float]  # strategy → mean held-out nll
    pairs: Sequence[Pair]


@cache
def published() -> Mapping[str, Mapping[str, float]]:
    """Table 4: width of the table ("E = 128") → strategy → average."""
    found: dict[str, dict[str, float]] = {}
    for result in results(ALBERT_AVERAGE):
        if result.source == SOURCE:
            strategy = result.choice.rpartition(" ")[2]
            found.setdefault(result.model.removeprefix(_MODEL), {})[strategy] = result.value
    return found


def orders(comparison: Comparison) -> list[Order]:
    """One entry per boundary of which two or more of the paper's strategies were trained; all pairs judged together."""
    groups: dict[str, dict[str, list[RunResult]]] = {}
    for arm in comparison.arms:
        boundary, _, strategy = arm.partition(_SHARE)
        if strategy in KINDS and comparison.of(arm):
            groups.setdefault(boundary, {})[strategy] = comparison.of(arm)
    made = [
        Order(
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


def table(found: Sequence[Order]) -> Table:
    """One row per strategy: held-out nll of each boundary, and the paper's averages."""
    header = ["shared", *(f"{order.boundary}: nll" for order in found), *(f"paper, {name}" for name in published())]
    rows = [
        [
            strategy,
            *(plain(order.nll.get(strategy)) for order in found),
            *(plain(own[strategy], 1) for own in published().values()),
        ]
        for strategy in KINDS
        if any(strategy in order.nll for order in found)
    ]
    return Table(header, rows)


def lines(found: Sequence[Order]) -> list[str]:
    """Say both orders, best first, and whether the directions agree."""
    if not found:
        return []
    theirs = "; ".join(f"{name}: {_ranked(own, reverse=True)}" for name, own in published().items())
    said = [
        f"{SOURCE}, orders what layers share by the average of five tasks after fine-tuning, best first: {theirs}. "
        "Here the order is by held-out nll of masked tokens, lowest first."
    ]
    return [*said, *(f"{order.boundary}: {_ranked(order.nll)}.{_summary(order.pairs)}" for order in found)]


def _summary(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return " The paper orders no two of these alike at both widths."
    counted = [f"{sum(pair.verdict == verdict for pair in pairs)} {verdict}" for verdict in VERDICTS]
    each = "; ".join(_sentence(pair) for pair in pairs)
    said = f"Of {len(pairs)} pair{'' if len(pairs) == 1 else 's'} that the paper orders alike at both widths"
    return f" {said}: {', '.join(counted)}. {each}."


def _pairs(runs: Mapping[str, Sequence[RunResult]]) -> Iterator[Pair]:
    for first, second in combinations(KINDS, 2):
        signs = {own[first] > own[second] for own in published().values()}
        if first not in runs or second not in runs or len(signs) > 1:
            continue  # the paper's own two widths differ
        better, worse = (first, second) if signs.pop() else (second, first)
        seeds = {run.seed: run.heldout_nll for run in runs[better]}
        values = [(seeds[run.seed], run.heldout_nll) for run in runs[worse] if run.seed in seeds]
        if not values:
            continue
        d = paired(*zip(*values, strict=True))
        yield Pair(better, worse, d.mean, interval(d), d.p)


def _sentence(pair: Pair) -> str:
    return f"{pair.worse} − {pair.better}: {signed(pair.difference)} ({pair.interval}), {pair.verdict}"


def _ranked(values: Mapping[str, float], *, reverse: bool = False) -> str:
    return ", ".join(sorted(values, key=lambda name: values[name], reverse=reverse))
