"""The catalogue of rules, in the order of their ids. Ids never change their meaning, and are never used again."""

from __future__ import annotations

from collections.abc import Iterable

from tiewise.checkpoint.rule import Rule
from tiewise.checkpoint.rules import (
    config,
    formats_adapter,
    formats_code,
    formats_gguf,
    formats_quantised,
    integrity,
    loading,
    rows,
    tying,
    vocabulary,
)
from tiewise.core.errors import CheckpointError

_MODULES = (integrity, tying, config, vocabulary, rows, loading)
_FORMATS = (formats_adapter, formats_code, formats_gguf, formats_quantised)
_ALL = [rule for part in (*_MODULES, *_FORMATS) for rule in part.RULES]
RULES: tuple[Rule, ...] = tuple(sorted(_ALL, key=lambda rule: rule.id))
by_id: dict[str, Rule] = {rule.id: rule for rule in RULES}


def matching(wanted: Iterable[str]) -> frozenset[str]:
    """Return the ids that the given ids and prefixes name: "B01" names B010 to B016.

    Raises:
        CheckpointError: one of them names no rule.
    """
    found: set[str] = set()
    for text in wanted:
        ids = {name for name in by_id if text and name.startswith(text.upper())}
        if not ids:
            fix = f"rules are {', '.join(by_id)}; B01 stands for B010 to B016"
            raise CheckpointError(f"there is no rule {text!r}", fix)
        found |= ids
    return frozenset(found)
