"""Writer of all files of a result into its new folder, synced to disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.rewrite.change import NewTensor
from tiewise.checkpoint.rewrite.file_plan import PROVENANCE, FilePlan
from tiewise.checkpoint.rewrite.new_folder import copy_file, link_or_copy
from tiewise.checkpoint.untrusted import path_inside
from tiewise.core.files import sync_to_disk
from tiewise.core.progress import advance_progress, progress_of


def write_files(folder: Folder, plan: FilePlan, target: Path, provenance: bytes) -> tuple[str, ...]:
    """Write all files into the folder `target`, the index last.

    Return the files that share bytes with the source.
    """
    done = 0
    with progress_of("writing", plan.new_bytes):
        for file, tensors in plan.rewritten.items():
            done = write_tensors(target / file, tensors, folder.headers[file].metadata, done)
    linked = []
    for file in (*plan.shared, *plan.copied):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if file in plan.copied:
            copy_file(path_inside(folder.path, file), target / file)
        elif link_or_copy(path_inside(folder.path, file), target / file):
            linked.append(file)
    for file, data in {PROVENANCE: provenance, **plan.texts}.items():
        (target / file).write_bytes(data)
        sync_to_disk(target / file)
    for place, _, _ in os.walk(target, topdown=False):
        sync_to_disk(Path(place))
    return tuple(linked)


def write_tensors(path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], done: int = 0) -> int:
    """Write a new safetensors file with `tensors` in this order, and sync it to disk.

    A piece of a tensor is written as soon as it is computed.

    Args:
        done: bytes of earlier files, for the progress display.

    Returns:
        `done` plus the bytes of these tensors.
    """
    header = _header(tensors, metadata)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            count = 0
            for piece in tensor.write():
                file.write(piece)
                count += len(piece)
                advance_progress(done + count)
            if count != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {count} bytes came, {tensor.nbytes} were announced")
            done += count
    sync_to_disk(path)
    return done


def _header(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the JSON header of a safetensors file.

    Padding makes the tensors start at a multiple of 8 bytes.
    """
    stored = {tensor.name for tensor in tensors}
    # The library's `save_model` adds an entry with the name of each shared tensor that it omits. Such an entry is wrong
    # if the result stores the tensor.
    notes = {key: value for key, value in metadata.items() if key not in stored}
    record: dict[str, object] = {}
    if notes:
        record["__metadata__"] = notes
    ends = accumulate(tensor.nbytes for tensor in tensors)
    for tensor, end in zip(tensors, ends, strict=True):
        offsets = [end - tensor.nbytes, end]
        record[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return text + b" " * (-len(text) % 8)
