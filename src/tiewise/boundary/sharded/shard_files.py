"""Files of a sharded save: an index, and one safetensors file per process.

    sharded.json                         names, types, shapes, which process holds which part, each file's SHA-256
    sharded-3f9c02aa-00000.safetensors   the parts of process 0, and so on

The index names its files. It is written last and replaces the index before it in one step. Until then the files of
two saves are next to each other, and the older save is the one that is loaded. Nothing is pickled. Everything is read
as untrusted.

tiewise has a separate format because torch.distributed.checkpoint breaks documented promises, also with its
`HuggingFaceStorageWriter` and `HuggingFaceStorageReader` (torch 2.13). `test_torch_checkpoint.py` has one test for
each promise, which turns red as soon as torch keeps that promise:

- Fused matrices (gate and up in one parameter under tensor parallelism) come back. torch describes the part of a
  process as one box. It refuses to save such a parameter, and fills it with wrong rows on loading, without an error
  (`test_fused_matrices_are_saved`, `test_fused_matrices_are_filled_with_their_own_rows`).
- A parameter that is not contiguous is saved (`test_a_transposed_parameter_is_saved`).
- The optimizer's options come back, and nothing is pickled. torch writes a pickle of each option in front of the
  safetensors bytes, and cannot read the file (`test_an_optimizer_and_its_options_come_back`,
  `test_nothing_is_pickled`).
- A tied table is stored once and stays tied (`test_a_tied_table_is_stored_once`,
  `test_two_tables_are_not_loaded_into_one`).
- A save is whole or is not loaded, and a failed save leaves the save before it. torch overwrites its files in place,
  writes no index, and leaves rows unset that no file holds (`test_a_full_disk_leaves_the_save_before`,
  `test_a_save_that_lacks_a_file_is_refused`, `test_parts_that_leave_a_hole_are_refused`,
  `test_a_save_of_fewer_processes_leaves_no_file_of_the_save_before`).
- Anything else than what was saved is refused in one line: another byte, a file outside the folder, another type, a
  tensor that the model lacks (`test_an_altered_byte_is_refused`, `test_a_file_outside_the_folder_is_refused`,
  `test_another_type_is_refused`, `test_a_tensor_that_the_model_lacks_is_refused`, `test_a_refusal_is_one_line`).
- A save needs no second copy in memory (`test_a_save_holds_no_copy_of_the_tensors`).

A separate index, digests and a commit step around torch's planner and storage keep most of these promises. They do not
keep the first, the last and the check for holes. Those need separate parts and files, and torch would then provide
only the overlaps of parts.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.sharded.cuts import Overlap, local_indices, local_part, overlaps, parts_cover, shape_of
from tiewise.checkpoint.rewrite.new_folder import cannot_write
from tiewise.checkpoint.stored import CHUNK_BYTES, Header, Reader, Stored, read_header
from tiewise.checkpoint.untrusted import open_regular, path_inside, read_json, short
from tiewise.core import ranks
from tiewise.core.errors import CheckpointError, RunError
from tiewise.core.records import from_record

INDEX = "sharded.json"
VERSION = 1
_SAVE_FILE = re.compile(r"\.?sharded(-[0-9a-f]{8}-\d{5}\.safetensors|\.json)(\.\d+\.partial)?")
TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
OTHER_SAVE = "take the save before it, or a copy of this one"


@dataclass(frozen=True)
class ShardPart:
    """Part of a tensor that one process has written."""

    process: int
    held: list[list[list[int]]]  # indices, as in `cuts`


@dataclass(frozen=True)
class SavedTensor:
    """Saved tensor: its type and full shape [..], placement and the number of its layout."""

    dtype: str
    shape: list[int]
    placed: str  # placement on the mesh of processes, in words
    layout: int  # position in `Index.layouts`


@dataclass(frozen=True)
class ShardFile:
    """File of one process."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """Everything in a save except the tensors' bytes.

    A field that the save lacked is None.
    """

    version: int
    notes: dict[str, Any]
    files: list[ShardFile]  # one file of each process
    layouts: list[list[ShardPart]]  # the parts of all tensors with the same cuts
    tensors: dict[str, SavedTensor]  # by name: "model/NAME", "optimizer/exp_avg/NAME"
    aliases: dict[str, str]  # name in the model → the name under which the same tensor is saved
    values: dict[str, Any]  # state of the optimizer that is not a tensor
    groups: list[dict[str, Any]] | None
    architecture: str | None
    config: dict[str, Any] | None
    generation_config: dict[str, Any] | None


class ShardedSave:
    """Save in an untrusted folder."""

    def __init__(self, folder: Path) -> None:
        """Read and check the index.

        Raises:
            CheckpointError: there is no complete save, or it has another version, or its parts are inconsistent.
            RunError: a field of the index has the wrong type.
        """
        self.folder = folder
        self._headers: dict[int, Header] = {}
        path = path_inside(folder, INDEX)
        if not path.exists():
            raise CheckpointError(f"{folder}: {_explain_absence(folder)}", "give the folder of one that is whole")
        record = read_json(os.fspath(path))
        if not isinstance(record, dict) or record.get("version") != VERSION:
            raise CheckpointError(f"{path}: it is of no version that is known here", "is a newer tiewise needed?")
        self.index = from_record(Index, record, os.fspath(path), OTHER_SAVE)
        self._check_tensors(path)
        names = {name.removeprefix("model/") for name in self.index.tensors}
        if not names.issuperset(self.index.aliases.values()):
            raise CheckpointError(f"{path}: an alias of a tensor that is not kept", OTHER_SAVE)

    def _check_tensors(self, path: Path) -> None:
        """Refuse a tensor of an unknown type or layout, or with missing parts."""
        checked: set[tuple[int, ...]] = set()  # checked pairs of layout and shape, which many tensors share
        for name, tensor in self.index.tensors.items():
            if tensor.dtype not in TYPES or not 0 <= tensor.layout < len(self.index.layouts):
                raise CheckpointError(f"{path}: {short(name)} is of no known type or layout", OTHER_SAVE)
            key = (tensor.layout, *tensor.shape)
            if key not in checked:
                self._check_parts(path, name, tensor)
                checked.add(key)

    def _check_parts(self, path: Path, name: str, tensor: SavedTensor) -> None:
        """Refuse a tensor whose parts are incomplete, or are in no file of the index."""
        parts = self.index.layouts[tensor.layout]
        if not parts_cover(tensor.shape, [part.held for part in parts]):
            raise CheckpointError(f"{path}: {short(name)} has parts that do not make it up", OTHER_SAVE)
        processes = {part.process for part in parts}
        if not processes.issubset(range(len(self.index.files))):
            raise CheckpointError(f"{path}: {short(name)} lies in no file that it names", OTHER_SAVE)

    def verify(self) -> None:
        """Compare the files with their sizes and digests in the index.

        Several processes share this work.
        """
        for file in self.index.files[ranks.rank() :: ranks.size()]:
            path = path_inside(self.folder, file.name)
            if not path.exists():
                raise CheckpointError(f"{path}: it is gone", OTHER_SAVE)
            if path.stat().st_size != file.size or sha256(path) != file.sha256:
                raise CheckpointError(f"{path}: it is not what was written", OTHER_SAVE)

    def name_of(self, name: str) -> str:
        """Return the name under which a tensor of the model is stored, both with `model/`."""
        return f"model/{self.owner_of(name.removeprefix('model/'))}"

    def owner_of(self, name: str) -> str:
        """Return the name under which a parameter is stored: the first name of a tied one."""
        return self.index.aliases.get(name, name)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill the part of a tensor in this process from the stored parts that overlap it."""
        entry, target, indices = self.index.tensors[name], local_part(tensor), local_indices(tensor)
        filled = torch.empty(target.shape, dtype=target.dtype)
        for part in self.index.layouts[entry.layout]:
            axes = [overlaps(*runs) for runs in zip(part.held, indices, strict=True)]
            if all(axes):
                stored = self._find_part(name, entry, part)
                _copy_overlap(stored, shape_of(part.held), axes, filled)
        target.copy_(filled)

    def _find_part(self, name: str, entry: SavedTensor, part: ShardPart) -> Stored:
        """Return where a part of a tensor is stored.

        Raises:
            CheckpointError: no tensor of that type and shape is stored there.
        """
        if part.process not in self._headers:
            self._headers[part.process] = read_header(path_inside(self.folder, self.index.files[part.process].name))
        header, shape = self._headers[part.process], shape_of(part.held)
        stored = header.tensors.get(name)
        if stored is None or (stored.dtype, stored.shape) != (entry.dtype, shape):
            what = f"{short(name)} is not stored there as {entry.dtype} {list(shape)}"
            raise CheckpointError(f"{header.path}: {what}", OTHER_SAVE)
        return stored


def _explain_absence(folder: Path) -> str:
    """Return why a folder lacks the index: no save, or an incomplete one."""
    if folder.is_dir():
        for name in os.listdir(folder):
            if _SAVE_FILE.fullmatch(name):
                return "the save was cut short before it was whole"
    return f"no save lies there (no {INDEX})"


def _copy_overlap(stored: Stored, shape: tuple[int, ...], axes: list[list[Overlap]], target: Tensor) -> None:
    """Copy the overlap of a stored part with `target`, reading only rows of the overlap."""
    if not axes:  # treat a scalar as one row
        shape, axes, target = (1,), [[Overlap(0, 0, 1)]], target.view(1)
    row_overlaps, *other_axes = axes
    with Reader(stored) as reader:
        step = max(1, CHUNK_BYTES // max(1, reader.row_bytes))
        for overlap in row_overlaps:
            for done in range(0, overlap.length, step):
                rows = min(step, overlap.length - done)
                raw = bytearray(rows * reader.row_bytes)
                reader.read_into(memoryview(raw), (overlap.source + done) * reader.row_bytes)
                block = torch.frombuffer(raw, dtype=target.dtype).view(rows, *shape[1:])
                start = overlap.target + done
                _copy_columns(block, target[start : start + rows], other_axes)


def _copy_columns(block: Tensor, target: Tensor, axes: list[list[Overlap]]) -> None:
    """Copy each row of `block` to one of `target`, in the overlaps of the other axes."""
    rows = slice(None)
    for box in itertools.product(*axes):
        columns_from = [overlap.source_slice for overlap in box]
        columns_to = [overlap.target_slice for overlap in box]
        target[(rows, *columns_to)] = block[(rows, *columns_from)]


def sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    digest = hashlib.sha256()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def wrap_write_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError in the block into a CheckpointError that says why writing failed."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from None


def remove_old_files(folder: Path) -> None:
    """Remove files of saves that the index does not name.

    They belong to an incomplete save, or to the save before this one.
    """
    named = {INDEX}
    with suppress(OSError, CheckpointError, RunError):  # if the index cannot be read, no file is removed
        if (folder / INDEX).exists():
            named |= {file.name for file in ShardedSave(folder).index.files}
        for path in folder.iterdir():
            if _SAVE_FILE.fullmatch(path.name) and path.name not in named:
                path.unlink()
