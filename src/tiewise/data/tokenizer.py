"""`--tokenizer`: a name becomes a Hugging Face tokenizer, always with an `eos` token to end documents.

bpe:4096          byte-level BPE of that many tokens, trained on the training split (Sennrich et al. 2016; bytes as
                  in GPT-2), so every text can be written and nothing of the held-out text shapes the vocabulary
bytes             256 bytes, token = byte, and <eos>
PATH              a tokenizer.json, or a folder that `save_pretrained` wrote
ID                a tokenizer of the Hugging Face Hub
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiewise.core.errors import DataError
from tiewise.data.byte_letters import byte_letters
from tiewise.data.tables import one_line

EOS = "<eos>"
_SMALLEST = 257  # every byte, and <eos>
# What tokenizers without a declared end call it, most usual first.
_ENDS = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "[SEP]", "[EOS]")
_CHOICES = "choose bpe:4096, bytes, a tokenizer.json, a tokenizer's folder, or a Hugging Face id"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def make_tokenizer(kind: str, train_texts: Callable[[], Iterator[str]]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `kind` names; `train_texts` is called for `bpe:N` only.

    A short text gives fewer than N tokens: `len(tokenizer)` is the actual size. The same text gives the same tokens.

    Raises:
        DataError: on a kind that is malformed, not to be found, or not a tokenizer that this package can run.
    """
    size = bpe_size(kind)
    if size is not None:
        return _wrap(_train(size, train_texts()))
    if kind == "bytes":
        return _wrap(_bytes())
    path = Path(kind).expanduser()
    if path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
        path = path.parent  # which knows the special tokens' parts
    if path.is_file():
        tokenizer = _from_file(path)
    elif path.is_dir():
        tokenizer = _from_pretrained(str(path), f"the folder {kind!r} holds no tokenizer", _CHOICES, local=True)
    elif kind.endswith(".json") or kind.startswith((".", "/", "~")):
        raise DataError(f"no tokenizer file or folder {kind!r}", _CHOICES)
    elif _HUB_ID.fullmatch(kind):
        fix = f"check the name and the network; offline, run `hf download {kind}` first, or give a path"
        tokenizer = _from_pretrained(kind, f"no tokenizer {kind!r} in the cache or on the Hugging Face Hub", fix)
    else:
        raise DataError(f"unknown tokenizer {kind!r}", _CHOICES)
    return _with_eos(tokenizer)


def bpe_size(kind: str) -> int | None:
    """Return N of `bpe:N`, and None for every other kind.

    Raises:
        DataError: where N is no number, or too small for the bytes.
    """
    if kind != "bpe" and not kind.startswith("bpe:"):
        return None
    number = kind.partition(":")[2]
    if not (number.isascii() and number.isdigit()):
        raise DataError(f"tokenizer {kind!r}: the size must be a whole number", "write bpe:4096, say")
    if int(number) < _SMALLEST:
        fix = "write bpe:4096, say, or bytes for no merges at all"
        raise DataError(f"tokenizer {kind!r}: needs at least {_SMALLEST} tokens (every byte, and {EOS})", fix)
    return int(number)


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train(size: int, texts: Iterator[str]) -> Tokenizer:
    tokenizer = _byte_level(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[EOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _bytes() -> Tokenizer:
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    return _byte_level(models.BPE(vocab={**vocabulary, EOS: 256}, merges=[]))


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    try:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(path)))
    except Exception as error:  # the Rust side raises Exception itself
        raise DataError(f"{str(path)!r} is not a tokenizer.json ({one_line(error)})", _CHOICES) from None


def _from_pretrained(name: str, what: str, fix: str, local: bool = False) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=local)
    except Exception as error:  # hub, network, missing packages, malformed files: each its own kind
        raise DataError(f"{what} ({one_line(error)})", fix) from None
    if not tokenizer.is_fast:
        raise DataError(f"tokenizer {name!r} has no tokenizer.json", "convert it with AutoTokenizer, or choose another")
    return tokenizer


def _with_eos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Declare the token that ends documents: the tokenizer's own, its separator, a usual one, or a new `<eos>`."""
    if tokenizer.eos_token is None:
        known = tokenizer.get_vocab()
        own = [tokenizer.sep_token] if tokenizer.sep_token else [name for name in _ENDS if name in known]
        tokenizer.add_special_tokens({"eos_token": own[0] if own else EOS})
    return tokenizer
