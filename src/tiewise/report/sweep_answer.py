"""Answer of a study in sentences: sign changes, or the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from tiewise.core.measurement import NATS, count, plain
from tiewise.report.sweep_axes import axes_of, in_words, parted, value_text, words
from tiewise.training.study.study import Study, SweepResult
from tiewise.training.verdicts import BETTER, EQUIVALENT, UNDECIDED, VERDICTS, WORSE, verdict_of

OUTCOMES = {-1: BETTER, 1: WORSE}  # sign of a result → outcome
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
    """Return a sentence about one contrast: its sign changes, or its verdicts."""
    contrast = f"{results[0].arm} against {results[0].reference}"
    changes = turns(study, results[0].contrast)
    if changes:
        return f"{contrast} turns {_first_changes(changes)}."
    counted = ", ".join(_verdicts_in_words(results))
    if not any(result.sign for result in results):
        counted += _sensitivity(results)
    return f"{contrast}, of {len(results)} settings: {counted}."


def _verdicts_in_words(results: Sequence[SweepResult]) -> Iterator[str]:
    """Yield each verdict that occurs, with its number of settings and the range of its differences."""
    by_verdict: dict[str, list[SweepResult]] = {verdict: [] for verdict in VERDICTS}
    for result in results:
        by_verdict[verdict_of(result.heldout)].append(result)
    for verdict in (BETTER, WORSE):
        if by_verdict[verdict]:
            yield f"{verdict} in {len(by_verdict[verdict])} by {_span_of_gaps(by_verdict[verdict])} {NATS}"
    if by_verdict[EQUIVALENT]:
        margin = by_verdict[EQUIVALENT][0].heldout.margin
        yield f"equivalent within {plain(margin, 3)} {NATS} in {len(by_verdict[EQUIVALENT])}"
    if by_verdict[UNDECIDED]:
        yield f"undecided in {len(by_verdict[UNDECIDED])}"


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
