"""Runs next to published results: figures of recurrent recipes, and ALBERT's order of what layers share.

A figure belongs to a run of the same recipe, boundary and settings. A figure whose setting is known only in part
belongs to no run: it is named, and no figure of the run stands next to it. Two counts identify the text of a figure.
A run on other words is shown all the same, and reported as no repetition.

Table 4 of ALBERT (Lan et al. 2020) orders none, attention, ffn and all by the average of five tasks after fine-tuning,
at two table widths; a comparison orders them by the validation nll of masked tokens, for each boundary. The paper's
models and texts are others, so directions are compared, not sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from tiewise.core.estimates import holm
from tiewise.core.found import NONE, Listing, plain, signed
from tiewise.core.sharing_spec import KINDS
from tiewise.planning.ledger import ALBERT_AVERAGE, Result, results
from tiewise.training.results import ALPHA, Comparison, Difference, RunResult, interval, over_seeds, paired

Beside = tuple[list[str], Listing]  # sentences, and the table under them
# (training tokens with <eos>, vocabulary) of the texts that figures are of
TEXTS = {"PTB": (929_589, 10_000), "WikiText-2": (2_088_628, 33_278)}
ALIKE = "alike at both widths"
METRIC = " test perplexity"  # behind the name of a text
ALBERT = "ALBERT (arXiv:1909.11942)"
AGREES, DISAGREES, OPEN = VERDICTS = ("as in the paper", "the other way", "not told apart at this budget")
UNCERTAIN = "open"  # status of a figure whose setting is known only in part


class _ArmFigure(NamedTuple):
    """A published figure, and the arm of the run that it belongs to."""

    arm: str
    figure: Result

    @property
    def text(self) -> str:
        """Name of the text that the figure is of."""
        return self.figure.metric.removesuffix(METRIC)


def beside_figures(
    recipe: str, changed: Sequence[str], own: Mapping[str, Sequence[float]], data: Mapping[str, Any]
) -> Beside:
    """Return published and reproduced figures of a recurrent recipe next to a run's.

    Args:
        recipe: its name.
        changed: settings other than the recipe's, as `name=value`.
        own: test perplexities of each arm's seeds.
        data: facts of the prepared text.
    """
    words, vocab = data["splits"]["train"]["tokens"], data["tokenizer"]["vocab"]
    text = next((name for name, counts in TEXTS.items() if counts == (words, vocab)), None)
    matches = _matches(recipe, changed, own, text)
    uncertain = [match for match in matches if match.figure.status == UNCERTAIN]
    certain = [match for match in matches if match.figure.status != UNCERTAIN]
    header = ["arm", "text of the figures", "published", "reproduced", "this run"]
    table = Listing("Beside this run", header, _figure_rows(certain, own))
    if uncertain:
        return [_uncertain_sentence(recipe, uncertain)], table
    if not certain:
        setting = f"{recipe} with {', '.join(changed)}" if changed else recipe
        return [f"No published figure is known for {setting}."], table
    sentences = [f"Test perplexity per word, <eos> counted. Figures: {_sources(certain)}."]
    if text is None:
        sentences.append(f"Another text ({words:,} words, vocabulary {vocab:,}): only differences of arms compare.")
    return sentences, table


def _matches(recipe: str, changed: Sequence[str], arms: Iterable[str], text: str | None) -> list[_ArmFigure]:
    """Return the figures of each arm with these settings. If the text is known, figures of it alone."""
    matches = []
    for arm, result in product(arms, results()):
        match = _ArmFigure(arm, result)
        has_settings = (result.recipe, result.arm, result.setting.split()) == (recipe, arm, list(changed))
        if has_settings and result.metric.endswith(METRIC) and text in (None, match.text):
            matches.append(match)
    return matches


def _figure_rows(matches: Sequence[_ArmFigure], own: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Return a row for each arm and text: figures of the authors, figures of others, and the run's perplexity."""
    rows = []
    for arm, text in dict.fromkeys((match.arm, match.text) for match in matches):
        row = [arm, text]
        for status in ("published", "reproduced"):
            values = [m.figure.value for m in matches if (m.arm, m.text, m.figure.status) == (arm, text, status)]
            row.append(", ".join(plain(value, 2) for value in values) or NONE)
        row.append(str(over_seeds("", own[arm], "perplexity", 2)) if own[arm] else NONE)
        rows.append(row)
    return rows


def _uncertain_sentence(recipe: str, matches: Sequence[_ArmFigure]) -> str:
    """Return the figures of a setting that is known only in part, which the run does not repeat."""
    figures = ", ".join(f"{match.arm} {plain(match.figure.value, 2)} ({match.text})" for match in matches)
    unknown = f"Parts of that setting are unknown (see the recipe {recipe}): this run is no repetition."
    return f"Published at this size: {figures}, by {_sources(matches)}. {unknown}"


def _sources(matches: Iterable[_ArmFigure]) -> str:
    """Return the sources of figures, each once."""
    return "; ".join(dict.fromkeys(match.figure.source for match in matches))


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


RunsBySharing = Mapping[str, Sequence[RunResult]]  # strategy → finished runs


def sharing_orders(comparison: Comparison) -> tuple[dict[str, dict[str, float]], list[Difference]]:
    """Return mean validation nll by boundary and strategy, and the differences of strategies.

    A boundary counts if two or more of the paper's strategies were trained. A difference is worse − better, as the
    paper orders two strategies alike at both of its widths, over the seeds that both have. Its `metric` is the
    boundary, and its p is adjusted by Holm over all pairs.
    """
    groups = _runs_by_boundary(comparison)
    pairs = []
    for boundary, runs in groups.items():
        for first, second in combinations([kind for kind in KINDS if kind in runs], 2):
            pair = _ordered_difference(boundary, runs, first, second)
            if pair is not None:
                pairs.append(pair)
    nll = {boundary: _mean_nll(runs) for boundary, runs in groups.items()}
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


def _ordered_difference(boundary: str, runs: RunsBySharing, first: str, second: str) -> Difference | None:
    """Return worse − better of two strategies over common seeds.

    None where the paper orders them differently at its two widths, or no seed is common.
    """
    first_is_better = {averages[first] > averages[second] for averages in table_4().values()}
    if len(first_is_better) != 1:
        return None
    better, worse = (first, second) if True in first_is_better else (second, first)
    nll_of_better = {run.seed: run.heldout_nll for run in runs[better]}
    common = [run for run in runs[worse] if run.seed in nll_of_better]
    if not common:
        return None
    reference = [nll_of_better[run.seed] for run in common]
    return paired(reference, [run.heldout_nll for run in common], arm=f"{worse} − {better}", metric=boundary)


def _adjusted_by_holm(pairs: Sequence[Difference]) -> list[Difference]:
    """Return differences with Holm's p over all of them. Those without a p stay as they are."""
    adjusted = iter(holm([pair.p for pair in pairs if pair.p is not None]))
    return [pair if pair.p is None else replace(pair, p=next(adjusted)) for pair in pairs]


def _mean_nll(runs: RunsBySharing) -> dict[str, float]:
    """Return the mean validation nll of each strategy."""
    return {kind: statistics.fmean(run.heldout_nll for run in of_kind) for kind, of_kind in runs.items()}


def direction(pair: Difference) -> str:
    """Return one of VERDICTS."""
    if pair.p is None or pair.p >= ALPHA:
        return OPEN
    return AGREES if pair.mean > 0 else DISAGREES


def beside_table_4(nll: Mapping[str, Mapping[str, float]], pairs: Sequence[Difference]) -> Beside:
    """Return both orders, best first, and whether the directions agree; a row for each strategy."""
    published = []
    for width, averages in table_4().items():
        best_first = sorted(averages, key=lambda kind: -averages[kind])
        published.append(f"{width}: {', '.join(best_first)}")
    ranked = f"{ALBERT}, Table 4, best first by five tasks after fine-tuning"
    sentences = [f"{ranked}: {'; '.join(published)}. Here by nll of masked tokens."]
    for boundary, of_boundary in nll.items():
        order = f"{boundary}: {', '.join(sorted(of_boundary, key=of_boundary.__getitem__))}."
        agreement = _agreement([pair for pair in pairs if pair.metric == boundary])
        sentences.append(f"{order} {agreement}")
    return sentences, _table_of_orders(nll)


def _agreement(pairs: Sequence[Difference]) -> str:
    """Return how many differences of one boundary have the paper's direction, and each of them."""
    if not pairs:
        return f"The paper orders no two of these {ALIKE}."
    directions = [direction(pair) for pair in pairs]
    counted = ", ".join(f"{directions.count(verdict)} {verdict}" for verdict in VERDICTS)
    each = "; ".join(f"{p.arm}: {signed(p.mean)} ({interval(p)}), {direction(p)}" for p in pairs)
    plural = "" if len(pairs) == 1 else "s"
    return f"Of {len(pairs)} pair{plural} that the paper orders {ALIKE}: {counted}. {each}."


def _table_of_orders(nll: Mapping[str, Mapping[str, float]]) -> Listing:
    """Return a row for each strategy that was trained: its nll by boundary, then the paper's averages."""
    header = ["shared", *(f"{boundary}: nll" for boundary in nll), *(f"paper, {width}" for width in table_4())]
    trained = set(chain.from_iterable(nll.values()))
    rows = []
    for kind in KINDS:
        if kind in trained:
            ours = [plain(of_boundary.get(kind)) for of_boundary in nll.values()]
            theirs = [plain(averages[kind], 1) for averages in table_4().values()]
            rows.append([kind, *ours, *theirs])
    return Listing("What layers share, here and in the paper", header, rows)
