"""Runs of recurrent recipes next to published figures.

A figure belongs to a run of the same recipe, boundary and settings. A figure whose settings are known only in part
belongs to no run: a sentence names it, without a figure of the run. Two counts identify the text of a figure. A run on
another text is listed too, with a sentence that it is not a repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tiewise.core.measurement import NONE, Listing, plain
from tiewise.planning.ledger import Result, results
from tiewise.training.results import over_seeds

PaperComparison = tuple[list[str], Listing]  # sentences, and the table under them
# text → (training tokens with <eos>, vocabulary)
TEXTS = {"PTB": (929_589, 10_000), "WikiText-2": (2_088_628, 33_278)}
METRIC = " test perplexity"  # suffix of a metric after the name of a text
PUBLISHED, REPRODUCED, UNCERTAIN = "published", "reproduced", "open"  # open: the setting is known only in part


@dataclass(frozen=True)
class _ArmFigure:
    """A published figure, and the arm of the run that it belongs to."""

    arm: str
    figure: Result

    @property
    def text(self) -> str:
        """Name of the text on which the figure was measured."""
        return self.figure.metric.removesuffix(METRIC)

    @property
    def is_uncertain(self) -> bool:
        """True if the figure's settings are known only in part."""
        return self.figure.status == UNCERTAIN

    def has_setting(self, recipe: str, changed: Sequence[str]) -> bool:
        """Return whether this is a perplexity of this recipe and arm with these settings changed."""
        figure = self.figure
        if not figure.metric.endswith(METRIC):
            return False
        return (figure.recipe, figure.arm, figure.setting.split()) == (recipe, self.arm, list(changed))


def paper_figures(
    recipe: str, changed: Sequence[str], perplexities: Mapping[str, Sequence[float]], data: Mapping[str, Any]
) -> PaperComparison:
    """Return published and reproduced figures of a recurrent recipe next to a run's.

    Args:
        recipe: name of the recipe.
        changed: settings that differ from the recipe's, as `name=value`.
        perplexities: by arm, the perplexity of each seed on the test split.
        data: facts of the prepared text.
    """
    words, vocab = data["splits"]["train"]["tokens"], data["tokenizer"]["vocab"]
    text = {counts: name for name, counts in TEXTS.items()}.get((words, vocab))
    certain: list[_ArmFigure] = []
    uncertain: list[_ArmFigure] = []
    for match in _matches(recipe, changed, perplexities, text):
        if match.is_uncertain:
            uncertain.append(match)
        else:
            certain.append(match)
    header = ["arm", "text of the figures", "published", "reproduced", "this run"]
    table = Listing("Beside this run", header, _figure_rows(certain, perplexities))
    if uncertain:
        return [_uncertain_sentence(recipe, uncertain)], table
    if not certain:
        return [_no_figure_sentence(recipe, changed)], table
    sentences = [f"Test perplexity per word, <eos> counted. Figures: {_sources(certain)}."]
    if text is None:
        sentences.append(f"Another text ({words:,} words, vocabulary {vocab:,}): only differences of arms compare.")
    return sentences, table


def _matches(recipe: str, changed: Sequence[str], arms: Iterable[str], text: str | None) -> list[_ArmFigure]:
    """Return the figures of each arm with these settings. If the text is known, only its figures."""
    matches = []
    for arm, result in product(arms, results()):
        match = _ArmFigure(arm, result)
        if match.has_setting(recipe, changed) and text in (None, match.text):
            matches.append(match)
    return matches


def _figure_rows(matches: Iterable[_ArmFigure], perplexities: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Return a row for each arm and text: the authors' figures, others' figures, the run's."""
    by_arm_and_text: dict[tuple[str, str], dict[str, list[str]]] = {}  # (arm, text) → status → figures
    for match in matches:
        by_status = by_arm_and_text.setdefault((match.arm, match.text), {PUBLISHED: [], REPRODUCED: []})
        by_status[match.figure.status].append(plain(match.figure.value, 2))
    rows = []
    for (arm, text), by_status in by_arm_and_text.items():
        figures = [", ".join(values) or NONE for values in by_status.values()]
        rows.append([arm, text, *figures, _perplexity_over_seeds(perplexities[arm])])
    return rows


def _perplexity_over_seeds(perplexities: Sequence[float]) -> str:
    """Return the mean perplexity with its deviation over seeds; a dash without any seed."""
    if not perplexities:
        return NONE
    return str(over_seeds("", perplexities, "perplexity", 2))


def _uncertain_sentence(recipe: str, matches: Sequence[_ArmFigure]) -> str:
    """Return a sentence with the figures whose settings are known in part."""
    figures = ", ".join(f"{match.arm} {plain(match.figure.value, 2)} ({match.text})" for match in matches)
    unknown = f"Parts of that setting are unknown (see the recipe {recipe}): this run is no repetition."
    return f"Published at this size: {figures}, by {_sources(matches)}. {unknown}"


def _no_figure_sentence(recipe: str, changed: Sequence[str]) -> str:
    """Return the sentence that no figure of these settings was published."""
    setting = recipe
    if changed:
        setting = f"{recipe} with {', '.join(changed)}"
    return f"No published figure is known for {setting}."


def _sources(matches: Iterable[_ArmFigure]) -> str:
    """Return the sources of figures, each once."""
    return "; ".join(dict.fromkeys(match.figure.source for match in matches))
