"""What lies in a checkpoint's folder, and what could not be read: opened once, believed only where checked.

A fault in one file does not hide the others: `Folder.faults` keeps each with the file that it concerns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tiewise.checkpoint.header import Header, Stored, read_header
from tiewise.checkpoint.open_file import inside
from tiewise.checkpoint.strict_json import read_json, short
from tiewise.core.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_FILES, MOST_SHARDS, MOST_TENSORS = 100_000, 30_000, 160_000  # the largest known has some hundred and 140,000
MOST_CONFIG = 8 * 2**20  # bytes


@dataclass(frozen=True)
class Fault:
    """A file, or what is said of one, that cannot be true: what, and the way out."""

    file: str
    what: str
    fix: str


@dataclass(frozen=True)
class Index:
    """`model.safetensors.index.json`: which file should hold which tensor."""

    name: str
    weight_map: dict[str, str]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Folder:
    """A checkpoint as it lies on disk.

    Args:
        path: the folder, or the folder of the single file that was given.
        files: names of all entries directly inside, sorted (of a single file: that one).
        config: config.json; None where there is none or it cannot be read.
        index: of the shards; None for a single file.
        headers: of the files of tensors, by file name. With an index the files it names, else every `.safetensors`.
        tensors: every tensor by name, from the file that the index maps it to (else the first that holds it).
        copies: tensors of a name that another file already gave.
        extra: names of `.safetensors` files in the folder that the index does not name.
        faults: what could not be read or cannot be true.
        single: one `.safetensors` was given rather than a folder.
    """

    path: Path
    files: tuple[str, ...]
    config: dict[str, Any] | None
    index: Index | None
    headers: dict[str, Header]
    tensors: dict[str, Stored]
    copies: tuple[Stored, ...] = ()
    extra: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    single: bool = False

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

    def has(self, name: str) -> bool:
        """Whether an entry of this name lies directly in the folder."""
        return name in self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.files)

    def json(self, name: str) -> Any:
        """Return what the JSON file `name` of the folder holds.

        Raises:
            CheckpointError: it leads outside, cannot be read, or is no JSON.
        """
        return read_json(os.fspath(inside(self.path, name)))


@dataclass
class _Faults:
    """Collects faults while a folder is being read."""

    found: list[Fault] = field(default_factory=list)

    def note(self, file: str, error: CheckpointError) -> None:
        self.found.append(Fault(file, error.what, error.fix))


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read a Hugging Face folder, or one `.safetensors` (with the config.json beside it, if there is one).

    Only headers, index and config are read.

    Raises:
        CheckpointError: the path does not exist, may not be read, or is neither.
    """
    path = Path(path)
    if os.path.isdir(path):
        return _folder(path)
    if path.suffix == ".safetensors" or os.path.isfile(path):
        return _file(path)
    what = "a pipe, device or socket" if os.path.exists(path) else "no such file or folder"
    raise CheckpointError(f"{path}: {what}", "give a checkpoint folder, or one .safetensors file")


def _file(path: Path) -> Folder:
    header = read_header(path)
    faults = _Faults()
    names = _listing(path.parent)
    config = _config(path.parent, faults) if CONFIG in names and _only_weights(path, names) else None
    tensors = dict(header.tensors)
    files = (path.name, CONFIG) if config is not None else (path.name,)
    return Folder(
        path.parent, files, config, None, {path.name: header}, tensors, faults=tuple(faults.found), single=True
    )


def _only_weights(path: Path, names: tuple[str, ...]) -> bool:
    """Whether a config beside a file speaks of it: not where the file is one shard of several."""
    return [name for name in names if name.endswith(".safetensors")] == [path.name]


def _folder(path: Path) -> Folder:
    names = _listing(path)
    faults = _Faults()
    config = _config(path, faults) if CONFIG in names else None
    index = _index(path, faults) if INDEX in names else None
    stored = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    wanted = sorted(set(index.weight_map.values())) if index is not None else stored
    if index is None and SINGLE in stored:
        wanted = [SINGLE]
    if len(wanted) > MOST_SHARDS:
        raise CheckpointError(f"{path}: {len(wanted):,} shards are no checkpoint", "give the checkpoint's own folder")
    headers: dict[str, Header] = {}
    there, tensors = frozenset(names), 0
    for name in wanted:
        try:
            if name not in there:
                raise CheckpointError(f"{path / name}: no such file", "check the path")
            headers[name] = read_header(inside(path, name))
        except CheckpointError as error:
            faults.note(name, error)
            continue
        tensors += len(headers[name].tensors)
        if tensors > MOST_TENSORS:
            fix = "give the checkpoint's own folder"
            raise CheckpointError(f"{path}: more than {MOST_TENSORS:,} tensors are no checkpoint", fix)
    extra = tuple(name for name in sorted(set(stored) - set(wanted)))
    return Folder(path, names, config, index, headers, *_gather(headers, index), extra, tuple(faults.found))


def _gather(headers: dict[str, Header], index: Index | None) -> tuple[dict[str, Stored], tuple[Stored, ...]]:
    tensors: dict[str, Stored] = {}
    copies: list[Stored] = []
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            mapped = index is not None and index.weight_map.get(name) == file
            if name not in tensors:
                tensors[name] = tensor
            elif mapped:
                copies.append(tensors[name])
                tensors[name] = tensor
            else:
                copies.append(tensor)
    return tensors, tuple(copies)


def _listing(path: Path) -> tuple[str, ...]:
    try:
        names = sorted(os.listdir(path))
    except PermissionError:
        raise CheckpointError(f"{path}: no permission to list it", f"chmod u+rx {path}, or ask its owner") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed ({error.strerror})", "check the path") from None
    if len(names) > MOST_FILES:
        raise CheckpointError(f"{path}: {len(names):,} entries are no checkpoint", "give the checkpoint's own folder")
    return tuple(names)


def _config(path: Path, faults: _Faults) -> dict[str, Any] | None:
    try:
        record = read_json(os.fspath(inside(path, CONFIG)), most=MOST_CONFIG)
        if isinstance(record, dict):
            return record
        raise CheckpointError(f"{path / CONFIG}: no JSON object", "take it from its source again")
    except CheckpointError as error:
        faults.note(CONFIG, error)
        return None


def _index(path: Path, faults: _Faults) -> Index | None:
    fix = "take it from its source again, or delete it where all tensors are in one file"
    try:
        record = read_json(os.fspath(inside(path, INDEX)), unique=True)
        weight_map = record.get("weight_map") if isinstance(record, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{path / INDEX}: it has no weight_map from tensors to files", fix)
        files = set(weight_map.values())
        if len(weight_map) > MOST_TENSORS or len(files) > MOST_SHARDS:
            what = f"{path / INDEX}: {len(weight_map):,} tensors in {len(files):,} files are no checkpoint"
            raise CheckpointError(what, fix)
        for file in sorted(files):
            if file != Path(file).name:
                raise CheckpointError(
                    f"{path / INDEX}: names the file {short(file)}, which does not lie in the folder", fix
                )
        metadata = record.get("metadata")
        return Index(INDEX, weight_map, metadata if isinstance(metadata, dict) else {})
    except CheckpointError as error:
        faults.note(INDEX, error)
        return None
