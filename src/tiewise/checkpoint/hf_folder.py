"""Contents of a Hugging Face folder or repository: config, index of shard files, headers.

A shard file is one of the files of a split checkpoint. (A shard is a part of a parameter that one rank stores.)

Each file is opened once and checked. A fault in one file does not hide the others: `Folder.faults` lists every fault
with its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiewise.checkpoint.file_sources import GIVE_FOLDER, FileSource, HubError, HubSource, LocalFolder
from tiewise.checkpoint.hub_names import (
    FOLDER_REMEDY,
    HubPath,
    cached_model,
    checkpoint_path,
    files_needed_on_disk,
    is_hub_path,
    remedy_for_missing,
)
from tiewise.checkpoint.shard_choice import shards_of_ends
from tiewise.checkpoint.stored import Header, Stored, read_header, read_header_from
from tiewise.checkpoint.untrusted import MOST_BYTES, is_text_map, object_of, parse_json, short
from tiewise.core import Late
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import report_progress

hub = Late("tiewise.checkpoint.hub_repository")  # imported late: it needs huggingface_hub

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_TENSOR_FILES, MOST_TENSORS = 30_000, 160_000  # the largest published checkpoint has 140,000 tensors
PREFETCHED = 64  # shard files whose beginnings are read together
MOST_CONFIG = 8 * 2**20  # bytes of config.json


@dataclass(frozen=True)
class Fault:
    """File that cannot be read or contradicts itself, with the problem and its remedy."""

    file: str
    problem: str  # what is wrong, with the path
    remedy: str  # what the user can do


@contextmanager
def recording_faults(faults: list[Fault], file: str) -> Iterator[None]:
    """Turn a CheckpointError in the block into a fault of `file`, and continue after the block.

    A server's error ends the check: it is no fault of the file.
    """
    try:
        yield
    except HubError:
        raise
    except CheckpointError as error:
        faults.append(Fault(file, error.problem, error.remedy))


@dataclass(frozen=True)
class HubReading:
    """Parts of a repository of the Hub that a command reads."""

    all_headers: bool = False  # the headers of all shards; False: of those with the two ends and tied tensors
    all_rows: bool = False  # tables are read whole; False: two tables are compared on random rows


@dataclass(frozen=True)
class Folder:
    """Stored checkpoint."""

    path: Path  # the folder, or the folder of the single file
    files: tuple[str, ...]  # sorted names of all entries directly inside; for a single file, its name
    config: dict[str, Any] | None  # config.json; None if absent or unreadable
    # {file: header} of the tensor files: those in the index, else model.safetensors, else all of them
    headers: dict[str, Header]
    # {name: tensor}, each from the file in the index, else from the first file that has it
    tensors: dict[str, Stored]
    weight_map: dict[str, str] | None = None  # {tensor: its file} in the index of shard files; None without an index
    total_size: Any = None  # total bytes of all tensors in the index; None if absent
    index_lacks_metadata: bool = False  # the index has no object `metadata`, and transformers stops at it
    copies: tuple[Stored, ...] = ()  # further tensors whose name is in `tensors` from another file
    extra: tuple[str, ...] = ()  # other `.safetensors` files in the folder, without those of an adapter
    faults: tuple[Fault, ...] = ()  # files that could not be read or are inconsistent
    has_unread_tensors: bool = False  # a file of tensors could not be read
    single: bool = False  # `path` of the caller was one `.safetensors`, not a folder
    # {tensor: its shard file} of the shards in the index whose headers were left out; empty for a folder on disk
    unread: Mapping[str, str] = field(default_factory=dict)
    repository: HubSource | None = None  # repository of the Hub with the files; None for a folder on disk

    @property
    def source(self) -> FileSource:
        """Return the source of the files."""
        return self.repository or LocalFolder(self.path)

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Return the names of all tensors, including those of shards whose headers were left out."""
        return (*self.tensors, *self.unread)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors. A shard that was left out counts as a whole."""
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        return nbytes + sum(map(self.source.size_of, self.unread_files))

    @property
    def unread_files(self) -> tuple[str, ...]:
        """Return the shard files whose headers were left out."""
        return tuple(sorted(set(self.unread.values())))

    @property
    def lost_shards(self) -> tuple[str, ...]:
        """Return the shard files in the index that are missing."""
        return tuple(sorted(file for file in set((self.weight_map or {}).values()) if not self.has(file)))

    @property
    def has_unread_index(self) -> bool:
        """Return whether the index of shard files could not be read."""
        return any(fault.file == INDEX for fault in self.faults)

    @property
    def pickles(self) -> tuple[str, ...]:
        """Return the files with pickled or foreign weights, which are never opened."""
        return tuple(name for name in self.files if name.endswith(PICKLES) and not name.startswith("training_args"))

    @property
    def opened(self) -> str | None:
        """Return the tensor file or index that transformers opens; None if it finds none."""
        if self.single:
            return self.files[0]
        names: tuple[str, ...] = (SINGLE, INDEX, TORCH, TORCH_INDEX)
        configured = (self.config or {}).get("transformers_weights")
        if isinstance(configured, str):
            names = (configured,)
        return next(filter(self.has, names), None)

    @property
    def is_adapter(self) -> bool:
        """Return whether the folder has a PEFT adapter and no model."""
        return self.has(ADAPTER_CONFIG) and not self.tensors

    def has(self, name: str) -> bool:
        """Return whether an entry of this name is directly in the folder."""
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.files)

    def read(self, *names: str) -> dict[str, bytes]:
        """Return {name: content} of the named files that exist."""
        existing = filter(self.has, dict.fromkeys(names))
        return {name: self.source.read_bytes(name, MOST_BYTES) for name in existing}


def json_object(source: FileSource, name: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of a source, of at most `most` bytes.

    Raises:
        CheckpointError: the file cannot be read, or has no object.
    """
    where = f"{source.path / name}"
    record = parse_json(source.read_bytes(name, most), where)
    if not isinstance(record, dict):
        raise CheckpointError(f"{where}: not a JSON object", "take it from its source again")
    return record


def open_folder(path: str | os.PathLike[str], reading: HubReading | None = None) -> Folder:
    """Read a Hugging Face folder, or one `.safetensors` and a config.json next to it.

    It reads only headers, index and config.

    Args:
        path: the folder or file; with `reading`, also an address hf://org/model, or a model's name in the local cache.
        reading: what is read of a repository; None for callers that need the files on disk.

    Raises:
        CheckpointError: the path does not exist, may not be read, or is neither.
    """
    path = checkpoint_path(path)
    if is_hub_path(path):
        return read_repository(open_repository(path, reading), reading or HubReading())
    if reading is not None:
        path = cached_model(path) or path
    if os.path.isdir(path):
        return _open_source(LocalFolder(path), HubReading(all_headers=True))
    return _open_file(path, reads_hub=reading is not None)


def read_repository(repository: HubSource, reading: HubReading) -> Folder:
    """Read the config, the index and the headers of a repository whose files are listed.

    Raises:
        CheckpointError: it has too many tensors or shards, or the server fails.
    """
    if repository.file is not None:
        return replace(_single_file_of(repository, repository.file), repository=repository)
    return replace(_open_source(repository, reading), repository=repository)


def _single_file_of(repository: HubSource, name: str) -> Folder:
    """Read the header of the `.safetensors` that an address names, and the config.json next to it."""
    if not name.endswith(".safetensors"):
        remedy = "give a repository, a folder in it, or one .safetensors, .gguf or .onnx file"
        raise CheckpointError(f"{repository.path / name}: no file of tensors that this command reads", remedy)
    return _single_file(repository, name, read_header_from(repository, name))


def open_repository(path: HubPath, reading: HubReading | None) -> HubSource:
    """Return the repository at an address of the Hub as a source; its files are listed.

    Raises:
        CheckpointError: the command needs the files on disk, a package is missing, or the Hub refuses.
    """
    if reading is None:
        raise files_needed_on_disk(path)
    if find_spec("huggingface_hub") is None:
        raise CheckpointError(f"{path}: reading it needs huggingface_hub", "pip install 'tiewise[hub]'")
    repository: HubSource = hub.HubRepository(path, reading.all_rows)
    return repository


def _open_file(path: Path, reads_hub: bool) -> Folder:
    """Read the header of one `.safetensors`, and the config.json next to it."""
    if path.suffix != ".safetensors" and not os.path.isfile(path):
        if os.path.exists(path):
            raise CheckpointError(f"{path}: a pipe, device or socket", FOLDER_REMEDY)
        raise CheckpointError(f"{path}: no such file or folder", remedy_for_missing(path, reads_hub))
    return _single_file(LocalFolder(path.parent), path.name, read_header(path))


def _single_file(source: FileSource, name: str, header: Header) -> Folder:
    """Return one `.safetensors` of a source with its config.json.

    The config counts if no other such file is next to it.
    """
    faults = list[Fault]()
    files: tuple[str, ...] = (name,)
    config = None
    neighbours = source.list()
    is_alone = [neighbour for neighbour in neighbours if neighbour.endswith(".safetensors")] == [name]
    if is_alone and CONFIG in neighbours:
        config = _config(source, faults)
    if config is not None:
        files = (name, CONFIG)
    tensors = dict(header.tensors)
    return Folder(source.path, files, config, {name: header}, tensors, faults=tuple(faults), single=True)


def _open_source(source: FileSource, reading: HubReading) -> Folder:
    """Read the config, the index and the headers of a source."""
    faults = list[Fault]()
    files = source.list()
    config, index = None, _Index()
    if CONFIG in files:
        config = _config(source, faults)
    if INDEX in files:
        with recording_faults(faults, INDEX):
            index = _index(source)
    candidates = [name for name in files if name.endswith(".safetensors") and not name.startswith("adapter_")]
    opened = _files_to_open(candidates, index.weight_map)
    if len(opened) > MOST_TENSOR_FILES:
        raise CheckpointError(f"{source.path}: {len(opened):,} shards are no checkpoint", GIVE_FOLDER)
    first_choice = opened
    if not reading.all_headers and index.weight_map is not None:
        first_choice = _files_of_ends(index.weight_map, config, opened, files)
    tensor_files = _TensorFiles.of(source, index.weight_map, first_choice)
    if first_choice != opened and tensor_files.contradict_index():
        tensor_files = _TensorFiles.of(source, index.weight_map, opened)
    return Folder(
        source.path,
        files,
        config,
        tensor_files.headers,
        tensor_files.tensors,
        index.weight_map,
        index.total_size,
        index.lacks_metadata,
        copies=tuple(tensor_files.copies),
        extra=tuple(sorted(set(candidates) - set(opened))),
        faults=(*faults, *tensor_files.faults),
        has_unread_tensors=bool(tensor_files.faults),
        unread=tensor_files.unread(),
    )


def _files_of_ends(
    weight_map: Mapping[str, str], config: Mapping[str, Any] | None, opened: list[str], files: tuple[str, ...]
) -> list[str]:
    """Return the shard files with the ends of the model and tied tensors.

    If the names do not show them, it returns all. Missing files are included, so that they become faults.
    """
    needed = shards_of_ends(weight_map, config)
    if needed is None:
        return opened
    needed |= set(opened).difference(files)
    return [name for name in opened if name in needed]


def _files_to_open(candidates: list[str], weight_map: dict[str, str] | None) -> list[str]:
    """Return the tensor files to open: those in the index, else model.safetensors, else all candidates."""
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    if SINGLE in candidates:
        return [SINGLE]
    return candidates


def _config(source: FileSource, faults: list[Fault]) -> dict[str, Any] | None:
    """Return config.json. If it cannot be read, add a fault and return None."""
    with recording_faults(faults, CONFIG):
        return json_object(source, CONFIG, MOST_CONFIG)
    return None


class _TensorFiles:
    """Tensors of the tensor files.

    If several files have a tensor, the file in the index counts, else the first one.
    """

    def __init__(self, source: FileSource, weight_map: dict[str, str] | None) -> None:
        self.source, self.weight_map = source, weight_map or {}
        self.opened = frozenset[str]()  # files that were read, or that cannot be read
        self.faults = list[Fault]()  # files that cannot be read
        self.headers = dict[str, Header]()
        self.tensors = dict[str, Stored]()
        self.copies = list[Stored]()  # further tensors of the same name

    @classmethod
    def of(cls, source: FileSource, weight_map: dict[str, str] | None, files: list[str]) -> _TensorFiles:
        """Read the headers of files. A file that cannot be read becomes a fault."""
        tensor_files, existing = cls(source, weight_map), frozenset(source.list())
        tensor_files.opened = frozenset(files)
        for number, file in enumerate(files, 1):
            if number % PREFETCHED == 1:
                source.prefetch(files[number - 1 : number - 1 + PREFETCHED])
            header = None
            with recording_faults(tensor_files.faults, file):
                if file not in existing:
                    raise CheckpointError(f"{source.path / file}: no such file", "check the path")
                header = read_header_from(source, file)
            if header is not None:
                tensor_files._add(file, header)
            report_progress("reading headers", number, len(files))
        return tensor_files

    def unread(self) -> dict[str, str]:
        """Return {tensor: its file} of the files in the index that were left out."""
        return {name: file for name, file in self.weight_map.items() if file not in self.opened}

    def contradict_index(self) -> bool:
        """Return whether a header and the index name different tensors for a file."""
        if self.copies or self.tensors.keys() - self.weight_map.keys():
            return True
        for name, file in self.weight_map.items():
            if file in self.headers and name not in self.headers[file].tensors:
                return True
        return False

    def _add(self, file: str, header: Header) -> None:
        """Add the tensors of one file."""
        if len(self.tensors) + len(self.copies) + len(header.tensors) > MOST_TENSORS:
            raise CheckpointError(
                f"{self.source.path}: more than {MOST_TENSORS:,} tensors are no checkpoint", GIVE_FOLDER
            )
        self.headers[file] = header
        for name, tensor in header.tensors.items():
            other = self.tensors.setdefault(name, tensor)
            if other is tensor:
                continue
            if self.weight_map.get(name) == file:
                self.tensors[name] = tensor
                self.copies.append(other)
            else:
                self.copies.append(tensor)


@dataclass(frozen=True)
class _Index:
    """Content of an index of shard files. Without arguments: no index."""

    weight_map: dict[str, str] | None = None  # {tensor: its file}; None without an index
    total_size: Any = None  # total bytes of all tensors; None if absent
    lacks_metadata: bool = False  # `metadata` is absent, or no object


def _index(source: FileSource) -> _Index:
    """Return the index of shard files."""
    where = f"{source.path / INDEX}"
    record = object_of(parse_json(source.read_bytes(INDEX, MOST_BYTES), where, unique=True))
    weight_map = record.get("weight_map")
    problem = _wrong_map(weight_map)
    if problem is not None:
        remedy = "take it from its source again, or delete it where all tensors are in one file"
        raise CheckpointError(f"{where}: {problem}", remedy)
    assert isinstance(weight_map, dict), "_wrong_map accepts dictionaries alone"
    metadata = record.get("metadata")
    return _Index(weight_map, object_of(metadata).get("total_size"), not isinstance(metadata, dict))


def _wrong_map(weight_map: Any) -> str | None:
    """Return the problem of a `weight_map`. None for a map from tensors to files of the folder."""
    if not is_text_map(weight_map):
        return "it has no weight_map from tensors to files"
    files = sorted(set(weight_map.values()))
    if len(weight_map) > MOST_TENSORS or len(files) > MOST_TENSOR_FILES:
        return f"{len(weight_map):,} tensors in {len(files):,} files are no checkpoint"
    for file in files:
        if file != Path(file).name:
            return f"names the file {short(file)}, which does not lie in the folder"
    return None
