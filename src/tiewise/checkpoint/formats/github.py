"""Format `github`: workflow commands, which GitHub Actions shows as annotations of files.

Each line is `::error file=…,title=…::message`. GitHub decodes %, carriage return and line feed in the message, and
colon and comma in properties. Syntax: https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiewise.checkpoint.audit import Audit
from tiewise.checkpoint.formats.answer import CheckedPath, file_of
from tiewise.checkpoint.rules.rule import Finding

LEVELS = {"fatal": "error", "error": "error", "warning": "warning", "info": "notice"}  # severity → workflow command
_IN_MESSAGES = {"%": "%25", "\r": "%0D", "\n": "%0A"}  # the first is replaced first
_IN_PROPERTIES = {**_IN_MESSAGES, ":": "%3A", ",": "%2C"}


def github_text(answers: Sequence[CheckedPath]) -> str:
    """Return one line for each finding and each unreadable path."""
    lines = list[str]()
    for answer in answers:
        if answer.audit is None:
            lines.append(annotation("error", str(answer.path), "unreadable", answer.error))
        else:
            lines += _annotations(answer.audit)
    return "\n".join(lines)


def _annotations(audit: Audit) -> Iterator[str]:
    """Yield one line for each finding of an audit."""
    for finding in audit.findings:
        title = f"{finding.rule} {finding.severity}: {finding.where}"
        yield annotation(LEVELS[finding.severity], str(file_of(audit, finding)), title, _message(finding))


def _message(finding: Finding) -> str:
    """Return the evidence of a finding, and below it each fix on a line."""
    return "\n".join([finding.evidence, *(f"→ {fix}" for fix in finding.fixes)])


def annotation(command: str, file: str, title: str, message: str) -> str:
    """Return one workflow command.

    >>> annotation("error", "a,b", "B012: head", "100 %")
    '::error file=a%2Cb,title=B012%3A head::100 %25'
    """
    properties = f"file={_escaped(file, _IN_PROPERTIES)},title={_escaped(title, _IN_PROPERTIES)}"
    return f"::{command} {properties}::{_escaped(message, _IN_MESSAGES)}"


def _escaped(text: str, replacements: dict[str, str]) -> str:
    """Return a text with its special characters encoded."""
    for character, code in replacements.items():
        text = text.replace(character, code)
    return text
