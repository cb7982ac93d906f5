"""A text of any size cut where no tokenizer sees it, and gathered into batches that keep several threads at work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_BATCH = 1 << 19  # characters handed to the tokenizer at once; it takes about 100 bytes per token while it works
PIECE = 1 << 14  # characters after which a longer document is cut, so that a batch has work for several threads
# Tokenizers begin a word at a single space between letters: what is cut there has the tokens of the text left whole.
_SAFE = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


def pieces(texts: Iterable[tuple[str, bool]], size: int = PIECE) -> Iterator[tuple[str, bool]]:
    """Join the parts of documents and cut these anew, where no tokenizer sees it: (text, whether a document ends).

    Pieces have `size` letters or a few more; where no single space stands between letters for long, the cut is at a
    line end, or anywhere.
    """
    text, start = "", 0
    for part, ends in texts:
        text, start = text[start:] + part, 0
        while len(text) - start > size:
            stop = start + 4 * size
            if safe := _SAFE.search(text, start + size, stop):
                end = safe.start()
            elif len(text) > stop:
                end = text.rfind("\n", start + size, stop) + 1 or stop
            else:  # more of the text may bring a safe place
                break
            yield text[start:end], False
            start = end
        if ends:
            yield text[start:], True
            text, start = "", 0


def batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Gather pieces until they are enough for the tokenizer."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def begins_spaced(engine: Any) -> bool:
    """Whether a tokenizer begins every text with a space, as SentencePiece does: what goes on must not bring one."""
    word, spaced, both = (engine.encode(t, add_special_tokens=False).ids for t in ("a", " a", "b a"))
    return both[-len(spaced) :] != spaced and both[-len(word) :] == word
