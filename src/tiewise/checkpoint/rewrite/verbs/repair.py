"""`repair`: apply all safe fixes that `check` proposes.

Most of them set the flag, or drop a head that is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from pathlib import Path

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import tied_change, untied_change
from tiewise.checkpoint.rules.rule import Finding
from tiewise.core.errors import CheckpointError

ENDS = frozenset({"B011", "B012", "B013", "B016", "B020", "B021"})  # rules on the flag and on the head
INDEX = frozenset({"B002", "B003"})  # rules on the index
COPIES = frozenset({"B004"})  # rule on tensors that two files store
MOST_LISTED = 3  # repairs named in one line


@verb(order=90, keeps_logits="all", example="wrong")
def repair(facts: Facts, *, force: bool = False) -> Change:
    """Apply the safe fixes that `tiewise check` proposes.

    `repair` sets the flags to match the tensors, drops equal second copies, and rewrites the index to match the files.
    A safe fix changes no logit in a loader that read the source correctly. The result has no safe finding left.

    >>> import tiewise  # the config of `wrong` claims one table, and the folder stores two
    >>> [finding.rule for finding in tiewise.check("wrong").at_least("error")]
    ['B012']
    >>> _ = tiewise.repair("wrong", "repaired")
    >>> tiewise.check("repaired").claims.tied
    False
    """
    findings = check(facts.path).findings
    rules = {finding.rule for finding in findings if finding.safe}
    by_hand = _repairs_by_hand(findings)
    if not rules:
        if not by_hand:
            raise NothingToDo(f"{facts.path}: nothing to repair", "tiewise check finds nothing wrong")
        raise CheckpointError(f"{facts.path}: nothing to repair", f"by hand: {by_hand}")
    change = _repaired(facts, rules)
    notes = change.notes
    if by_hand:
        notes += (f"not repaired: {by_hand}",)
    return replace(change, notes=notes, flaws=_flaws)


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
    for finding in check(folder).findings:
        if finding.safe:
            yield f"{finding.rule} is left ({finding.evidence})"
