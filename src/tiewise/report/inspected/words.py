"""The words of every section, by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tiewise.inspection.inspect import Section
from tiewise.inspection.section import SECTIONS
from tiewise.report.inspected import (
    alignment,
    closer,
    direct_path,
    evidence,
    run_alignment,
    tokens,
)

WORDS: Mapping[str, Any] = {
    "evidence": evidence,
    "direct_path": direct_path,
    "alignment": alignment,
    "closer": closer,
    "run_alignment": run_alignment,
    "tokens": tokens,
}


def left_out(section: Section) -> Iterator[str]:
    """Say what a section does not have, and why; subjects with one reason together."""
    for reason, labels in _reasons(section).items():
        yield f"left out of {', '.join(labels)}: {reason}"


def title(name: str) -> str:
    """Title of a section: the question that it asks; its name where what it needs is not installed."""
    return SECTIONS[name].asks if name in SECTIONS else str(WORDS[name].TITLE) if name in WORDS else name


def absent(sections: Sequence[Section]) -> Iterator[str]:
    """Say which sections have nothing at all, and why; those of one reason together."""
    titles: dict[str, list[str]] = {}
    for section in sections:
        for reason in () if section.found else _reasons(section):
            titles.setdefault(reason, []).append(f"“{title(section.name)}”")
    for reason, named in titles.items():
        yield f"{', '.join(named)}: {reason}"


def _reasons(section: Section) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for label, reason in section.left_out.items():
        reasons.setdefault(reason, []).append(label)
    return reasons
