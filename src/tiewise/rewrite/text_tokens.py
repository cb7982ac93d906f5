"""A text as a checkpoint's own tokenizer reads it, streamed: what `--text` counts.

The tokenizer is the library's, from tokenizer.json: nothing of a checkpoint runs. It is no part of a base install.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiewise.checkpoint.untrusted import MOST_BYTES, inside, read_whole, short
from tiewise.core import Late
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import advance, doing
from tiewise.core.text_pieces import PIECE, batches, begins_spaced, pieces

tokenizers = Late("tokenizers")
BLOCK = 1 << 20  # characters read at once


def loaded(text: bytes, where: str) -> Any:
    """Return the tokenizer that the text of a tokenizer.json describes, which cuts off and pads nothing.

    Raises:
        CheckpointError: the library is missing, or the text, which came from `where`, is no tokenizer's.
    """
    if find_spec("tokenizers") is None:
        raise CheckpointError(f"{where}: this needs the tokenizers library", "pip install 'tiewise[torch]'")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception for every damaged file, and Rust's panics, which are none
        raise CheckpointError(f"{where}: no tokenizer ({short(error, 120)})", "take it from its source again") from None
    return tokenizer


def encoded(tokenizer: Any, text: Path, purpose: str) -> Iterator[tuple[int, str, list[int]]]:
    """Yield (bytes read before it, a piece of the text, its tokens); progress in bytes under `purpose`."""

    def blocks() -> Iterator[tuple[str, bool]]:
        with text.open(encoding="utf-8") as file:
            while block := file.read(BLOCK):
                yield block, False
        yield "", True

    spaced, done, count = begins_spaced(tokenizer), 0, 0
    try:
        if not text.is_file():
            raise CheckpointError(f"{text}: no file of text", "check the path")
        size = text.stat().st_size
        with doing(purpose, size):
            for batch in batches(pieces(blocks(), max(200, min(PIECE, size // 50)))):
                parts = [one for one, _ in batch]
                read = [one.removeprefix(" ") if spaced and (done or i) else one for i, one in enumerate(parts)]
                for one, said, found in zip(
                    parts, read, tokenizer.encode_batch_fast(read, add_special_tokens=False), strict=True
                ):
                    yield done, said, found.ids
                    done, count = done + len(one.encode()), count + len(found.ids)
                    advance(done)
        if not count:
            raise CheckpointError(f"{text}: no token in it", "give a text")
    except OSError as error:
        raise CheckpointError(f"{text}: cannot be read ({error.strerror})", "check the path") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{text}: not UTF-8 text", "convert it first") from None


def count_tokens(folder: Path, text: Path) -> list[int]:
    """Count how often each token of the tokenizer in `folder` occurs in a text."""
    file, found = inside(folder, "tokenizer.json"), Counter[int]()
    if not file.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json in it", "put the model's tokenizer there, or give --counts")
    for _, _, ids in encoded(loaded(read_whole(file, MOST_BYTES), str(file)), text, f"counting {text.name}"):
        found.update(ids)
    return [found[token] for token in range(max(found) + 1)]
