"""`repair`: apply all safe fixes that `check` proposes, and store each tied tensor once.

Most fixes set the flag, or drop a head that is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from pathlib import Path

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import drop_tied_copies, is_t5_like_untied, tied_change, untied_change
from tiewise.checkpoint.rules.rule import Finding
from tiewise.core.errors import CheckpointError

ENDS = frozenset({"B011", "B012", "B013", "B016", "B020", "B021"})  # rules on the flag and on the head
INDEX = frozenset({"B002", "B003"})  # rules on the index
COPIES = frozenset({"B004"})  # rule on tensors that two files store
MOST_LISTED = 3  # repairs named in one line


@verb(order=10, keeps_logits="all", example="wrong")
def repair(facts: Facts, *, force: bool = False) -> Change:
    """Apply the safe fixes that `tiewise check` proposes.

    `repair` sets the flags to match the tensors, drops equal second copies, and rewrites the index to match the files.
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
    rules = {finding.rule for finding in findings if finding.safe}
    causes = [finding for finding in findings if finding.rule != "B080" or not rules]  # B080 follows from the others
    by_hand = _repairs_by_hand(causes)
    change = _repaired(facts, rules) if rules else _stored_once(facts)
    if not rules and change.is_empty:
        if not by_hand:
            raise NothingToDo(f"{facts.path}: nothing to repair", "tiewise check reports no fault")
        raise CheckpointError(f"{facts.path}: no finding has a safe fix", f"fix by hand: {by_hand}")
    notes = change.notes
    if by_hand:
        notes += (f"not repaired: {by_hand}",)
    return replace(change, notes=notes, summary=_summary(rules), flaws=_flaws)


def _summary(rules: Set[str]) -> str:
    """Return the change in one clause: the rules whose findings are fixed."""
    if not rules:
        return "each tied tensor is stored once; no logit changes"
    return f"{', '.join(sorted(rules))} fixed; no logit changes where the source was loaded right"


def _repaired(facts: Facts, rules: Set[str]) -> Change:
    """Return the change that repairs the findings of these rules."""
    change = Change()
    if rules & ENDS:
        change = _as_stored(facts)
    if rules & INDEX:
        change = replace(change, reindex=True, drop=change.drop | _head_without_file(facts))
    if rules & COPIES:
        change = replace(change, drop_copies=_equal_copies(facts))
    return change


def _repairs_by_hand(findings: Iterable[Finding]) -> str:
    """Return the repairs that are not safe, on one line; "" if there are none."""
    repairs = []
    for finding in findings:
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
