"""Texts that are written before the runs of a claim."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tiewise.core.files import write_atomically

DOCUMENTS, FEWEST, MOST = 1500, 12, 24  # documents, and sentences of one
_WORDS = "river stone bread light horse window garden letter winter music silver forest"


def numbered() -> Iterator[str]:
    """Yield documents of sentences that say their place, the control text of docs/albert.md.

    Depth helps on it within minutes, where small models learn hardly more than frequencies on natural text.
    """
    draw, things = random.Random(0), _WORDS.split()
    for _ in range(DOCUMENTS):
        last = draw.randint(FEWEST, MOST)
        yield " ".join(f"Number {place} is the {draw.choice(things)}." for place in range(1, last + 1))


TEXTS: Mapping[str, Callable[[], Iterator[str]]] = {"numbered": numbered}


def write_text(name: str, folder: Path) -> Path:
    """Write a text as JSON lines into a folder, and return its file."""
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": document}) for document in TEXTS[name]()]
    write_atomically(path, "\n".join(lines) + "\n")
    return path
