"""Word-level corpora as in papers: `train.txt`, `valid.txt` and `test.txt`, one token per word.

A line is cut at white space and ended by `<eos>`, also a blank line. The vocabulary is that of the training file, most
frequent word first, and every other word is `<unk>`. Counted so, the training file of the Penn Treebank has 929,589
tokens and 10,000 words, and that of WikiText-2 has 2,088,628 and 33,278.

The result is a prepared folder like any other. Its splits are train, tune (valid) and heldout (test).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiewise.core.errors import DataError, RunError
from tiewise.core.progress import report_progress
from tiewise.core.writing_faults import writing_fault
from tiewise.training.data.corpus import (
    TOKENIZER,
    PreparedText,
    install_prepared,
    load_prepared,
    token_type,
    work_folder,
)
from tiewise.training.data.documents import SPLITS, decode, open_text
from tiewise.training.data.tokenizer import EOS

FILES = ("train.txt", "valid.txt", "test.txt")
UNKNOWN = "<unk>"
KIND = "words"
_LINES = 20_000  # lines of a batch that is encoded at once
_PART = re.compile(r"(?P<name>[^@]+)(?:@(?P<low>\d+)-(?P<high>\d+))?")


def prepare_words(corpus: str, folder: Path, files: Sequence[str] = ()) -> PreparedText:
    """Turn the word-level corpus in a folder into tokens in `folder`, and replace its content.

    `files` are those of training, validation and test. `valid.txt@0-90` is the first nine tenths of a file's lines,
    `valid.txt@90-100` the rest.

    Raises:
        DataError: a file is missing, empty or no text.
        RunError: `folder` cannot be written.
    """
    parts = word_files(corpus, files)
    folder = Path(folder)
    try:
        with work_folder(folder) as work:
            report_progress(KIND, 0, 1)
            words = _count_words(parts[0])
            dtype = token_type(len(words))
            splits: dict[str, dict[str, int]] = {}
            for index, (name, part) in enumerate(zip(SPLITS, parts, strict=True)):
                splits[name] = _write_split(work / f"{name}.bin", part, words, dtype)
                if splits[name]["tokens"] < 2:
                    raise DataError(f"{part.text} has no words", "give a file with text in it")
                report_progress(KIND, index + 1, len(SPLITS))
            _word_tokenizer(words).save_pretrained(work / TOKENIZER)
            counted = ("tokens", "characters", "bytes", "documents")
            facts: dict[str, Any] = {name: sum(split[name] for split in splits.values()) for name in counted}
            facts["tokenizer"] = {"vocab": len(words), "eos_id": words[EOS], "dtype": dtype.name, "kind": KIND}
            facts |= {"splits": splits, "texts": [corpus], "demo": False, "files": [part.text for part in parts]}
            install_prepared(work, folder, facts)
    except OSError as error:
        problem = f"cannot prepare the words in {str(folder)!r}: {error.strerror or error}"
        raise RunError(problem, writing_fault(error).remedy("choose another folder")) from None
    return load_prepared(folder)


def _count_words(part: WordFile) -> dict[str, int]:
    """Return the ids of the words of a training file, most frequent first, and of `<unk>`."""
    counts: Counter[str] = Counter()
    for line in read_words(part):
        counts.update(line)
    if len(counts) < 2:
        raise DataError(f"{part.text} has no words", "give a training file with text in it")
    words = {word: index for index, (word, _) in enumerate(counts.most_common())}  # ties by first appearance
    words.setdefault(UNKNOWN, len(words))  # last if the training file lacks it
    return words


def _word_tokenizer(words: dict[str, int]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with these ids.

    White space separates words, a line end is `<eos>`, and any other word is `<unk>`.
    """
    engine = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    engine.normalizer = normalizers.Replace("\n", f" {EOS} ")
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=engine, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )


def unknown_share(facts: dict[str, Any], split: str) -> float:
    """Return the share of a split's tokens that are `<unk>` because training lacks them."""
    counts: dict[str, int] = facts["splits"][split]
    return counts["unknown"] / counts["tokens"] if counts["tokens"] else 0.0


def _write_split(path: Path, part: WordFile, words: dict[str, int], dtype: np.dtype) -> dict[str, int]:
    """Write one split's ids, and return its counts.

    They count tokens, lines (as documents), characters, bytes, and words that training lacks.
    """
    counts = dict.fromkeys(("tokens", "documents", "characters", "bytes"), 0)
    unknown: Counter[str] = Counter()
    with path.open("wb") as out:
        rows = read_words(part)
        while batch := list(islice(rows, _LINES)):
            flat = [word for line in batch for word in line]
            ids = np.fromiter((words.get(word, -1) for word in flat), np.int64, len(flat))
            unknown.update(flat[i] for i in np.flatnonzero(ids < 0))
            ids[ids < 0] = words[UNKNOWN]
            out.write(ids.astype(dtype).tobytes())
            # spaces and line ends between the words, instead of the `<eos>` that replace line ends
            between = sum(max(len(line) - 1, 1) for line in batch) - len(batch) * len(EOS)
            counts["tokens"] += len(ids)
            counts["documents"] += len(batch)
            counts["characters"] += sum(len(word) for word in flat) + between
            counts["bytes"] += sum(len(word.encode()) for word in flat) + between
    return {**counts, "unknown": unknown.total(), "unknown_words": len(unknown)}


@dataclass(frozen=True)
class WordFile:
    """A file of a corpus, or a part of its lines.

    Parts let two files serve as three.
    """

    path: Path
    numbers: range  # numbers of its lines, from 0
    text: str  # file and part as the user wrote them


def read_words(part: WordFile) -> Iterator[list[str]]:
    """Yield the words of each line, `<eos>` last.

    DataError: the file cannot be read or is no text.
    """
    with open_text(part.path) as file:
        for number, line in enumerate(_lines_of(file, str(part.path))):
            if number in part.numbers:
                yield [*line.split(), EOS]


def _lines_of(file: BinaryIO, name: str) -> Iterator[str]:
    """Yield the lines of a text, also a last one without a line end."""
    rest = ""
    for piece in decode(file, name):
        *complete, rest = (rest + piece).split("\n")
        yield from complete
    if rest:
        yield rest


def word_files(corpus: str, files: Sequence[str] = ()) -> list[WordFile]:
    """Find the training, validation and test file of a corpus; `files` as in `prepare_words`."""
    folder = Path(corpus).expanduser()
    if not folder.is_dir():
        raise DataError(f"no corpus folder {corpus!r}", f"name a folder with {', '.join(FILES)}")
    names = tuple(files) or FILES
    if len(names) != len(FILES):
        problem = f"{len(names)} files ({', '.join(names)}) for training, validation and test"
        raise DataError(problem, "name three; parts of one file are valid.txt@0-90 and valid.txt@90-100")
    return [_word_file(folder, name) for name in names]


def _word_file(folder: Path, text: str) -> WordFile:
    """Find a file of a corpus, or a part of one, by its written form, `valid.txt@0-90`."""
    remedy = "write valid.txt@0-90 or valid.txt@90-100, say, in per cent of its lines"
    match = _PART.fullmatch(text)
    if match is None:
        raise DataError(f"{text!r} names no part of a file", remedy)
    path = folder / match["name"]
    if not path.is_file():
        texts = ", ".join(sorted(file.name for file in folder.glob("*.txt"))) or "no .txt files"
        other = "other files: --set 'files=[valid.txt@0-90, valid.txt@90-100, test.txt]'"
        raise DataError(f"{str(folder)!r} has no {match['name']} (it has {texts})", other)
    if match["low"] is None:
        with open_text(path):  # raises if it cannot be read
            return WordFile(path, range(sys.maxsize), text)
    low, high = int(match["low"]), int(match["high"])
    if not low < high <= 100:
        raise DataError(f"{text!r} is an empty part", remedy)
    with open_text(path) as file:
        count = sum(1 for _ in file)
    end = sys.maxsize if high == 100 else count * high // 100
    return WordFile(path, range(count * low // 100, end), text)
