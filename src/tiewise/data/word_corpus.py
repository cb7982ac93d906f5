"""Word-level corpora as papers count them: a folder of `train.txt`, `valid.txt`, `test.txt`, one token per word.

A line is cut at whitespace and ended by `<eos>`, blank lines too; the vocabulary is that of the training file, most
frequent word first, and every other word is `<unk>`. So counted, the training file of the Penn Treebank has 929,589
tokens and 10,000 words, and that of WikiText-2 2,088,628 and 33,278.

What is left is a prepared folder like any other, its splits called train, tune (valid) and heldout (test).
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiewise.core.errors import DataError, RunError
from tiewise.core.progress import progress
from tiewise.data.corpus import TOKENIZER, PreparedText, load_prepared, put_in_place, token_type
from tiewise.data.documents import SPLITS, decode, opened
from tiewise.data.tokenizer import EOS

FILES = ("train.txt", "valid.txt", "test.txt")
UNKNOWN = "<unk>"
KIND = "words"
_LINES = 20_000  # turned into tokens at once
_PART = re.compile(r"(?P<name>.+?)(?:@(?P<low>\d+)-(?P<high>\d+))?")
_FIX = "write valid.txt@0-90 or valid.txt@90-100, say, in per cent of its lines"


def prepare_words(corpus: str, folder: Path, files: Sequence[str] = ()) -> PreparedText:
    """Turn a word-level corpus into tokens in `folder`.

    Args:
        corpus: the folder of the corpus.
        folder: where the tokens go; what it held is replaced.
        files: of training, validation and test; empty: train.txt, valid.txt, test.txt. `valid.txt@0-90` is the first
            nine tenths of a file's lines, `valid.txt@90-100` the rest.

    Raises:
        DataError: a file that is missing, empty or no text.
        RunError: `folder` cannot be written.
    """
    splits = word_files(corpus, files)
    folder = Path(folder)
    work = folder / ".building"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        progress(KIND, 0, 1)
        words = _vocabulary(splits[0])
        facts = _write(work, splits, words)
        # gives a text these ids: white space cuts, a line end is `<eos>`, the rest `<unk>`
        engine = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
        engine.normalizer = normalizers.Replace("\n", f" {EOS} ")
        engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=engine, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
        )
        tokenizer.save_pretrained(work / TOKENIZER)
        put_in_place(
            work, folder, facts | {"texts": [corpus], "demo": False, "files": [str(split) for split in splits]}
        )
    except OSError as error:
        what = f"cannot prepare the words in {str(folder)!r}: {error.strerror or error}"
        raise RunError(what, "choose another folder, or make room") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return load_prepared(folder)


def unknown_share(facts: dict[str, Any], split: str) -> float:
    """Share of a split's tokens that became `<unk>` because training does not know them."""
    found = facts["splits"][split]
    return found["unknown"] / found["tokens"] if found["tokens"] else 0.0


def lines(file: WordFile) -> Iterator[list[str]]:
    """Yield the words of each line, `<eos>` last.

    Raises:
        DataError: a file that cannot be read or is no text.
    """
    with opened(file.path) as opened_file:
        rest, number = "", 0
        for piece in decode(opened_file, str(file.path)):
            *whole, rest = (rest + piece).split("\n")
            for line in whole:
                if file.holds(number):
                    yield [*line.split(), EOS]
                number += 1
        if rest and file.holds(number):  # a last line without its end
            yield [*rest.split(), EOS]


def _vocabulary(train: WordFile) -> dict[str, int]:
    """Word → id, most frequent first, ties by first appearance; `<unk>` last where training does not have it."""
    counts: Counter[str] = Counter()
    for line in lines(train):
        counts.update(line)
    if len(counts) < 2:
        raise DataError(f"{train} has no words", "give a training file with text in it")
    words = {word: index for index, (word, _) in enumerate(counts.most_common())}
    words.setdefault(UNKNOWN, len(words))
    return words


def _write(work: Path, splits: Sequence[WordFile], words: dict[str, int]) -> dict[str, Any]:
    dtype = token_type(len(words))
    found: dict[str, Any] = {}
    for index, (name, file) in enumerate(zip(SPLITS, splits, strict=True)):
        found[name] = _write_split(work / f"{name}.bin", file, words, dtype)
        if found[name]["tokens"] < 2:
            raise DataError(f"{file} has no words", "give a file with text in it")
        progress(KIND, index + 1, len(SPLITS))
    total = {key: sum(part[key] for part in found.values()) for key in ("tokens", "characters", "bytes", "documents")}
    tokenizer = {"vocab": len(words), "eos_id": words[EOS], "dtype": dtype.name, "kind": KIND}
    return {**total, "tokenizer": tokenizer, "splits": found}


def _write_split(path: Path, file: WordFile, words: dict[str, int], dtype: np.dtype) -> dict[str, Any]:
    """Write one split's ids; count tokens, lines (as documents), characters, bytes and words unknown to training."""
    unknown = words[UNKNOWN]
    found = dict.fromkeys(("tokens", "documents", "characters", "bytes", "unknown"), 0)
    lost: Counter[str] = Counter()
    with path.open("wb") as out:
        rows = lines(file)
        while batch := list(islice(rows, _LINES)):
            flat = [word for line in batch for word in line]
            ids = np.fromiter((words.get(word, -1) for word in flat), np.int64, len(flat))
            lost.update(flat[i] for i in np.flatnonzero(ids < 0))
            ids[ids < 0] = unknown
            out.write(ids.astype(dtype).tobytes())
            found["tokens"] += len(ids)
            found["documents"] += len(batch)
            breaks = sum(max(len(line) - 1, 1) for line in batch)  # the spaces and the line end that cut its words
            marks = len(batch) * len(EOS)
            found["characters"] += sum(len(word) for word in flat) - marks + breaks
            found["bytes"] += sum(len(word.encode()) for word in flat) - marks + breaks
    found["unknown"] = lost.total()
    return {**found, "unknown_words": len(lost)}


@dataclass(frozen=True)
class WordFile:
    """A file of a corpus, or part of it by lines, so that two files can make three."""

    path: Path
    first: int  # line, from 0
    last: int | None  # not included; None: to the end
    text: str  # how that was written

    def holds(self, line: int) -> bool:
        """Whether the line of this number, from 0, belongs to it."""
        return self.first <= line and (self.last is None or line < self.last)

    def __str__(self) -> str:
        return self.text


def word_files(corpus: str, files: Sequence[str] = ()) -> tuple[WordFile, WordFile, WordFile]:
    """Find the training, validation and test file of a corpus; `files` as `prepare_words` takes them.

    Raises:
        DataError: no folder, a file that is not there, a part that cannot be read, or not three files.
    """
    folder = Path(corpus).expanduser()
    if not folder.is_dir():
        raise DataError(f"no corpus folder {corpus!r}", f"name a folder with {', '.join(FILES)}")
    names = tuple(files) or FILES
    if len(names) != len(FILES):
        what = f"{len(names)} files ({', '.join(names)}) for training, validation and test"
        raise DataError(what, "name three; parts of one file are valid.txt@0-90 and valid.txt@90-100")
    train, valid, test = (_file(folder, name) for name in names)
    return train, valid, test


def _file(folder: Path, text: str) -> WordFile:
    part = _PART.fullmatch(text)
    if part is None or "@" in part["name"]:
        raise DataError(f"{text!r} names no part of a file", _FIX)
    path = folder / part["name"]
    if not path.is_file():
        there = sorted(file.name for file in folder.glob("*.txt"))
        fix = "other files: --set 'files=[valid.txt@0-90, valid.txt@90-100, test.txt]'"
        raise DataError(f"{str(folder)!r} has no {part['name']} (it has {', '.join(there) or 'no .txt files'})", fix)
    if part["low"] is None:
        return WordFile(path, 0, None, text)
    low, high = int(part["low"]), int(part["high"])
    if not low < high <= 100:
        raise DataError(f"{text!r} is an empty part", _FIX)
    with opened(path) as file:
        count = sum(1 for _ in file)
    return WordFile(path, count * low // 100, None if high == 100 else count * high // 100, text)
