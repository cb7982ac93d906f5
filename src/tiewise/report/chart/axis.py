"""Scales and ticks of an axis, read from plotly's figure."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiewise.report.chart.tick_text import tick_text

PADDING = 0.04  # share of the data's extent that stays free at both ends
MOST_TICKS = 6
STEPS = (1, 2, 2.5, 5, 10)  # multiples of a power of ten between ticks
MANTISSAS = (1, 2, 5)  # ticks of a short logarithmic axis

Record = Mapping[str, Any]  # part of a figure as plotly.js reads it


@dataclass(frozen=True)
class AxisTick:
    """Text at a place of an axis, which is in per cent of the axis."""

    place: float
    text: str


@dataclass(frozen=True)
class ChartAxis:
    """Scale that maps numbers to per cent of an axis.

    Attributes:
        start: number at 0 %; its logarithm to base 10 on a logarithmic axis.
        end: the same at 100 %.
        is_log: True for a logarithmic axis.
        options: plotly's layout of the axis.
    """

    start: float
    end: float
    is_log: bool
    options: Record

    def place(self, value: float | None) -> float | None:
        """Return the place of a number in per cent. None for a number that the axis cannot show."""
        if value is None or not is_number(value):
            return None
        coordinate: float = value
        if self.is_log:
            if value <= 0:
                return None
            coordinate = math.log10(value)
        return 100 * (coordinate - self.start) / (self.end - self.start)

    @property
    def title(self) -> str:
        """Title of the axis as text; "" without one."""
        return html.unescape(self.options.get("title", {}).get("text") or "")

    @property
    def has_names(self) -> bool:
        """True if the figure gives the texts of the ticks."""
        return "ticktext" in self.options

    @property
    def ticks(self) -> list[AxisTick]:
        """Ticks within the axis."""
        ticks = []
        for value, text in self._values_and_texts():
            place = self.place(value)
            if place is not None and -0.01 <= place <= 100.01:
                ticks.append(AxisTick(place, text))
        return ticks

    def _values_and_texts(self) -> Iterator[tuple[float, str]]:
        """Yield the values and texts of the ticks."""
        if self.has_names:
            names = [html.unescape(str(text).replace("<br>", "\n")) for text in self.options["ticktext"]]
            yield from zip(self.options["tickvals"], names, strict=True)
            return
        low, high = sorted((self.start, self.end))
        if self.is_log:
            for value in _logarithmic_ticks(low, high, self.options.get("dtick")):
                yield value, tick_text(value, value, self.options)
            return
        step = _linear_step(low, high, self.options.get("dtick"))
        for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
            yield k * step, tick_text(k * step, step, self.options)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _linear_step(low: float, high: float, requested: Any) -> float:
    """Return the distance between ticks: the requested one, or a round one that gives few ticks."""
    if is_number(requested) and (high - low) / requested <= 2 * MOST_TICKS:
        return float(requested)
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    if requested == 1:  # integers
        power = max(power, 1.0)
    return next(step * power for step in STEPS if step * power >= rough * (1 - 1e-9))


def _logarithmic_ticks(low: float, high: float, requested: Any) -> list[float]:
    """Return numbers at multiples of a step in logarithms.

    A short axis has 1, 2 and 5 of each decade.
    """
    step = 1.0
    if is_number(requested):
        step = float(requested)
    while (high - low) / step > MOST_TICKS + 1:
        step *= 2
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [10 ** (k * step) for k in range(first, last + 1)]
    if len(ticks) > 2 and requested != "D2":
        return [_rounded(tick) for tick in ticks]
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [mantissa * 10.0**decade for decade in decades for mantissa in MANTISSAS]
    return [_rounded(tick) for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def _rounded(value: float) -> float:
    """Return a number with ten significant digits, which removes the error of powers."""
    return float(f"{value:.10g}")


def axis_of(options: Record, values: Iterable[Any], *, from_zero: bool = False) -> ChartAxis:
    """Return the axis that shows all values.

    Args:
        options: plotly's layout of the axis; its `range` has priority.
        values: numbers to show; None and NaN are skipped.
        from_zero: the axis starts at 0, without padding.
    """
    is_log = options.get("type") == "log"
    start, end = _padded(list(_coordinates(values, is_log)), from_zero)
    if "range" in options:
        start, end = options["range"]
    elif options.get("autorange") == "reversed":
        start, end = end, start
    return ChartAxis(start, end, is_log, options)


def _coordinates(values: Iterable[Any], is_log: bool) -> Iterator[float]:
    """Yield numbers, or their logarithms."""
    for value in values:
        if not is_number(value):
            continue
        if not is_log:
            yield value
        elif value > 0:
            yield math.log10(value)


def _padded(coordinates: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """Return the ends of an axis around all coordinates."""
    low, high = min(coordinates, default=0.0), max(coordinates, default=1.0)
    if from_zero:
        return 0.0, (high or 1.0) * (1 + PADDING)
    padding = PADDING * (high - low) or abs(high) * PADDING or 1.0
    return low - padding, high + padding
