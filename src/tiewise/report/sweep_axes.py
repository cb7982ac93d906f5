"""Varying axes of a study, the numeric ones among them, and values as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiewise.core.measurement import count
from tiewise.training.study.study import Study, SweepResult

ARM = "arm"  # name of the arm in tables and maps, which treat it as an axis
UNSET = {"train_tokens": "all"}  # text of an axis without a value; "default" for all others


@dataclass(frozen=True)
class StudyAxes:
    """Varying axes of a study: those with numbers in every result, then the others."""

    numeric: list[str]
    others: list[str]

    @property
    def varying(self) -> list[str]:
        """All varying axes."""
        return [*self.numeric, *self.others]

    def all_but(self, along: str) -> list[str]:
        """Return all axes without one of them."""
        axes = self.varying
        axes.remove(along)
        return axes


def axes_of(study: Study) -> StudyAxes:
    """Return axes with more than one value, or else the first."""
    several = [axis for axis, values in study.grid.axes.items() if len(values) > 1]
    axes = StudyAxes([], [])
    for axis in several or list(study.grid.axes)[:1]:
        if any(math.isnan(result.measure(axis)) for result in study.results):
            axes.others.append(axis)
        else:
            axes.numeric.append(axis)
    return axes


def parted(results: Iterable[SweepResult], axes: Sequence[str]) -> dict[str, list[SweepResult]]:
    """Return results grouped by their contrast and their values on these axes, as text."""
    groups: dict[str, list[SweepResult]] = {}
    for result in results:
        groups.setdefault(heading(result.contrast, result, axes), []).append(result)
    return groups


def heading(subject: str, result: SweepResult, axes: Iterable[str]) -> str:
    """Return a subject and a result's values on these axes, as text."""
    return ", ".join([subject, *(in_words(result, axis) for axis in axes)])


def in_words(result: SweepResult, axis: str) -> str:
    """Return an axis and a result's value on it, as text."""
    return f"{words(axis)} {value_text(result, axis)}"


def words(axis: str) -> str:
    """Return an axis's name with spaces."""
    return axis.replace("_", " ")


def value_text(result: SweepResult, axis: str) -> str:
    """Return a result's value on an axis as text. The axis may be `ARM`."""
    if axis == ARM:
        return result.arm
    value = result.at[axis]
    if value is None:
        return UNSET.get(axis, "default")
    return count(value) if isinstance(value, int) else str(value)


def number_texts(values: Iterable[float]) -> list[str]:
    """Return numbers of an axis as text. Below 10 they have three digits, as learning rates need."""
    texts = []
    for value in values:
        if value >= 10:
            texts.append(count(value))
        else:
            texts.append(f"{value:.3g}")
    return texts
