"""A rule: one thing that can be wrong with a checkpoint, what it finds, and the words that findings share."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import IDENTICAL, SAME_VALUES, SIGNS, UNRELATED, Likeness
from tiewise.checkpoint.untrusted import short

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


CONFIG_FIX = "edit config.json by hand"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def describe(tensor: Stored) -> str:
    """Return name, type and shape: `lm_head.weight BF16 [128256, 4096]`."""
    return f"{short(tensor.name, 100)} {tensor.dtype} {list(tensor.shape)}"


def size(count: float) -> str:
    """Return bytes in the unit that keeps the number below 1024.

    >>> size(3 * 2**20)
    '3.0 MiB'
    """
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{count:.0f} bytes"


def names(items: Collection[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(short(item) for item in list(items)[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def numbers(values: Iterable[int], count: int) -> str:
    """Return the first few of `count` row numbers."""
    shown = ", ".join(str(value) for value in values)
    return f"{shown}, …" if count > len(shown.split(", ")) else shown


def difference(alike: Likeness) -> str:
    """Return how alike two tables are, with numbers."""
    nan = ", and some values are NaN, which no loader finds equal" if alike.nan else ""
    if alike.kind == IDENTICAL:
        return f"identical, byte by byte{nan}"
    if alike.kind in (SIGNS, SAME_VALUES):
        how = "but for the signs of zeros" if alike.kind == SIGNS else "once both have the narrower type"
        return f"equal in all {alike.rows:,} rows {how}{nan}"
    share = f"{alike.differing:,} of {alike.rows:,} rows differ (first: {numbers(alike.first, alike.differing)})"
    return f"{share}, {_by(alike)}; {'two tables of their own' if alike.kind == UNRELATED else 'once one table'}"


def _by(alike: Likeness) -> str:
    relative = alike.relative
    if not math.isfinite(relative):
        return "from zeros" if math.isfinite(alike.largest) else "some values are NaN or infinite"
    return f"by {100 * relative:.2g} % of their length" if relative < 1 else f"by {relative:.2g} times their length"


def flag_at(level: str) -> str:
    """Return the dotted key of the flag at a level of the config."""
    return dotted(level, FLAG)


def dotted(level: str, key: str) -> str:
    """Return the path of a key at a level of the config; keys above it come from the file."""
    return f"{short(level)}.{key}" if level else key


def said(flag: Any) -> str:
    """Return a flag as JSON writes it."""
    return {True: "true", False: "false", None: "absent"}[flag]


def shown(value: Any) -> str:
    """Return a value of a config as text of bounded length; a container by its type alone."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return short(repr(value)) if plain else f"a {type(value).__name__}"
