"""Registry of check rules, their results, and texts that findings share.

    @rule("B042", "info", "the number of rows divides by 64")
    def not_divisible(facts):
        '''What goes wrong, and in which tools.
        What to do: what helps.
        Sources: where it was seen; and where else
        '''
        yield "where", "evidence", "fix"           # an optional fourth value: True if `tiewise repair` does it

A new rule is one function in a file of this folder. `--explain` prints its docstring, and no other file has to name it.
The comments in the folder's `__init__.py` list all rules by subject.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.indexed_tensors import MTP_INPUT, MTP_OUTPUT
from tiewise.checkpoint.numeric_ends import find_differing_tie
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import CLOSE, IDENTICAL, SAME_VALUES, SIGNS, SOME_ROWS, UNRELATED, TableLikeness
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, suggest_choices

if TYPE_CHECKING:
    from tiewise.checkpoint.adapter import AdapterFacts
    from tiewise.checkpoint.rules.gguf_file import GgufFacts
    from tiewise.checkpoint.rules.onnx_file import OnnxFacts

AnyFacts: TypeAlias = "Facts | AdapterFacts | GgufFacts | OnnxFacts"
FactsOfType = TypeVar("FactsOfType", bound=AnyFacts)  # type of the facts that the rules on one type of checkpoint check

Severity = Literal["info", "warning", "error", "fatal"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # the least severe first
FOLLOWS_FROM_OTHERS = "B080"  # rule on loaders, whose findings disappear with the findings that cause them
HEADERS, BOTH_TABLES, EVERY_ROW = "headers", "both tables", "every row, with `--deep`"  # values of `Rule.reads`
CheckpointType = Literal["folder", "draft", "adapter", "gguf", "onnx", "any"]


@dataclass(frozen=True)
class JsonEdit:
    """New value in a JSON file of a checkpoint, which `tiewise repair` writes."""

    file: str  # such as "config.json"
    key: str  # dotted path
    value: Any  # a JSON value; the entries of an object are added to those of the object in the file


@dataclass(frozen=True)
class Finding:
    """One fault of a checkpoint."""

    rule: str  # id of the rule, such as "B012"
    severity: Severity  # fatal: every loader is wrong; error: some fail or are silently wrong; warning; info
    where: str  # file, tensor or config key
    evidence: str  # what the rule read, with numbers; the first sentence can stand alone
    repair: str  # all fixes in one line
    safe: bool = False  # True if `tiewise repair` applies it; it changes no logit of a loader that is right
    count: int = 1  # number of findings that it represents: after the tenth of a group, one represents the rest
    # ways to repair it, the usual one first: a command, "condition: command", or an instruction for a repair by hand
    fixes: tuple[str, ...] = ()


class Observation(NamedTuple):
    """One result of a rule.

    A rule may also yield a plain tuple of the first three or four fields.
    """

    where: str
    evidence: str
    repair: str | tuple[str, ...]  # one fix, or several of which the user chooses one
    safe: bool = False
    severity: Severity | None = None  # None for the rule's severity
    edits: tuple[JsonEdit, ...] = ()  # values that `tiewise repair` writes
    # fixes if no other rule reports anything above a note; empty: `repair` holds then, too
    alone: tuple[str, ...] = ()


Observations: TypeAlias = Iterator[
    Observation | tuple[str, str, str | tuple[str, ...]] | tuple[str, str, str | tuple[str, ...], bool]
]  # `Rule.check` makes each one an `Observation`


@dataclass(frozen=True)
class Rule:
    """One rule of `tiewise check`."""

    id: str  # "B001" to "B101"
    severity: Severity  # severity of its findings, unless a finding sets another
    title: str  # the condition that a sound checkpoint fulfils
    explain: str  # effects of a violation in each tool, and the remedy
    sources: tuple[str, ...]  # public threads or documentation of the effect
    look: Callable[[AnyFacts], Observations]  # the rule's function; called with facts of `kind` only
    scans: bool = False  # True if it reads the two tables; it is skipped if only headers may be read
    deep: bool = False  # True if it reads every row of every large tensor; it runs on request only
    kind: CheckpointType = "folder"  # type of checkpoint that it checks
    reads: str = HEADERS  # parts of the checkpoint that it reads, for the table in docs/reference-rules.md

    @property
    def subject(self) -> str:
        """Name of the file that defines the rule."""
        return self.look.__module__.rpartition(".")[2]

    def check(self, facts: AnyFacts, is_alone: bool = False) -> Iterator[Finding]:
        """Yield one finding for each result of the rule's function.

        `is_alone`: no other rule reports anything above a note.
        """
        for fields in self.look(facts):
            result = Observation(*fields)
            severity = result.severity or self.severity
            fixes = (result.repair,) if isinstance(result.repair, str) else result.repair
            if is_alone and result.alone:
                fixes = result.alone
            repair = "; ".join(fixes)
            yield Finding(self.id, severity, result.where, result.evidence, repair, result.safe, fixes=fixes)

    def safe_edits(self, facts: AnyFacts) -> Iterator[JsonEdit]:
        """Yield the values that `tiewise repair` writes for the rule's safe findings."""
        for fields in self.look(facts):
            result = Observation(*fields)
            if result.safe:
                yield from result.edits


_REGISTERED: dict[str, Rule] = {}


def rule(
    id: str,
    severity: Severity,
    title: str,
    *,
    scans: bool = False,
    deep: bool = False,
    kind: CheckpointType = "folder",
    reads: str = "",
) -> Callable[[Callable[[FactsOfType], Observations]], Callable[[FactsOfType], Observations]]:
    """Return a decorator that registers a function over facts as a rule.

    By default, `reads` follows from `scans` and `deep`. `Rule` explains the arguments.
    """
    usual = HEADERS
    if scans:
        usual = BOTH_TABLES
    if deep:
        usual = EVERY_ROW

    def registered(look: Callable[[FactsOfType], Observations]) -> Callable[[FactsOfType], Observations]:
        """Register one function, and return it unchanged."""
        if id in _REGISTERED:
            raise ValueError(f"{id} is the id of two rules: {_REGISTERED[id].title}; {title}")
        explain, _, sources = cleandoc(look.__doc__ or "").partition("\nSources: ")
        threads = tuple(" ".join(source.split()) for source in sources.split(";"))
        # `audit.check` calls a rule with facts of its checkpoint type only, which types cannot express
        any_look = cast("Callable[[AnyFacts], Observations]", look)
        _REGISTERED[id] = Rule(id, severity, title, explain, threads, any_look, scans, deep, kind, reads or usual)
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
    for each in rules().values():
        subjects.setdefault(each.subject, []).append(each)
    return dict(sorted(subjects.items()))


def matching(prefixes: Iterable[str]) -> frozenset[str]:
    """Return the ids of all rules that start with one of the prefixes.

    "B01" names B010 to B016.

    Raises:
        CheckpointError: no rule starts with a prefix.
    """
    if isinstance(prefixes, str):
        prefixes = (prefixes,)
    catalogue = rules()
    selected = set[str]()
    for prefix in prefixes:
        ids = {id for id in catalogue if prefix and id.startswith(prefix.upper())}
        if not ids:
            remedy = f"{suggest_choices(prefix, catalogue, 'rules are')}; B01 stands for B010 to B016"
            raise CheckpointError(f"there is no rule {prefix!r}", remedy)
        selected |= ids
    return frozenset(selected)


CONFIG_FIX = "edit config.json by hand"


class Repair(NamedTuple):
    """Fixes of a finding, and a flag that `tiewise repair` may apply the first one."""

    remedy: str | tuple[str, ...]
    is_safe: bool = False


def repair_of_ties(facts: Facts) -> Repair:
    """Return the repair that stores each tied table once. It is safe if they are equal."""
    differing = find_differing_tie(facts)
    if differing is None:
        return Repair(facts.command("repair"), is_safe=True)
    both = " and ".join(short(table.name) for table in differing)
    return Repair(f"the class ties {both} too, and they differ; to keep every table: {facts.command('untie')}")


def resize_command(facts: Facts, rows: int) -> str:
    """Return the command that gives the tables `rows` rows.

    A condition is before it if tables have different numbers of rows, since the command then refuses. There is none if
    a matrix of unknown role may belong to tokens too.
    """
    if facts.matrices_without_role:
        return f"resize the model in transformers, with {tensor_names(facts.matrices_without_role)}"
    command = facts.command("vocab resize", f"--vocab {rows}")
    row_counts = {table.rows for table in facts.roles.tables}
    if len(row_counts) > 1:
        return f"once all tables of tokens have one number of rows: {command}"
    return command


def describe(tensor: Stored) -> str:
    """Return name, type and shape: `lm_head.weight BF16 [128256, 4096]`."""
    return f"{short(tensor.name, 100)} {tensor.dtype} {list(tensor.shape)}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 tensor", "2,400 tensors"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def names(items: Collection[str], most: int = 4) -> str:
    """Return the first few names, and the number of further ones, as text."""
    listed = ", ".join(short(item) for item in list(items)[:most])
    if len(items) <= most:
        return listed
    return f"{listed} and {len(items) - most:,} more"


def tensor_names(tensors: Iterable[Stored]) -> str:
    """Return the names of the first few tensors, and the number of further ones, as text."""
    return names([tensor.name for tensor in tensors])


def further_tables(facts: Facts, *parts: str) -> list[Stored]:
    """Return the further tables that token ids index and whose role is one of `parts`."""
    tables = list[Stored]()
    for other in facts.roles.indexed_tensors:
        if other.role in parts:
            tables.append(other.tensor)
    return tables


def numbers(values: Iterable[int], count: int) -> str:
    """Return the first few of `count` row numbers, as text."""
    texts = [str(value) for value in values]
    listed = ", ".join(texts)
    if count > len(texts):
        listed += ", …"
    return listed


def difference(alike: TableLikeness) -> str:
    """Return a clause on how alike two tables are, with numbers."""
    nan = ""
    if alike.nan:
        nan = ", and some values are NaN, which no loader counts as equal"
    rows = f"{alike.rows:,} rows"
    if alike.of is not None:
        rows = f"{alike.rows:,} random rows, of {alike.of:,},"
        nan = nan or " (--full compares all)"
    if alike.kind == IDENTICAL:
        if alike.of is not None:
            return f"identical in {rows} byte by byte{nan}"
        return f"identical, byte by byte{nan}"
    if alike.kind == SIGNS:
        return f"equal in all {rows} except for the signs of zeros{nan}"
    if alike.kind == SAME_VALUES:
        return f"equal in all {rows} once both have the narrower type{nan}"
    first = numbers(alike.first, alike.differing)
    share = f"{alike.differing:,} of {rows} differ (first: {first})"
    origin = "so they were one table once"
    if alike.kind == UNRELATED:
        origin = "so they are separate tables"
    return f"{share}, {_distance(alike)}, {origin}"


def _distance(alike: TableLikeness) -> str:
    """Return a clause on the distance between the differing rows of two tables."""
    if math.isfinite(alike.relative):
        if alike.relative < 1:
            return f"by {100 * alike.relative:.2g} % of their length"
        return f"by {alike.relative:.2g} times their length"
    if math.isfinite(alike.largest):  # the distance is relative to a length of 0
        return "from zeros"
    return "some values are NaN or infinite"


def compare_if_unequal(facts: Facts, table: Stored, other: Stored) -> TableLikeness | None:
    """Return how alike two tables are, None if they are equal or were not compared."""
    alike = facts.compare(table, other)
    if alike is None or not alike.differing:
        return None
    return alike


def differing_copies(facts: Facts, of: Roles) -> Observations:
    """Report tables of further tokens that differ from a model's table at the same end.

    The model is the checkpoint itself, or the target of a draft.
    """
    ends = {MTP_INPUT: of.input, MTP_OUTPUT: of.output or of.input}
    for other in facts.roles.indexed_tensors:
        end, copy = ends.get(other.role), other.tensor
        if end is None or end.shape != copy.shape:
            continue
        alike = compare_if_unequal(facts, end, copy)
        if alike is None:
            continue
        problem = f"{short(copy.name)} differs from {short(end.name)}. {describe(copy)}: {difference(alike)}"
        remedy = "none needed if it was trained so"
        severity: Severity = "info"
        if alike.kind in (SOME_ROWS, CLOSE):
            remedy = f"store {short(end.name)} under that name too"
            severity = "warning"
        elif of is facts.roles:
            problem += ". transformers drafts with the main table instead"
        yield Observation(short(copy.name), problem, remedy, severity=severity)


def dotted(level: str, key: str = FLAG) -> str:
    """Return the dotted path of a key at a level of the config."""
    if not level:
        return key
    return f"{short(level)}.{key}"


def flag_text(flag: bool | None) -> str:
    """Return a flag as JSON writes it."""
    return {True: "true", False: "false", None: "absent"}[flag]


def value_text(value: object) -> str:
    """Return a value of a config as text of bounded length.

    A container gives its type only."""
    if value is None or isinstance(value, bool | int | float | str):
        return short(repr(value))
    return f"a {type(value).__name__}"
