"""ALBERT's order of sharing strategies, compared with a comparison's order.

Table 4 of ALBERT (Lan et al. 2020) orders none, attention, ffn and all by the average of five tasks after fine-tuning,
at two table widths. A comparison orders them by the validation nll of masked tokens, for each boundary. The paper has
other models and texts, so only the directions of differences are compared, not their sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, combinations

from tiewise.core.estimates import holm_adjusted
from tiewise.core.measurement import Listing, plain, signed
from tiewise.core.sharing_spec import KINDS
from tiewise.planning.ledger import ALBERT_AVERAGE, results
from tiewise.report.papers import PaperComparison
from tiewise.training.results import ALPHA, Comparison, Difference, RunResult, interval, paired

ALIKE = "alike at both widths"
ALBERT = "ALBERT (arXiv:1909.11942)"
AGREES, DISAGREES, OPEN = VERDICTS = ("as in the paper", "the other way", "not told apart at this budget")


@cache
def table_4() -> Mapping[str, Mapping[str, float]]:
    """Return Table 4 as width of the table ("E = 128") → strategy → average."""
    averages: dict[str, dict[str, float]] = {}
    for result in results(ALBERT_AVERAGE):
        if result.source == f"{ALBERT}, Table 4":
            width = result.model.removeprefix("ALBERT-base, ")
            strategy = result.choice.rpartition(" ")[2]
            averages.setdefault(width, {})[strategy] = result.value
    return averages


@cache
def agreed_orders() -> Sequence[tuple[str, str]]:
    """Return the (better, worse) pairs of strategies that the paper orders alike at both widths."""
    orders = []
    for first, second in combinations(KINDS, 2):
        first_is_better = {averages[first] > averages[second] for averages in table_4().values()}
        if first_is_better == {True}:
            orders.append((first, second))
        elif first_is_better == {False}:
            orders.append((second, first))
    return orders


RunsBySharing = Mapping[str, Sequence[RunResult]]  # strategy → finished runs


def sharing_orders(comparison: Comparison) -> tuple[dict[str, dict[str, float]], list[Difference]]:
    """Return mean validation nll by boundary and strategy, and the differences of strategies.

    A boundary counts if two or more of the paper's strategies were trained. A difference is worse − better for two
    strategies that the paper orders alike at both widths, over the seeds that both strategies have. Its `metric` is the
    boundary, and its p is adjusted by Holm over all pairs.
    """
    nll: dict[str, dict[str, float]] = {}
    pairs = []
    for boundary, runs in _runs_by_boundary(comparison).items():
        nll[boundary] = _mean_nll(runs)
        for better, worse in agreed_orders():
            pair = _worse_minus_better(boundary, runs, better, worse)
            if pair is not None:
                pairs.append(pair)
    return nll, _adjusted_by_holm(pairs)


def _runs_by_boundary(comparison: Comparison) -> dict[str, RunsBySharing]:
    """Return finished runs by boundary and strategy, of boundaries with two or more strategies."""
    groups: dict[str, dict[str, Sequence[RunResult]]] = {}
    for arm in comparison.arms:
        boundary, _, strategy = arm.partition("+share=")
        runs = comparison.of(arm)
        if strategy in KINDS and runs:
            groups.setdefault(boundary, {})[strategy] = runs
    return {boundary: runs for boundary, runs in groups.items() if len(runs) > 1}


def _worse_minus_better(boundary: str, runs: RunsBySharing, better: str, worse: str) -> Difference | None:
    """Return the difference of two strategies over common seeds. None without such a seed."""
    nll_of_better = {run.seed: run.heldout_nll for run in runs.get(better, ())}
    nll_of_worse: list[float] = []
    reference: list[float] = []
    for run in runs.get(worse, ()):
        if run.seed in nll_of_better:
            nll_of_worse.append(run.heldout_nll)
            reference.append(nll_of_better[run.seed])
    if not reference:
        return None
    return paired(reference, nll_of_worse, arm=f"{worse} − {better}", metric=boundary)


def _adjusted_by_holm(pairs: Sequence[Difference]) -> list[Difference]:
    """Return differences with Holm's p over all of them. Differences without a p are not changed."""
    p_values = iter(holm_adjusted([pair.p for pair in pairs if pair.p is not None]))
    adjusted = []
    for pair in pairs:
        if pair.p is not None:
            pair = replace(pair, p=next(p_values))
        adjusted.append(pair)
    return adjusted


def _mean_nll(runs: RunsBySharing) -> dict[str, float]:
    """Return the mean validation nll of each strategy."""
    means = {}
    for kind, of_kind in runs.items():
        means[kind] = statistics.fmean(run.heldout_nll for run in of_kind)
    return means


def direction(pair: Difference) -> str:
    """Return one of VERDICTS for a difference worse − better."""
    if pair.p is None or pair.p >= ALPHA:
        return OPEN
    if pair.mean > 0:
        return AGREES
    return DISAGREES


def compare_with_table_4(nll: Mapping[str, Mapping[str, float]], pairs: Sequence[Difference]) -> PaperComparison:
    """Return both orders, best first, whether the directions agree, and a row for each strategy."""
    published = []
    for width, averages in table_4().items():
        best_first = sorted(averages, key=averages.__getitem__, reverse=True)
        published.append(f"{width}: {', '.join(best_first)}")
    ranked = f"{ALBERT}, Table 4, best first by five tasks after fine-tuning"
    sentences = [f"{ranked}: {'; '.join(published)}. Here by nll of masked tokens."]
    for boundary, of_boundary in nll.items():
        order = f"{boundary}: {', '.join(sorted(of_boundary, key=of_boundary.__getitem__))}."
        agreement = _agreement([pair for pair in pairs if pair.metric == boundary])
        sentences.append(f"{order} {agreement}")
    return sentences, _table_of_orders(nll)


def _agreement(pairs: Sequence[Difference]) -> str:
    """Return how many differences of one boundary have the paper's direction, with each of them."""
    if not pairs:
        return f"The paper orders no two of these {ALIKE}."
    counts = dict.fromkeys(VERDICTS, 0)
    differences = []
    for pair in pairs:
        verdict = direction(pair)
        counts[verdict] += 1
        differences.append(f"{pair.arm}: {signed(pair.mean)} ({interval(pair)}), {verdict}")
    counted = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    plural = "" if len(pairs) == 1 else "s"
    return f"Of {len(pairs)} pair{plural} that the paper orders {ALIKE}: {counted}. {'; '.join(differences)}."


def _table_of_orders(nll: Mapping[str, Mapping[str, float]]) -> Listing:
    """Return a row for each trained strategy: its nll by boundary, then the paper's averages."""
    header = ["shared", *(f"{boundary}: nll" for boundary in nll), *(f"paper, {width}" for width in table_4())]
    trained = set(chain.from_iterable(nll.values()))
    rows = []
    for kind in KINDS:
        if kind in trained:
            row = [kind]
            row += [plain(of_boundary.get(kind)) for of_boundary in nll.values()]
            row += [plain(averages[kind], 1) for averages in table_4().values()]
            rows.append(row)
    return Listing("What layers share, here and in the paper", header, rows)
