"""Word-level corpora as papers count them: a folder of `train.txt`, `valid.txt`, `test.txt`, one token per word.

A line is cut at whitespace and ended by `<eos>`, blank lines too; the vocabulary is that of the training file, most
frequent word first, and every other word is `<unk>`. So counted, the training file of the Penn Treebank has 929,589
tokens and 10,000 words, and that of WikiText-2 2,088,628 and 33,278.

What is left is a prepared folder like any other, its splits called train, tune (valid) and heldout (test).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiewise.core.errors import DataError, RunError, progress
from tiewise.training.data.corpus import TOKENIZER, PreparedText, building, load_prepared, put_in_place, token_type
from tiewise.training.data.documents import SPLITS, decode, opened
from tiewise.training.data.tokenizer import EOS

FILES = ("train.txt", "valid.txt", "test.txt")
UNKNOWN = "<unk>"
KIND = "words"
_LINES = 20_000  # turned into tokens at once
_PART = re.compile(r"(?P<name>[^@]+)(?:@(?P<low>\d+)-(?P<high>\d+))?")


def prepare_words(corpus: str, folder: Path, files: Sequence[str] = ()) -> PreparedText:
    """Turn the word-level corpus in a folder into tokens in `folder`, in the place of what it held.

    `files` are those of training, validation and test; `valid.txt@0-90` is the first nine tenths of a file's lines,
    `valid.txt@90-100` the rest. DataError: one is missing, empty or no text; RunError: `folder` cannot be written.
    """
    parts = word_files(corpus, files)
    folder = Path(folder)
    try:
        with building(folder) as work:
            progress(KIND, 0, 1)
            counts: Counter[str] = Counter()
            for line in lines(parts[0]):
                counts.update(line)
            if len(counts) < 2:
                raise DataError(f"{parts[0].text} has no words", "give a training file with text in it")
            words = {word: index for index, (word, _) in enumerate(counts.most_common())}  # ties by first appearance
            words.setdefault(UNKNOWN, len(words))  # last where training does not have it
            dtype = token_type(len(words))
            splits: dict[str, dict[str, int]] = {}
            for index, (name, part) in enumerate(zip(SPLITS, parts, strict=True)):
                splits[name] = _write_split(work / f"{name}.bin", part, words, dtype)
                if splits[name]["tokens"] < 2:
                    raise DataError(f"{part.text} has no words", "give a file with text in it")
                progress(KIND, index + 1, len(SPLITS))
            # gives a text these ids: white space cuts, a line end is `<eos>`, the rest `<unk>`
            engine = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
            engine.normalizer = normalizers.Replace("\n", f" {EOS} ")
            engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=engine, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
            )
            tokenizer.save_pretrained(work / TOKENIZER)
            counted, found = ("tokens", "characters", "bytes", "documents"), splits.values()
            facts: dict[str, Any] = {name: sum(split[name] for split in found) for name in counted}
            facts["tokenizer"] = {"vocab": len(words), "eos_id": words[EOS], "dtype": dtype.name, "kind": KIND}
            facts |= {"splits": splits, "texts": [corpus], "demo": False, "files": [part.text for part in parts]}
            put_in_place(work, folder, facts)
    except OSError as error:
        what = f"cannot prepare the words in {str(folder)!r}: {error.strerror or error}"
        raise RunError(what, "choose another folder, or make room") from None
    return load_prepared(folder)


def unknown_share(facts: dict[str, Any], split: str) -> float:
    """Share of a split's tokens that became `<unk>` because training does not know them."""
    found = facts["splits"][split]
    return found["unknown"] / found["tokens"] if found["tokens"] else 0.0


def _write_split(path: Path, part: WordFile, words: dict[str, int], dtype: np.dtype) -> dict[str, int]:
    """Write one split's ids; count tokens, lines (as documents), characters, bytes and words unknown to training."""
    found = dict.fromkeys(("tokens", "documents", "characters", "bytes"), 0)
    lost: Counter[str] = Counter()
    with path.open("wb") as out:
        rows = lines(part)
        while batch := list(islice(rows, _LINES)):
            flat = [word for line in batch for word in line]
            ids = np.fromiter((words.get(word, -1) for word in flat), np.int64, len(flat))
            lost.update(flat[i] for i in np.flatnonzero(ids < 0))
            ids[ids < 0] = words[UNKNOWN]
            out.write(ids.astype(dtype).tobytes())
            found["tokens"] += len(ids)
            found["documents"] += len(batch)
            # the spaces and the line ends that cut the words, in place of the `<eos>` that stand for the latter
            between = sum(max(len(line) - 1, 1) for line in batch) - len(batch) * len(EOS)
            found["characters"] += sum(len(word) for word in flat) + between
            found["bytes"] += sum(len(word.encode()) for word in flat) + between
    return {**found, "unknown": lost.total(), "unknown_words": len(lost)}


@dataclass(frozen=True)
class WordFile:
    """A file of a corpus, or part of it by lines, so that two files can make three."""

    path: Path
    held: range  # numbers of its lines, from 0
    text: str  # how that was written


def lines(part: WordFile) -> Iterator[list[str]]:
    """Yield the words of each line, `<eos>` last; a DataError for a file that cannot be read or is no text."""
    with opened(part.path) as file:
        rest, number = "", 0
        for piece in decode(file, str(part.path)):
            *whole, rest = (rest + piece).split("\n")
            for line in whole:
                if number in part.held:
                    yield [*line.split(), EOS]
                number += 1
        if rest and number in part.held:  # a last line without its end
            yield [*rest.split(), EOS]


def word_files(corpus: str, files: Sequence[str] = ()) -> list[WordFile]:
    """Find the training, validation and test file of a corpus; `files` as `prepare_words` takes them."""
    folder = Path(corpus).expanduser()
    if not folder.is_dir():
        raise DataError(f"no corpus folder {corpus!r}", f"name a folder with {', '.join(FILES)}")
    names = tuple(files) or FILES
    if len(names) != len(FILES):
        what = f"{len(names)} files ({', '.join(names)}) for training, validation and test"
        raise DataError(what, "name three; parts of one file are valid.txt@0-90 and valid.txt@90-100")
    found = []
    fix = "write valid.txt@0-90 or valid.txt@90-100, say, in per cent of its lines"
    for text in names:
        match = _PART.fullmatch(text)
        if match is None:
            raise DataError(f"{text!r} names no part of a file", fix)
        path, low, high = folder / match["name"], int(match["low"] or 0), int(match["high"] or 100)
        if not path.is_file():
            there = ", ".join(sorted(file.name for file in folder.glob("*.txt"))) or "no .txt files"
            other = "other files: --set 'files=[valid.txt@0-90, valid.txt@90-100, test.txt]'"
            raise DataError(f"{str(folder)!r} has no {match['name']} (it has {there})", other)
        if not low < high <= 100:
            raise DataError(f"{text!r} is an empty part", fix)
        with opened(path) as file:
            count = sum(1 for _ in file) if match["low"] else 0
        last = sys.maxsize if high == 100 else count * high // 100
        found.append(WordFile(path, range(count * low // 100, last), text))
    return found
