"""What becomes of every file of a checkpoint, decided before one is written: rewritten, shared, copied, or gone.

A config is edited as text: order, nesting, indentation, the spelling of numbers and unknown keys stay as they were, for
people edit it too, and a difference between two versions should show what was meant and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tiewise.checkpoint.hf_folder import CONFIG, INDEX, PICKLES, Folder
from tiewise.checkpoint.rewrite.change import DELETE, Change, NewTensor
from tiewise.checkpoint.rewrite.new_folder import copy, share
from tiewise.checkpoint.stored import BITS, Header
from tiewise.checkpoint.untrusted import inside, parse_json, short
from tiewise.core.errors import CheckpointError, advance, doing
from tiewise.core.files import sync

PROVENANCE = "tiewise.json"
LEFT_OUT = (".git", ".cache")  # they speak of the source's history and download, and would lie about the result
WEIGHTS = (*PICKLES, ".safetensors", ".gguf", ".onnx", ".onnx_data", ".npz")  # large, and edited by nobody
MOST_DEPTH = 16


@dataclass(frozen=True)
class FilePlan:
    """All files of the result but its provenance."""

    shards: dict[str, tuple[NewTensor, ...]]  # file → its tensors, in order, for each file whose tensors change
    shared: tuple[str, ...]  # files that keep their bytes and may share them with the source (paths below the folder)
    copied: tuple[str, ...]  # other files
    texts: dict[str, bytes]  # file → bytes of the files beside the tensors that change; the index last
    tensors: dict[str, NewTensor]  # name → what the result stores under it
    notes: tuple[str, ...]  # what the user should know

    @property
    def new_bytes(self) -> int:
        """Bytes of all tensors in the shards that are written anew."""
        return sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors)


def plan_files(folder: Folder, change: Change) -> FilePlan:
    """Decide what becomes of every file; a source that is damaged, or holds a link that leads outside, is refused."""
    if folder.faults:
        raise CheckpointError(folder.faults[0].what, folder.faults[0].fix)
    twice = next((c for c in folder.copies if (c.path.name, c.name) not in change.drop_copies), None)
    if twice is not None and twice.name not in change.drop:
        what = f"{folder.path}: {short(twice.name)} is stored twice, also in {twice.path.name}"
        raise CheckpointError(what, "tiewise check says whether the two are equal; if so, tiewise repair drops one")
    shards: dict[str, tuple[NewTensor, ...]] = {}
    tensors: dict[str, NewTensor] = {}
    for file, header in folder.headers.items():
        gone = {n for n in header.tensors if n in change.drop or (file, n) in change.drop_copies}
        put = [tensor for tensor in change.put if tensor.file == file]
        after = arranged(header, gone, put)
        if gone or put:
            shards[file] = after
        tensors |= {tensor.name: tensor for tensor in after}
    texts = dict(change.texts)
    if change.config:
        texts[CONFIG] = edited_file(folder, CONFIG, change.config)
    if folder.weight_map is not None and (shards or change.reindex):
        texts[INDEX] = _index_text(folder, folder.weight_map, change, tensors)

    notes: list[str] = []
    stale = [n for n in folder.pickles if n.endswith((".bin", ".msgpack", ".h5", ".ckpt", ".pth"))] + [*folder.extra]
    if stale and not folder.single:  # kept, since they are the user's, and named, since a tool may prefer them
        named = ", ".join(map(short, stale[:3])) + (" …" if len(stale) > 3 else "")
        how = "stay as they were and do not know of this change: delete them where a tool prefers them"
        notes.append(f"{named} {how}")
    shared = [file for file in folder.headers if file not in shards]
    copied: list[str] = []
    left = [name for name in reversed(folder.files) if name not in {*folder.headers, *texts, PROVENANCE, *change.leave}]
    while left:  # paths below the folder, what a folder holds in its place; links to folders are not entered
        file = left.pop()
        path = folder.path / file
        if file in LEFT_OUT:
            notes.append(f"{file} stays behind: it speaks of the source")
        elif not path.is_dir():
            inside(folder.path, file)
            (shared if file.endswith(WEIGHTS) else copied).append(file)
        elif path.is_symlink():
            notes.append(f"{short(file)} stays behind: a link to a folder")
        elif file.count("/") == MOST_DEPTH:
            raise CheckpointError(f"{path}: folders go deeper than {MOST_DEPTH}", "give the checkpoint's own folder")
        else:
            try:
                left += (f"{file}/{name}" for name in sorted(os.listdir(path), reverse=True))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be listed ({error.strerror})", "check its permissions") from None
    kept = {file: after for file, after in shards.items() if after}
    return FilePlan(kept, tuple(sorted(shared)), tuple(copied), texts, tensors, tuple(notes))


def arranged(header: Header, gone: Iterable[str], put: Iterable[NewTensor]) -> tuple[NewTensor, ...]:
    """Return what a file holds after a change, in an order that keeps every tensor aligned to its type.

    Stored tensors keep their order. The format's library puts wider types first; a new tensor goes behind the last
    one that is as wide. Where the order was another and a tensor would come to lie across its alignment, all are
    sorted by width: readers view the bytes in place.
    """
    left = {tensor.name: tensor for tensor in put}
    made = [left.pop(n) if n in left else NewTensor.copy(t) for n, t in header.tensors.items() if n not in gone]
    for tensor in left.values():
        places = [i + 1 for i, other in enumerate(made) if BITS[other.dtype] >= BITS[tensor.dtype]]
        made.insert(places[-1] if places else 0, tensor)
    starts = accumulate((tensor.nbytes for tensor in made), initial=0)
    if any(start % max(1, BITS[tensor.dtype] // 8) for start, tensor in zip(starts, made, strict=False)):
        made.sort(key=lambda tensor: -BITS[tensor.dtype])
    return tuple(made)


def _index_text(folder: Folder, old: Mapping[str, str], change: Change, tensors: Mapping[str, NewTensor]) -> bytes:
    """Every tensor of the result in the file that holds it, and the sum of their bytes; the rest as it was.

    A name that no file holds stays unless the change drops it: it says that something is missing.
    """
    text = folder.read(INDEX)[INDEX]
    record = parse_json(text, str(folder.path / INDEX), unique=True)
    metadata = record["metadata"] if isinstance(record.get("metadata"), dict) else {}
    metadata["total_size"] = sum(tensor.nbytes for tensor in tensors.values())
    if type(metadata.get("total_parameters")) is int:
        after, before = (sum(math.prod(t.shape) for t in some.values()) for some in (tensors, folder.tensors))
        metadata["total_parameters"] += after - before
    files = {name: file for name, file in old.items() if name not in folder.tensors and name not in change.drop}
    files |= {name: tensor.file for name, tensor in tensors.items()}
    names = [name for name in old if name in files]
    ordered = names == sorted(names)  # else in their old order, new ones last
    names += [name for name in files if name not in old]
    record |= {"metadata": metadata, "weight_map": {n: files[n] for n in (sorted(names) if ordered else names)}}
    indent = re.match(rb"\s*[\[{][ \t]*\r?\n([ \t]+)", text)  # as the old text is indented and ended
    made = json.dumps(record, indent=indent[1].decode() if indent else None)
    return made.encode() + (b"\n" if text.endswith(b"\n") else b"")


# writing


def write_files(folder: Folder, plan: FilePlan, made: Path, provenance: bytes) -> tuple[str, ...]:
    """Write everything, the index last; return the files that share their bytes with the source."""
    done = 0
    with doing("writing", plan.new_bytes):
        for file, tensors in plan.shards.items():
            done = write_tensors(made / file, tensors, folder.headers[file].metadata, done)
    linked = []
    for file in (*plan.shared, *plan.copied):
        (made / file).parent.mkdir(parents=True, exist_ok=True)
        if file in plan.copied:
            copy(inside(folder.path, file), made / file)
        elif share(inside(folder.path, file), made / file):
            linked.append(file)
    for file, data in {PROVENANCE: provenance, **plan.texts}.items():
        (made / file).write_bytes(data)
        sync(made / file)
    for place, _, _ in os.walk(made, topdown=False):
        sync(Path(place))
    return tuple(linked)


def write_tensors(path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], done: int = 0) -> int:
    """Write a new safetensors file that holds `tensors` in this order, each as it arrives, and see it on the disk.

    Return `done`, bytes that were written before, and the bytes of these tensors.
    """
    stored = {tensor.name for tensor in tensors}
    # The library's `save_model` notes a shared tensor that it left out under that tensor's name: untrue once stored.
    kept = {key: value for key, value in metadata.items() if key not in stored}
    record: dict[str, object] = {"__metadata__": kept} if kept else {}
    for tensor, end in zip(tensors, accumulate(tensor.nbytes for tensor in tensors), strict=True):
        offsets = [end - tensor.nbytes, end]
        record[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    header = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    header += b" " * (-len(header) % 8)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            count = 0
            for piece in tensor.write():
                file.write(piece)
                count += len(piece)
                advance(done + count)
            if count != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {count} bytes came, {tensor.nbytes} were announced")
            done += count
    sync(path)
    return done


# JSON, edited in place

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


def edited_file(folder: Folder, name: str, changes: Mapping[str, Any]) -> bytes:
    """Return the content that a JSON file of a folder shall have; `changes` as of `edited`."""
    try:
        return edited(folder.read(name)[name].decode(), changes).encode()
    except (KeyError, RecursionError) as error:  # a key with a dot in it; nested as deep as the parser goes
        what = f"{folder.path / name}: {short(', '.join(changes))} cannot be written into it ({short(error)})"
        raise CheckpointError(what, "write it by hand at every level, then run again") from None


def edited(text: str, changes: Mapping[str, Any]) -> str:
    """Return JSON text with the values at dotted paths set, or gone where `DELETE`.

    A new key goes to its alphabetical place where the keys of its object are sorted, else to the end. KeyError: a
    level above the last key does not exist.
    """
    for path, value in changes.items():
        *levels, key = path.split(".")
        at = _after_space(text, 0)
        for level in levels:
            _, _, at, _ = _members(text, at)[level]
        members = _members(text, at)
        if key in members and value is not DELETE:
            _, _, start, end = members[key]
            new = json.dumps(value)
        elif key in members:  # with one comma: that behind it, or before the last that before it
            start, _, _, end = members[key]
            new, behind = "", _after_space(text, end)
            if text[behind] == ",":
                end = behind + 1
            elif text[start - 1] == ",":
                start -= 1
        elif value is DELETE:
            continue
        else:
            new, keys = f"{json.dumps(key)}: {json.dumps(value)}", list(members)
            later = next((name for name in keys if name > key), None) if keys == sorted(keys) else None
            lead, first, _, end = members[later or keys[-1]] if keys else (at + 1, at + 1, 0, at + 1)
            space = text[lead:first]
            new = f"{space}{new}," if later else f",{space}{new}" if keys else new
            start = end = lead if later else end
        text = text[:start] + new + text[end:]
    return text


def _members(text: str, at: int) -> dict[str, tuple[int, int, int, int]]:
    """{key: (its white space, itself, its value, the end of that)} of an object, by places; of two the last counts."""
    if text[at] != "{":
        raise KeyError("no object")
    found = {}
    lead = at + 1
    while text[start := _after_space(text, lead)] != "}":
        key, end = _DECODER.raw_decode(text, start)
        value = _after_space(text, _after_space(text, end) + 1)  # past the colon
        _, end = _DECODER.raw_decode(text, value)
        found[key] = (lead, start, value, end)
        lead = _after_space(text, end)
        if text[lead] == "}":
            break
        lead += 1  # past the comma
    return found


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # the pattern matches the empty string
    return match.end()
