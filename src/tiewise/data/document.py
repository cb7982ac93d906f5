"""`Document`: a text, or a part of one, as it arrives; and what a paragraph is.

Parts are what is split and tuned on, documents are what `<eos>` ends: a long file arrives in parts, and reads on from
one to the next. A paragraph is a run of lines between blank lines; it is what two documents may share, and what is
looked for when duplicates are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class Document:
    """A text, or a part of one, and where it came from (for messages only); `begins`: it is the first part."""

    name: str
    text: str
    begins: bool = True


def ended(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether its document ends with it)."""
    last: str | None = None
    for document in documents:
        if last is not None:
            yield last, document.begins
        last = document.text
    if last is not None:
        yield last, True


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` in order: indentation kept, trailing white space dropped."""
    for paragraph in BLANK_LINES.split(text):
        kept = paragraph.strip("\n").rstrip()
        if kept:
            yield kept
