"""SOP beside NSP: one page of ALBERTs pretrained on one objective each and judged on both, beside the paper's Table 5.

runs = [Comparison.from_dict(json.loads(Path(f"runs/{name}/results.json").read_text())) for name in ("sop", "nsp")]
write_objectives(runs, "objectives.html")
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tiewise.core.errors import RunError
from tiewise.core.files import write_result
from tiewise.core.found import Found, Quantity
from tiewise.core.ledger import results
from tiewise.report.comparison_found import CHANCE, SHARES_NOTE, share
from tiewise.report.faces import summary
from tiewise.report.figures import panels
from tiewise.report.papers import ALBERT
from tiewise.report.sheet import PageSection, Sheet
from tiewise.training.results import MASKED, Comparison, Share

JUDGED = {MASKED: "masked tokens right", "nsp": "pairs right as nsp", "sop": "pairs right as sop"}
NOTE = f"{SHARES_NOTE} Told from chance by both intervals. The paper: {ALBERT}, Table 5, on other texts."


@cache
def table_5() -> Mapping[str, Mapping[str, float]]:
    """Objective → share → percent."""
    found: dict[str, dict[str, float]] = {}
    for name, metric in JUDGED.items():
        for result in results(f"{metric}, %"):
            found.setdefault(result.setting.removeprefix("objective="), {})[name] = result.value
    return found


def objectives(comparisons: Sequence[Comparison]) -> dict[str, Found]:
    """What the first arms of ALBERTs' comparisons, one for each objective, judge right as nsp and sop.

    The paper's figures stand beside them.

    Raises:
        RunError: one that is no ALBERT's, or an objective given twice.
    """
    found: dict[str, Found] = {}
    for one in comparisons:
        objective, runs = one.setting.get("objective"), one.of(one.reference)
        if objective is None or not any(run.shares for run in runs):
            raise RunError("a comparison without an objective of pairs", "give ALBERTs' (--recipe albert-small)")
        label = "without pairs" if objective == "none" else f"on {objective}"
        theirs = f"{label}, the paper"
        if label in found:
            raise RunError(f"objective {objective} twice", "give each once")
        here, paper, said = [], [], []
        for name, words in JUDGED.items():
            q, each = share(runs, name), [run.shares[name] for run in runs if name in run.shares]
            if q is None:
                continue
            of_pairs: dict[str, Any] = {} if name == MASKED else {"chance": CHANCE, "figure": "Pairs judged right"}
            # Wilson's interval over the rows, which all seeds are asked alike
            count = each[0].count
            rows = Share.of(round(statistics.fmean(s.share for s in each) * count), count, math.nan)
            q = replace(q, name=words, n=count, of=label, **of_pairs)
            here.append(q)
            if objective in table_5():
                value = table_5()[objective][name] / 100
                paper.append(Quantity(words, value, of=theirs, unit="%", **of_pairs))
            if of_pairs:  # by both intervals: seeds that all guess alike agree on the same rows by chance
                told = "above chance" if min(q.low, rows.low) > CHANCE else "not told from chance"
                told = "below chance" if max(q.high, rows.high) < CHANCE else told
                said.append(f"{name} {q}, {told}")
        found[label] = Found("; ".join(said), tuple(here))
        if paper:
            found[theirs] = Found("; ".join(f"{q.name} {q}" for q in paper), tuple(paper))
    return found


def write_objectives(comparisons: Sequence[Comparison], path: str | os.PathLike[str]) -> Path:
    """Write `objectives` as one HTML file, whole or not at all, and return it.

    Raises:
        RunError: as `objectives`, or a file that cannot be written.
    """
    found = objectives(comparisons)
    table = summary(found, "Judged right by objective of pretraining")
    page = Sheet(
        command_name="objectives",
        title="SOP beside NSP: tiewise",
        subject=", ".join(found),
        heading="SOP beside NSP",
        answer=[f"Pretrained {label}: {one.answer}." for label, one in found.items()],
        results=PageSection("Judged as both", panels(found), tables=[table], notes=[NOTE]),
        sections=[],
        command="\n".join(one.command for one in comparisons),
    )
    return write_result(page.render(), path, "path")
