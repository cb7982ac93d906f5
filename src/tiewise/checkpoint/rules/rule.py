"""A rule: one thing that can be wrong with a checkpoint, what it finds, and the words that findings share.

    @rule("B042", "info", "the number of rows divides by 64")
    def not_divisible(facts):
        '''What goes wrong, and in which tools.
        What to do: what helps.
        Sources: where it was seen; and where else
        '''
        yield "where", "evidence", "repair"        # and, fourth, whether `tiewise repair` does it

A new rule is one function in a file of this folder: its docstring is what `--explain` prints, and nothing else has to
name it. The comments in the folder's `__init__.py` list all rules by subject.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from typing import Any, Literal, NamedTuple, get_args

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.roles import MTP_INPUT, MTP_OUTPUT, Roles
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import CLOSE, IDENTICAL, SAME_VALUES, SIGNS, SOME_ROWS, UNRELATED, TableLikeness
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

Severity = Literal["info", "warning", "error", "fatal"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # from the least
HEADERS, BOTH_TABLES, EVERY_ROW = "headers", "both tables", "every row, with `--deep`"  # what rules read
Kind = Literal["folder", "draft", "adapter", "gguf", "onnx", "any"]


@dataclass(frozen=True)
class Finding:
    """What a rule found."""

    rule: str  # its id, "B012"
    severity: Severity  # fatal: no loader can be right; error: some loader is silently wrong, or fails; warning; info
    where: str  # file, tensor or config key
    evidence: str  # what was read, with numbers: one or two sentences
    repair: str  # the command that repairs it, or what to do by hand
    safe: bool = False  # `tiewise repair` applies it: it changes no logit of any loader that was right
    count: int = 1  # of findings that this one stands for: after the tenth of a kind, one stands for all others


class Said(NamedTuple):
    """What a rule yields; plain tuples of the first three or four will do."""

    where: str
    evidence: str
    repair: str
    safe: bool = False
    severity: Severity | None = None  # where it is not the rule's own


Told = Iterator[tuple[Any, ...]]  # each makes a `Said`


@dataclass(frozen=True)
class Rule:
    """One entry of the catalogue."""

    id: str  # "B001" to "B101"
    severity: Severity  # of its findings, unless a finding says otherwise
    title: str  # what must hold, in half a line
    explain: str  # what goes wrong where it does not hold, in which tools, and what to do
    sources: tuple[str, ...]  # public threads or documentation that show it
    look: Callable[[Any], Told]  # given `Facts`, or the facts of the adapter, GGUF or ONNX file
    scans: bool = False  # it reads the two tables, and does not run where only headers may be read
    deep: bool = False  # it reads every row of every large tensor, and runs only when asked
    kind: Kind = "folder"  # of checkpoint that it looks at
    reads: str = HEADERS  # what of the checkpoint, for the table of rules in docs/check.md

    @property
    def subject(self) -> str:
        """The name of the file that has it."""
        return self.look.__module__.rpartition(".")[2]

    def check(self, facts: Any) -> Iterator[Finding]:
        """Yield what it finds."""
        for said in (Said(*told) for told in self.look(facts)):
            yield Finding(self.id, said.severity or self.severity, said.where, said.evidence, said.repair, said.safe)


_REGISTERED: dict[str, Rule] = {}


def rule(
    id: str,
    severity: Severity,
    title: str,
    *,
    scans: bool = False,
    deep: bool = False,
    kind: Kind = "folder",
    reads: str = "",
) -> Callable[[Callable[[Any], Told]], Callable[[Any], Told]]:
    """Register a function over facts as a rule; `reads` is by default what `scans` and `deep` say."""
    usual = HEADERS
    if scans:
        usual = BOTH_TABLES
    if deep:
        usual = EVERY_ROW

    def registered(look: Callable[[Any], Told]) -> Callable[[Any], Told]:
        if id in _REGISTERED:
            raise ValueError(f"{id} is the id of two rules: {_REGISTERED[id].title}; {title}")
        explain, _, sources = cleandoc(look.__doc__ or "").partition("\nSources: ")
        named = tuple(" ".join(source.split()) for source in sources.split(";"))
        _REGISTERED[id] = Rule(id, severity, title, explain, named, look, scans, deep, kind, reads or usual)
        return look

    return registered


def rules() -> dict[str, Rule]:
    """Return every rule that a file of this folder registers, by id."""
    folder = "tiewise.checkpoint.rules"
    for file in pkgutil.iter_modules(import_module(folder).__path__, f"{folder}."):
        import_module(file.name)
    return dict(sorted(_REGISTERED.items()))


def rules_by_subject() -> dict[str, list[Rule]]:
    """Return the rules by the name of their file, which is their subject."""
    subjects: dict[str, list[Rule]] = {}
    for one in rules().values():
        subjects.setdefault(one.subject, []).append(one)
    return dict(sorted(subjects.items()))


def matching(wanted: Iterable[str]) -> frozenset[str]:
    """Return the ids that the given ids and prefixes name: "B01" names B010 to B016."""
    known, found = rules(), set[str]()
    for text in (wanted,) if isinstance(wanted, str) else wanted:
        found |= (ids := {name for name in known if text and name.startswith(text.upper())})
        if not ids:
            fix = f"rules are {', '.join(known)}; B01 stands for B010 to B016"
            raise CheckpointError(f"there is no rule {text!r}", fix)
    return frozenset(found)


CONFIG_FIX = "edit config.json by hand"


def describe(tensor: Stored) -> str:
    """Return name, type and shape: `lm_head.weight BF16 [128256, 4096]`."""
    return f"{short(tensor.name, 100)} {tensor.dtype} {list(tensor.shape)}"


def names(items: Collection[str], most: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(short(item) for item in list(items)[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def numbers(values: Iterable[int], count: int) -> str:
    """Return the first few of `count` row numbers."""
    shown = ", ".join(str(value) for value in values)
    return f"{shown}, …" if count > len(shown.split(", ")) else shown


def difference(alike: TableLikeness) -> str:
    """Return how alike two tables are, with numbers."""
    nan = ", and some values are NaN, which no loader finds equal" if alike.nan else ""
    if alike.kind == IDENTICAL:
        return f"identical, byte by byte{nan}"
    if alike.kind in (SIGNS, SAME_VALUES):
        how = "but for the signs of zeros" if alike.kind == SIGNS else "once both have the narrower type"
        return f"equal in all {alike.rows:,} rows {how}{nan}"
    share = f"{alike.differing:,} of {alike.rows:,} rows differ (first: {numbers(alike.first, alike.differing)})"
    by, origin = alike.relative, "two tables of their own" if alike.kind == UNRELATED else "once one table"
    if not math.isfinite(by):
        far = "from zeros" if math.isfinite(alike.largest) else "some values are NaN or infinite"
    else:
        far = f"by {100 * by:.2g} % of their length" if by < 1 else f"by {by:.2g} times their length"
    return f"{share}, {far}; {origin}"


def copies(facts: Any, of: Roles) -> Told:
    """Which tables of further tokens are not those at the same end of a model: the checkpoint's own, or a target."""
    ends = {MTP_INPUT: of.input, MTP_OUTPUT: of.output or of.input}
    for other in facts.roles.others:
        end = ends.get(other.role)
        alike = None if end is None or end.shape != other.tensor.shape else facts.compare(end, other.tensor)
        if end is None or alike is None or not alike.differing:
            continue
        close = alike.kind in (SOME_ROWS, CLOSE)
        what = f"{describe(other.tensor)} is not {short(end.name)}: {difference(alike)}"
        what += "" if close or of is not facts.roles else "; transformers drafts with the main one in its place"
        fix = f"store {short(end.name)} under that name too" if close else "none if it was trained so"
        yield Said(short(other.tensor.name), what, fix, severity="warning" if close else "info")


def dotted(level: str, key: str = FLAG) -> str:
    """Return the path of a key, the flag's where none is given, at a level of the config; the level is the file's."""
    return f"{short(level)}.{key}" if level else key


def said(flag: Any) -> str:
    """Return a flag as JSON writes it."""
    return {True: "true", False: "false", None: "absent"}[flag]


def value_text(value: Any) -> str:
    """Return a value of a config as text of bounded length; a container by its type alone."""
    plain = value is None or isinstance(value, bool | int | float | str)
    return short(repr(value)) if plain else f"a {type(value).__name__}"
