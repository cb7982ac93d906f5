"""Verification of a finished result, before it gets its final name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiewise.checkpoint.adapter import WEIGHTS
from tiewise.checkpoint.audit import check, errors_of_result
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.rewrite.change import DELETE, Change
from tiewise.checkpoint.rewrite.file_plan import FilePlan
from tiewise.checkpoint.stored import read_header
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import path_inside, short
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import progress_of


def open_with_tensors(path: str | os.PathLike[str]) -> Folder:
    """Open a folder of a checkpoint or an adapter, with its tensors."""
    folder = open_folder(path)
    if not folder.is_adapter or not folder.has(WEIGHTS):
        return folder
    header = read_header(path_inside(folder.path, WEIGHTS))
    return replace(folder, headers={WEIGHTS: header}, tensors=header.tensors)


def verify(source: Facts, change: Change, plan: FilePlan, written: Path, force: bool) -> None:
    """Open the result as any reader would, and raise if it differs from the plan.

    Args:
        written: folder of the result.
        force: accept a result that breaks a rule of `check`.
    """
    result = open_with_tensors(written)
    for flaw in _flaws(source, change, plan, result):
        raise _not_as_planned(flaw)
    if not force:
        _require_no_new_error(source, written, result)
    if change.flaws is not None:
        for flaw in change.flaws(written):
            raise _not_as_planned(flaw)


def _not_as_planned(flaw: str) -> CheckpointError:
    """Return an error that says why the result was removed."""
    return CheckpointError(
        f"the result was not kept: {flaw}", "run again if another program wrote to the source; else report it"
    )


def _flaws(source: Facts, change: Change, plan: FilePlan, result: Folder) -> Iterator[str]:
    """Yield a sentence for each difference between the result and the plan."""
    for fault in result.faults:
        yield fault.problem
    for copy in result.copies:
        yield f"{short(copy.name)} is stored twice"
    yield from _headers_unlike_plan(plan, result)
    for path, value in change.config.items():
        if _value_at(result.config, path) != value:
            yield f"config.json does not say {short(path)} as planned"
    yield from _changed_bytes(source, change, plan, result)


def _headers_unlike_plan(plan: FilePlan, result: Folder) -> Iterator[str]:
    """Yield a sentence for each tensor whose type, shape or file differs from the plan."""
    stored = {name: (tensor.dtype, tensor.shape, tensor.path.name) for name, tensor in result.tensors.items()}
    planned = {name: (tensor.dtype, tensor.shape, tensor.file) for name, tensor in plan.tensors.items()}
    for name in sorted(stored.keys() | planned.keys()):
        if stored.get(name) != planned.get(name):
            yield f"{short(name)} is not stored as planned"


def _value_at(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a config, `DELETE` if there is none."""
    value = config
    for key in path.split("."):
        if not isinstance(value, dict):
            return DELETE
        value = value.get(key, DELETE)
    return value


def _changed_bytes(source: Facts, change: Change, plan: FilePlan, result: Folder) -> Iterator[str]:
    """Yield a sentence for each unchanged tensor whose bytes differ from the source's.

    The check covers rewritten files only.
    """
    put = {tensor.name for tensor in change.put}
    stay = [tensor for tensor in plan.written if tensor.name not in put]
    total, done = sum(tensor.nbytes for tensor in stay), 0
    for tensor in stay:
        before = source.folder.headers[tensor.file].tensors[tensor.name]
        with progress_of("checking the result", total, start=done):
            if not same_bytes(before, result.tensors[tensor.name]):
                yield f"{short(tensor.name)} differs from the source"
        done += tensor.nbytes


def _require_no_new_error(source: Facts, written: Path, result: Folder) -> None:
    """Raise if the result breaks a rule of `check` that the source does not break.

    Rules that read tables are skipped.
    """
    broken = {finding.rule for finding in check(source.path, scan=False, build=False).at_least("error")}
    for worse in errors_of_result(check(written, scan=False, build=False), result.config):
        if worse.rule not in broken:
            problem = f"the result was not kept: {worse.rule} at {worse.where}: {worse.evidence}"
            raise CheckpointError(problem, "--force keeps it anyway")
