"""`repair`: all safe fixes that `check` proposes, at once; most are of the flag and of a head stored twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import joined, parted
from tiewise.core.errors import CheckpointError

ENDS = frozenset({"B011", "B012", "B013", "B016", "B020", "B021"})  # the flag, a head stored twice, or alone
INDEX = frozenset({"B002", "B003"})
COPIES = frozenset({"B004"})


@verb(order=90, keeps_logits="all", example="wrong")
def repair(facts: Facts, *, force: bool = False) -> Change:
    """Apply the safe fixes that `tiewise check` proposes.

    Flags are written as the tensors have them, what is stored twice is dropped, and the index is written as the files
    are. A safe fix changes no logit of a loader that was right. The result has no such finding any more.
    """
    findings = check(facts.path).findings
    rules = {finding.rule for finding in findings if finding.safe}
    left = [f"{found.rule}: {found.repair}" for found in findings if not found.safe and found.severity != "info"]
    listed = "; ".join(left[:3]) + (f"; and {len(left) - 3} more" if len(left) > 3 else "")
    if not rules:
        if not left:
            raise NothingToDo(f"{facts.path}: nothing to repair", "tiewise check finds nothing wrong")
        raise CheckpointError(f"{facts.path}: nothing to repair", f"by hand: {listed}")
    change = Change()
    if rules & ENDS:
        change = parted(facts) if facts.truth is False else joined(facts)
    if rules & INDEX:
        head, only_named = facts.roles.output_name, set(facts.folder.weight_map or ()) - set(facts.folder.tensors)
        gone = {head} & only_named if head is not None and facts.claims.tied else set()
        change = replace(change, reindex=True, drop=change.drop | gone)
    if rules & COPIES:
        stored, found = facts.folder.tensors, facts.folder.copies
        unlike = {copy.name for copy in found if not facts.same(copy, stored[copy.name])}
        copies = frozenset((copy.path.name, copy.name) for copy in found if copy.name not in unlike)
        change = replace(change, drop_copies=copies)
    if left:
        change = replace(change, notes=(*change.notes, f"not repaired: {listed}"))

    def flaws(made: Path) -> Iterator[str]:
        yield from (f"{again.rule} is left ({again.evidence})" for again in check(made).findings if again.safe)

    return replace(change, flaws=flaws)
