"""`Document`: the unit in which text arrives, is split, and is ended by `<eos>`; and what a paragraph is.

A paragraph is a run of lines between blank lines. Documents are made of paragraphs, so a paragraph is what two
documents may share, and what is looked for when duplicates are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class Document:
    """A text and where it came from (`name` is for messages only)."""

    name: str
    text: str


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` in order: indentation kept, trailing white space dropped."""
    for paragraph in BLANK_LINES.split(text):
        kept = paragraph.strip("\n").rstrip()
        if kept:
            yield kept
