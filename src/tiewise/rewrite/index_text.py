"""The index of the shards after a change: order, metadata and indentation as they were."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tiewise.checkpoint.hf_folder import Folder, Index
from tiewise.checkpoint.untrusted import MOST_BYTES, inside, parse_json, read_whole
from tiewise.rewrite.change import Change, NewTensor
from tiewise.rewrite.json_text import like


def index_text(folder: Folder, index: Index, change: Change, tensors: Mapping[str, NewTensor]) -> bytes:
    """Return the index's text: every tensor of the result in the file that holds it, and the sum of their bytes.

    A name that no file holds stays unless the change drops it: it says that something is missing.

    Raises:
        CheckpointError: the index cannot be read.
    """
    path = inside(folder.path, index.name)
    text = read_whole(path, MOST_BYTES)
    record = parse_json(text, str(path), unique=True)
    metadata = record["metadata"] if isinstance(record.get("metadata"), dict) else {}
    metadata["total_size"] = sum(tensor.nbytes for tensor in tensors.values())
    if type(metadata.get("total_parameters")) is int:
        shapes = [tensor.shape for tensor in tensors.values()], [tensor.shape for tensor in folder.tensors.values()]
        metadata["total_parameters"] += sum(map(math.prod, shapes[0])) - sum(map(math.prod, shapes[1]))
    record["metadata"] = metadata
    lost = {n: file for n, file in index.weight_map.items() if n not in folder.tensors and n not in change.drop}
    record["weight_map"] = _weight_map(index.weight_map, tensors, lost)
    return like(text.decode(), record).encode()


def _weight_map(old: Mapping[str, str], tensors: Mapping[str, NewTensor], lost: Mapping[str, str]) -> dict[str, str]:
    """Names in their old order, new ones last, or all sorted where they were."""
    files = {**lost, **{name: tensor.file for name, tensor in tensors.items()}}
    names = [name for name in old if name in files]
    ordered = names == sorted(names)
    names += [name for name in files if name not in old]
    return {name: files[name] for name in (sorted(names) if ordered else names)}
