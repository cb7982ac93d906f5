"""`repair`: apply the safe fixes that `check` proposes, all at once."""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from tiewise.checkpoint.audit import check
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rule import INFO, Finding
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import Change
from tiewise.rewrite.ends import opened
from tiewise.rewrite.measure import UNCHANGED
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.tie import join
from tiewise.rewrite.transaction import apply
from tiewise.rewrite.untie import part

ENDS = frozenset({"B011", "B012", "B013", "B016", "B020", "B021"})  # the flag, a head stored twice, or alone
FILES = frozenset({"B002", "B003"})  # the index
COPIES = frozenset({"B004"})


def repair(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Write flags as the tensors have them, drop what is stored twice, and write the index as the files are.

    What is fixed is what `check` calls safe: it changes no logit of a loader that was right. The result has no such
    finding any more.

    Args:
        source: checkpoint folder, or one `.safetensors`.
        to: the folder to make.
        dry_run: foresee everything, write nothing.
        force: recorded; nothing here needs it.

    Raises:
        CheckpointError: nothing that can be repaired safely, files that cannot be read, or a destination that cannot
            be used.
    """
    facts = opened(Path(source))
    audit = check(source)
    rules = {finding.rule for finding in audit.findings if finding.safe}
    if not rules:
        raise CheckpointError(f"{facts.path}: nothing to repair", _by_hand(audit.findings))
    change = mend(facts, rules)
    left = [finding for finding in audit.findings if not finding.safe and finding.severity != INFO]
    if left:
        change = replace(change, notes=(*change.notes, f"not repaired: {_listed(left)}"))
    return apply(
        facts.folder,
        change,
        Path(to),
        command="repair",
        dry_run=dry_run,
        force=force,
        accept=_require_mended,
    )


def mend(facts: Facts, rules: Set[str]) -> Change:
    """Return the change that answers the safe findings of these rules."""
    change = Change(UNCHANGED)
    if rules & ENDS:
        change = part(facts) if facts.truth is False else join(facts)
    if rules & FILES:
        change = replace(change, reindex=True, drop=change.drop | _spare_names(facts))
    if rules & COPIES:
        copies = {(copy.path.name, copy.name) for copy in facts.folder.copies if _is_spare(facts, copy.name)}
        change = replace(change, drop_copies=frozenset(copies))
    return change


def _spare_names(facts: Facts) -> frozenset[str]:
    """The head of a tied model where only the index knows it."""
    index, head = facts.folder.index, facts.roles.output_name
    known = index is not None and head in index.weight_map and head not in facts.folder.tensors
    return frozenset({head}) if known and head is not None and facts.claims.tied else frozenset()


def _is_spare(facts: Facts, name: str) -> bool:
    kept = facts.folder.tensors[name]
    return all(facts.same(copy, kept) for copy in facts.folder.copies if copy.name == name)


def _require_mended(made: Path) -> None:
    left = [finding for finding in check(made).findings if finding.safe]
    if left:
        what = f"the result was not kept: {left[0].rule} is left ({left[0].evidence})"
        raise CheckpointError(what, "report this with the output of tiewise check")


def _by_hand(findings: tuple[Finding, ...]) -> str:
    left = [finding for finding in findings if finding.severity != INFO]
    return f"by hand: {_listed(left)}" if left else "tiewise check finds nothing wrong"


def _listed(findings: list[Finding]) -> str:
    shown = "; ".join(f"{finding.rule}: {finding.repair}" for finding in findings[:3])
    return shown + (f"; and {len(findings) - 3} more" if len(findings) > 3 else "")
