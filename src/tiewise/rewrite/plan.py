"""What will be written, linked and copied, decided before anything is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiewise.checkpoint.hf_folder import CONFIG, INDEX, PICKLES, Folder
from tiewise.checkpoint.untrusted import MOST_BYTES, inside, read_whole, short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import Change, NewTensor, copy_of
from tiewise.rewrite.index_text import index_text
from tiewise.rewrite.json_text import edited
from tiewise.rewrite.writer import arranged

PROVENANCE = "tiewise.json"
LEFT_OUT = (".git", ".cache")  # they speak of the source's history and download, and would lie about the result
WEIGHTS = (*PICKLES, ".safetensors", ".gguf", ".onnx", ".onnx_data", ".npz")  # large, and edited by nobody
MOST_DEPTH = 16


@dataclass(frozen=True)
class Plan:
    """All files of the result but its provenance.

    Args:
        shards: file → its tensors, in order, for each file whose tensors change.
        gone: files that have lost their last tensor.
        shared: files that keep their bytes and may share them with the source (paths below the folder).
        copied: other files.
        texts: file → bytes of the JSON files that change; the index last.
        tensors: name → what the result stores under it.
        notes: what the user should know.
    """

    shards: dict[str, tuple[NewTensor, ...]]
    gone: tuple[str, ...]
    shared: tuple[str, ...]
    copied: tuple[str, ...]
    texts: dict[str, bytes]
    tensors: dict[str, NewTensor]
    notes: tuple[str, ...]


def plan(folder: Folder, change: Change) -> Plan:
    """Decide what becomes of every file.

    Raises:
        CheckpointError: the source is damaged, or holds a link that leads outside.
    """
    _require_sound(folder, change)
    after = {file: _after(folder, change, file) for file in folder.headers}
    shards = {file: tensors for file, tensors in after.items() if tensors is not None}
    gone = tuple(file for file, tensors in shards.items() if not tensors)
    tensors = _tensors(folder, shards)
    texts = _texts(folder, change, bool(shards), tensors)
    others, links = _others(folder, {*folder.headers, *texts, PROVENANCE})
    shared = [file for file in folder.headers if file not in shards] + [f for f in others if f.endswith(WEIGHTS)]
    copied = tuple(file for file in others if not file.endswith(WEIGHTS))
    return Plan(
        {file: made for file, made in shards.items() if made},
        gone,
        tuple(sorted(shared)),
        copied,
        texts,
        tensors,
        (*_stale(folder), *links),
    )


def _require_sound(folder: Folder, change: Change) -> None:
    if folder.faults:
        raise CheckpointError(folder.faults[0].what, folder.faults[0].fix)
    copy = next((c for c in folder.copies if (c.path.name, c.name) not in change.drop_copies), None)
    if copy is not None and copy.name not in change.drop:
        what = f"{folder.path}: {short(copy.name)} is stored twice, also in {copy.path.name}"
        raise CheckpointError(what, "tiewise check says whether the two are equal; if so, tiewise repair drops one")


def _after(folder: Folder, change: Change, file: str) -> tuple[NewTensor, ...] | None:
    """The tensors of one file after the change; None where nothing about it changes."""
    header = folder.headers[file]
    gone = {n for n in header.tensors if n in change.drop or (file, n) in change.drop_copies}
    put = [tensor for tensor in change.put if tensor.file == file]
    return arranged(header, gone, put) if gone or put else None


def _tensors(folder: Folder, shards: dict[str, tuple[NewTensor, ...]]) -> dict[str, NewTensor]:
    found = {}
    for file, header in folder.headers.items():
        kept = shards[file] if file in shards else tuple(copy_of(tensor, n) for n, tensor in header.tensors.items())
        for tensor in kept:
            found[tensor.name] = NewTensor(tensor.name, tensor.dtype, tensor.shape, file, tensor.write)
    return found


def _texts(folder: Folder, change: Change, resharded: bool, tensors: dict[str, NewTensor]) -> dict[str, bytes]:
    texts: dict[str, bytes] = {}
    if change.config:
        texts[CONFIG] = _config(folder, change)
    if folder.index is not None and (resharded or change.reindex):
        texts[INDEX] = index_text(folder, folder.index, change, tensors)
    return texts


def _config(folder: Folder, change: Change) -> bytes:
    path = inside(folder.path, CONFIG)
    text = read_whole(path, MOST_BYTES).decode()
    try:
        return edited(text, change.config).encode()
    except (KeyError, RecursionError) as error:  # a key with a dot in it; nested as deep as the parser goes
        what = f"{path}: the flag cannot be written into it ({short(error)})"
        raise CheckpointError(what, "write it by hand at every level, then run again") from None


def _others(folder: Folder, taken: set[str]) -> tuple[list[str], list[str]]:
    """(every other file, as a path below the folder, sorted; notes on what is left out)."""
    files: list[str] = []
    notes: list[str] = []
    for name in folder.files:
        if name in LEFT_OUT:
            notes.append(f"{name} stays behind: it speaks of the source")
        elif name not in taken:
            for file in _walk(folder.path, name, 0):
                if (folder.path / file).is_dir():
                    notes.append(f"{short(file)} stays behind: a link to a folder")
                else:
                    inside(folder.path, file)
                    files.append(file)
    return files, notes


def _walk(root: Path, name: str, depth: int) -> Iterator[str]:
    """Files below `name`, and links to folders, which are not entered."""
    path = root / name
    if path.is_symlink() or not path.is_dir():
        yield name
        return
    if depth == MOST_DEPTH:
        raise CheckpointError(
            f"{path}: folders are nested deeper than {MOST_DEPTH}", "give the checkpoint's own folder"
        )
    try:
        entries = sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be listed ({error.strerror})", "check its permissions") from None
    for entry in entries:
        yield from _walk(root, f"{name}/{entry}", depth + 1)


def _stale(folder: Folder) -> list[str]:
    """Other weights in the folder: kept, since they are the user's, and named, since a tool may prefer them."""
    if folder.single:
        return []
    stale = [n for n in folder.pickles if n.endswith((".bin", ".msgpack", ".h5", ".ckpt", ".pth"))] + list(folder.extra)
    if not stale:
        return []
    names = ", ".join(short(name) for name in stale[:3]) + (" …" if len(stale) > 3 else "")
    return [f"{names} stay as they were and do not know of this change: delete them where a tool prefers them"]
