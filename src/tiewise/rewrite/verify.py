"""Look at a finished result before it gets its name: what was planned, and where nothing changed the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.rule import ERROR
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import progress
from tiewise.rewrite.change import DELETE, Change
from tiewise.rewrite.plan import Plan


def verify(source: Folder, change: Change, plan: Plan, made: Path) -> None:
    """Open the result as any reader would and hold it against source and plan.

    Raises:
        CheckpointError: something differs.
    """
    result = open_folder(made)
    if result.faults:
        raise _wrong(result.faults[0].what)
    if result.copies:
        raise _wrong(f"{short(result.copies[0].name)} is stored twice")
    found = {name: (tensor.dtype, tensor.shape, tensor.path.name) for name, tensor in result.tensors.items()}
    wanted = {name: (tensor.dtype, tensor.shape, tensor.file) for name, tensor in plan.tensors.items()}
    if found != wanted:
        different = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise _wrong(f"{short(different[0])} is not stored as planned")
    for path, value in change.config.items():
        if _at(result.config, path) != value:
            raise _wrong(f"config.json does not say {short(path)} as planned")
    _hold_bytes(source, change, plan, result)


def require_not_worse(source: Folder, made: Path) -> None:
    """Run the rules that need no tables over both.

    Raises:
        CheckpointError: the result breaks one that the source does not break.
    """
    before = {f.rule for f in check(given(source), scan=False).at_least(ERROR)}
    worse = [f for f in check(made, scan=False).at_least(ERROR) if f.rule not in before]
    if worse:
        fix = "--force keeps it all the same"
        raise CheckpointError(f"the result was not kept: {worse[0].rule} at {worse[0].where}: {worse[0].evidence}", fix)


def given(folder: Folder) -> Path:
    """The path that was opened: the folder, or its single file."""
    return folder.path / folder.files[0] if folder.single else folder.path


def _hold_bytes(source: Folder, change: Change, plan: Plan, result: Folder) -> None:
    put = {tensor.name for tensor in change.put}
    kept = [t for tensors in plan.shards.values() for t in tensors if t.name not in put]
    total, done = sum(tensor.nbytes for tensor in kept), 0
    for tensor in kept:
        old = source.headers[tensor.file].tensors[tensor.name]
        if not _same(old, result.tensors[tensor.name]):
            raise _wrong(f"{short(tensor.name)} differs from the source")
        done += tensor.nbytes
        progress("checking the result", done, total)


def _same(a: Stored, b: Stored) -> bool:
    return a.nbytes == 0 or same_bytes(a, b)


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(config, dict) or key not in config:
            return DELETE
        config = config[key]
    return config


def _wrong(what: str) -> CheckpointError:
    return CheckpointError(f"the result was not kept: {what}", "was the source written meanwhile? If not, report this")
