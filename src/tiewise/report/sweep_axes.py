"""Varying axes of a study, the numeric ones among them, and values as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiewise.core.measurement import count
from tiewise.training.study.study import Study, SweepRow

ARM = "arm"  # name of the arm in tables and maps, which treat it as an axis
UNSET = {"train_tokens": "all"}  # text of an axis without a value; "default" for all others


@dataclass(frozen=True)
class StudyAxes:
    """Varying axes of a study: those with numbers in every row, then the others."""

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
        if any(math.isnan(row.measure(axis)) for row in study.rows):
            axes.others.append(axis)
        else:
            axes.numeric.append(axis)
    return axes


def parted(rows: Iterable[SweepRow], axes: Sequence[str]) -> dict[str, list[SweepRow]]:
    """Return rows grouped by their contrast and their values on these axes, as text."""
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(heading(row.contrast, row, axes), []).append(row)
    return groups


def heading(subject: str, row: SweepRow, axes: Iterable[str]) -> str:
    """Return a subject and a row's values on these axes, as text."""
    return ", ".join([subject, *(in_words(row, axis) for axis in axes)])


def in_words(row: SweepRow, axis: str) -> str:
    """Return an axis and a row's value on it, as text."""
    return f"{words(axis)} {value_text(row, axis)}"


def words(axis: str) -> str:
    """Return an axis's name with spaces."""
    return axis.replace("_", " ")


def value_text(row: SweepRow, axis: str) -> str:
    """Return a row's value on an axis as text. The axis may be `ARM`."""
    if axis == ARM:
        return row.arm
    value = row.at[axis]
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
