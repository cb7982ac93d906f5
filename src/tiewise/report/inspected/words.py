"""The words of every section, by its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiewise.inspection.evidence import NAME
from tiewise.inspection.section import SECTIONS, SectionFound
from tiewise.report.inspected import evidence


def left_out(section: SectionFound) -> Iterator[str]:
    """Say what a section does not have, and why; subjects with one reason together."""
    for reason, labels in _reasons(section).items():
        yield f"left out of {', '.join(labels)}: {reason}"


def title(name: str) -> str:
    """Title of a section: the question that it asks; its name where what it needs is not installed."""
    return SECTIONS[name].asks if name in SECTIONS else evidence.TITLE if name == NAME else name


def absent(sections: Sequence[SectionFound]) -> Iterator[str]:
    """Say which sections have nothing at all, and why; those of one reason together."""
    titles: dict[str, list[str]] = {}
    for section in sections:
        for reason in () if section.found else _reasons(section):
            titles.setdefault(reason, []).append(f"“{title(section.name)}”")
    for reason, named in titles.items():
        yield f"{', '.join(named)}: {reason}"


def _reasons(section: SectionFound) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for label, reason in section.left_out.items():
        reasons.setdefault(reason, []).append(label)
    return reasons
