"""`tiewise.json`: what was done to a checkpoint, from what, kept beside it and carried on by every further rewrite."""

from __future__ import annotations

import hashlib
import json
import math
import os
from datetime import datetime, timezone
from typing import Any

from tiewise.checkpoint.hf_folder import CONFIG, INDEX, Folder
from tiewise.checkpoint.stored import Header
from tiewise.checkpoint.untrusted import MOST_BYTES, inside, open_regular, read_json, read_whole
from tiewise.core.errors import CheckpointError
from tiewise.core.version import __version__
from tiewise.rewrite.change import DELETE, Change
from tiewise.rewrite.plan import PROVENANCE, Plan

VERSION = 1


def provenance(folder: Folder, change: Change, plan: Plan, command: str, force: bool) -> bytes:
    """Return the text of `tiewise.json`: operations before this one, then this one. Only `time` differs between runs.

    Raises:
        CheckpointError: a file of the source cannot be read.
    """
    put = {tensor.name for tensor in change.put}
    operation = {
        "command": command,
        "version": __version__,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "forced": force,
        "source": {"name": folder.path.resolve().name, "sha256": _digests(folder)},
        "dropped": sorted(change.drop & set(folder.tensors)),
        "added": sorted(put - set(folder.tensors)),
        "replaced": sorted(put & set(folder.tensors)),
        "kept": len(set(plan.tensors) - put),
        "config": {key: repr(value) if value is DELETE else value for key, value in change.config.items()},
        "measured": {
            "logits": _number(change.measured.logits),
            "input_rows": _number(change.measured.input_rows),
            "how": change.measured.how,
        },
        "notes": [*change.notes, *plan.notes],
    }
    record = {"tiewise": VERSION, "operations": [*_earlier(folder), operation]}
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _earlier(folder: Folder) -> list[Any]:
    if not folder.has(PROVENANCE):
        return []
    try:
        record = read_json(os.fspath(inside(folder.path, PROVENANCE)))
    except CheckpointError:  # a file of that name that is not ours
        return []
    operations = record.get("operations") if isinstance(record, dict) else None
    return operations if isinstance(operations, list) else []


def _digests(folder: Folder) -> dict[str, str]:
    """SHA-256 of config and index, and of each header: they name every tensor, and cost no read of one."""
    texts = [name for name in (CONFIG, INDEX) if folder.has(name)]
    made = {name: _hex(read_whole(inside(folder.path, name), MOST_BYTES)) for name in texts}
    return made | {f"{file} (header)": _hex(_header_bytes(header)) for file, header in folder.headers.items()}


def _header_bytes(header: Header) -> bytes:
    with os.fdopen(open_regular(header.path), "rb") as file:
        return file.read(header.data_start)


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
