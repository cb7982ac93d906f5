"""`repair`: apply all safe fixes that `check` proposes, and store each tied tensor once.

Most fixes set the flag, or drop a head that is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.byte_order_marks import as_utf8
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import CONFIG
from tiewise.checkpoint.rewrite.change import Change, NewTensor, NothingToDo
from tiewise.checkpoint.rewrite.json_edits import edit_json_file
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import drop_tied_copies, is_t5_like_untied, tied_change, untied_change
from tiewise.checkpoint.rules.rule import Finding, JsonEdit, rules
from tiewise.checkpoint.untrusted import object_of
from tiewise.core.errors import CheckpointError

ENDS = frozenset({"B011", "B012", "B013", "B016", "B020", "B021"})  # rules on the flag and on the head
INDEX = frozenset({"B002", "B003"})  # rules on the index
COPIES = frozenset({"B004"})  # rule on tensors that two files store
NAMES = frozenset({"B010", "B011"})  # rules on names with the prefix of a training wrapper
VALUES = frozenset({"B030", "B033", "B050", "B054"})  # rules on values of JSON files, which give the right ones
ENCODING = "B001"  # rule on JSON files with a byte order mark
MOST_LISTED = 3  # repairs named in one line


@verb(order=10, keeps_logits="all", example="wrong")
def repair(facts: Facts, *, force: bool = False) -> Change:
    """Apply the safe fixes that `tiewise check` proposes.

    `repair` sets flags, sizes and lists of the config to match the tensors, drops equal second copies, removes prefixes
    of training wrappers, and rewrites the index to match the files.
    Second copies are a head that equals its table, and every other tensor that the class ties. A safe fix changes no
    logit in a loader that read the source correctly. The result has no safe finding left.

    >>> import tiewise  # the config of `wrong` claims one table, and the folder stores two
    >>> [finding.rule for finding in tiewise.check("wrong").at_least("error")]
    ['B012']
    >>> _ = tiewise.repair("wrong", "repaired")
    >>> tiewise.check("repaired").claims.tied
    False
    >>> receipt = tiewise.repair("equal", "once")  # `equal` stores one table twice
    >>> receipt.dropped, receipt.bytes_before - receipt.bytes_after
    (('lm_head.weight',), 1280)
    """
    findings = check(facts.path, build=False).findings
    safe = [finding for finding in findings if finding.safe]
    repaired = {finding.rule for finding in safe}
    by_hand = _repairs_by_hand(findings, leave_out={"B080"} if repaired else set())  # B080 follows from the others
    change = _repaired(facts, safe) if repaired else _stored_once(facts)
    if not repaired and change.is_empty:
        if not by_hand:
            raise NothingToDo(f"{facts.path}: nothing to repair", "tiewise check reports no fault")
        raise CheckpointError(f"{facts.path}: no finding has a safe fix", f"fix by hand: {by_hand}")
    notes = change.notes
    if by_hand:
        notes += (f"not repaired: {by_hand}",)
    return replace(change, notes=notes, summary=_summary(repaired), flaws=_flaws)


def _summary(repaired: Set[str]) -> str:
    """Return the change in one clause: the rules whose findings are fixed."""
    if not repaired:
        return "each tied tensor is stored once; no logit changes"
    return f"{', '.join(sorted(repaired))} fixed; no logit changes where the source was loaded right"


def _repaired(facts: Facts, safe: Sequence[Finding]) -> Change:
    """Return the change that repairs the safe findings."""
    change = Change()
    names = {finding.rule for finding in safe}
    if names & ENDS:
        change = _as_stored(facts)
    if names & INDEX:
        change = replace(change, reindex=True, drop=change.drop | _head_without_file(facts))
    if names & COPIES:
        change = replace(change, drop_copies=_equal_copies(facts))
    if names & NAMES:
        change = replace(change, drop=change.drop | _equal_head(facts, bool(names & ENDS)))
        change = _without_wrapper(facts, change)
    texts = _as_utf8(facts, safe)
    return _with_edits(facts, replace(change, texts={**change.texts, **texts}), names & VALUES)


def _without_wrapper(facts: Facts, change: Change) -> Change:
    """Return a change that also removes the prefix of a training wrapper from all names."""
    tensors, renamed = facts.folder.tensors, facts.unwrapped_names
    stored = sorted(renamed.keys() - change.drop)
    put = [NewTensor.copy(tensors[name], name=renamed[name]) for name in stored]
    return replace(change, drop=change.drop | renamed.keys(), put=(*change.put, *put))


def _equal_head(facts: Facts, writes_flag: bool) -> set[str]:
    """Return the name of a head that equals its wrapped table, if the result ties both.

    Args:
        writes_flag: the change writes the flag that fits the tables.
    """
    head = facts.roles.output
    result_ties = (writes_flag or facts.claims.tied) and not is_t5_like_untied(facts)
    if head is None or not facts.tables_are_tied or not result_ties:
        return set()
    return {head.name}


def _as_utf8(facts: Facts, safe: Iterable[Finding]) -> dict[str, bytes]:
    """Return {file: text as UTF-8} of JSON files that start with a byte order mark."""
    texts = dict[str, bytes]()
    for finding in safe:
        if finding.rule == ENCODING:
            text = as_utf8(facts.folder, finding.where)
            if text is not None:
                texts[finding.where] = text
    return texts


def _with_edits(facts: Facts, change: Change, names: Iterable[str]) -> Change:
    """Return a change that also writes the values which rules give to keys of JSON files.

    Args:
        names: ids of the rules.
    """
    values = dict[str, dict[str, Any]]()  # {file: {dotted path: new value}}
    for name in sorted(names):
        for edit in rules()[name].safe_edits(facts):
            by_key = values.setdefault(edit.file, {})
            by_key[edit.key] = _added(by_key.get(edit.key, _value_in(facts, edit)), edit.value)
    config = {**change.config, **values.pop(CONFIG, {})}
    texts = {file: edit_json_file(facts.folder, file, by_key) for file, by_key in values.items()}
    return replace(change, config=config, texts={**change.texts, **texts})


def _value_in(facts: Facts, edit: JsonEdit) -> Any:
    """Return the value that an edit replaces in config.json.

    Return None for any other file, because edits replace only lists there.
    """
    if edit.file != CONFIG:
        return None
    value: Any = facts.config
    for name in edit.key.split("."):
        value = object_of(value).get(name)
    return value


def _added(old: Any, new: Any) -> Any:
    """Return the new value of a key. The entries of an object are added to the old object."""
    if isinstance(new, Mapping):
        return {**object_of(old), **new}
    return new


def _repairs_by_hand(findings: Iterable[Finding], leave_out: Set[str]) -> str:
    """Return the repairs that are not safe, on one line; "" if there are none."""
    repairs = []
    for finding in findings:
        if finding.rule in leave_out:
            continue
        if not finding.safe and finding.severity != "info":
            repairs.append(f"{finding.rule}: {finding.repair}")
    line = "; ".join(repairs[:MOST_LISTED])
    if len(repairs) > MOST_LISTED:
        line += f"; and {len(repairs) - MOST_LISTED} more"
    return line


def _as_stored(facts: Facts) -> Change:
    """Return the change that ties or unties the checkpoint, as its tensors show.

    The flag changes to match.
    """
    if facts.tables_are_tied is False:
        return untied_change(facts)
    return tied_change(facts)


def _stored_once(facts: Facts) -> Change:
    """Return the change that stores each group of tied tensors once.

    It is empty if no tensor is stored twice, if copies differ, or if nothing ties them.
    """
    if facts.roles.headless or not (facts.claims.tied or facts.claims.t5_like):
        return Change()
    separate_head = None
    if is_t5_like_untied(facts):
        separate_head = facts.roles.output  # it differs on purpose
    try:
        drop, put = drop_tied_copies(facts, separate_head)
    except CheckpointError:  # copies differ
        return Change()
    if separate_head is not None:
        drop -= {separate_head.name}
    if drop.isdisjoint(facts.folder.tensors):
        return Change()
    return Change(drop=drop, put=put)


def _head_without_file(facts: Facts) -> set[str]:
    """Return the name of a tied head that the index lists and no file stores."""
    head, folder = facts.roles.output_name, facts.folder
    if head is None or not facts.claims.tied:
        return set()
    named_only = set(folder.weight_map or ()) - folder.tensors.keys()
    return named_only & {head}


def _equal_copies(facts: Facts) -> frozenset[tuple[str, str]]:
    """Return (file, name) of every second copy, for tensors whose copies are all equal."""
    copies = facts.folder.copies
    unlike = {copy.name for copy in copies if not facts.are_equal(copy, facts.folder.tensors[copy.name])}
    return frozenset((copy.path.name, copy.name) for copy in copies if copy.name not in unlike)


def _flaws(folder: Path) -> Iterator[str]:
    """Yield the safe findings that the finished result still has."""
    for finding in check(folder, build=False).findings:
        if finding.safe:
            yield f"{finding.rule} is left ({finding.evidence})"
