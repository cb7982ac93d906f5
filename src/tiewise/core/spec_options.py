"""Table of spec options: syntax, meaning, and the backends that honour each.

An entry is the declaration of a field of `BoundarySpec`: `option(…)` follows a plus, `argument(…)` follows the kind's
colon. Parsing, printing, the lists in messages, the tables of docs/boundary.md and every refusal derive from it.

A reader of specs is a *backend*. It calls `spec.require(BACKEND)` before it builds or reads anything. An option whose
entry does not list the backend is refused there, so an entry without behaviour is refused everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from typing import Any
from urllib.parse import quote, unquote

# The named scales are functions of the model width D, so that one spec serves models of any width.
SCALES: dict[str, Callable[[int], float]] = {
    "sqrt_d": math.sqrt,
    "1/sqrt_d": lambda d: 1 / math.sqrt(d),
    "1/d": lambda d: 1 / d,
}

# backends, by the name that a message gives them
BOUNDARY = "Boundary in PyTorch"
INSTALL = "install"
FLAX = "Boundary in Flax"
PLAN = "tiewise plan"
UNDO = "tiewise factor --undo"
INSPECT = "the direct path of tiewise inspect"
SHARDED = "a sharded model"
RUN = "a training run"
ALBERT_RUN = "an ALBERT run"
FLAX_RUN = "a run with the flax backend"
MODULES = frozenset({BOUNDARY, INSTALL, FLAX, SHARDED})  # compute rows, logits and gradients
RUNS = frozenset({RUN, ALBERT_RUN, FLAX_RUN})
STORED = frozenset({UNDO, INSPECT})  # read a saved boundary
BACKENDS = frozenset({PLAN}) | MODULES | RUNS | STORED

# the property of a model that an option changes
SIZES = "sizes"
INPUT_ROWS = "input rows"
LOGITS = "logits"
GRADIENT = "gradient of a table"
LOSS = "training loss"
START = "start values"
PRETRAINED = "start values, from a file"
TRAINED = "what is trained"
SCHEDULE = "schedule"
TRAINING_ONLY = frozenset({GRADIENT, LOSS, TRAINED, SCHEDULE})  # a saved table computes the same without it

# how other tools load a model that has the option
AS_SAVED = "as saved"
AS_TABLES = "as dense tables"
NEVER = "not at all"

Reader = Callable[[str], Any] | None  # None: a switch without a value


@dataclass(frozen=True)
class Refusal:
    """Text of an error about a spec."""

    problem: str  # follows the spec
    remedy: str


@dataclass(frozen=True)
class OptionEntry:
    """Entry of the table: one option, or one argument of some kinds."""

    read: Reader
    syntax: str  # as docs/boundary.md prints it
    meaning: str
    changes: str
    backends: frozenset[str] = frozenset()
    other_tools: str = AS_SAVED
    no_tables: Refusal | None = None  # why two plain tables cannot compute the same; set if `other_tools` is NEVER
    refusal: Refusal | None = None  # error of a backend that does not honour it; None: the general text
    kinds: Mapping[str, tuple[str, ...]] | None = None  # kind → written keys of an argument; None for an option
    field: str = ""
    default: Any = None

    @property
    def key(self) -> str:
        """The written key: the field's name of an option, the last key of an argument."""
        if self.kinds is None:
            return self.field
        return next(keys[-1] for keys in self.kinds.values())

    def is_of(self, kind: str) -> bool:
        """Return whether a boundary of this kind takes it."""
        return self.kinds is None or kind in self.kinds

    def written(self, value: Any, key: str | None = None) -> str:
        """Return `key=value` as it is written in a spec, or the key of a switch."""
        key = key or self.key
        if self.read is None:
            return key
        return f"{key}={printed(value)}"


def option(default: Any, read: Reader, syntax: str, meaning: str, changes: str, **more: Any) -> Any:
    """Declare a field of a spec and its entry, for an option of any kind.

    Options are written after a plus.
    """
    return field(default=default, metadata={"entry": OptionEntry(read, syntax, meaning, changes, **more)})


def argument(
    default: Any, kinds: Mapping[str, tuple[str, ...]], read: Reader, syntax: str, meaning: str, **more: Any
) -> Any:
    """Declare a field of a spec and its entry, for an argument of some kinds.

    Arguments are written after the kind's colon.
    """
    more = {"changes": SIZES, "backends": BACKENDS, "other_tools": AS_TABLES} | more
    return field(default=default, metadata={"entry": OptionEntry(read, syntax, meaning, kinds=kinds, **more)})


def option_entries(spec_type: Any) -> tuple[OptionEntry, ...]:
    """Return the entries of a type of specs, in the order of its fields."""
    return _option_entries(spec_type)


@cache
def _option_entries(spec_type: Any) -> tuple[OptionEntry, ...]:
    declared = [one for one in fields(spec_type) if "entry" in one.metadata]
    assert all(one.default is not MISSING for one in declared)
    return tuple(replace(one.metadata["entry"], field=one.name, default=one.default) for one in declared)


def options(spec_type: Any) -> dict[str, OptionEntry]:
    """Return written key → entry of every option."""
    return {entry.key: entry for entry in option_entries(spec_type) if entry.kinds is None}


def arguments(spec_type: Any, kind: str) -> dict[str, OptionEntry]:
    """Return written key → entry of every argument of a kind."""
    by_key = {}
    for entry in option_entries(spec_type):
        if entry.kinds is not None:
            by_key.update(dict.fromkeys(entry.kinds.get(kind, ()), entry))
    return by_key


# readers of values


def _reader(kind: type[float], holds: Callable[[float], bool], must: str) -> Callable[[str], Any]:
    """Return a function that reads a number and raises ValueError if it fails `holds`."""

    def read(text: str) -> Any:
        """Read a number of one kind and range."""
        value = kind(text)
        if not holds(value):
            raise ValueError(f"must be {must}")
        return value

    return read


positive = _reader(float, lambda value: 0 < value < math.inf, "a positive number")
not_negative = _reader(float, lambda value: 0 <= value < math.inf, "zero or a positive number")
count = _reader(int, lambda value: value >= 1, "1 or more")
row_number = _reader(int, lambda value: value >= 0, "a row number, 0 or more")


def token_count(text: str) -> int:
    """Read a number of tokens."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ValueError("must be a whole number, 1 or more")
    return int(text)


def scale(text: str) -> str:
    """Read a named scale or a positive number; returns its shortest written form."""
    if text in SCALES:
        return text
    return printed(positive(text))


def map_kind(text: str) -> bool:
    """Read whether there is a linear map: "linear" or "none"."""
    if text not in ("linear", "none"):
        raise ValueError("must be 'linear' or 'none'")
    return text == "linear"


def file_path(text: str) -> str:
    """Read a path, in which a plus or a comma is percent-encoded."""
    if not text:
        raise ValueError("must be a file path")
    return unquote(text)


def printed(value: Any) -> str:
    """Return the written form of a value, which its reader accepts."""
    if isinstance(value, bool):
        return "linear" if value else "none"
    if isinstance(value, float):
        short = f"{value:g}"
        if float(short) != value:
            short = repr(value)
        return short.replace("e+", "e")  # a plus would start the next option
    if isinstance(value, str) and value not in SCALES:
        return quote(value, safe="/.:~_-")
    return str(value)
