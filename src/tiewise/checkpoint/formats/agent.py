"""Format `agent`: terse `key=value` lines for programs and coding agents, without colour and never wrapped.

Each path has these lines, in this order:

    path=FOLDER verdict=broken findings=2 infos=1
    finding=B012 severity=error where=lm_head.weight evidence=TEXT   one line per finding above a note, at most five
    more=3                                                           further findings that are not listed
    repair=COMMAND                                                   always last, or: repair=none reason=TEXT

A value with spaces is quoted as a shell does. The last value of a line reaches to the end of the line, and is not
quoted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from tiewise.checkpoint.audit import Audit
from tiewise.checkpoint.audit_verdict import UNREADABLE, first_sentence, verdict_word
from tiewise.checkpoint.formats.answer import CheckedPath
from tiewise.checkpoint.next_step import next_step
from tiewise.checkpoint.rules.rule import SEVERITIES, Finding
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import to_printable

MOST_FINDINGS = 5  # listed findings of one path
MOST_EVIDENCE = 300  # characters of a finding's evidence


def agent_text(answers: Sequence[CheckedPath]) -> str:
    """Return the lines of every path."""
    lines = list[str]()
    for answer in answers:
        lines += _lines(answer)
    return "\n".join(lines)


def _lines(answer: CheckedPath) -> Iterator[str]:
    """Yield the lines of one path; the last one is the command that repairs it."""
    path = _quoted(str(answer.path))
    if answer.audit is None:
        yield f"path={path} verdict={_verdict(UNREADABLE)}"
        yield _no_repair(answer.error)
        return
    audit = answer.audit
    serious = audit.at_least(SEVERITIES[1])
    infos = len(audit.findings) - len(serious)
    yield f"path={path} verdict={_verdict(verdict_word(audit))} findings={len(serious)} infos={infos}"
    yield from map(_finding, serious[:MOST_FINDINGS])
    if len(serious) > MOST_FINDINGS:
        yield f"more={len(serious) - MOST_FINDINGS}"
    yield _repair(audit)


def _finding(finding: Finding) -> str:
    """Return the line of one finding."""
    evidence = short(first_sentence(finding.evidence), MOST_EVIDENCE)
    return f"finding={finding.rule} severity={finding.severity} where={_quoted(finding.where)} evidence={evidence}"


def _repair(audit: Audit) -> str:
    """Return the command that repairs a checkpoint, or why there is none."""
    step = next_step(audit)
    if not step.command:
        return _no_repair(step.reason)
    if not step.command.isprintable():
        return _no_repair("the path has characters that do not fit on one line; rename it")
    return f"repair={step.command}"


def _no_repair(reason: str) -> str:
    """Return the last line of a path without a command."""
    return f"repair=none reason={to_printable(reason)}"


def _verdict(word: str) -> str:
    """Return a verdict's word as a value: `needs-tiewise`."""
    return word.lower().replace(" ", "-")


def _quoted(text: str) -> str:
    """Return a printable value, quoted as a shell does if it has spaces."""
    return shlex.quote(to_printable(text))
