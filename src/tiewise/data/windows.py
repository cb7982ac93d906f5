"""A text as a checkpoint's own tokens: one stream of ids, and windows of it that a model can be run on."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiewise.core.errors import DataError
from tiewise.data.plain_text import ended
from tiewise.data.sources import Text, open_sources
from tiewise.data.tokenizer import StreamEncoder, batches, make_tokenizer, pieces

Ids = NDArray[np.int64]


def read_tokens(
    folder: str | PathLike[str],
    texts: Text | Sequence[Text],
    vocab: int,
    most: int | None = None,
) -> Ids:
    """Read texts (as in `tiewise.data.sources`) with the tokenizer in a checkpoint's folder.

    Documents end in the tokenizer's end token, where it has one that the table knows; a plain file is one document.

    Args:
        folder: where the tokenizer lies.
        texts: what to read, in order; one alone needs no list.
        vocab: rows of the model's table.
        most: stop after so many tokens; None reads all.

    Returns:
        ids [N].

    Raises:
        DataError: no text, no tokenizer in the folder that can be read, or one that gives tokens without a row.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise DataError(f"{folder} holds no tokenizer", "put the model's tokenizer.json beside its weights")
    try:
        tokenizer = make_tokenizer(str(folder), lambda: iter(()))
    except DataError as error:
        raise DataError(error.what, "put the model's own tokenizer.json beside its weights") from None
    encoder = StreamEncoder(tokenizer, np.dtype(np.int64))
    end = int(tokenizer.eos_token_id)  # beyond the table where the tokenizer has none, and was given one
    parts: list[Ids] = []
    count = 0
    for batch in batches(pieces(ended(open_sources(texts)))):
        found = encoder.encode(batch)
        parts.append(found if end < vocab else found[found != end])
        count += len(parts[-1])
        if most is not None and count >= most:
            break
    ids = np.concatenate(parts)[:most]
    if ids.max(initial=0) >= vocab:
        what = f"the tokenizer in {folder} gives token {int(ids.max())}, the table has {vocab:,} rows"
        raise DataError(what, "put the tokenizer that belongs to the model beside it (`tiewise check` compares them)")
    return ids


def windows(ids: Ids, length: int, count: int) -> Ids:
    """Cut `count` windows [count, length], evenly apart over the whole stream and not overlapping.

    Raises:
        DataError: the text is shorter than that.
    """
    whole = len(ids) // length
    if whole < count:
        what = f"the text has {len(ids):,} tokens, {count} windows of {length} need {count * length:,}"
        raise DataError(what, "give a longer text")
    starts = np.arange(count) * whole // max(count, 1)
    return ids[: whole * length].reshape(whole, length)[starts]
