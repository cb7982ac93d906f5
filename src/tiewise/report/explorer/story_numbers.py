"""Numbers of a user's comparison for the steps of the story.

Each names the section of the report that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tiewise.core.measurement import count, plain, visible
from tiewise.report import comparison_measurement
from tiewise.training.results import ArmDirectPath, Comparison

TABLES = ("shared table", "input table", "output table")  # names in `RunResult.parameters`
OPENING, STRAIGHT, MIRROR, WAYS_OUT, CHANCES = range(1, 6)  # steps of the story


@dataclass(frozen=True)
class StoryNumber:
    """Sentence with numbers of a comparison for one step of the story.

    Args:
        step: number of the step, from 1.
        sentence: the numbers in words.
        section: title of the report's section that has them.
    """

    step: int
    sentence: str
    section: str


def story_numbers(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the numbers of a comparison for the story as records, by step."""
    numbers = _table_sizes(comparison) + _direct_paths(comparison)
    numbers.append(StoryNumber(WAYS_OUT, comparison_measurement.verdict(comparison), "Results"))
    return [asdict(number) for number in sorted(numbers, key=lambda number: number.step)]


def _table_sizes(comparison: Comparison) -> list[StoryNumber]:
    """Return the parameters in the tables of each arm."""
    numbers = []
    for arm, run in comparison_measurement.first_runs(comparison).items():
        in_tables = sum(run.parameters.get(name, 0) for name in TABLES)
        if in_tables:
            share = plain(100 * in_tables / run.total_parameters, 1)
            sentence = f"{arm}: tables have {count(in_tables)} of {count(run.total_parameters)} parameters ({share} %)."
            numbers.append(StoryNumber(OPENING, sentence, "Parameters"))
    return numbers


def _direct_paths(comparison: Comparison) -> list[StoryNumber]:
    """Return the scores and probabilities of the most one-sided pair of tokens that every arm has."""
    paths = [path for path in comparison.direct_path if path.tokens]
    pair = next((pair for pair in comparison.bigrams if paths and _has_pair(paths, pair)), None)
    if pair is None:
        return []
    first, second = visible(pair["left"]), visible(pair["right"])
    numbers = []
    for path in paths:
        there = _score(path, pair["left"], pair["right"])
        back = _score(path, pair["right"], pair["left"])
        sentence = f"{path.arm}: the direct path gives {second} after {first} the logit {there}."
        numbers.append(StoryNumber(STRAIGHT, sentence, "Direct path"))
        both = f"{path.arm}: logit {there} for {second} after {first}, {back} for {first} after {second}."
        numbers.append(StoryNumber(MIRROR, both, "Direct path"))
    chances = (
        f"In your text {second} follows {first} with probability {plain(pair['forward'], 3)}, "
        f"and {first} follows {second} with {plain(pair['backward'], 3)}."
    )
    numbers.append(StoryNumber(CHANCES, chances, "Direct path"))
    return numbers


def _has_pair(paths: list[ArmDirectPath], pair: Mapping[str, Any]) -> bool:
    """Return whether every direct path has both tokens of a pair."""
    return all({pair["left"], pair["right"]} <= set(path.tokens) for path in paths)


def _score(path: ArmDirectPath, current: str, following: str) -> str:
    """Return the logit of a token after another one as text."""
    return plain(path.logits[path.tokens.index(current)][path.tokens.index(following)], 2)
