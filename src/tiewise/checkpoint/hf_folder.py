"""Contents of a Hugging Face folder: config, index of shard files, headers of tensor files.

A shard file is one of the files of a split checkpoint. (A shard is a part of a parameter that one rank stores.)

Each file is opened once and checked. A fault in one file does not hide the others: `Folder.faults` lists every fault
with its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tiewise.checkpoint.hub_names import FOLDER_REMEDY, remedy_for_missing
from tiewise.checkpoint.stored import Header, Stored, read_header
from tiewise.checkpoint.untrusted import MOST_BYTES, is_text_map, object_of, path_inside, read_bytes, read_json, short
from tiewise.core.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_FILES, MOST_TENSOR_FILES, MOST_TENSORS = 100_000, 30_000, 160_000  # the largest published one has 140,000 tensors
MOST_CONFIG = 8 * 2**20  # bytes of config.json
_GIVE_FOLDER = "give the checkpoint's own folder"


@dataclass(frozen=True)
class Fault:
    """File that cannot be read or contradicts itself, with the problem and its remedy."""

    file: str
    problem: str  # what is wrong, with the path
    remedy: str  # what the user can do


@contextmanager
def recording_faults(faults: list[Fault], file: str) -> Iterator[None]:
    """Turn a CheckpointError in the block into a fault of `file`, and continue after the block."""
    try:
        yield
    except CheckpointError as error:
        faults.append(Fault(file, error.problem, error.remedy))


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
    copies: tuple[Stored, ...] = ()  # further tensors whose name is in `tensors` from another file
    extra: tuple[str, ...] = ()  # other `.safetensors` files in the folder, without those of an adapter
    faults: tuple[Fault, ...] = ()  # files that could not be read or are inconsistent
    single: bool = False  # `path` of the caller was one `.safetensors`, not a folder

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
        return {name: read_bytes(path_inside(self.path, name), MOST_BYTES) for name in existing}


def json_object(folder: Path, name: str, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of a folder, of at most `most` bytes.

    Raises:
        CheckpointError: the file cannot be read, or has no object.
    """
    record = read_json(os.fspath(path_inside(folder, name)), most=most)
    if not isinstance(record, dict):
        raise CheckpointError(f"{folder / name}: not a JSON object", "take it from its source again")
    return record


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read a Hugging Face folder, or one `.safetensors` and a config.json next to it.

    It reads only headers, index and config.

    Raises:
        CheckpointError: the path does not exist, may not be read, or is neither.
    """
    path = Path(path)
    if os.path.isdir(path):
        return _open_directory(path)
    return _open_file(path)


def _open_file(path: Path) -> Folder:
    """Read the header of one `.safetensors`, and the config.json next to it.

    A config is ignored if the folder has several such files.
    """
    if path.suffix != ".safetensors" and not os.path.isfile(path):
        if os.path.exists(path):
            raise CheckpointError(f"{path}: a pipe, device or socket", FOLDER_REMEDY)
        raise CheckpointError(f"{path}: no such file or folder", remedy_for_missing(path))
    header = read_header(path)
    faults = list[Fault]()
    files: tuple[str, ...] = (path.name,)
    config = None
    neighbours = _listing(path.parent)
    is_alone = [name for name in neighbours if name.endswith(".safetensors")] == [path.name]
    if is_alone and CONFIG in neighbours:
        config = _config(path.parent, faults)
    if config is not None:
        files = (path.name, CONFIG)
    headers = {path.name: header}
    return Folder(path.parent, files, config, headers, dict(header.tensors), faults=tuple(faults), single=True)


def _open_directory(path: Path) -> Folder:
    """Read the config, the index and the headers of a folder."""
    faults = list[Fault]()
    files = _listing(path)
    config = weight_map = total_size = None
    if CONFIG in files:
        config = _config(path, faults)
    if INDEX in files:
        with recording_faults(faults, INDEX):
            weight_map, total_size = _index(path)
    candidates = [name for name in files if name.endswith(".safetensors") and not name.startswith("adapter_")]
    opened = _files_to_open(candidates, weight_map)
    if len(opened) > MOST_TENSOR_FILES:
        raise CheckpointError(f"{path}: {len(opened):,} shards are no checkpoint", _GIVE_FOLDER)
    tensor_files = _TensorFiles(path, weight_map)
    existing = frozenset(files)
    for file in opened:
        header = None
        with recording_faults(faults, file):
            if file not in existing:
                raise CheckpointError(f"{path / file}: no such file", "check the path")
            header = read_header(path_inside(path, file))
        if header is not None:
            tensor_files.add(file, header)
    return Folder(
        path,
        files,
        config,
        tensor_files.headers,
        tensor_files.tensors,
        weight_map,
        total_size,
        copies=tuple(tensor_files.copies),
        extra=tuple(sorted(set(candidates) - set(opened))),
        faults=tuple(faults),
    )


def _files_to_open(candidates: list[str], weight_map: dict[str, str] | None) -> list[str]:
    """Return the tensor files to open: those in the index, else model.safetensors, else all candidates."""
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    if SINGLE in candidates:
        return [SINGLE]
    return candidates


def _config(folder: Path, faults: list[Fault]) -> dict[str, Any] | None:
    """Return config.json. If it cannot be read, add a fault and return None."""
    with recording_faults(faults, CONFIG):
        return json_object(folder, CONFIG, MOST_CONFIG)
    return None


class _TensorFiles:
    """Tensors of the tensor files.

    If several files have a tensor, the file in the index counts, else the first one.
    """

    def __init__(self, folder: Path, weight_map: dict[str, str] | None) -> None:
        self.folder, self.weight_map = folder, weight_map or {}
        self.headers = dict[str, Header]()
        self.tensors = dict[str, Stored]()
        self.copies = list[Stored]()  # further tensors of the same name

    def add(self, file: str, header: Header) -> None:
        """Add the tensors of one file."""
        if len(self.tensors) + len(self.copies) + len(header.tensors) > MOST_TENSORS:
            raise CheckpointError(f"{self.folder}: more than {MOST_TENSORS:,} tensors are no checkpoint", _GIVE_FOLDER)
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


def _listing(path: Path) -> tuple[str, ...]:
    """Return the sorted names of all entries of a folder."""
    try:
        names = sorted(os.listdir(path))
    except PermissionError:
        raise CheckpointError(f"{path}: no permission to list it", f"chmod u+rx {path}, or ask its owner") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed ({error.strerror})", "check the path") from None
    if len(names) > MOST_FILES:
        raise CheckpointError(f"{path}: {len(names):,} entries are no checkpoint", _GIVE_FOLDER)
    return tuple(names)


def _index(path: Path) -> tuple[dict[str, str], Any]:
    """Return ({tensor: its file}, total bytes) in the index of shard files. The bytes may be None."""
    record = object_of(read_json(os.fspath(path_inside(path, INDEX)), unique=True))
    weight_map = record.get("weight_map")
    problem = _wrong_map(weight_map)
    if problem is not None:
        remedy = "take it from its source again, or delete it where all tensors are in one file"
        raise CheckpointError(f"{path / INDEX}: {problem}", remedy)
    assert isinstance(weight_map, dict), "_wrong_map accepts dictionaries alone"
    return weight_map, object_of(record.get("metadata")).get("total_size")


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
