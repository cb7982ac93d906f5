"""Verdict on a checked checkpoint: one sentence, and a fix unless it is sound."""

from __future__ import annotations

from collections.abc import Sequence

from tiewise.checkpoint.audit import Audit, Part
from tiewise.checkpoint.rules.rule import Finding, counted
from tiewise.checkpoint.transformers_loading import WITH_TIEWISE

BROKEN, UNREADABLE, NEEDS_TIEWISE, WORKS, HEALTHY = "BROKEN", "UNREADABLE", "NEEDS TIEWISE", "Works", "Healthy"
NO_NEWS = "No news"  # nothing above a note that the baseline lacks
KINDS = {  # {kind of a checkpoint: its name in a sentence}
    "folder": "this folder",
    "file": "this file",
    "draft": "this draft",
    "adapter": "this adapter",
    "gguf": "this GGUF file",
    "onnx": "this ONNX file",
}
NUMBERS = {1: "one table", 2: "two tables"}
NOTHING_READ = ("fatal", "error")  # severities of B001 at which weights or config were not read


def verdict(audit: Audit) -> str:
    """Return the verdict in one or two sentences.

    The first word says how serious it is. Below "Healthy" and "Works", a fix of the most severe finding follows.
    """
    word = verdict_word(audit)
    if word == NO_NEWS:
        return f"{NO_NEWS}: {_findings_of_baseline(audit)}."
    if word == HEALTHY:
        return f"{HEALTHY}{_of_headers(audit)}: {'; '.join(_healthy_parts(audit))}."
    worst = audit.findings[0]
    if word == WORKS:
        word += f", with {_warnings(audit)}"
    return f"{word}: {first_sentence(worst.evidence)}. {fix_sentence(worst)}"


def _warnings(audit: Audit) -> str:
    """Return the number of warnings in words: "1 warning"."""
    return counted(sum(finding.count for finding in audit.findings if finding.severity == "warning"), "warning")


def _findings_of_baseline(audit: Audit) -> str:
    """Return the findings above a note that the baseline has, in words."""
    serious = _serious_in_baseline(audit)
    worst = serious[0]
    number = counted(sum(finding.count for finding in serious), "known finding")
    return f"{number}, the most severe {worst.rule} ({worst.severity})"


def _serious_in_baseline(audit: Audit) -> list[Finding]:
    """Return the findings above a note that the baseline has, the most severe first."""
    return [finding for finding in audit.in_baseline or () if finding.severity != "info"]


def verdict_word(audit: Audit) -> str:
    """Return the first word of the verdict: one of the constants of this module."""
    if audit.worst in (None, "info"):
        if _serious_in_baseline(audit):
            return NO_NEWS
        return HEALTHY
    worst = audit.findings[0]
    if worst.severity == "warning":
        return WORKS
    if worst.rule == "B001" and worst.severity in NOTHING_READ:
        return UNREADABLE
    is_of_tiewise = any(outcome.loader == WITH_TIEWISE for outcome in audit.outcomes)
    if worst.rule == "B080" and is_of_tiewise:
        return NEEDS_TIEWISE
    return BROKEN


def first_sentence(text: str) -> str:
    """Return the first sentence of a finding's evidence, without its full stop."""
    return text.partition(". ")[0].rstrip(".")


def as_sentence(text: str) -> str:
    """Return a text with a full stop at its end."""
    return text.rstrip(".") + "."


def fix_sentence(finding: Finding) -> str:
    """Return the first fix of a finding as a sentence: `Fix: tiewise repair …`.

    A condition comes before the command: `Fix, if it was trained tied: tiewise tie …`.
    """
    fix = finding.fixes[0]
    if fix.startswith(("if ", "to ")) and ": " in fix:
        return f"Fix, {fix}"
    return f"Fix: {fix}"


def _of_headers(audit: Audit) -> str:
    """Return a restriction of the verdict if the tables were not compared."""
    if audit.scan:
        return ""
    return " as far as headers show"


def _healthy_parts(audit: Audit) -> list[str]:
    """Return clauses on the tables and the loaders of a sound checkpoint."""
    parts = [clause for clause in (_tables(audit), _loaders(audit)) if clause]
    if len(parts) < 2:
        parts.append(f"{len(audit.ran)} rules found no fault in {KINDS[audit.kind]}")
    return parts


def _tables(audit: Audit) -> str:
    """Return a clause on the tables of both ends; an empty text if none is known."""
    tables = [part for part in audit.parts if part.role in ("input", "output", "both")]
    if not tables:
        return ""
    if audit.roles is not None and audit.roles.headless:
        return f"no token head, {_count(tables)}"
    stores_head = any(table.role == "output" for table in tables)
    if not stores_head or len(tables) == 1:  # T5Gemma's head uses one of two input tables
        return f"tied, {_count(tables)}"
    return f"untied, {_count(tables)}"


def _count(tables: Sequence[Part]) -> str:
    """Return the number and shapes of some tables: "two tables [24, 8]"."""
    shapes = list(dict.fromkeys(str(list(part.tensor.shape)) for part in tables))
    number = NUMBERS.get(len(tables), f"{len(tables)} tables")
    return f"{number} {' and '.join(shapes)}"


def _loaders(audit: Audit) -> str:
    """Return a clause on the loaders that read a checkpoint right; an empty text without loaders."""
    outcomes = audit.outcomes
    if not outcomes:
        return ""
    right = sum(outcome.right is True for outcome in outcomes)
    if right == len(outcomes):
        return f"all {right} loaders read it"
    return f"{right} of {len(outcomes)} loaders are known to read it"
