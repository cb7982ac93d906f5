"""Text to tokens to disk, a batch at a time: neither the text nor its tokens are ever held whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tiewise.core.progress import advance

_BATCH = 1 << 19  # characters handed to the tokenizer at once; it takes about 100 bytes per token while it works
_PIECE = 1 << 14  # characters after which a longer document is cut, so that a batch has work for several threads
# Tokenizers begin a word at a single space between letters: what is cut there has the tokens of the text left whole.
_SAFE = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


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
        word, spaced, both = (self._engine.encode(t, add_special_tokens=False).ids for t in ("a", " a", "b a"))
        # SentencePiece begins every text with a space of its own: a piece that goes on must not bring another
        self._begins_spaced = both[-len(spaced) :] != spaced and both[-len(word) :] == word
        self._ended = True  # whether the last piece was the end of a document

    def encode(self, batch: list[tuple[str, bool]]) -> np.ndarray:
        """Return the tokens of all pieces, with `<eos>` after each that ends a document."""
        texts = [piece for piece, _ in batch]
        if self._begins_spaced:
            ended = [self._ended, *(last for _, last in batch)]
            texts = [t if new else t.removeprefix(" ") for t, new in zip(texts, ended, strict=False)]
            self._ended = ended[-1]
        encoded = self._engine.encode_batch_fast(texts, add_special_tokens=False)
        ids: list[int] = []
        for (_, last), encoding in zip(batch, encoded, strict=True):
            ids.extend(encoding.ids)
            if last:
                ids.append(self._eos_id)
        return np.array(ids, self._dtype)


def write_tokens(path: Path, texts: Iterable[tuple[str, bool]], encoder: Encoder) -> int:
    """Write the tokens of all `texts` (text, whether a document ends with it) to `path`; return how many these are."""
    count, characters = 0, 0
    with path.open("wb") as file:
        for batch in batches(pieces(texts)):
            tokens = encoder.encode(batch)
            file.write(tokens.tobytes())
            count += len(tokens)
            characters += sum(len(piece) for piece, _ in batch)
            advance(characters)
        file.flush()
        os.fsync(file.fileno())
    return count


def pieces(texts: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Join the parts of documents and cut these anew, where no tokenizer sees it: (text, whether a document ends).

    Where no single space stands between letters for long, the cut is at a line end, or anywhere.
    """
    text, start = "", 0
    for part, ends in texts:
        text, start = text[start:] + part, 0
        while len(text) - start > _PIECE and (end := _cut(text, start)):
            yield text[start:end], False
            start = end
        if ends:
            yield text[start:], True
            text, start = "", 0


def _cut(text: str, start: int) -> int:
    """Return where a piece from `start` on ends; 0 where the text goes no further than one may."""
    stop = start + 4 * _PIECE
    if safe := _SAFE.search(text, start + _PIECE, stop):
        return safe.start()
    return (text.rfind("\n", start + _PIECE, stop) + 1 or stop) if len(text) > stop else 0


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
