"""A recurrent run beside the figures that were published and reproduced for its recipe and boundary.

A figure belongs to a run of the same recipe, boundary and settings. One whose setting is known in part only belongs to
no run, and is named beside none of its own. The text of a figure is told apart by its counts: what was
trained on other words is shown all the same, and said to be no repetition.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiewise.core.ledger import Result, results
from tiewise.core.numerals import NONE, plain
from tiewise.report.grid import Table

# (training tokens with <eos>, vocabulary) of the texts that figures are of
TEXTS = {"PTB": (929_589, 10_000), "WikiText-2": (2_088_628, 33_278)}
_SUFFIX = " test perplexity"


@dataclass(frozen=True)
class Beside:
    """Own test perplexities by arm, and what to hold them against."""

    recipe: str
    changed: Sequence[str]  # settings other than the recipe's, as `name=value`
    own: Mapping[str, Sequence[float]]  # arm → perplexity of each seed
    data: Mapping[str, Any]  # facts of the prepared text

    @property
    def text(self) -> str | None:
        """Name of the published text that the run was trained on, or None."""
        counts = (self.data["splits"]["train"]["tokens"], self.data["tokenizer"]["vocab"])
        return next((name for name, known in TEXTS.items() if known == counts), None)

    def figures(self, arm: str, *, matched: bool = True) -> list[Result]:
        """Return the ledger's test figures for an arm at these settings; where the text is known, those of it alone.

        Without `matched` those whose settings agree as far as they are known, which is no match.
        """
        setting = (self.recipe, arm, list(self.changed))
        found = (r for r in results() if (r.recipe, r.arm, r.setting.split()) == setting and _text(r) is not None)
        return [r for r in found if (r.status != "open") == matched and self.text in (None, _text(r))]


def of_comparison(comparison: Any) -> Beside | None:
    """Return what a comparison is held against; None where it has no recipe."""
    if not comparison.setting.get("recipe"):
        return None
    own = {arm: [run.perplexity for run in comparison.of(arm)] for arm in comparison.arms}
    return Beside(comparison.setting["recipe"], comparison.setting["changed"], own, comparison.data)


def table(beside: Beside) -> Table | None:
    """One row per published figure, reproductions in one cell; None where the ledger has none for these settings."""
    rows = []
    for arm, own in beside.own.items():
        found = beside.figures(arm)
        for text in dict.fromkeys(map(_text, found)):
            of_text = [r for r in found if _text(r) == text]
            published = [plain(r.value, 2) for r in of_text if r.status == "published"]
            again = [plain(r.value, 2) for r in of_text if r.status == "reproduced"]
            rows.append([arm, text or "", ", ".join(published) or NONE, ", ".join(again) or NONE, _spread(own)])
    return Table(["arm", "text of the figures", "published", "reproduced", "this run"], rows) if rows else None


def lines(beside: Beside) -> list[str]:
    """Say what the figures are of, and whether this run repeats them."""
    found = [r for arm in beside.own for r in beside.figures(arm)]
    unsure = [(arm, r) for arm in beside.own for r in beside.figures(arm, matched=False)]
    if unsure:
        named = ", ".join(f"{arm} {plain(r.value, 2)} ({_text(r)})" for arm, r in unsure)
        sources = "; ".join(dict.fromkeys(r.source for _, r in unsure))
        return [
            f"Published for models of this size: {named}, by {sources}. Parts of that setting are unknown "
            f"to us (see the recipe {beside.recipe}), so this run is no repetition of it."
        ]
    if not found:
        other = f" with {', '.join(beside.changed)}" if beside.changed else ""
        return [f"No published figure is known for {beside.recipe}{other}."]
    words, vocab = beside.data["splits"]["train"]["tokens"], beside.data["tokenizer"]["vocab"]
    said = [f"Test perplexity per word, <eos> counted. Figures: {'; '.join(dict.fromkeys(r.source for r in found))}."]
    if beside.text is None:
        said.append(
            f"This run was trained on another text ({words:,} words, vocabulary {vocab:,}), so its figures do not "
            "repeat the published ones: only differences between arms can be compared."
        )
    return said


def _text(result: Result) -> str | None:
    return result.metric.removesuffix(_SUFFIX) if result.metric.endswith(_SUFFIX) else None


def _spread(values: Sequence[float]) -> str:
    if not values or not all(map(math.isfinite, values)):
        return "diverged" if values else NONE
    mean = plain(statistics.fmean(values), 2)
    return mean if len(values) < 2 else f"{mean} ± {plain(statistics.stdev(values), 2)}"
