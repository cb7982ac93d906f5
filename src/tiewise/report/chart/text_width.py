"""Estimated widths of texts in the page's sans-serif font. They are upper bounds for nearly all texts."""

from __future__ import annotations

import math
from unicodedata import east_asian_width

NARROW_LETTERS = frozenset("iljtfrI.,:;'|!()[] ")
EM = {"narrow": 0.36, "usual": 0.6, "wide": 1.05}  # shares of the font's size


def text_width(text: str, size: float = 12) -> int:
    """Return the width of a line in pixels, rounded up."""
    widths = [EM[_class_of(letter)] for letter in text]
    return math.ceil(size * sum(widths))


def _class_of(letter: str) -> str:
    """Return the class of a letter's width."""
    if letter in NARROW_LETTERS:
        return "narrow"
    if letter in "mwMW%@" or east_asian_width(letter) in "WF":
        return "wide"
    return "usual"


def shortened(text: str, letters: int) -> str:
    """Return a text of at most so many letters, ending with … if shortened."""
    if len(text) <= letters:
        return text
    return f"{text[: letters - 1]}…"
