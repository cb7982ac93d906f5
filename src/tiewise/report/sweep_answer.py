"""Answer of a study in sentences: sign changes, or the significant sign."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tiewise.core.measurement import NATS, count, plain
from tiewise.report.sweep_axes import axes_of, in_words, parted, value_text, words
from tiewise.training.study.study import Study, SweepResult

OUTCOMES = {-1: "better", 0: "–", 1: "worse"}  # sign of a result → outcome
MOST_CHANGES = 2  # maximum number of changes in an answer


def answer(study: Study) -> list[str]:
    """Return a sentence for every contrast about its sign, then one about the models' sizes."""
    sentences = [_answer_of(study, results) for results in parted(study.results, []).values()]
    sizes: list[int] = []
    for result in study.results:
        sizes += (result.parameters, result.reference_parameters)
    smallest, largest = count(min(sizes)), count(max(sizes))
    sentences.append(f"The models have {smallest} to {largest} parameters; larger ones were not measured.")
    if study.left:
        sentences.append(f"Not finished: {study.left} of the grid’s cells; --resume trains the rest.")
    return sentences


def _answer_of(study: Study, results: Sequence[SweepResult]) -> str:
    """Return a sentence about one contrast: its sign changes, or its significant sign."""
    contrast = f"{results[0].arm} against {results[0].reference}"
    changes = turns(study, results[0].contrast)
    if changes:
        return f"{contrast} turns {_first_changes(changes)}."
    settings = len(results)
    by_sign: dict[int, list[SweepResult]] = {sign: [] for sign in OUTCOMES}
    for result in results:
        by_sign[result.sign].append(result)
    better, worse = by_sign[-1], by_sign[1]
    if better and worse:
        return f"{contrast} is better in {len(better)} and worse in {len(worse)} of {settings} settings."
    detected = better or worse
    if not detected:
        return f"{contrast}: no difference is detected in any of {settings} settings{_sensitivity(results)}."
    outcome = OUTCOMES[detected[0].sign]
    where = f"in {len(detected)} of {settings} settings, by {_span_of_gaps(detected)} {NATS}"
    return f"{contrast} is {outcome} wherever a difference is detected: {where}."


def _first_changes(changes: Sequence[str]) -> str:
    """Return the first sign changes, and the number of all others."""
    named = "; ".join(changes[:MOST_CHANGES])
    others = len(changes) - MOST_CHANGES
    if others <= 0:
        return named
    return f"{named}, and at {others} other places"


def _span_of_gaps(results: Iterable[SweepResult]) -> str:
    """Return the smallest and the largest absolute difference."""
    gaps = sorted(abs(result.heldout.mean) for result in results)
    if len(gaps) == 1:
        return plain(gaps[0])
    return f"{plain(gaps[0])} to {plain(gaps[-1])}"


def _sensitivity(results: Iterable[SweepResult]) -> str:
    """Return the smallest difference that any result could detect, as a clause.

    "" if no result has one.
    """
    detectable = [result.heldout.detectable for result in results if result.heldout.detectable is not None]
    if not detectable:
        return ""
    return f"; the most sensitive detects {plain(min(detectable))} {NATS} in 80 of 100 repetitions"


def turns(study: Study, contrast: str) -> list[str]:
    """Return every change from one significant sign to the other along one axis, as text.

    Rows without a significant sign may be between the two.
    """
    results = [result for result in study.results if result.contrast == contrast]
    axes = axes_of(study)
    changes = []
    for axis in axes.numeric:
        others = axes.all_but(axis)
        for line in parted(results, others).values():
            changes += _turns_along(axis, line, others)
    return changes


def _turns_along(axis: str, results: Iterable[SweepResult], others: Sequence[str]) -> list[str]:
    """Return the sign changes along one axis among results that are equal on `others`."""
    detected = [result for result in results if result.sign]
    detected.sort(key=lambda result: result.measure(axis))
    changes = []
    for before, after in pairwise(detected):
        if before.sign != after.sign:
            changes.append(_change_in_words(before, after, axis, others))
    return changes


def _change_in_words(before: SweepResult, after: SweepResult, axis: str, others: Sequence[str]) -> str:
    """Return one sign change along an axis as text, with both results' values on the `others`."""
    place = f"between {words(axis)} {value_text(before, axis)} and {value_text(after, axis)}"
    change = f"from {OUTCOMES[before.sign]} to {OUTCOMES[after.sign]} {place}"
    if not others:
        return change
    fixed = ", ".join(in_words(before, other) for other in others)
    return f"{change} (at {fixed})"
