"""Writer of `tiewise.json`: the record of every rewrite that led to a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, timezone
from typing import Any

from tiewise.checkpoint.hf_folder import CONFIG, INDEX, Folder, json_object
from tiewise.checkpoint.rewrite.change import DELETE, Change
from tiewise.checkpoint.rewrite.file_plan import PROVENANCE, FilePlan
from tiewise.checkpoint.untrusted import open_regular
from tiewise.core import __version__
from tiewise.core.errors import CheckpointError
from tiewise.core.records import to_record

VERSION = 1  # version of the format of `tiewise.json`


def provenance(folder: Folder, change: Change, plan: FilePlan, command: str, force: bool) -> bytes:
    """Return the text of `tiewise.json`: earlier operations, then this one.

    Two equal runs differ in `time` only.
    """
    operations = [*_earlier_operations(folder), _operation(folder, change, plan, command, force)]
    record = {"tiewise": VERSION, "operations": operations}
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _earlier_operations(folder: Folder) -> list[Any]:
    """Return the operations that led to the source.

    The list is empty if the source has no such file, or one of another program.
    """
    if not folder.has(PROVENANCE):
        return []
    try:
        operations = json_object(folder.source, PROVENANCE).get("operations")
    except CheckpointError:
        return []
    if not isinstance(operations, list):
        return []
    return operations


def _operation(folder: Folder, change: Change, plan: FilePlan, command: str, force: bool) -> dict[str, Any]:
    """Return the record of one rewrite."""
    put, stored = {tensor.name for tensor in change.put}, set(folder.tensors)
    config = dict(change.config)
    for key, value in config.items():
        if value is DELETE:
            config[key] = "DELETE"
    return {
        "command": command,
        "version": __version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "forced": force,
        "source": {"name": folder.path.resolve().name, "sha256": _digests(folder, change)},
        "dropped": sorted(change.drop & stored),
        "added": sorted(put - stored),
        "replaced": sorted(put & stored),
        "kept": len(plan.tensors.keys() - put),
        "config": config,
        "measured": to_record(change.movement),
        "notes": [*change.notes, *plan.notes],
    }


def _digests(folder: Folder, change: Change) -> dict[str, str]:
    """Return {file: SHA-256} of the source's config, index, changed texts and headers.

    A header has the name, type, shape and offsets of each tensor. The values of tensors are not read.
    """
    contents = folder.read(CONFIG, INDEX, *change.texts)
    for file, header in folder.headers.items():
        descriptor = open_regular(header.path)
        with os.fdopen(descriptor, "rb") as opened:
            contents[f"{file} (header)"] = opened.read(header.data_start)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
