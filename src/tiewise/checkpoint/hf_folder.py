"""What lies in a Hugging Face folder: config, index, headers, and the ids that its tokenizer's files name.

Each file is opened once and believed only where checked. A fault in one does not hide the others: `Folder.faults` keeps
each with the file that it concerns. No tokenizer is built: its files are read as data, in the order tokenizer.json,
vocab.json, vocab.txt, a SentencePiece model; then, always, added_tokens.json and tokenizer_config.json.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiewise.checkpoint.stored import Header, Stored, read_header
from tiewise.checkpoint.untrusted import MOST_BYTES, first_fields, inside, read_json, read_whole, require_bounded, short
from tiewise.core.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_FILES, MOST_SHARDS, MOST_TENSORS = 100_000, 30_000, 160_000  # the largest known has some hundred and 140,000
MOST_CONFIG = 8 * 2**20  # bytes
_OWN = "give the checkpoint's own folder"


@dataclass(frozen=True)
class Fault:
    """A file, or what is said of one, that cannot be true: what, and the way out."""

    file: str
    what: str
    fix: str


@contextmanager
def noting(faults: list[Fault], file: str) -> Iterator[None]:
    """Make an error in the block one of the `faults`, and go on behind it."""
    try:
        yield
    except CheckpointError as error:
        faults.append(Fault(file, error.what, error.fix))


@dataclass(frozen=True)
class Folder:
    """A checkpoint as it lies on disk."""

    path: Path  # the folder, or the folder of the single file that was given
    files: tuple[str, ...]  # names of all entries directly inside, sorted (of a single file: that one)
    config: dict[str, Any] | None  # config.json; None where there is none or it cannot be read
    # of the files of tensors, by file name: those that the index names, else model.safetensors, else every one
    headers: dict[str, Header]
    # every tensor by name, from the file that the index maps it to (else the first that holds it)
    tensors: dict[str, Stored]
    weight_map: dict[str, str] | None = None  # {tensor: its file} of the index of shards; None without one
    total_size: Any = None  # what the index says of all tensors' bytes; None where it does not
    copies: tuple[Stored, ...] = ()  # tensors of a name that another file already gave
    extra: tuple[str, ...] = ()  # names of further `.safetensors` files in the folder, an adapter's left out
    faults: tuple[Fault, ...] = ()  # what could not be read or cannot be true
    single: bool = False  # one `.safetensors` was given rather than a folder

    @property
    def pickles(self) -> tuple[str, ...]:
        """Files of pickled or foreign weights: named, never opened."""
        return tuple(name for name in self.files if name.endswith(PICKLES) and not name.startswith("training_args"))

    @property
    def opened(self) -> str | None:
        """The file that transformers opens of this folder, or the index that it follows; None where it finds none."""
        named = None if self.config is None else self.config.get("transformers_weights")
        looked_for = (named,) if isinstance(named, str) else (SINGLE, INDEX, TORCH, TORCH_INDEX)
        return self.files[0] if self.single else next((name for name in looked_for if self.has(name)), None)

    @property
    def is_adapter(self) -> bool:
        """Whether it is a PEFT adapter's and no whole model's."""
        return self.has(ADAPTER_CONFIG) and not self.tensors

    def has(self, name: str) -> bool:
        """Whether an entry of this name lies directly in the folder."""
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.files)

    def read(self, *names: str) -> dict[str, bytes]:
        """{name: content} of those of the files that lie in the folder."""
        there = filter(self.has, dict.fromkeys(names))
        return {name: read_whole(inside(self.path, name), MOST_BYTES) for name in there}


def json_object(folder: Path, name: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object that a JSON file of a folder holds, of at most `most` bytes."""
    record = read_json(os.fspath(inside(folder, name)), most=most)
    if not isinstance(record, dict):
        raise CheckpointError(f"{folder / name}: no JSON object", "take it from its source again")
    return record


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read a Hugging Face folder, or one `.safetensors` (with the config.json beside it, if there is one).

    Only headers, index and config are read.

    Raises:
        CheckpointError: the path does not exist, may not be read, or is neither.
    """
    path, faults = Path(path), list[Fault]()
    single, config, weight_map, total_size = not os.path.isdir(path), None, None, None
    if single and path.suffix != ".safetensors" and not os.path.isfile(path):
        what = "a pipe, device or socket" if os.path.exists(path) else "no such file or folder"
        raise CheckpointError(f"{path}: {what}", "give a checkpoint folder, or one .safetensors file")
    header = read_header(path) if single else None
    listed = _listing(home := path.parent if single else path)
    alone = [name for name in listed if name.endswith(".safetensors")] == [path.name]  # not one shard of several
    if CONFIG in listed and (alone or not single):
        with noting(faults, CONFIG):
            config = json_object(home, CONFIG, MOST_CONFIG)
    if header is not None:
        files = (path.name, CONFIG) if config is not None else (path.name,)
        return Folder(home, files, config, {path.name: header}, dict(header.tensors), faults=tuple(faults), single=True)
    if INDEX in listed:
        with noting(faults, INDEX):
            weight_map, total_size = _index(path)
    stored = [name for name in listed if name.endswith(".safetensors") and not name.startswith("adapter_")]
    wanted = ([SINGLE] if SINGLE in stored else stored) if weight_map is None else sorted(set(weight_map.values()))
    if len(wanted) > MOST_SHARDS:
        raise CheckpointError(f"{path}: {len(wanted):,} shards are no checkpoint", _OWN)
    headers, tensors, copies, there = dict[str, Header](), dict[str, Stored](), list[Stored](), frozenset(listed)
    for file in wanted:
        with noting(faults, file):
            if file not in there:
                raise CheckpointError(f"{path / file}: no such file", "check the path")
            headers[file] = read_header(inside(path, file))
        found = headers[file].tensors if file in headers else {}
        if len(tensors) + len(copies) + len(found) > MOST_TENSORS:
            raise CheckpointError(f"{path}: more than {MOST_TENSORS:,} tensors are no checkpoint", _OWN)
        for name, tensor in found.items():
            kept = tensors.setdefault(name, tensor)
            if kept is not tensor:  # the one counts that the index maps the name to, else the first
                mapped = weight_map is not None and weight_map.get(name) == file
                copies.append(kept if mapped else tensor)
                tensors[name] = tensor if mapped else kept
    extra = tuple(sorted(set(stored) - set(wanted)))
    return Folder(path, listed, config, headers, tensors, weight_map, total_size, tuple(copies), extra, tuple(faults))


def _listing(path: Path) -> tuple[str, ...]:
    try:
        names = sorted(os.listdir(path))
    except PermissionError:
        raise CheckpointError(f"{path}: no permission to list it", f"chmod u+rx {path}, or ask its owner") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed ({error.strerror})", "check the path") from None
    if len(names) > MOST_FILES:
        raise CheckpointError(f"{path}: {len(names):,} entries are no checkpoint", _OWN)
    return tuple(names)


def _index(path: Path) -> tuple[dict[str, str], Any]:
    """Which file should hold which tensor, and the bytes that all should have."""
    record = read_json(os.fspath(inside(path, INDEX)), unique=True)
    weight_map = record.get("weight_map") if isinstance(record, dict) else None
    what = "it has no weight_map from tensors to files"
    if isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values()):
        files = sorted(set(weight_map.values()))
        outside = next((file for file in files if file != Path(file).name), None)
        if len(weight_map) > MOST_TENSORS or len(files) > MOST_SHARDS:
            what = f"{len(weight_map):,} tensors in {len(files):,} files are no checkpoint"
        elif outside is not None:
            what = f"names the file {short(outside)}, which does not lie in the folder"
        else:
            metadata = record.get("metadata")
            return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None
    fix = "take it from its source again, or delete it where all tensors are in one file"
    raise CheckpointError(f"{path / INDEX}: {what}", fix)


MOST_TOKENS = 1_500_000  # the largest vocabulary known has 900,000
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", *PIECES)
TOKENIZER_FILES = (  # all that a tokenizer is written as
    *_VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja"),
)
# Whole names in brackets, as tokenizers write them: "unused", "reserved" and "##pad" are words of BERT's vocabulary.
_NAME = r"▁?(?:unused|reserved|extra|dummy|place▁?holder|pad(?:ding)?)(?:[ _▁-]?(?:special|token|id|no))*[ _▁-]?\d*▁?"
_RESERVED = re.compile(rf"\[{_NAME}\]|<[|｜]?{_NAME}[|｜]?>|madeupword\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Tokenizer:
    """Ids of one tokenizer."""

    files: tuple[str, ...]  # those that were read
    # {text: id} of the vocabulary proper. SentencePiece models other than tokenizer.model give "#position" as texts.
    base: Mapping[str, int]
    added: Mapping[int, str]  # {id: text} of tokens added to it
    faults: tuple[Fault, ...] = ()  # files that could not be read

    @cached_property
    def base_max(self) -> int:
        """Largest id of the vocabulary proper; -1 where there is none."""
        return max(self.base.values(), default=-1)

    @cached_property
    def max_id(self) -> int:
        """Largest id of all, added tokens included; -1 where there is none."""
        return max(self.base_max, max(self.added, default=-1))

    @cached_property
    def texts(self) -> dict[int, str]:
        """{id: text} of all tokens; an added token's text where it takes an id of the vocabulary proper."""
        return {number: text for text, number in self.base.items()} | dict(self.added)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen digits that two tokenizers share where every id is the same token: of SHA-256 over both in order."""
        lines = "".join(f"{number}\0{text}\0" for number, text in sorted(self.texts.items()))
        return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def used(self) -> frozenset[int]:
        """Ids that text can produce: all but placeholders, `[unused12]`, `<|reserved_special_token_3|>`, `<pad>`."""
        return frozenset(number for number, text in self.texts.items() if not _RESERVED.fullmatch(text))


def read_tokenizer(folder: Folder) -> Tokenizer | None:
    """Read the tokenizer files of a folder; None where it has none. What cannot be read becomes a fault."""
    files, faults, base, added = list[str](), list[Fault](), dict[str, int](), dict[int, str]()
    vocabulary = [name for name in _VOCABULARIES if folder.has(name)][:1]
    for name in (*vocabulary, *filter(folder.has, ("added_tokens.json", "tokenizer_config.json"))):
        with noting(faults, name):
            found_base, found_added = _read(folder, name)
            files.append(name)
            base = {**base, **found_base} if base else found_base
            added |= found_added
    return Tokenizer(tuple(files), base, added, tuple(faults)) if base or added or faults else None


def _read(folder: Folder, name: str) -> tuple[dict[str, int], dict[int, str]]:
    where = f"{folder.path / name}"
    data = b"" if name.endswith(".json") else read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)
    if name == "vocab.txt":
        if (count := data.count(b"\n")) > MOST_TOKENS:
            fix = "no vocabulary is that large: take it from its source again"
            raise CheckpointError(f"{where}: more than {MOST_TOKENS:,} tokens", fix)
        require_bounded(data, 2 * count, where)
        if data.startswith(codecs.BOM_UTF8):
            what = f"{where}: it begins with the byte order mark of UTF-8, which becomes part of the first token"
            raise CheckpointError(what, "save it as UTF-8 without a byte order mark")
        lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
        return {text.rstrip("\r"): number for number, text in enumerate(lines)}, {}
    if name in PIECES:
        # a SentencePiece model repeats field 1 for each piece, and in a piece field 1 is the text
        pieces = list(first_fields(data, 0, len(data), MOST_TOKENS, where))
        require_bounded(data, 2 * len(pieces), where)
        found = (data[slice(*next(first_fields(data, *each, MOST_TOKENS, where), (0, 0)))] for each in pieces)
        # positions in tokenizer.model are ids; a class may put tokens of its own before those of others (XLM-R)
        return _positions(text.decode("utf-8", "replace") if name == PIECES[0] else None for text in found), {}
    record = json_object(folder.path, name)
    if name == "tokenizer.json":
        model, listed = record.get("model"), record.get("added_tokens")
        entries = [one for one in (listed if isinstance(listed, list) else ()) if isinstance(one, Mapping)]
        added = {one["id"]: str(one.get("content", "")) for one in entries if is_id(one.get("id"))}
        return _vocabulary(model.get("vocab") if isinstance(model, Mapping) else None), added
    if name == "tokenizer_config.json":
        decoder = record.get("added_tokens_decoder")
        by_id = decoder if isinstance(decoder, Mapping) else {}
        texts = {key: str(one.get("content", "")) if isinstance(one, Mapping) else "" for key, one in by_id.items()}
        return {}, {int(key): text for key, text in texts.items() if re.fullmatch(r"[0-9]{1,18}", key)}
    if name == "added_tokens.json":
        return {}, {number: text for text, number in _vocabulary(record).items()}
    return _vocabulary(record), {}


def _vocabulary(record: Any) -> dict[str, int]:
    """{text: id} of BPE, WordPiece and WordLevel; of Unigram's list of [text, score] the positions."""
    if isinstance(record, list):
        return _positions(entry[0] if isinstance(entry, list) and entry else None for entry in record)
    if isinstance(record, dict):  # without a copy where it is as it should be
        whole = all(map(is_id, record.values()))
        return record if whole else {text: number for text, number in record.items() if is_id(number)}
    return {}


def _positions(texts: Iterable[Any]) -> dict[str, int]:
    """{text: position}; what has no text, or one that is there already, is called by its position alone."""
    found = dict[str, int]()
    for number, text in enumerate(texts):
        found[text if isinstance(text, str) and text not in found else f"#{number}"] = number
    return found


def is_id(value: Any) -> bool:
    """Whether a JSON value can be a token's id."""
    return type(value) is int and 0 <= value < 2**63
