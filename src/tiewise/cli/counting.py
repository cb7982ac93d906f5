"""How often each token of a checkpoint's own tokenizer occurs in a text."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from tiewise.core.errors import CheckpointError

LINES = 2048


def count_tokens(folder: Path, text: Path) -> list[int]:
    """Return the count of every token id from 0 on, up to the largest that occurs; text of any size is streamed.

    Raises:
        CheckpointError: no tokenizers library, no usable tokenizer.json, or a text that cannot be read.
    """
    from tiewise.checkpoint.untrusted import inside

    if find_spec("tokenizers") is None:
        raise CheckpointError("--text needs the tokenizers library", "pip install 'tiewise[torch]', or give --counts")
    from tokenizers import Tokenizer

    file = inside(folder, "tokenizer.json")
    if not file.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json in it", "put the model's tokenizer there, or give --counts")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every damaged file
        raise CheckpointError(f"{file}: no tokenizer ({error})", "take it from its source again") from None
    counts: Counter[int] = Counter()
    try:
        with text.open(encoding="utf-8") as lines:
            while batch := list(islice(lines, LINES)):
                for encoded in tokenizer.encode_batch(batch, add_special_tokens=False):
                    counts.update(encoded.ids)
    except OSError as error:
        raise CheckpointError(f"{text}: cannot be read ({error.strerror})", "check the path") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{text}: not UTF-8 text", "convert it first") from None
    if not counts:
        raise CheckpointError(f"{text}: no token in it", "give a text")
    return [counts[token] for token in range(max(counts) + 1)]
