"""Runs beside what was published of their like: figures of recurrent recipes, and ALBERT's order of what layers share.

A figure belongs to a run of the same recipe, boundary and settings. One whose setting is known in part only belongs to
no run, and is named beside none of its own. The text of a figure is told apart by its counts: what was trained on other
words is shown all the same, and said to be no repetition.

Table 4 of ALBERT (Lan et al. 2020) orders none, attention, ffn and all by the average of five tasks after fine-tuning,
at two table widths; a comparison orders them by the validation nll of masked tokens, for each boundary. The paper's
models and texts are others, so directions are compared, not sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

from tiewise.core.estimates import holm
from tiewise.core.found import NONE, Listing, plain, signed
from tiewise.core.sharing_spec import KINDS
from tiewise.planning.ledger import ALBERT_AVERAGE, Result, results
from tiewise.training.results import ALPHA, Comparison, Difference, RunResult, interval, over_seeds, paired

Beside = tuple[list[str], Listing]  # what is said, and the table under it
# (training tokens with <eos>, vocabulary) of the texts that figures are of
TEXTS = {"PTB": (929_589, 10_000), "WikiText-2": (2_088_628, 33_278)}
ALIKE = "alike at both widths"
METRIC = " test perplexity"  # behind the name of a text
ALBERT = "ALBERT (arXiv:1909.11942)"
AGREES, DISAGREES, OPEN = VERDICTS = ("as in the paper", "the other way", "not told apart at this budget")


def beside_figures(
    recipe: str, changed: Sequence[str], own: Mapping[str, Sequence[float]], data: Mapping[str, Any]
) -> Beside:
    """Published and reproduced figures of a recurrent recipe beside a run's own.

    `changed` are settings other than the recipe's, as `name=value`, `own` the test perplexities of each arm's seeds,
    `data` facts of the prepared text.
    """
    words, vocab = data["splits"]["train"]["tokens"], data["tokenizer"]["vocab"]
    text = next((name for name, counts in TEXTS.items() if counts == (words, vocab)), None)

    def text_of(result: Result) -> str:
        return result.metric.removesuffix(METRIC)

    of_arms = [  # where the text is known, figures of it alone
        (arm, r)
        for arm in own
        for r in results()
        if (r.recipe, r.arm, r.setting.split()) == (recipe, arm, list(changed))
        and r.metric.endswith(METRIC)
        and text in (None, text_of(r))
    ]
    unsure = [(arm, r) for arm, r in of_arms if r.status == "open"]
    known = [(arm, r) for arm, r in of_arms if r.status != "open"]
    rows = []
    for arm, of in dict.fromkeys((arm, text_of(r)) for arm, r in known):
        cells = [
            ", ".join(plain(r.value, 2) for a, r in known if (a, text_of(r), r.status) == (arm, of, status)) or NONE
            for status in ("published", "reproduced")
        ]
        ours = str(over_seeds("", own[arm], "perplexity", 2)) if own[arm] else NONE
        rows.append([arm, of, *cells, ours])
    table = Listing("Beside this run", ["arm", "text of the figures", "published", "reproduced", "this run"], rows)
    sources = "; ".join(dict.fromkeys(r.source for _, r in unsure or known))
    if unsure:
        named = ", ".join(f"{arm} {plain(r.value, 2)} ({text_of(r)})" for arm, r in unsure)
        unknown = f"Parts of that setting are unknown (see the recipe {recipe}): this run is no repetition."
        said = [f"Published at this size: {named}, by {sources}. {unknown}"]
    elif not known:
        said = [f"No published figure is known for {' with '.join(filter(None, [recipe, ', '.join(changed)]))}."]
    else:
        said = [f"Test perplexity per word, <eos> counted. Figures: {sources}."]
        if text is None:
            said.append(f"Another text ({words:,} words, vocabulary {vocab:,}): only differences of arms compare.")
    return said, table


@cache
def table_4() -> Mapping[str, Mapping[str, float]]:
    """Width of the table ("E = 128") → strategy → average."""
    found: dict[str, dict[str, float]] = {}
    for result in results(ALBERT_AVERAGE):
        if result.source == f"{ALBERT}, Table 4":
            width = result.model.removeprefix("ALBERT-base, ")
            found.setdefault(width, {})[result.choice.rpartition(" ")[2]] = result.value
    return found


def sharing_orders(comparison: Comparison) -> tuple[dict[str, dict[str, float]], list[Difference]]:
    """Mean validation nll by boundary and strategy, where two or more of the paper's were trained; their differences.

    A difference is worse − better, as the paper orders two strategies alike at both of its widths, over the seeds that
    both have; `metric` is the boundary, p adjusted by Holm over all pairs.
    """
    groups: dict[str, dict[str, list[RunResult]]] = {}
    for arm in comparison.arms:
        boundary, _, strategy = arm.partition("+share=")
        if strategy in KINDS and comparison.of(arm):
            groups.setdefault(boundary, {})[strategy] = comparison.of(arm)
    groups = {boundary: runs for boundary, runs in groups.items() if len(runs) > 1}
    pairs = []
    for boundary, runs in groups.items():
        for first, second in combinations([kind for kind in KINDS if kind in runs], 2):
            signs = {own[first] > own[second] for own in table_4().values()}
            better, worse = (first, second) if True in signs else (second, first)
            seeds = {run.seed: run.heldout_nll for run in runs[better]}
            values = [(seeds[run.seed], run.heldout_nll) for run in runs[worse] if run.seed in seeds]
            if len(signs) == 1 and values:
                pairs.append(paired(*zip(*values, strict=True), arm=f"{worse} − {better}", metric=boundary))
    adjusted = iter(holm([pair.p for pair in pairs if pair.p is not None]))
    judged = [pair if pair.p is None else replace(pair, p=next(adjusted)) for pair in pairs]
    nll = {
        boundary: {kind: statistics.fmean(run.heldout_nll for run in found) for kind, found in runs.items()}
        for boundary, runs in groups.items()
    }
    return nll, judged


def direction(pair: Difference) -> str:
    """One of VERDICTS."""
    if pair.p is None or pair.p >= ALPHA:
        return OPEN
    return AGREES if pair.mean > 0 else DISAGREES


def beside_table_4(nll: Mapping[str, Mapping[str, float]], pairs: Sequence[Difference]) -> Beside:
    """Both orders, best first, and whether the directions agree; a row for each strategy."""
    theirs = (f"{name}: {', '.join(sorted(own, key=lambda kind: -own[kind]))}" for name, own in table_4().items())
    ranked = f"{ALBERT}, Table 4, best first by five tasks after fine-tuning"
    said = [f"{ranked}: {'; '.join(theirs)}. Here by nll of masked tokens."]
    for boundary, of in nll.items():
        own = [pair for pair in pairs if pair.metric == boundary]
        line = f"{boundary}: {', '.join(sorted(of, key=of.__getitem__))}."
        if not own:
            said.append(f"{line} The paper orders no two of these {ALIKE}.")
            continue
        counted = (f"{sum(direction(pair) == verdict for pair in own)} {verdict}" for verdict in VERDICTS)
        each = (f"{p.arm}: {signed(p.mean)} ({interval(p)}), {direction(p)}" for p in own)
        many = f"{len(own)} pair{'' if len(own) == 1 else 's'} that the paper orders {ALIKE}"
        said.append(f"{line} Of {many}: {', '.join(counted)}. {'; '.join(each)}.")
    header = ["shared", *(f"{boundary}: nll" for boundary in nll), *(f"paper, {name}" for name in table_4())]
    rows = [
        [kind, *(plain(of.get(kind)) for of in nll.values()), *(plain(own[kind], 1) for own in table_4().values())]
        for kind in KINDS
        if any(kind in of for of in nll.values())
    ]
    return said, Listing("What layers share, here and in the paper", header, rows)
