"""Next step after a check: the command that repairs the checkpoint, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiewise.checkpoint.audit import Audit
from tiewise.checkpoint.rules.rule import FOLLOWS_FROM_OTHERS, SEVERITIES, Finding

COMMANDS = (["mv", "--"], ["hf", "download"])  # beginnings of commands of other programs
PLACEHOLDERS = ("NEW_DIR", "BASE")  # words of a command that stand for a path that only the user knows


@dataclass(frozen=True)
class NextStep:
    """One command, or the reason why no command repairs the checkpoint."""

    command: str  # command line for a shell; "" if there is none
    reason: str  # why there is no command, in one line; "" if there is one


def next_step(audit: Audit) -> NextStep:
    """Return the command that repairs the most severe findings without a decision of the user.

    Safe repairs come first: other commands may need the names that they correct.
    Every error must have such a command, because a folder of which one error remains stays broken. Without errors,
    the first warning with a command decides. Notes need no repair.
    """
    causes = _causes(audit)
    if not causes:
        return NextStep("", _nothing_to_repair(audit))
    errors = [finding for finding in causes if finding.severity != "warning"]
    undecided = [finding for finding in errors if not runnable_command(finding)]
    if undecided:
        return NextStep("", _why(undecided[0]))
    for finding in sorted(errors or causes, key=lambda finding: not finding.safe):
        command = runnable_command(finding)
        if command:
            return NextStep(command, "")
    return NextStep("", _why(causes[0]))


def _causes(audit: Audit) -> Sequence[Finding]:
    """Return the findings to repair, the most severe first.

    Those on loaders are left out if there are others.
    """
    serious = audit.at_least(SEVERITIES[1])
    causes = [finding for finding in serious if finding.rule != FOLLOWS_FROM_OTHERS]
    return causes or serious


def runnable_command(finding: Finding) -> str:
    """Return the command that repairs a finding; "" if there is none.

    There is none if the repair needs a decision, a path or an edit by hand. The condition before the command of a safe
    fix only names what the fix preserves.
    """
    fix = next(iter(finding.fixes), "")
    condition, _, command = fix.partition(": ")
    if finding.safe and condition.startswith("to "):
        fix = command
    words = fix.split(" ")
    is_command = words[0] == "tiewise" or words[:2] in COMMANDS
    if not is_command or not set(words).isdisjoint(PLACEHOLDERS):
        return ""
    return fix


def _nothing_to_repair(audit: Audit) -> str:
    """Return the reason for a checkpoint without serious findings."""
    if audit.in_baseline:
        return "no new finding"
    return "healthy"


def _why(finding: Finding) -> str:
    """Return why no command repairs a finding: what the user has to decide, fetch or edit."""
    return f"{finding.rule} needs you: {finding.repair}"
