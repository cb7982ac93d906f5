"""Tokens of a text, by a checkpoint's own tokenizer.json.

The text is streamed through the `tokenizers` library, for `--text`. No code of the checkpoint runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiewise.checkpoint.untrusted import MOST_BYTES, path_inside, read_bytes, short
from tiewise.core import Late
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import advance_progress, progress_of
from tiewise.core.text import PIECE, batch_pieces, cut_pieces, prepends_space

tokenizers = Late("tokenizers")  # not part of a base install
BLOCK = 1 << 20  # characters in one read
LEAST_PIECE = 200  # smallest length of a piece, in characters


def load_tokenizer(text: bytes, where: str) -> Any:
    """Return the tokenizer of a tokenizer.json, without truncation and padding.

    Args:
        text: content of the file.
        where: origin of the text, for messages.

    Raises:
        CheckpointError: the library is missing, or the text describes no tokenizer.
    """
    if find_spec("tokenizers") is None:
        raise CheckpointError(f"{where}: this needs the tokenizers library", "pip install 'tiewise[torch]'")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a damaged file raises Exception; a panic in Rust is a BaseException only
        raise CheckpointError(f"{where}: no tokenizer ({short(error, 120)})", "take it from its source again") from None
    return tokenizer


def encode_text(tokenizer: Any, text: Path, purpose: str) -> Iterator[tuple[int, str, list[int]]]:
    """Yield (bytes before a piece, the piece, its tokens) for each piece of a text file.

    The progress display counts bytes under the name `purpose`.
    """
    spaced = prepends_space(tokenizer)
    count = 0
    try:
        if not text.is_file():
            raise CheckpointError(f"{text}: no file of text", "check the path")
        for bytes_before, piece, ids in _encoded_pieces(tokenizer, text, purpose, spaced):
            yield bytes_before, piece, ids
            count += len(ids)
        if not count:
            raise CheckpointError(f"{text}: no token in it", "give a text")
    except OSError as error:
        raise CheckpointError(f"{text}: cannot be read ({error.strerror})", "check the path") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{text}: not UTF-8 text", "convert it first") from None


def _encoded_pieces(tokenizer: Any, text: Path, purpose: str, spaced: bool) -> Iterator[tuple[int, str, list[int]]]:
    """Yield the pieces of `encode_text`, without catching errors of the file.

    Args:
        spaced: True if the tokenizer puts a space before each text.
    """
    size = text.stat().st_size
    piece_length = max(LEAST_PIECE, min(PIECE, size // 50))
    done = 0
    with progress_of(purpose, size):
        for batch in batch_pieces(cut_pieces(_blocks(text), piece_length)):
            parts = [part for part, _ in batch]
            read = parts
            if spaced:  # the tokenizer adds a space before each piece, so later pieces must not start with one
                read = [part.removeprefix(" ") for part in parts]
                if not done:
                    read[0] = parts[0]
            tokens = tokenizer.encode_batch_fast(read, add_special_tokens=False)
            for part, piece, encoding in zip(parts, read, tokens, strict=True):
                yield done, piece, encoding.ids
                done += len(part.encode())
                advance_progress(done)


def _blocks(text: Path) -> Iterator[tuple[str, bool]]:
    """Yield (part of a text file, False) for each read, then ("", True)."""
    with text.open(encoding="utf-8") as file:
        block = file.read(BLOCK)
        while block:
            yield block, False
            block = file.read(BLOCK)
    yield "", True


def count_tokens(folder: Path, text: Path) -> list[int]:
    """Return how often each token id of a folder's tokenizer occurs in a text."""
    file = path_inside(folder, "tokenizer.json")
    if not file.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json in it", "put the model's tokenizer there, or give --counts")
    tokenizer = load_tokenizer(read_bytes(file, MOST_BYTES), str(file))
    counts: Counter[int] = Counter()
    for _, _, ids in encode_text(tokenizer, text, f"counting {text.name}"):
        counts.update(ids)
    return [counts[token] for token in range(max(counts) + 1)]
