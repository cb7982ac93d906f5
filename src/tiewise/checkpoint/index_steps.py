"""Steps of transformers with an index of shard files that this package refuses to read."""

from __future__ import annotations

import json
import os

from tiewise.checkpoint.file_sources import FileSource
from tiewise.checkpoint.hf_folder import INDEX
from tiewise.checkpoint.untrusted import MOST_BYTES
from tiewise.core.errors import CheckpointError

UNREAD_INDEX = "It reads the index, which was not read here."


def stops_transformers(source: FileSource) -> bool:
    """Return whether the steps of `get_checkpoint_shard_files` raise for the index of a source.

    False also if the index is too large to be read here.
    """
    try:
        content = source.read_bytes(INDEX, MOST_BYTES)
    except CheckpointError:
        return False
    try:
        index = json.loads(content.decode("utf-8"))
        for file in sorted(set(index["weight_map"].values())):
            os.path.join("folder", file)
        index["metadata"]["weight_map"] = index["weight_map"].copy()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return True
    return False
