"""Write the changed checkpoint beside its destination, look at it, and give it its name: all of it, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tiewise.checkpoint.hf_folder import INDEX, Folder
from tiewise.checkpoint.stored import read_header
from tiewise.checkpoint.untrusted import inside
from tiewise.core.errors import CheckpointError
from tiewise.core.files import sync
from tiewise.core.progress import progress
from tiewise.rewrite.change import Change
from tiewise.rewrite.place import cannot_write, copy, destination, require_space, share
from tiewise.rewrite.plan import PROVENANCE, Plan, plan
from tiewise.rewrite.provenance import provenance
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.temporary import become, temporary
from tiewise.rewrite.verify import given, require_not_worse, verify
from tiewise.rewrite.writer import write_tensors

Seen = dict[str, tuple[int, int, int, int]]
Accept = Callable[[Path], None]


def _anything(made: Path) -> None:
    pass


def apply(
    folder: Folder,
    change: Change,
    to: Path,
    *,
    command: str,
    dry_run: bool = False,
    force: bool = False,
    accept: Accept = _anything,
) -> Receipt:
    """Write `folder` with `change` to the new folder `to`; the source is only read.

    Args:
        folder: the source.
        change: what differs in the result.
        to: absent, or an empty folder; its parent exists.
        command: the verb, for the receipt and for `tiewise.json`.
        dry_run: check and foresee everything, write nothing.
        force: keep the result although its headers and config break a rule that the source's do not; recorded.
        accept: looks at the finished result too, and raises where it is not as it should be.

    Raises:
        CheckpointError: the source is damaged or changes meanwhile, the destination is unusable or full, or the result
            does not stand up to its audit. Nothing is left at `to` or beside it.
    """
    real = destination(folder, Path(to))
    planned = plan(folder, change)
    seen = _seen(folder, planned)
    _require_unchanged_headers(folder)
    linked = _expected_links(planned, seen, real)
    require_space(to, real.parent, _need(planned, seen, linked))
    if not dry_run:
        text = provenance(folder, change, planned, command, force)
        with temporary(real) as made:
            try:
                linked = _write(folder, planned, made, text)
            except OSError as error:
                raise cannot_write(to, error) from None
            verify(folder, change, planned, made)
            if not force:
                require_not_worse(folder, made)
            accept(made)
            _require_unchanged(folder, planned, seen)
            become(made, real)
    return _receipt(folder, change, planned, to, command, linked, dry_run)


def _write(folder: Folder, planned: Plan, made: Path, text: bytes) -> tuple[str, ...]:
    """Write everything, the index last; return the files that share their bytes with the source."""
    total, done = sum(t.nbytes for tensors in planned.shards.values() for t in tensors), 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress("writing", done, total)

    for file, tensors in planned.shards.items():
        write_tensors(made / file, tensors, folder.headers[file].metadata, tick)
    linked = []
    for file in planned.shared:
        (made / file).parent.mkdir(parents=True, exist_ok=True)
        if share(inside(folder.path, file), made / file):
            linked.append(file)
    for file in planned.copied:
        (made / file).parent.mkdir(parents=True, exist_ok=True)
        copy(inside(folder.path, file), made / file)
    for file, data in {PROVENANCE: text, **planned.texts}.items():
        _write_text(made / file, data)
    for place, _, _ in os.walk(made, topdown=False):
        sync(Path(place))
    return tuple(linked)


def _write_text(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _seen(folder: Folder, planned: Plan) -> Seen:
    """Identity, size and time of every file of the source that the result depends on."""
    names = [*folder.headers, *planned.shared, *planned.copied, *planned.texts]
    found = {}
    for name in dict.fromkeys(names):
        try:
            state = os.stat(inside(folder.path, name))
        except FileNotFoundError:
            if name == INDEX:  # one that is about to be made
                continue
            raise CheckpointError(
                f"{folder.path / name}: no such file", "run again when nothing writes there"
            ) from None
        found[name] = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    return found


def _require_unchanged(folder: Folder, planned: Plan, seen: Seen) -> None:
    now = _seen(folder, planned)
    changed = next((name for name in seen if now.get(name) != seen[name]), None)
    if changed is not None:
        what = f"{folder.path / changed}: it changed while it was read; no result was made"
        raise CheckpointError(what, "run again when nothing writes there")


def _require_unchanged_headers(folder: Folder) -> None:
    for file, header in folder.headers.items():
        if read_header(header.path) != header:
            raise CheckpointError(f"{folder.path / file}: it changed since it was opened", "run again")


def _expected_links(planned: Plan, seen: Seen, real: Path) -> tuple[str, ...]:
    """Files that a hard link will do for: those on the destination's file system."""
    device = os.stat(real.parent).st_dev
    return tuple(file for file in planned.shared if seen[file][0] == device)


def _need(planned: Plan, seen: Seen, linked: tuple[str, ...]) -> int:
    written = sum(t.nbytes for tensors in planned.shards.values() for t in tensors)
    others = {*planned.shared, *planned.copied} - set(linked)
    return written + sum(seen[file][2] for file in others) + sum(map(len, planned.texts.values()))


def _receipt(
    folder: Folder, change: Change, planned: Plan, to: Path, command: str, linked: tuple[str, ...], dry_run: bool
) -> Receipt:
    return Receipt(
        verb=command,
        source=given(folder),
        to=Path(to),
        dropped=tuple(sorted(change.drop & set(folder.tensors))),
        written=tuple(sorted(tensor.name for tensor in change.put)),
        bytes_before=sum(tensor.nbytes for header in folder.headers.values() for tensor in header.tensors.values()),
        bytes_after=sum(tensor.nbytes for tensor in planned.tensors.values()),
        rewritten=tuple(planned.shards),
        linked=linked,
        copied=tuple(sorted({*planned.shared, *planned.copied} - set(linked))),
        logit_change=change.measured.logits,
        input_change=change.measured.input_rows,
        measured_on=change.measured.how,
        notes=(*change.notes, *planned.notes),
        dry_run=dry_run,
    )
