"""Text to tokens to disk, a batch at a time: neither the text nor its tokens are ever held whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

# Characters handed to the tokenizer at once; it takes about 100 bytes per token while it works. A longer document is
# cut, at a line end where it has one.
_BATCH = 1 << 19


class Encoder:
    """A tokenizer that takes text as text and ends documents.

    Words such as "<eos>" in a text stay words (only we end documents), and nothing is truncated or padded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype):
        # a copy, because the settings are for this use only
        self._engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._engine.encode_special_tokens = True
        self._engine.no_truncation()
        self._engine.no_padding()
        self._eos_id = tokenizer.eos_token_id
        self._dtype = dtype

    def encode(self, batch: list[tuple[str, bool]]) -> np.ndarray:
        """Return the tokens of all pieces, with `<eos>` after each that ends a document."""
        encoded = self._engine.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
        ids: list[int] = []
        for (_, last), encoding in zip(batch, encoded, strict=True):
            ids.extend(encoding.ids)
            if last:
                ids.append(self._eos_id)
        return np.array(ids, self._dtype)


def write_tokens(path: Path, texts: Iterable[str], encoder: Encoder, progress: Callable[[int], None]) -> int:
    """Write the tokens of all `texts` to `path`; return how many these are.

    `progress` is called with the number of characters done since its last call.
    """
    count = 0
    with path.open("wb") as file:
        for batch in batches(pieces(texts)):
            tokens = encoder.encode(batch)
            file.write(tokens.tobytes())
            count += len(tokens)
            progress(sum(len(piece) for piece, _ in batch))
        file.flush()
        os.fsync(file.fileno())
    return count


def pieces(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends with it), no text longer than a batch."""
    for text in texts:
        start = 0
        while len(text) - start > _BATCH:
            end = text.rfind("\n", start + _BATCH // 2, start + _BATCH) + 1 or start + _BATCH
            yield text[start:end], False
            start = end
        yield text[start:], True


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
