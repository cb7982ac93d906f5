"""Engine of all verbs: it writes, verifies and renames the changed checkpoint, or leaves nothing.

A verb is one function from facts and options to a `Change`. `registry.verb` turns it into the function that users
call. Before the result gets its final name, the engine opens it as any reader would (`verification.py`). `tiewise.json`
in the result records the rewrite (`provenance.py`).
"""

from __future__ import annotations

import html
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tiewise.checkpoint.adapter import WEIGHTS
from tiewise.checkpoint.claims import architecture
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import ADAPTER_CONFIG, Folder
from tiewise.checkpoint.rewrite.change import Change
from tiewise.checkpoint.rewrite.file_plan import FilePlan, plan_files
from tiewise.checkpoint.rewrite.file_writing import write_files
from tiewise.checkpoint.rewrite.new_folder import cannot_write, destination, rename_to_destination, temporary_folder
from tiewise.checkpoint.rewrite.provenance import provenance
from tiewise.checkpoint.rewrite.verification import open_with_tensors, verify
from tiewise.checkpoint.rules.rule import counted, names
from tiewise.checkpoint.stored import read_header
from tiewise.checkpoint.untrusted import path_inside, short
from tiewise.core.errors import CheckpointError
from tiewise.core.files import format_bytes
from tiewise.core.measurement import percent
from tiewise.core.records import to_record
from tiewise.core.result import PrintedResult, Row
from tiewise.core.writing_faults import NO_SPACE

SCHEMA = 1  # version of the schema of a receipt's record
MOST_LISTED = 6  # tensors named in one line
LARGE_LOSS = 0.3  # lost share of a table's norm above which a receipt warns

AnyPath = str | os.PathLike[str]
MakeChange = Callable[..., Change]


@dataclass(frozen=True, repr=False)
class Receipt(PrintedResult):
    """Result of one rewrite, for people and for programs.

    With `dry_run`, it describes a rewrite that was planned and not carried out.

    Attributes:
        verb: name of the verb, such as "untie".
        source: checkpoint that was read.
        to: path of the new folder.
        dropped: names of tensors that the result no longer stores.
        written: names of tensors that are new, or new in content.
        bytes_before: of all tensors of the source.
        bytes_after: of all tensors of the result.
        rewritten: files whose tensors changed.
        linked: unchanged files that share their bytes on disk with the source.
        copied: unchanged files that were copied.
        logit_change: largest absolute change of a logit at equal hidden states, before the family's scale and cap; 0 if
            the output table stays.
        input_change: largest Euclidean distance by which a row of the input table moves.
        measured_on: rows and hidden vectors on which the two changes were measured.
        notes: advice for the user, one sentence each.
        dry_run: True if nothing was written.
        lost: shares of tables that the result lacks, one sentence each.
        next_command: command that trains back the loss; None without a loss, or if heal cannot.
        summary: the change in one clause.
        lost_share: largest lost share of a table's norm; 0 without a loss.

    >>> import tiewise  # `tied` is a folder with one table for both ends
    >>> receipt = tiewise.untie("tied", "two-tables", dry_run=True)
    >>> receipt.written, receipt.logit_change
    (('lm_head.weight',), 0.0)
    """

    verb: str
    source: Path
    to: Path
    dropped: tuple[str, ...]
    written: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    rewritten: tuple[str, ...]
    linked: tuple[str, ...]
    copied: tuple[str, ...]
    logit_change: float
    input_change: float
    measured_on: str
    notes: tuple[str, ...] = ()
    dry_run: bool = False
    lost: tuple[str, ...] = ()
    next_command: str | None = None
    summary: str = ""
    lost_share: float = 0.0

    def sentences(self) -> list[str]:
        """Return the answer: what changed and what was lost, then a warning if much was lost."""
        verb = self.verb
        if self.dry_run:
            verb = f"dry run of {verb}, nothing written"
        answer = f"{verb}: {self.summary or self._counts_of_tensors()}."
        if self.next_command is None or self.lost_share <= LARGE_LOSS:
            return [answer]
        return [answer, f"Warning: more than {percent(LARGE_LOSS)} is lost. Heal the model before you use it."]

    def _next_sentences(self) -> list[str]:
        """Return the command that trains back the loss. A dry run has none, since its result does not exist."""
        if self.dry_run or self.next_command is None:
            return []
        return [f"Next: {self.next_command}"]

    def _counts_of_tensors(self) -> str:
        """Return the numbers of written and removed tensors in words."""
        return f"{counted(len(self.written), 'tensor')} written, {len(self.dropped):,} removed"

    def record(self) -> dict[str, Any]:
        """Return the receipt as a dict for JSON, with the version of the schema.

        NaN and infinity become null.
        """
        return {"schema": SCHEMA, **to_record(self), "source": str(self.source), "to": str(self.to)}

    def answer_text(self) -> str:
        """Return what changed and what was lost, then a warning if much was lost."""
        return "\n".join(self.sentences())

    def rows(self) -> list[Row]:
        """Return a row for every tensor that is new or no longer stored."""
        changed = [(name, "written") for name in self.written] + [(name, "dropped") for name in self.dropped]
        return [{"tensor": name, "change": change} for name, change in changed]

    def __str__(self) -> str:
        lines = [f"{heading}: {text}" for heading, text in self.lines()]
        return "\n".join([*self.sentences(), *lines, *self._next_sentences()])

    def lines(self) -> list[tuple[str, str]]:
        """Return the details below the answer as (heading, text) pairs."""
        heading = "written"
        if self.dry_run:
            heading = "would write"
        size = f"{format_bytes(self.bytes_before)} → {format_bytes(self.bytes_after)}"
        lines = [(heading, f"{self.to}, {size}, files: {self._counts_of_files()}")]
        if self.written:
            lines.append(("new tensors", names(self.written, MOST_LISTED)))
        if self.dropped:
            lines.append(("removed", names(self.dropped, MOST_LISTED)))
        lines.append(("logits", self._largest_change()))
        lines += [("lost", share) for share in self.lost]
        lines += [("note", note) for note in self.notes]
        return lines

    def _largest_change(self) -> str:
        """Return the largest changes of a logit and of an input row, as text."""
        if self.logit_change == 0 and self.input_change == 0:
            return f"unchanged: {self.measured_on.removeprefix('nothing: ')}"
        moved = f"an input row moves by up to {self.input_change:.3g}"
        if self.logit_change == 0:
            return f"the output table stays; hidden states change, because {moved} ({self.measured_on})"
        if self.input_change == 0:
            moved = "no input row moves"
        return f"largest change {self.logit_change:.3g}; {moved} ({self.measured_on})"

    def _counts_of_files(self) -> str:
        """Return the numbers of rewritten, linked and copied files in words, "none" if all are 0."""
        counts = []
        for word, files in (("rewritten", self.rewritten), ("linked", self.linked), ("copied", self.copied)):
            if files:
                counts.append(f"{len(files)} {word}")
        return ", ".join(counts) or "none"

    def _repr_html_(self) -> str:
        """Return the answer, the details as an HTML table, and the next command, for a notebook."""
        rows = []
        for name, text in self.lines():
            rows.append(f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>")
        table = f"<table>{''.join(rows)}</table>"
        return f"{_paragraphs(self.sentences())}{table}{_paragraphs(self._next_sentences())}"


def _paragraphs(sentences: Sequence[str]) -> str:
    """Return each sentence as an HTML paragraph."""
    return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)


def rewrite(
    source: AnyPath,
    to: AnyPath,
    make: MakeChange,
    *,
    of_adapter: bool = False,
    dry_run: bool = False,
    force: bool = False,
    **options: Any,
) -> Receipt:
    """Write a changed checkpoint to a new folder.

    If that fails, nothing is left at the destination.

    Args:
        source: checkpoint folder, or one `.safetensors` file.
        to: path of the new folder.
        make: function of a verb; it returns the `Change` of the opened checkpoint.
        of_adapter: require the folder of an adapter; other verbs refuse adapters.
        dry_run: plan and measure everything, but write nothing.
        force: keep the result although its headers and config break a rule that the source does not break.
        options: further arguments of `make`.
    """
    folder, to = _open_source(source, make.__name__, of_adapter), Path(to)
    facts = Facts(folder)
    change = make(facts, force=force, **options)
    change = replace(change, notes=(*_note_on_family(facts), *change.notes))
    real = destination(folder, to)
    plan = plan_files(folder, change)
    flags = tuple(name for name, value in options.items() if value is True)
    planned = _Rewrite(make.__name__, flags, facts, change, plan, to, real, _file_states(folder, plan), force)
    _require_opened_headers(folder)
    linked = planned.linked_files()
    planned.require_room(linked)
    if not dry_run:
        linked = planned.write()
    return planned.receipt(linked, dry_run)


def _open_source(source: AnyPath, verb: str, of_adapter: bool) -> Folder:
    """Open the folder of a checkpoint, or with `of_adapter` the folder of an adapter.

    Raise if it is the other of the two, or if it has no tensors.
    """
    if Path(source).suffix == ".gguf":
        remedy = "rewrite the Hugging Face folder from which it was made, and convert that"
        raise CheckpointError(f"{source}: GGUF files cannot be rewritten", remedy)
    folder = open_with_tensors(source)
    has_tensors = bool(folder.tensors or folder.faults)
    if (WEIGHTS in folder.headers) is of_adapter and has_tensors:
        return folder
    if of_adapter:
        raise CheckpointError(f"{source}: {verb} is for adapters", f"give a folder with {ADAPTER_CONFIG} and {WEIGHTS}")
    if folder.has(ADAPTER_CONFIG):
        problem = f"{source}: this is an adapter, without tables to rewrite"
        raise CheckpointError(problem, "merge it into its base first: tiewise adapter merge")
    problem = f"{source}: the folder has no safetensors file to rewrite"
    raise CheckpointError(problem, "give a folder with model.safetensors")


def _note_on_family(facts: Facts) -> tuple[str, ...]:
    """Return a note on how the ends were identified, if the family is unknown."""
    roles = facts.roles
    if facts.family.has_facts or roles.input_name is None:
        return ()
    if facts.folder.has(ADAPTER_CONFIG):  # an adapter has no family
        return ()
    ends = f"{short(roles.input_name)} and {short(roles.output_name or 'none')}"
    return (f"{facts.family.unknown_message}: the two ends were identified by {roles.source}, {ends}",)


def _require_opened_headers(folder: Folder) -> None:
    """Raise if the header of a tensor file changed since the source was opened."""
    for file, header in folder.headers.items():
        if read_header(header.path) != header:
            raise CheckpointError(f"{folder.path / file}: it changed since it was opened", "run again")


class FileState(NamedTuple):
    """State of a file, which differs after somebody wrote to it."""

    device: int
    inode: int
    nbytes: int
    changed: int  # time of the last change, in ns


def _file_states(folder: Folder, plan: FilePlan) -> dict[str, FileState]:
    """Return the state of every source file that the rewrite reads, by name."""
    texts = [name for name in plan.texts if folder.has(name)]
    states: dict[str, FileState] = {}
    read_files = dict.fromkeys([*folder.headers, *plan.shared, *plan.copied, *texts])  # without duplicates
    for name in read_files:
        try:
            state = os.stat(path_inside(folder.path, name))
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder.path / name}: it is gone", "run again when no other program writes there"
            ) from None
        states[name] = FileState(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    return states


@dataclass(frozen=True)
class _Rewrite:
    """One planned rewrite, not written yet."""

    verb: str
    flags: tuple[str, ...]  # options without a value, such as "undo"
    facts: Facts
    change: Change
    plan: FilePlan
    to: Path  # destination as the caller wrote it, for messages
    real: Path  # destination without symbolic links
    states: dict[str, FileState]  # states of the source's files before they are read
    force: bool

    def linked_files(self) -> tuple[str, ...]:
        """Return the files that can share bytes with the source.

        They are on the same disk as the destination.
        """
        try:
            device = os.stat(self.real.parent).st_dev
        except OSError as error:
            raise cannot_write(self.to, error) from None
        return tuple(file for file in self.plan.shared if self.states[file].device == device)

    def copied_files(self, linked: tuple[str, ...]) -> list[str]:
        """Return the unchanged files that are not linked, sorted."""
        return sorted({*self.plan.shared, *self.plan.copied} - set(linked))

    def require_room(self, linked: tuple[str, ...]) -> None:
        """Raise if the destination's disk has too little room for written and copied bytes."""
        try:
            free = shutil.disk_usage(self.real.parent).free
        except OSError as error:
            raise cannot_write(self.to, error) from None
        copied = sum(self.states[file].nbytes for file in self.copied_files(linked))
        texts = sum(len(text) for text in self.plan.texts.values())
        needed = self.plan.new_bytes + copied + texts
        if free < needed:
            problem = f"{self.to}: {needed:,} bytes are needed and {free:,} are free"
            raise CheckpointError(problem, NO_SPACE.remedy())

    def write(self) -> tuple[str, ...]:
        """Write the result, verify it, and rename it to its destination.

        Return the files that share bytes with the source.
        """
        folder = self.facts.folder
        command = " ".join([self.verb, *(f"--{flag}" for flag in self.flags)])
        record = provenance(folder, self.change, self.plan, command, self.force)
        with temporary_folder(self.real) as unnamed:
            try:
                linked = write_files(folder, self.plan, unnamed, record)
            except OSError as error:
                raise cannot_write(self.to, error) from None
            verify(self.facts, self.change, self.plan, unnamed, self.force)
            self._require_unchanged_source()
            rename_to_destination(unnamed, self.real)
        return linked

    def _require_unchanged_source(self) -> None:
        """Raise if a file of the source changed while it was read."""
        folder = self.facts.folder
        states = _file_states(folder, self.plan)
        for name, state in self.states.items():
            if states.get(name) != state:
                problem = f"{folder.path / name}: it changed while it was read; no result was made"
                raise CheckpointError(problem, "run again when no other program writes there")

    def receipt(self, linked: tuple[str, ...], dry_run: bool) -> Receipt:
        """Return the receipt of the rewrite, carried out or planned."""
        folder, change, plan = self.facts.folder, self.change, self.plan
        return Receipt(
            verb=self.verb,
            source=self.facts.path,
            to=self.to,
            dropped=tuple(sorted(change.drop & folder.tensors.keys())),
            written=tuple(sorted(tensor.name for tensor in change.put)),
            bytes_before=_stored_bytes(folder),
            bytes_after=sum(tensor.nbytes for tensor in plan.tensors.values()),
            rewritten=tuple(plan.rewritten),
            linked=linked,
            copied=tuple(self.copied_files(linked)),
            logit_change=change.movement.logits,
            input_change=change.movement.input_rows,
            measured_on=change.movement.how,
            notes=(*change.notes, *plan.notes),
            dry_run=dry_run,
            lost=change.lost,
            next_command=self._healing(),
            summary=change.summary,
            lost_share=change.lost_share,
        )

    def _healing(self) -> str | None:
        """Return the command that trains back the loss of the rewrite.

        Return None if nothing was lost, and for models that `heal` cannot train.
        """
        facts = self.facts
        name = architecture(facts.config) or ""
        if not self.change.lost or facts.folder.single:
            return None
        if not name.endswith(("ForCausalLM", "LMHeadModel")):
            return None
        return f"tiewise heal {shlex.quote(str(self.to))} --teacher {shlex.quote(str(facts.path))}"


def _stored_bytes(folder: Folder) -> int:
    """Return the bytes of all tensors of a folder, including second copies."""
    total = 0
    for header in folder.headers.values():
        total += sum(tensor.nbytes for tensor in header.tensors.values())
    return total
