"""The values inside a boundary's written form: how each kind of value is read, refused and printed.

A reader takes the text after `=` and raises `ValueError` with what the value must be. `printed` is its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

# The named scales are functions of the model width D, so that one spec serves models of any width.
SCALES: dict[str, Callable[[int], float]] = {
    "sqrt_d": math.sqrt,
    "1/sqrt_d": lambda d: 1 / math.sqrt(d),
    "1/d": lambda d: 1 / d,
}


def scale(text: str) -> str:
    """Read a named scale or a positive number; returns its shortest written form."""
    if text not in SCALES:
        return number(positive(text))
    return text


def positive(text: str) -> float:
    """Read a finite number above zero."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError("must be a positive number")
    return value


def not_negative(text: str) -> float:
    """Read a finite number, zero or more."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("must be zero or a positive number")
    return value


def count(text: str) -> int:
    """Read a whole number, 1 or more."""
    value = int(text)
    if value < 1:
        raise ValueError("must be 1 or more")
    return value


def row(text: str) -> int:
    """Read a row number, 0 or more."""
    value = int(text)
    if value < 0:
        raise ValueError("must be a row number, 0 or more")
    return value


def map_kind(text: str) -> bool:
    """Read whether a linear map stands there."""
    if text not in ("linear", "none"):
        raise ValueError("must be 'linear' or 'none'")
    return text == "linear"


def file_path(text: str) -> str:
    """Read a path, percent-encoded where it holds a plus or a comma."""
    if not text:
        raise ValueError("must be a file path")
    return unquote(text)


def number(value: float) -> str:
    """Print a number without a plus sign, which would start the next option."""
    short = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return short.replace("e+", "e")  # a plus would start the next option


def printed(value: Any) -> str:
    """Print any value as its reader takes it."""
    if isinstance(value, bool):
        return "linear" if value else "none"
    if isinstance(value, float):
        return number(value)
    return quote(value, safe="/.:~_-") if isinstance(value, str) and value not in SCALES else str(value)


def scale_value(scale: str | None, d: int) -> float:
    """Return a scale as a number in a model of width `d`; None is 1."""
    if scale is None:
        return 1.0
    return SCALES[scale](d) if scale in SCALES else float(scale)
