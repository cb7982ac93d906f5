"""Plan of all files of a result: rewritten, shared, copied or omitted.

The plan is complete before the first file is written.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from tiewise.checkpoint.hf_folder import CONFIG, INDEX, PICKLES, Folder
from tiewise.checkpoint.rewrite.change import Change, NewTensor
from tiewise.checkpoint.rewrite.json_edits import edit_json_file
from tiewise.checkpoint.stored import BITS, Header, Stored
from tiewise.checkpoint.untrusted import parse_json, path_inside, short
from tiewise.core.errors import CheckpointError

PROVENANCE = "tiewise.json"
LEFT_OUT = (".git", ".cache")  # history and download data of the source, wrong for the result
WEIGHTS = (*PICKLES, ".safetensors", ".gguf", ".onnx", ".onnx_data", ".npz")  # large files that nobody edits
OTHER_WEIGHTS = (".bin", ".msgpack", ".h5", ".ckpt", ".pth")  # other weights that a tool may load as the model
_NEW_INDEX = b"{\n  }\n"  # indented as transformers indents an index
MOST_DEPTH = 16  # deepest nesting of folders


@dataclass(frozen=True)
class FilePlan:
    """All files of the result except its provenance."""

    rewritten: dict[str, tuple[NewTensor, ...]]  # {file whose tensors change: its tensors, in order}
    shared: tuple[str, ...]  # paths of unchanged files that may share their bytes with the source
    copied: tuple[str, ...]  # paths of other unchanged files
    texts: dict[str, bytes]  # {changed file without tensors: its content}; the index last
    tensors: dict[str, NewTensor]  # {name: tensor of the result}
    notes: tuple[str, ...]  # advice for the user, one sentence each

    @property
    def written(self) -> Iterator[NewTensor]:
        """All tensors of the rewritten files, in order."""
        return chain.from_iterable(self.rewritten.values())

    @property
    def new_bytes(self) -> int:
        """Size of the tensors of the rewritten files, in bytes."""
        return sum(tensor.nbytes for tensor in self.written)


def plan_files(folder: Folder, change: Change) -> FilePlan:
    """Return the plan that carries out a change.

    Raises:
        CheckpointError: the source is damaged, or it contains a link that leads outside.
    """
    _require_readable(folder, change)
    _require_one_copy(folder, change)
    rewritten: dict[str, tuple[NewTensor, ...]] = {}
    unchanged: list[str] = []
    tensors: dict[str, NewTensor] = {}
    for file, header in folder.headers.items():
        after = _contents(file, header, change)
        tensors |= {tensor.name: tensor for tensor in after.tensors}
        if not after.is_changed:
            unchanged.append(file)
        elif after.tensors:  # a file without tensors is omitted
            rewritten[file] = after.tensors
    texts = dict(change.texts)
    if change.config:
        texts[CONFIG] = edit_json_file(folder, CONFIG, change.config)
    index_is_outdated = change.reindex or len(unchanged) < len(folder.headers)
    needs_index = folder.weight_map is not None or change.reindex
    if needs_index and index_is_outdated:
        texts[INDEX] = _index_text(folder, folder.weight_map or {}, change, tensors)

    files = _UnchangedFiles(folder)
    files.add_all({*folder.headers, *texts, PROVENANCE, *change.leave})
    return FilePlan(
        rewritten=rewritten,
        shared=tuple(sorted([*unchanged, *files.shared])),
        copied=tuple(files.copied),
        texts=texts,
        tensors=tensors,
        notes=(*_note_on_other_weights(folder), *files.notes),
    )


def _require_readable(folder: Folder, change: Change) -> None:
    """Raise if a file of the source is damaged that the change does not replace."""
    written = set(change.texts)
    if change.reindex and folder.weight_map is None:
        written.add(INDEX)
    for fault in folder.faults:
        if fault.file not in written:
            raise CheckpointError(fault.problem, fault.remedy)


class _Contents(NamedTuple):
    """The tensors of one file after a change."""

    tensors: tuple[NewTensor, ...]
    is_changed: bool


def _contents(file: str, header: Header, change: Change) -> _Contents:
    """Return the tensors that a file contains after a change."""
    dropped_here = {name for place, name in change.drop_copies if place == file}
    dropped = header.tensors.keys() & (change.drop | dropped_here)
    put = [tensor for tensor in change.put if tensor.file == file]
    return _Contents(arranged(header, dropped, put), bool(dropped or put))


def _require_one_copy(folder: Folder, change: Change) -> None:
    """Raise if two files of the result would store one tensor."""
    for copy in folder.copies:
        if copy.name in change.drop or (copy.path.name, copy.name) in change.drop_copies:
            continue
        problem = f"{folder.path}: {short(copy.name)} is stored twice, also in {copy.path.name}"
        raise CheckpointError(problem, "tiewise check says whether the two are equal; if so, tiewise repair drops one")


def _note_on_other_weights(folder: Folder) -> list[str]:
    """Return a note on weights in other formats.

    The result contains them unchanged, because they belong to the user. A tool may prefer them to the new weights.
    """
    if folder.single:
        return []
    stale = [name for name in folder.pickles if name.endswith(OTHER_WEIGHTS)]
    stale += folder.extra
    if not stale:
        return []
    listed = ", ".join(short(name) for name in stale[:3])
    if len(stale) > 3:
        listed += " …"
    return [f"{listed} stay as they were and do not know of this change: delete them where a tool prefers them"]


class _UnchangedFiles:
    """Unchanged files without the model's tensors, as paths below the folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.shared: list[str] = []
        self.copied: list[str] = []
        self.notes: list[str] = []

    def add_all(self, others: Collection[str]) -> None:
        """Add every file of the folder and its subfolders except `others`."""
        for file in self.folder.files:
            if file not in others:
                self._add(file)

    def _add(self, file: str) -> None:
        """Add a file, or the files of a subfolder."""
        if file in LEFT_OUT:
            self.notes.append(f"{file} stays behind: it speaks of the source")
            return
        if (self.folder.path / file).is_dir():
            self._add_folder(file)
            return
        path_inside(self.folder.path, file)  # raises for a link that leads outside
        if file.endswith(WEIGHTS):
            self.shared.append(file)
        else:
            self.copied.append(file)

    def _add_folder(self, file: str) -> None:
        """Add the files of a subfolder; a link to a folder is not followed."""
        path = self.folder.path / file
        if path.is_symlink():
            self.notes.append(f"{short(file)} stays behind: a link to a folder")
            return
        if file.count("/") == MOST_DEPTH:
            raise CheckpointError(f"{path}: folders go deeper than {MOST_DEPTH}", "give the checkpoint's own folder")
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be listed ({error.strerror})", "check its permissions") from None
        for name in names:
            self._add(f"{file}/{name}")


def arranged(header: Header, dropped: Collection[str], put: Iterable[NewTensor]) -> tuple[NewTensor, ...]:
    """Return the tensors of a file after a change, each aligned to its type.

    Stored tensors keep their order. The safetensors library stores wider types first, so a new tensor is inserted
    after the last one that is at least as wide. If a tensor would not be aligned in this order, all are sorted by
    width, because readers use the bytes without copying them.
    """
    new = {tensor.name: tensor for tensor in put}
    tensors = []
    for name, stored in header.tensors.items():
        if name in dropped:
            continue
        if name in new:
            tensors.append(new.pop(name))
        else:
            tensors.append(NewTensor.copy(stored))
    for tensor in new.values():
        tensors.insert(_place_by_width(tensors, tensor), tensor)
    if not _are_aligned(tensors):
        tensors.sort(key=lambda tensor: -BITS[tensor.dtype])
    return tuple(tensors)


def _place_by_width(tensors: Sequence[NewTensor], new: NewTensor) -> int:
    """Return the index after the last tensor of at least the new tensor's width."""
    for place in range(len(tensors), 0, -1):
        if BITS[tensors[place - 1].dtype] >= BITS[new.dtype]:
            return place
    return 0


def _are_aligned(tensors: Sequence[NewTensor]) -> bool:
    """Return True if every tensor starts at a multiple of the bytes of its type."""
    start = 0
    for tensor in tensors:
        if start % max(1, BITS[tensor.dtype] // 8):
            return False
        start += tensor.nbytes
    return True


# the index


def _index_text(folder: Folder, old: Mapping[str, str], change: Change, tensors: Mapping[str, NewTensor]) -> bytes:
    """Return the text of the result's index.

    It has the file of every tensor, and the sum of bytes. All other entries stay. A name that no file contains also
    stays, unless the change drops it: the entry shows that a tensor is missing. An index that is absent or unreadable
    is replaced.
    """
    text, record = _NEW_INDEX, {}
    if folder.weight_map is not None:
        text = folder.read(INDEX)[INDEX]
        record = parse_json(text, str(folder.path / INDEX), unique=True)
    metadata = record.get("metadata")
    if not isinstance(metadata, dict):
        metadata = {}
    metadata["total_size"] = sum(tensor.nbytes for tensor in tensors.values())
    if type(metadata.get("total_parameters")) is int:
        metadata["total_parameters"] += _parameters(tensors) - _parameters(folder.tensors)
    gone = folder.tensors.keys() | change.drop
    files = {name: file for name, file in old.items() if name not in gone}
    files |= {name: tensor.file for name, tensor in tensors.items()}
    weight_map = {name: files[name] for name in _in_old_order(files, old)}
    record |= {"metadata": metadata, "weight_map": weight_map}
    return _spaced_alike(record, text)


def _parameters(tensors: Mapping[str, Stored] | Mapping[str, NewTensor]) -> int:
    """Return the number of values of all tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def _in_old_order(names: Collection[str], old: Iterable[str]) -> list[str]:
    """Return names in the order of an index.

    If the old names are sorted, all names are. Else the old names keep their order, and new names come last.
    """
    before = [name for name in old if name in names]
    if before == sorted(before):
        return sorted(names)
    return list(dict.fromkeys([*before, *names]))  # without duplicates


def _spaced_alike(record: Mapping[str, Any], old: bytes) -> bytes:
    """Return the JSON of a record, indented and ended like the old text."""
    first_line = re.match(rb"\s*[\[{][ \t]*\r?\n([ \t]+)", old)
    indent = None
    if first_line is not None:
        indent = first_line[1].decode()
    text = json.dumps(record, indent=indent).encode()
    if old.endswith(b"\n"):
        text += b"\n"
    return text
