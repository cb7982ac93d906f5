"""A rule: one thing that can be wrong with a checkpoint, with its id, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FATAL, ERROR, WARNING, INFO = "fatal", "error", "warning", "info"
SEVERITIES = (INFO, WARNING, ERROR, FATAL)  # from the least
FOLDER, ADAPTER, GGUF, ANY = "folder", "adapter", "gguf", "any"


@dataclass(frozen=True)
class Finding:
    """What a rule found.

    Args:
        rule: its id, "B012".
        severity: "fatal" (no loader can be right), "error" (some loader is silently wrong, or fails), "warning" or
            "info".
        where: file, tensor or config key.
        evidence: what was read, with numbers: one or two sentences.
        repair: the command that repairs it, or what to do by hand.
        safe: `tiewise repair` applies it: it changes no logit of any loader that was right.
        count: how many findings this one stands for: after the tenth of a kind, one stands for all others.
    """

    rule: str
    severity: str
    where: str
    evidence: str
    repair: str
    safe: bool = False
    count: int = 1


@dataclass(frozen=True)
class Rule:
    """One entry of the catalogue.

    Args:
        id: "B001" to "B090".
        severity: of its findings, unless a finding says otherwise.
        title: what must hold, in half a line.
        explain: for `--explain`: what goes wrong where it does not hold, in which tools, and what to do.
        sources: public threads or documentation that show it.
        check: yields findings; what it is given depends on `kind`.
        scans: it reads the two tables, and does not run where only headers may be read.
        deep: it reads every row of every large tensor, and runs only when asked.
        kind: what it looks at: "folder" (`Facts`), "adapter" or "gguf" (the facts of those formats), or "any" of them.
    """

    id: str
    severity: str
    title: str
    explain: str
    sources: tuple[str, ...]
    check: Callable[[Any], Iterator[Finding]]
    scans: bool = False
    deep: bool = False
    kind: str = FOLDER
