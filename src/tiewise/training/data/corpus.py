"""`prepare`: text becomes tokens in a folder, once for equal requests.

`PreparedText` reads the folder.

    read once → every paragraph once → split → tokenizer of the training split → tokens → moved into place

A prepared folder holds `train.bin`, `tune.bin`, `heldout.bin` (raw little-endian token ids), `tokenizer/`, and
`data.json`. The work is done in a subfolder that is always removed. `data.json` is deleted first and written last, so
an incomplete folder never looks prepared.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiewise.core.errors import DataError, RunError, TiewiseError, suggest_choices
from tiewise.core.files import atomic_replacement, sync_to_disk, write_atomically
from tiewise.core.progress import advance_progress, progress_of, report_progress
from tiewise.core.text import cut_pieces, token_counts
from tiewise.core.writing_faults import writing_fault
from tiewise.training.data.documents import CONTIGUOUS, RANDOM, SPLITS, Deduplicator, Document, assign_splits, decode
from tiewise.training.data.sources import Source, read_sources, resolve
from tiewise.training.data.tokenizer import StreamEncoder, bpe_size, make_tokenizer, windows, write_tokens

FACTS = "data.json"
SHARES = (0.88, 0.04, 0.08)  # shares of the splits, in characters
TOKENIZER = "tokenizer"
_FORMAT = 3  # version of the folder's format; a folder of another version is prepared again
_LEARNT = 50_000_000  # characters that a tokenizer is trained on, at most: frequent pairs need far fewer


def token_type(vocab: int) -> np.dtype:
    """Return the integer type of token ids below `vocab`: two bytes if they suffice, else four."""
    return np.dtype("<u2" if vocab < 1 << 16 else "<u4")


@dataclass(frozen=True)
class PreparedText:
    """A text as tokens, in a folder."""

    folder: Path
    facts: dict[str, Any]  # content of `data.json`: sources, sha256, sizes in all and per split
    vocab: int  # V, number of rows that a model's tables need
    eos_id: int  # id of the token after every document

    def __reduce__(self) -> tuple[Callable[[Path], PreparedText], tuple[Path]]:
        """Return how another process opens the same folder, without a copy."""
        return load_prepared, (self.folder,)

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of "train", "tune" or "heldout": uint16[N] or uint32[N].

        The array is memory-mapped and read-only.
        """
        if name not in SPLITS:
            raise DataError(f"no split {name!r}", suggest_choices(name, SPLITS))
        return np.memmap(self.folder / f"{name}.bin", token_type(self.vocab), mode="r")

    @cached_property
    def counts(self) -> np.ndarray:
        """Occurrences of each token in the training split [V]."""
        return token_counts(self.split("train"), self.vocab)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the folder."""
        where = str(self.folder / TOKENIZER)
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=True)


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Contiguous blocks of tokens as training rows.

    Each is `{"input_ids": int64[length], "labels": int64[length]}`; labels are not shifted. Tokens at the end that fill
    no block are left out.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        if not 1 <= length <= len(tokens):
            raise DataError(f"{len(tokens)} tokens hold no block of {length}", "give more text, or another length")
        self.blocks = tokens[: len(tokens) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        ids = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def load_prepared(folder: Path) -> PreparedText:
    """Open a folder that `prepare` wrote.

    DataError: the folder has no prepared text, or a damaged one.
    """
    folder = Path(folder)
    path, remedy = folder / FACTS, "prepare the text again"
    try:
        facts = json.loads(path.read_text("utf-8"))
        tokenizer = facts["tokenizer"]
        prepared = PreparedText(folder, facts, int(tokenizer["vocab"]), int(tokenizer["eos_id"]))
        tokens = {name: int(facts["splits"][name]["tokens"]) for name in SPLITS}
    except FileNotFoundError:
        raise DataError(f"no prepared text in {str(folder)!r} ({FACTS} is missing)", remedy) from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}", remedy) from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{str(path)!r} is damaged", remedy) from None
    itemsize = token_type(prepared.vocab).itemsize
    for name, count in tokens.items():
        file = folder / f"{name}.bin"
        if not file.is_file() or file.stat().st_size != count * itemsize:
            raise DataError(f"{str(file)!r} does not hold the {count} tokens that {FACTS} names", remedy)
    return prepared


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """Create a subfolder to work in, and remove it at the end of this context."""
    work = folder / ".building"
    shutil.rmtree(work, ignore_errors=True)  # left by a killed process
    work.mkdir(parents=True)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def install_prepared(work: Path, folder: Path, facts: dict[str, Any]) -> None:
    """Move the token files and the tokenizer of `work` into `folder`, and write `facts` last."""
    (folder / FACTS).unlink(missing_ok=True)
    for name in SPLITS:
        (work / f"{name}.bin").replace(folder / f"{name}.bin")
    shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
    (work / TOKENIZER).rename(folder / TOKENIZER)
    sync_to_disk(folder)
    write_atomically(folder / FACTS, json.dumps(facts, indent=2))


def prepare(
    texts: Sequence[str],
    tokenizer: str,
    folder: Path,
    *,
    length: int,
    split: str = RANDOM,
    apart: bool = False,
    train_tokens: int | None = None,
) -> PreparedText:
    """Turn `texts` (as in `sources`) into tokens in `folder`, or reuse those of an equal call.

    Args:
        texts: names of texts. Standard input is stored as `stdin.txt` in the folder, which later calls read.
        tokenizer: name of the tokenizer, as in `make_tokenizer`.
        folder: folder for the tokens.
        length: T of the blocks that must fit.
        split: "random" or "contiguous", as in `documents`.
        apart: end every part of a plain file as a document, since pairs of segments need many documents.
        train_tokens: number of tokens of the training split that remain. The tokenizer and the other splits are those
            of
            the full text.

    Raises:
        DataError: a text or the tokenizer cannot be used, or a split is too short. For blocks of `length` tokens,
            training
            needs two, tune and heldout one each. Nothing is left behind then.
        RunError: `folder` cannot be written.
    """
    _refuse_bad_arguments(texts, length, split)
    bpe_size(tokenizer)  # raises for a wrong size before gigabytes are read
    folder = Path(folder)
    created: list[Path] = []  # removed if the text cannot be used
    if not folder.exists():
        created.append(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sources = []
        for text in texts:
            sources.append(_save_stdin(folder, created) if text == "-" else resolve(text))
        tokens = None if train_tokens is None else [train_tokens, length]
        request = _request(texts, sources, tokenizer) | {"split": split, "apart": apart, "train_tokens": tokens}
        return _reuse_or_build(folder, sources, request, length)
    except TiewiseError:
        for path in created:
            _remove(path)
        raise
    except OSError as error:
        problem = f"cannot prepare the text in {str(folder)!r}: {error.strerror or error} ({error.filename})"
        raise RunError(problem, writing_fault(error).remedy("choose another folder")) from None


def _refuse_bad_arguments(texts: Sequence[str], length: int, split: str) -> None:
    """Raise DataError for arguments of `prepare` that are wrong for any text."""
    if not texts:
        raise DataError("no text is given", "name a file, a folder, or builtin")
    if texts.count("-") >= 2:
        raise DataError("'-' is given twice", "standard input can be read once")
    if length < 1:
        raise DataError(f"a block of {length} tokens", "use a length of 1 or more")
    if split not in (RANDOM, CONTIGUOUS):
        raise DataError(f"split = {split!r}", f"choose {RANDOM} or {CONTIGUOUS}")


def _request(texts: Sequence[str], sources: Sequence[Source], tokenizer: str) -> dict[str, Any]:
    """Return everything in texts and tokenizer that determines the result.

    Equal requests have equal results.
    """
    path = Path(tokenizer).expanduser()
    tokenizer_files: list[Path] = []
    if path.exists():
        tokenizer_files = [path, *sorted(path.glob("*"))]
    return {
        "format": _FORMAT,
        "texts": [source.text for source in sources],
        "sources": [_fingerprint(source.files) for source in sources],
        "tokenizer": tokenizer,
        "tokenizer_files": _fingerprint(tokenizer_files),
        "python": platform.python_version() if "builtin" in texts else None,
    }


def _reuse_or_build(folder: Path, sources: Sequence[Source], request: dict[str, Any], length: int) -> PreparedText:
    """Return the text that an equal request left in `folder`, or prepare it."""
    prepared = None
    if (folder / FACTS).exists():
        with suppress(DataError):  # damaged: prepare it again
            prepared = load_prepared(folder)
    if prepared is not None and prepared.facts.get("request") == request:
        _check_length(prepared.facts, length)
        return prepared
    _build(folder, sources, request, length)
    return load_prepared(folder)


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _save_stdin(folder: Path, created: list[Path]) -> Source:
    """Return standard input as a file of the folder.

    The first call copies it there and adds the file to `created`.
    """
    path = folder / "stdin.txt"
    if not path.exists():
        with atomic_replacement(path) as partial, partial.open("wb") as file:
            for piece in decode(sys.stdin.buffer, "standard input"):
                file.write(piece.encode())
            if not file.tell():
                raise DataError("standard input is empty", "pipe a text into the command")
        created.append(path)
    return replace(resolve(str(path)), text="-")


def _fingerprint(files: Sequence[Path]) -> dict[str, Any]:
    """Return a digest of files by name, size and time of change, as `make` compares them."""
    digest, total = sha256(), 0
    for file in files:
        stat = file.stat()
        line = f"{file.as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
        total += stat.st_size
    return {"files": len(files), "bytes": total, "fingerprint": digest.hexdigest()}


def _build(folder: Path, sources: Sequence[Source], request: dict[str, Any], length: int) -> None:
    """Prepare `sources` in `folder` by `request`.

    After an error the folder is as it was.
    """
    with work_folder(folder) as work:
        tokenizer_name = request["tokenizer"]
        tokenizer = None
        if bpe_size(tokenizer_name) is None:  # needs no training text, so errors come before gigabytes are read
            tokenizer = make_tokenizer(tokenizer_name)
        deduplicate = Deduplicator()
        documents = (Document(text, begins or request["apart"]) for text, begins in read_sources(sources))
        with progress_of("reading", sum(source.size for source in sources)):
            spool = _Spool(work / "text", deduplicate(documents))
        split_of = assign_splits(spool.characters, SHARES, 0, request["split"])
        report_progress("tokenizer", 0, 1)
        if tokenizer is None:
            tokenizer = _train_tokenizer(tokenizer_name, spool, np.flatnonzero(split_of == 0))
        report_progress("tokenizer", 1, 1)
        tokenizer.save_pretrained(work / TOKENIZER)
        vocab = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)  # some vocabularies have holes
        dtype = token_type(vocab)
        facts = spool.facts(np.arange(len(split_of)))
        splits = _write_splits(work, spool, split_of, StreamEncoder(tokenizer, dtype))
        if request["train_tokens"] is not None:
            splits["train"]["tokens"] = _cut_train(work / "train.bin", dtype, *request["train_tokens"])
        facts |= {"splits": splits, "tokens": sum(split["tokens"] for split in splits.values())}
        facts |= {"texts": request["texts"], "demo": set(request["texts"]) == {"builtin"}, "python": request["python"]}
        facts |= {"dropped_paragraphs": deduplicate.dropped, "request": request}
        facts["tokenizer"] = {
            "vocab": vocab,
            "eos_id": tokenizer.eos_token_id,
            "dtype": dtype.name,
            "kind": tokenizer_name,
        }
        _check_length(facts, length)
        install_prepared(work, folder, facts)


def _train_tokenizer(tokenizer_name: str, spool: _Spool, train: np.ndarray) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the parts `train` of a spool, or on a sample."""
    characters = int(spool.characters[train].sum())
    # every nth part of the training split, since a folder's first files may be alike
    every = -(-characters // _LEARNT)
    sample = train[::every]
    return make_tokenizer(tokenizer_name, lambda: (text for text, _ in cut_pieces(spool.read(sample))))


def _write_splits(work: Path, spool: _Spool, split_of: np.ndarray, encoder: StreamEncoder) -> dict[str, dict[str, Any]]:
    """Write the tokens of every split, and return its facts.

    `split_of` has the index of each part's split.
    """
    splits: dict[str, dict[str, Any]] = {}
    total, done = int(spool.characters.sum()), 0
    for index, name in enumerate(SPLITS):
        parts = np.flatnonzero(split_of == index)
        facts = spool.facts(parts)
        with progress_of("tokens", total, done):
            facts["tokens"] = write_tokens(work / f"{name}.bin", spool.read(parts), encoder)
        done += facts["characters"]
        splits[name] = facts
    return splits


def _cut_train(path: Path, dtype: np.dtype, count: int, length: int) -> int:
    """Reduce a training split to `count` tokens in windows of `length`.

    Return the number of tokens that remain.
    """
    tokens = np.fromfile(path, dtype)
    if count > len(tokens):
        problem = f"the text has {len(tokens):,} training tokens, {count:,} are asked for"
        raise DataError(problem, "give more text, or a smaller train_tokens")
    sample = windows(tokens, length, count // length)  # evenly spread, since a text has the order of its sources
    sample.tofile(path)
    return sample.size


def _check_length(facts: dict[str, Any], length: int) -> None:
    """Refuse a text with too few blocks of `length` tokens.

    Training needs two, the other splits one each.
    """
    tokens = {name: facts["splits"][name]["tokens"] for name in SPLITS}
    fits = min(tokens["train"] // 2, tokens["tune"], tokens["heldout"])
    remedy = f"give more text, or a length of at most {fits}" if fits else "give more text"
    for name, needed in (("train", 2 * length), ("tune", length), ("heldout", length)):
        if tokens[name] < needed:
            problem = f"the text has {sum(tokens.values())} tokens, {tokens[name]} of them for {name}"
            raise DataError(f"{problem}; needs at least {needed} there for length {length}", remedy)


class _Spool:
    """Documents, or their parts, in one UTF-8 file that is read by index.

    Only the end of each part is in memory. Sources are read once: a stream cannot be read twice, and a file may change.
    The split needs all sizes, `characters` [n], and the tokenizer needs the training split.
    """

    def __init__(self, path: Path, documents: Iterable[Document]):
        self._path = path
        ends, characters, numbers = array("q", [0]), array("q"), array("q")
        with path.open("wb") as file:
            for text, begins in documents:
                ends.append(ends[-1] + file.write(text.encode("utf-8", "replace")))
                characters.append(len(text))
                numbers.append((numbers[-1] if numbers else 0) + begins)
                advance_progress(ends[-1])
        self.characters = np.array(characters, np.int64)
        self._ends = np.array(ends, np.int64)
        self._numbers = np.array(numbers, np.int64)  # number of each part's document

    def read(self, indices: np.ndarray) -> Iterator[tuple[str, bool]]:
        """Yield the parts of `indices`, which ascend, and whether each ends its document.

        A part ends it if it is the document's last among `indices`.
        """
        last = np.diff(self._numbers[indices], append=-1) != 0
        with self._path.open("rb") as file:
            for index, ends in zip(indices, last.tolist(), strict=True):
                file.seek(self._ends[index])
                yield file.read(self._ends[index + 1] - self._ends[index]).decode(), ends

    def facts(self, indices: np.ndarray) -> dict[str, Any]:
        """Return documents, characters, bytes, and sha256 of the documents.

        A zero byte follows each document in the hash.
        """
        digest, documents = sha256(), 0
        for text, ends in self.read(indices):
            digest.update(text.encode())
            if ends:
                documents += 1
                digest.update(b"\0")
        characters, size = int(self.characters[indices].sum()), int(np.diff(self._ends)[indices].sum())
        return {"documents": documents, "characters": characters, "bytes": size, "sha256": digest.hexdigest()}
