"""Tokenizers by name (`--tokenizer`), and text as tokens.

Every tokenizer has an `eos` token.

bpe:4096          byte-level BPE of that many tokens, trained on the training split (Sennrich et al. 2016; bytes as
                  in GPT-2), so it can encode every text, and held-out text has no influence on the vocabulary
bytes             256 bytes, token = byte, and <eos>
PATH              a tokenizer.json, or a folder that `save_pretrained` wrote
ID                a tokenizer of the Hugging Face Hub

Text is encoded and written batch by batch, so neither the text nor its tokens are ever in memory completely. An
inspection reads a text with a checkpoint's tokenizer (`read_tokens`), and runs a model on `windows` of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiewise.core.errors import DataError, did_you_mean, one_line_message
from tiewise.core.files import sync_to_disk
from tiewise.core.progress import advance_progress
from tiewise.core.text import batch_pieces, byte_letters, cut_pieces, prepends_space
from tiewise.training.data.documents import with_document_ends
from tiewise.training.data.sources import Text, open_sources

Ids = NDArray[np.int64]
EOS = "<eos>"
_SMALLEST = 257  # tokens: every byte, and <eos>
# Names of the end token in tokenizers that declare none, most usual first.
_ENDS = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "[SEP]", "[EOS]")
_CHOICES = "choose bpe:4096, bytes, a tokenizer.json, a tokenizer's folder, or a Hugging Face id"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def make_tokenizer(
    tokenizer_name: str, train_texts: Callable[[], Iterator[str]] = lambda: iter(())
) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `tokenizer_name` names.

    `train_texts` is called for `bpe:N` only. A short text gives fewer than N tokens: `len(tokenizer)` is the actual
    size. The same text gives the same tokens.

    Raises:
        DataError: `tokenizer_name` is malformed, does not exist, or is a tokenizer that this package cannot run.
    """
    size = bpe_size(tokenizer_name)
    if size is not None:
        return _train_bpe(size, train_texts())
    if tokenizer_name == "bytes":
        return _with_eos(_byte_level_engine(models.BPE(vocab={**byte_letters(), EOS: 256}, merges=[])))
    path = Path(tokenizer_name).expanduser()
    if path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
        path = path.parent  # its tokenizer_config.json names the special tokens
    if path.is_file():
        tokenizer = _read_tokenizer_json(path)
    elif path.is_dir() or _is_hub_id(tokenizer_name):
        tokenizer = _read_with_transformers(tokenizer_name, path)
    else:
        looks_like_path = tokenizer_name.endswith(".json") or tokenizer_name.startswith((".", "/", "~"))
        problem = "no tokenizer file or folder" if looks_like_path else "unknown tokenizer"
        raise DataError(f"{problem} {tokenizer_name!r}", _CHOICES)
    if tokenizer.eos_token is None:
        _add_end(tokenizer)
    return tokenizer


def _byte_level_engine(model: models.BPE) -> Tokenizer:
    """Return an engine on bytes, as in GPT-2, with the merges of a model."""
    engine = Tokenizer(model)
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    return engine


def _with_eos(engine: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=EOS, clean_up_tokenization_spaces=False)


def _train_bpe(size: int, texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer of at most `size` tokens."""
    engine = _byte_level_engine(models.BPE())
    alphabet = sorted(byte_letters())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(texts, trainer)
    return _with_eos(engine)


def _is_hub_id(tokenizer_name: str) -> bool:
    """Return whether a tokenizer's name can be an id of the Hugging Face Hub."""
    return (
        bool(_HUB_ID.fullmatch(tokenizer_name))
        and not tokenizer_name.endswith(".json")
        and not tokenizer_name.startswith(".")
    )


def _read_tokenizer_json(path: Path) -> PreTrainedTokenizerFast:
    """Read a tokenizer.json. Raises DataError."""
    try:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(path)))
    except Exception as error:  # the Rust library raises plain Exception
        raise DataError(f"{str(path)!r} is not a tokenizer.json ({one_line_message(error)})", _CHOICES) from None


def _read_with_transformers(tokenizer_name: str, folder: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a folder, else of the Hub. Raises DataError."""
    is_local = folder.is_dir()
    name = str(folder) if is_local else tokenizer_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=is_local)
    except Exception as error:  # hub, network, missing packages and malformed files raise many types
        if is_local:
            problem, remedy = f"the folder {tokenizer_name!r} holds no tokenizer", _CHOICES
        else:
            problem = f"no tokenizer {tokenizer_name!r} in the cache or on the Hugging Face Hub"
            remedy = (
                f"check the name and the network; offline, run `hf download {tokenizer_name}` first, or give a path"
            )
            remedy = did_you_mean(tokenizer_name, ("bytes", "bpe:4096")) + remedy
        raise DataError(f"{problem} ({one_line_message(error)})", remedy) from None
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer {name!r} has no tokenizer.json", "convert it with AutoTokenizer first")
    return tokenizer


def _add_end(tokenizer: PreTrainedTokenizerFast) -> None:
    """Give a tokenizer an end token.

    This is its separator, else a usual end token in its vocabulary, else a new one.
    """
    end = tokenizer.sep_token
    if not end:
        vocabulary = tokenizer.get_vocab()
        end = next((name for name in _ENDS if name in vocabulary), EOS)
    tokenizer.add_special_tokens({"eos_token": end})


def bpe_size(tokenizer_name: str) -> int | None:
    """Return N of `bpe:N`, and None for every other name.

    DataError: N is no number, or too small.
    """
    name, _, number = tokenizer_name.partition(":")
    if name != "bpe":
        return None
    if not (number.isascii() and number.isdigit()):
        raise DataError(f"tokenizer {tokenizer_name!r}: the size must be a whole number", "write bpe:4096, say")
    if int(number) < _SMALLEST:
        remedy = "write bpe:4096, say, or bytes for no merges at all"
        raise DataError(
            f"tokenizer {tokenizer_name!r}: needs at least {_SMALLEST} tokens (every byte, and {EOS})", remedy
        )
    return int(number)


def plain_engine(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy of the engine that reads special tokens in text as plain text.

    A word such as "<eos>" remains a word. Nothing is truncated or padded.
    """
    engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    engine.encode_special_tokens = True
    engine.no_truncation()
    engine.no_padding()
    return engine


class StreamEncoder:
    """Encoder that reads special tokens as plain text (`plain_engine`) and ends documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype):
        self._engine = plain_engine(tokenizer)
        self._eos_id = tokenizer.eos_token_id
        self._dtype = dtype
        self._begins_spaced = prepends_space(self._engine)
        self._ended = True  # True if the last piece ended a document

    def encode(self, batch: list[tuple[str, bool]]) -> np.ndarray:
        """Return the tokens of all pieces, with `<eos>` after each that ends a document."""
        texts = [piece for piece, _ in batch]
        if self._begins_spaced:
            texts = self._without_second_spaces(batch)
        encoded = self._engine.encode_batch_fast(texts, add_special_tokens=False)
        ids: list[int] = []
        for (_, is_last), encoding in zip(batch, encoded, strict=True):
            ids += encoding.ids
            if is_last:
                ids.append(self._eos_id)
        return np.array(ids, self._dtype)

    def _without_second_spaces(self, batch: list[tuple[str, bool]]) -> list[str]:
        """Return the pieces without the space that the engine adds again.

        A piece that continues a document loses its first space.
        """
        texts = []
        for piece, is_last in batch:
            texts.append(piece if self._ended else piece.removeprefix(" "))
            self._ended = is_last
        return texts


def write_tokens(path: Path, texts: Iterable[tuple[str, bool]], encoder: StreamEncoder) -> int:
    """Write the tokens of `texts` to `path`; return their number.

    A text comes with True if its document ends with it.
    """
    count, characters = 0, 0
    with path.open("wb") as file:
        for batch in batch_pieces(cut_pieces(texts)):
            tokens = encoder.encode(batch)
            file.write(tokens.tobytes())
            count += len(tokens)
            characters += sum(len(piece) for piece, _ in batch)
            advance_progress(characters)
    sync_to_disk(path)
    return count


# texts of an inspection


def read_tokens(folder: Path | str, texts: Text | Sequence[Text], vocab: int, most: int | None = None) -> Ids:
    """Read texts (as in `sources`) with a checkpoint's tokenizer; return ids [N], at most `most`.

    A document ends in the tokenizer's end token, if the table of `vocab` rows has a row for it. A plain file is one
    document. Raises DataError.
    """
    folder = Path(folder)
    tokenizer = _checkpoint_tokenizer(folder)
    encoder = StreamEncoder(tokenizer, np.dtype(np.int64))
    end = int(tokenizer.eos_token_id)  # beyond the table if the tokenizer lacks one and got a new one
    parts: list[Ids] = []
    count = 0
    for batch in batch_pieces(cut_pieces(with_document_ends(open_sources(texts)))):
        ids = encoder.encode(batch)
        if end >= vocab:
            ids = ids[ids != end]
        parts.append(ids)
        count += len(ids)
        if most is not None and count >= most:
            break
    tokens = np.concatenate(parts)[:most]
    largest = int(tokens.max(initial=0))
    if largest >= vocab:
        problem = f"the tokenizer in {folder} gives token {largest}, the table has {vocab:,} rows"
        raise DataError(
            problem, "put the tokenizer that belongs to the model into its folder (`tiewise check` compares them)"
        )
    return tokens


def _checkpoint_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer next to a model's weights. Raises DataError."""
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise DataError(f"{folder} holds no tokenizer", "put the model's tokenizer.json into its folder")
    try:
        return make_tokenizer(str(folder))
    except DataError as error:
        raise DataError(error.problem, "put the model's own tokenizer.json into its folder") from None


def windows(ids: np.ndarray, length: int, count: int) -> np.ndarray:
    """Cut `count` windows [count, length], evenly spread over the stream, without overlap."""
    most = len(ids) // length
    if most < count:
        problem = f"the text has {len(ids):,} tokens, {count} windows of {length} need {count * length:,}"
        raise DataError(problem, "give a longer text")
    starts = np.arange(count) * most // max(count, 1)
    return ids[: most * length].reshape(most, length)[starts]
