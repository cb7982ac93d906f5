"""`--tokenizer`: a name becomes a Hugging Face tokenizer, always with an `eos` token, and text becomes tokens.

bpe:4096          byte-level BPE of that many tokens, trained on the training split (Sennrich et al. 2016; bytes as
                  in GPT-2), so every text can be written and nothing of the held-out text shapes the vocabulary
bytes             256 bytes, token = byte, and <eos>
PATH              a tokenizer.json, or a folder that `save_pretrained` wrote
ID                a tokenizer of the Hugging Face Hub

Text goes to tokens and on to the disk a batch at a time: neither the text nor its tokens are ever held whole. An
inspection reads a text with a checkpoint's own tokenizer (`read_tokens`), and runs a model on `windows` of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiewise.core.errors import DataError, advance, one_line
from tiewise.core.files import sync
from tiewise.core.text import batches, begins_spaced, byte_letters, pieces
from tiewise.training.data.documents import ended
from tiewise.training.data.sources import Text, open_sources

Ids = NDArray[np.int64]
EOS = "<eos>"
_SMALLEST = 257  # every byte, and <eos>
# What tokenizers without a declared end call it, most usual first.
_ENDS = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "[SEP]", "[EOS]")
_CHOICES = "choose bpe:4096, bytes, a tokenizer.json, a tokenizer's folder, or a Hugging Face id"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def make_tokenizer(kind: str, train_texts: Callable[[], Iterator[str]] = lambda: iter(())) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `kind` names; `train_texts` is called for `bpe:N` only.

    A short text gives fewer than N tokens: `len(tokenizer)` is the actual size. The same text gives the same tokens.

    Raises:
        DataError: on a kind that is malformed, not to be found, or not a tokenizer that this package can run.
    """
    size = bpe_size(kind)
    if size is not None or kind == "bytes":
        letters = byte_letters()
        engine = Tokenizer(models.BPE() if size is not None else models.BPE(vocab={**letters, EOS: 256}, merges=[]))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        engine.decoder = decoders.ByteLevel()
        if size is not None:
            trainer = trainers.BpeTrainer(
                vocab_size=size, special_tokens=[EOS], initial_alphabet=sorted(letters), show_progress=False
            )
            engine.train_from_iterator(train_texts(), trainer)
        return PreTrainedTokenizerFast(tokenizer_object=engine, eos_token=EOS, clean_up_tokenization_spaces=False)
    path = Path(kind).expanduser()
    if path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
        path = path.parent  # which knows the special tokens' parts
    local = path.is_dir()
    if path.is_file():
        try:
            found = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(path)))
        except Exception as error:  # the Rust side raises Exception itself
            raise DataError(f"{str(path)!r} is not a tokenizer.json ({one_line(error)})", _CHOICES) from None
    elif local or (_HUB_ID.fullmatch(kind) and not kind.endswith(".json") and not kind.startswith(".")):
        try:
            name = str(path) if local else kind
            found = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=local)
        except Exception as error:  # hub, network, missing packages, malformed files: each its own kind
            what = f"no tokenizer {kind!r} in the cache or on the Hugging Face Hub"
            what = f"the folder {kind!r} holds no tokenizer" if local else what
            fix = f"check the name and the network; offline, run `hf download {kind}` first, or give a path"
            raise DataError(f"{what} ({one_line(error)})", _CHOICES if local else fix) from None
        if not found.is_fast:
            raise DataError(f"tokenizer {name!r} has no tokenizer.json", "convert it with AutoTokenizer first")
    else:
        a_file = kind.endswith(".json") or kind.startswith((".", "/", "~"))
        raise DataError(f"{'no tokenizer file or folder' if a_file else 'unknown tokenizer'} {kind!r}", _CHOICES)
    if found.eos_token is None:  # the tokenizer's own separator, a usual end, or a new one
        known = found.get_vocab()
        own = [found.sep_token] if found.sep_token else [name for name in _ENDS if name in known]
        found.add_special_tokens({"eos_token": own[0] if own else EOS})
    return found


def bpe_size(kind: str) -> int | None:
    """Return N of `bpe:N`, and None for every other kind; a DataError where N is no number, or too small."""
    if kind != "bpe" and not kind.startswith("bpe:"):
        return None
    number = kind.partition(":")[2]
    if not (number.isascii() and number.isdigit()):
        raise DataError(f"tokenizer {kind!r}: the size must be a whole number", "write bpe:4096, say")
    if int(number) < _SMALLEST:
        fix = "write bpe:4096, say, or bytes for no merges at all"
        raise DataError(f"tokenizer {kind!r}: needs at least {_SMALLEST} tokens (every byte, and {EOS})", fix)
    return int(number)


def plain_engine(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy that takes text as text: words such as "<eos>" in it stay words, nothing is truncated or padded."""
    engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    engine.encode_special_tokens = True
    engine.no_truncation()
    engine.no_padding()
    return engine


class StreamEncoder:
    """A tokenizer that takes text as text (`plain_engine`) and ends documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype):
        self._engine = plain_engine(tokenizer)
        self._eos_id = tokenizer.eos_token_id
        self._dtype = dtype
        self._begins_spaced = begins_spaced(self._engine)
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
            ids += [*encoding.ids, self._eos_id] if last else encoding.ids
        return np.array(ids, self._dtype)


def write_tokens(path: Path, texts: Iterable[tuple[str, bool]], encoder: StreamEncoder) -> int:
    """Write the tokens of all `texts` (text, whether a document ends with it) to `path`; return how many these are."""
    count, characters = 0, 0
    with path.open("wb") as file:
        for batch in batches(pieces(texts)):
            tokens = encoder.encode(batch)
            file.write(tokens.tobytes())
            count += len(tokens)
            characters += sum(len(piece) for piece, _ in batch)
            advance(characters)
    sync(path)
    return count


# what an inspection reads


def read_tokens(folder: Path | str, texts: Text | Sequence[Text], vocab: int, most: int | None = None) -> Ids:
    """Read texts (as in `sources`) with the tokenizer in a checkpoint's folder: ids [N], at most `most`.

    Documents end in the tokenizer's end token, where it has one that the table of `vocab` rows knows; a plain file is
    one document. Raises DataError.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise DataError(f"{folder} holds no tokenizer", "put the model's tokenizer.json beside its weights")
    try:
        tokenizer = make_tokenizer(str(folder))
    except DataError as error:
        raise DataError(error.what, "put the model's own tokenizer.json beside its weights") from None
    encoder = StreamEncoder(tokenizer, np.dtype(np.int64))
    end = int(tokenizer.eos_token_id)  # beyond the table where the tokenizer has none, and was given one
    parts: list[Ids] = []
    for batch in batches(pieces(ended(open_sources(texts)))):
        found = encoder.encode(batch)
        parts.append(found if end < vocab else found[found != end])
        if most is not None and sum(map(len, parts)) >= most:
            break
    ids = np.concatenate(parts)[:most]
    if ids.max(initial=0) >= vocab:
        what = f"the tokenizer in {folder} gives token {int(ids.max())}, the table has {vocab:,} rows"
        raise DataError(what, "put the tokenizer that belongs to the model beside it (`tiewise check` compares them)")
    return ids


def windows(ids: Ids, length: int, count: int) -> Ids:
    """Cut `count` windows [count, length], evenly apart over the whole stream and not overlapping."""
    whole = len(ids) // length
    if whole < count:
        what = f"the text has {len(ids):,} tokens, {count} windows of {length} need {count * length:,}"
        raise DataError(what, "give a longer text")
    starts = np.arange(count) * whole // max(count, 1)
    return ids[: whole * length].reshape(whole, length)[starts]
