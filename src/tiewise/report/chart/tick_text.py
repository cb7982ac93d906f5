"""Texts of numbers along an axis, in the formats of plotly that tiewise's figures use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tiewise.core.measurement import MINUS

MOST_DIGITS = 7  # a step below 10⁻⁶ gives texts with an exponent
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SI_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}
LETTERS = {1e12: "T", 1e9: "B", 1e6: "M", 1e3: "k"}  # plotly's exponentformat "B"


def tick_text(value: float, step: float, options: Mapping[str, Any]) -> str:
    """Return the text of a number.

    Args:
        value: the number.
        step: distance to the next tick, which decides how many digits the text needs.
        options: plotly's layout of the axis.

    >>> tick_text(0.25, 0.25, {"tickformat": ".0%"}), tick_text(-0.5, 0.5, {}), tick_text(2e6, 1e6, {})
    ('25%', '−0.5', '2M')
    """
    if options.get("exponentformat") == "power":
        text = _power_of_ten(value)
    else:
        formats: dict[str, Callable[[float, float], str]] = {
            ".0%": _integer_percent,
            ".1~%": _percent,
            "~g": _general,
            "~s": _with_si_prefix,
        }
        text = formats.get(options.get("tickformat") or "", _plain)(value, step)
    return text.replace("-", MINUS) + str(options.get("ticksuffix", ""))


def _power_of_ten(value: float) -> str:
    """Return a power of ten with a superscript exponent."""
    exponent = str(round(math.log10(value)))
    return f"10{exponent.translate(SUPERSCRIPTS)}"


def _integer_percent(value: float, step: float) -> str:
    """Return a share as per cent, with a decimal if the step needs one."""
    digits = 0
    if 0 < step < 0.01:
        digits = 1
    return f"{value:.{digits}%}"


def _percent(value: float, step: float) -> str:
    """Return a share as per cent with at most one decimal."""
    return f"{100 * value:.1f}".removesuffix(".0") + "%"


def _general(value: float, step: float) -> str:
    """Return a number with at most six significant digits."""
    return f"{value:g}"


def _with_si_prefix(value: float, step: float) -> str:
    """Return a number with an SI prefix."""
    return _shortened(value, SI_PREFIXES)


def _plain(value: float, step: float) -> str:
    """Return a number with as many decimals as the step needs; large numbers with a letter."""
    if abs(value) >= 1e4:
        return _shortened(value, LETTERS)
    for digits in range(MOST_DIGITS):
        if abs(round(step, digits) - step) < 1e-6 * step:
            return f"{value:,.{digits}f}"
    return f"{value:g}"


def _shortened(value: float, letters: Mapping[float, str]) -> str:
    """Return a number as a multiple of the largest power below it."""
    for power, letter in letters.items():
        if abs(value) >= power:
            return f"{value / power:.6g}{letter}"
    return f"{value:g}"
