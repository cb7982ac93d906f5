"""The engine of all verbs: write the changed checkpoint beside its place, look at it, and give it its name, or nothing.

A verb is one function from facts and options to a `Change`; `registry.verb` makes of it what users call. The result is
opened again as any reader would before it gets its name, and `tiewise.json` beside it tells what was done, carried on
by every further rewrite.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tiewise.checkpoint.adapter import WEIGHTS
from tiewise.checkpoint.audit import check, errors_of_result
from tiewise.checkpoint.claims import architecture
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, CONFIG, INDEX, Folder, json_object, open_folder
from tiewise.checkpoint.rewrite.change import DELETE, Change
from tiewise.checkpoint.rewrite.file_plan import PROVENANCE, FilePlan, plan_files, write_files
from tiewise.checkpoint.rewrite.new_folder import become, beside, cannot_write, destination
from tiewise.checkpoint.rules.rule import names
from tiewise.checkpoint.stored import read_header
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import inside, open_regular, short
from tiewise.core import __version__
from tiewise.core.errors import CheckpointError, doing
from tiewise.core.files import size, to_record

SCHEMA = 1  # of a receipt's record
VERSION = 1  # of `tiewise.json`
SHOWN = 6  # names of tensors in one line

Place = str | os.PathLike[str]
Verb = Callable[..., Change]


@dataclass(frozen=True)
class Receipt:
    """One rewrite, done or (`dry_run`) foreseen: for the person who asked for it, and for a program."""

    verb: str  # "untie", …
    source: Path  # the checkpoint that was read
    to: Path  # the folder that was made
    dropped: tuple[str, ...]  # names of tensors that the result no longer stores
    written: tuple[str, ...]  # names of tensors that are new, or new in content
    bytes_before: int  # of all tensors of the source
    bytes_after: int  # of all tensors of the result
    rewritten: tuple[str, ...]  # files whose tensors changed
    linked: tuple[str, ...]  # files that share their bytes on disk with the source
    copied: tuple[str, ...]  # files that do not
    logit_change: float  # largest absolute change of a logit, before the family's own scale and cap
    input_change: float  # largest Euclidean length by which a row of the input table moves
    measured_on: str  # what the two were measured on
    notes: tuple[str, ...] = ()  # what the user should know, one sentence each
    dry_run: bool = False  # nothing was written
    lost: tuple[str, ...] = ()  # shares of tables that the result no longer has, one sentence each
    next_command: str | None = None  # trains back what was lost; None where nothing was, or heal cannot

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it, with the version of this schema; a number that is none becomes null."""
        return {"schema": SCHEMA, **to_record(self), "source": str(self.source), "to": str(self.to)}

    def lines(self) -> list[tuple[str, str]]:
        """Return it as (heading, text), for the terminal and for a notebook."""
        counts = (("rewritten", self.rewritten), ("linked", self.linked), ("copied", self.copied))
        files = ", ".join(f"{len(files)} {word}" for word, files in counts if files)
        return [
            ("would write" if self.dry_run else "written", str(self.to)),
            *([("tensors in", names(self.written, SHOWN))] if self.written else []),
            *([("tensors out", names(self.dropped, SHOWN))] if self.dropped else []),
            ("files", files or "none"),
            ("bytes", f"{size(self.bytes_before)} → {size(self.bytes_after)}"),
            ("logits at one state", f"largest change {self.logit_change:.3g}"),
            ("input rows", f"largest change {self.input_change:.3g}"),
            ("measured", self.measured_on),
            *(("lost", share) for share in self.lost),
            *(("note", note) for note in self.notes),
            *([("next", self.next_command)] if self.next_command is not None else []),
        ]

    def _repr_html_(self) -> str:
        """A table of its lines, for a notebook."""
        rows = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in self.lines())
        return f"<table>{''.join(rows)}</table>"


def rewrite(
    source: Place,
    to: Place,
    make: Verb,
    *,
    of_adapter: bool = False,
    dry_run: bool = False,
    force: bool = False,
    **options: Any,
) -> Receipt:
    """Open a checkpoint, ask the verb `make` what shall change, and write that to the new folder `to`.

    `of_adapter` demands the folder of an adapter, which every other verb refuses. `force` keeps the result although its
    headers and config break a rule that the source's do not.
    """
    if Path(source).suffix == ".gguf":
        fix = "rewrite the Hugging Face folder from which it was made, and convert that"
        raise CheckpointError(f"{source}: a GGUF file is not rewritten", fix)
    folder, to = _opened(source), Path(to)
    what, fix = "a folder without safetensors has no two ends to rewrite", "give a folder with model.safetensors"
    if folder.has(ADAPTER_CONFIG):
        what, fix = "an adapter has no two ends to rewrite", "tiewise merge it into its base first"
    if of_adapter:
        what, fix = f"{make.__name__} is for adapters", f"give a folder with {ADAPTER_CONFIG} and {WEIGHTS}"
    if (WEIGHTS in folder.headers) != of_adapter or not (folder.tensors or folder.faults):
        raise CheckpointError(f"{source}: {what}", fix)
    facts = Facts(folder)
    change = make(facts, force=force, **options)
    change = replace(change, notes=(*_note_on_family(facts), *change.notes))
    real = destination(folder, to)
    plan = plan_files(folder, change)
    before = _states(folder, plan)
    for file, header in folder.headers.items():
        if read_header(header.path) != header:
            raise CheckpointError(f"{folder.path / file}: it changed since it was opened", "run again")

    # room for what is written anew, and for what cannot be linked because it lies on another disk
    try:
        device, free = os.stat(real.parent).st_dev, shutil.disk_usage(real.parent).free
    except OSError as error:
        raise cannot_write(to, error) from None
    linked = tuple(file for file in plan.shared if before[file][0] == device)
    copied = {*plan.shared, *plan.copied} - set(linked)
    need = plan.new_bytes + sum(before[file][2] for file in copied) + sum(map(len, plan.texts.values()))
    if free < need:
        raise CheckpointError(f"{to}: {need:,} bytes are needed and {free:,} are free", "free some, or write elsewhere")

    if not dry_run:
        provenance = _provenance(folder, change, plan, make.__name__, force)
        with beside(real) as made:
            try:
                linked = write_files(folder, plan, made, provenance)
            except OSError as error:
                raise cannot_write(to, error) from None
            verify(facts, change, plan, made, force)
            now = _states(folder, plan)
            changed = next((name for name in before if now.get(name) != before[name]), None)
            if changed is not None:
                what = f"{folder.path / changed}: it changed while it was read; no result was made"
                raise CheckpointError(what, "run again when nothing writes there")
            become(made, real)
    return Receipt(
        verb=make.__name__,
        source=facts.path,
        to=to,
        dropped=tuple(sorted(change.drop & set(folder.tensors))),
        written=tuple(sorted(tensor.name for tensor in change.put)),
        bytes_before=sum(tensor.nbytes for header in folder.headers.values() for tensor in header.tensors.values()),
        bytes_after=sum(tensor.nbytes for tensor in plan.tensors.values()),
        rewritten=tuple(plan.shards),
        linked=linked,
        copied=tuple(sorted({*plan.shared, *plan.copied} - set(linked))),
        logit_change=change.moved.logits,
        input_change=change.moved.input_rows,
        measured_on=change.moved.how,
        notes=(*change.notes, *plan.notes),
        dry_run=dry_run,
        lost=change.lost,
        next_command=_healing(facts, to) if change.lost else None,
    )


def _healing(facts: Facts, to: Path) -> str | None:
    """The command that trains back what a rewrite lost; None for models that `heal` does not train."""
    name = architecture(facts.config) or ""
    if facts.folder.single or not name.endswith(("ForCausalLM", "LMHeadModel")):
        return None
    return f"tiewise heal {shlex.quote(str(to))} --teacher {shlex.quote(str(facts.path))}"


def _note_on_family(facts: Facts) -> tuple[str, ...]:
    """Say that the family is unknown, and how its ends were identified."""
    roles = facts.roles
    if facts.family.is_known or facts.folder.has(ADAPTER_CONFIG) or roles.input_name is None:
        return ()
    ends = f"{short(roles.input_name)} and {short(roles.output_name or 'none')}"
    return (f"{facts.family.unknown}: the two ends were identified by {roles.source}, {ends}",)


def _opened(path: Place) -> Folder:
    """Open a folder, an adapter's with its tensors."""
    folder = open_folder(path)
    if not folder.is_adapter or not folder.has(WEIGHTS):
        return folder
    header = read_header(inside(folder.path, WEIGHTS))
    return replace(folder, headers={WEIGHTS: header}, tensors=header.tensors)


def _states(folder: Folder, plan: FilePlan) -> dict[str, tuple[int, int, int, int]]:
    """(device, inode, bytes, time of change) of every file that is read."""
    found = {}
    for name in dict.fromkeys([*folder.headers, *plan.shared, *plan.copied, *filter(folder.has, plan.texts)]):
        try:
            state = os.stat(inside(folder.path, name))
        except FileNotFoundError:
            raise CheckpointError(f"{folder.path / name}: it is gone", "run again when nothing writes there") from None
        found[name] = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    return found


def verify(source: Facts, change: Change, plan: FilePlan, made: Path, force: bool) -> None:
    """Open the result as any reader would, before it gets its name; raise where it is not what was planned."""
    result, put = _opened(made), {tensor.name for tensor in change.put}

    def flaws() -> Iterator[str]:
        yield from (fault.what for fault in result.faults)
        yield from (f"{short(copy.name)} is stored twice" for copy in result.copies)
        found = {name: (tensor.dtype, tensor.shape, tensor.path.name) for name, tensor in result.tensors.items()}
        wanted = {name: (tensor.dtype, tensor.shape, tensor.file) for name, tensor in plan.tensors.items()}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                yield f"{short(name)} is not stored as planned"
        for path, value in change.config.items():
            at: Any = result.config
            for key in path.split("."):
                at = at.get(key, DELETE) if isinstance(at, dict) else DELETE
            if at != value:
                yield f"config.json does not say {short(path)} as planned"
        kept = [tensor for tensors in plan.shards.values() for tensor in tensors if tensor.name not in put]
        total, done = sum(tensor.nbytes for tensor in kept), 0
        for tensor in kept:  # what stays has the bytes that it had
            with doing("checking the result", total, begun=done):
                if not same_bytes(source.folder.headers[tensor.file].tensors[tensor.name], result.tensors[tensor.name]):
                    yield f"{short(tensor.name)} differs from the source"
            done += tensor.nbytes
        if not force:  # no rule is broken, of those that need no tables, that the source does not break
            broken = {finding.rule for finding in check(source.path, scan=False).at_least("error")}
            for worse in errors_of_result(check(made, scan=False), result.config):
                if worse.rule not in broken:
                    what = f"the result was not kept: {worse.rule} at {worse.where}: {worse.evidence}"
                    raise CheckpointError(what, "--force keeps it all the same")
        yield from change.flaws(made) if change.flaws is not None else ()

    for flaw in flaws():
        raise CheckpointError(f"the result was not kept: {flaw}", "was the source written meanwhile? If not, report it")


def _provenance(folder: Folder, change: Change, plan: FilePlan, command: str, force: bool) -> bytes:
    """The text of `tiewise.json`: operations before this one, then this one. Only `time` differs between runs."""
    put, stored = {tensor.name for tensor in change.put}, set(folder.tensors)
    # config, index and what changes beside them whole, and each header: they name every tensor, and cost no read of one
    read = folder.read(CONFIG, INDEX, *change.texts)
    for file, header in folder.headers.items():
        with os.fdopen(open_regular(header.path), "rb") as opened:
            read[f"{file} (header)"] = opened.read(header.data_start)
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in read.items()}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    operation = {
        **{"command": command, "version": __version__, "time": now, "forced": force},
        "source": {"name": folder.path.resolve().name, "sha256": digests},
        "dropped": sorted(change.drop & stored),
        "added": sorted(put - stored),
        "replaced": sorted(put & stored),
        "kept": len(set(plan.tensors) - put),
        "config": {key: "DELETE" if value is DELETE else value for key, value in change.config.items()},
        "measured": to_record(change.moved),
        "notes": [*change.notes, *plan.notes],
    }
    earlier: Any = None
    with suppress(CheckpointError):  # a file of that name that is not ours
        earlier = json_object(folder.path, PROVENANCE).get("operations") if folder.has(PROVENANCE) else None
    operations = [*(earlier if isinstance(earlier, list) else []), operation]
    record = {"tiewise": VERSION, "operations": operations}
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
