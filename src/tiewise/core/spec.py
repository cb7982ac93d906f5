"""`BoundarySpec`: one written form for every way of touching the vocabulary.

The same string is typed on the command line, written in YAML, passed in Python and saved in a model's config:

    tied                        one table [V, D], looked up and multiplied
    untied                      two tables [V, D]
    factored:128                one table [V, 128] and two linear maps (ALBERT)
    factored-untied:in=64,out=128   two tables of their own widths, each with its map
    projected:300               table [V, 300] between linear maps, any width (Press & Wolf)
    residual:32,s=0.03          tied, with out_map = I + s P Q of rank 32
    spd                         tied, with a learned positive definite out_map and its inverse as in_map

then any options, each after a `+`:  `factored:128+bias+softcap=30+init=0.05`. `BoundarySpec.parse` and `str` are
inverse to each other; `str` prints the shortest form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import quote, unquote

from tiewise.core.errors import SpecError, choices

MODEL_TYPE = "tiewise"  # `model_type` of a saved model whose boundary no other tool knows
KINDS = ("untied", "tied", "factored", "factored-untied", "projected", "residual", "spd")
# The named scales are functions of the model width D, so that one spec serves models of any width.
SCALES: dict[str, Callable[[int], float]] = {
    "sqrt_d": math.sqrt,
    "1/sqrt_d": lambda d: 1 / math.sqrt(d),
    "1/d": lambda d: 1 / d,
}


@dataclass(frozen=True)
class BoundarySpec:
    """One point of the spectrum: a kind, its sizes, and options that any kind takes.

    `embed(ids) = in_map(table_in[ids]) · input_scale`;
    `logits(h) = softcap(out_map(h) · table_outᵀ · output_scale + bias)`. Letters as in `tiewise.core`.

    Raises:
        SpecError: on an unknown kind, a size that the kind does not take or lacks, or a value out of range.
    """

    kind: str = "tied"
    # sizes and arguments of a kind, written after its colon
    width: int | None = None  # table width: k of factored, E of projected, input table of factored-untied
    out_width: int | None = None  # output table of factored-untied, where it differs
    rank: int | None = None  # r of residual
    strength: float = 0.03  # s of residual
    in_map: bool | None = None  # projected: a linear map behind the lookup; None = where the widths need one
    out_map: bool | None = None  # projected: a linear map before the head
    two_tables: bool = False  # projected: untied
    penalty: float = 0.0  # projected: λ of the penalty λ‖P_out‖₂, as printed (Press & Wolf 2017, §3)
    decay: float = 0.0  # projected: c of c/2 ‖P_out‖²_F, which is what their code adds
    out_bias: bool = False  # projected: a bias [E] behind P_out, which their code has and their counts leave out
    # options of every kind, each written after a plus
    bias: bool = False
    input_scale: str | None = None
    output_scale: str | None = None
    softcap: float | None = None
    alpha: float = 1.0
    pad: int | None = None
    init: float | None = None
    vectors: str | None = None
    freeze: bool = False
    tie_at: int | None = None
    untie_at: int | None = None

    def __post_init__(self) -> None:
        if self.out_width == self.width:
            object.__setattr__(self, "out_width", None)  # one written form for one meaning
        if self.kind not in KINDS:
            raise SpecError(f"unknown boundary {self.kind!r}", choices(self.kind, KINDS))
        if self.kind in ("factored", "factored-untied") and self.width is None:
            raise SpecError(f"{self.kind} needs the table width k", f"write {self.kind}:128, say")
        if self.kind == "residual" and self.rank is None:
            raise SpecError("residual needs the rank r", "write residual:32, say")
        allowed = {name for name, _ in _ARGUMENTS.get(self.kind, {}).values()}
        arguments = {name for table in _ARGUMENTS.values() for name, _ in table.values()}
        for name in sorted(arguments - allowed):
            if getattr(self, name) != _DEFAULTS[name]:
                raise SpecError(f"{self.kind} takes no {name}", "leave it out")
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise SpecError(f"{name} = {value} in {self.kind}", "give a finite number")
        for name in ("width", "out_width", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} = {value} in {self.kind}", "sizes are 1 or more")
        if self.out_bias and self.out_map is False:
            raise SpecError("out_bias stands behind a map that out=none leaves out", "leave one of the two out")
        if self.freeze and self.vectors is None:
            raise SpecError("freeze without vectors would keep a random table", "add vectors=FILE, or leave freeze out")
        if self.tie_at is not None and self.kind != "untied":
            raise SpecError(f"tie_at on {self.kind}: there is nothing to tie", "use untied+tie_at=STEP")
        if self.untie_at is not None and self.kind != "tied":
            raise SpecError(f"untie_at on {self.kind}: there is nothing to untie", "use tied+untie_at=STEP")

    @classmethod
    def parse(cls, text: str | BoundarySpec) -> BoundarySpec:
        """Read the written form. A spec is returned as it is.

        >>> BoundarySpec.parse("factored:128+bias").width
        128
        """
        if isinstance(text, BoundarySpec):
            return text
        if not isinstance(text, str):
            raise SpecError(f"a {type(text).__name__} is no boundary", "write tied, untied or factored:128, say")
        head, *options = text.strip().split("+")
        kind, _, arguments = head.partition(":")
        if kind not in KINDS:
            raise SpecError(f"unknown boundary {kind!r} in {text!r}", choices(kind, KINDS))
        values: dict[str, Any] = {}
        for item in filter(None, arguments.split(",")):
            key, equals, value = item.partition("=")
            if not equals and key not in ("untied", "out_bias"):
                key, value = ("r" if kind == "residual" else "k"), item
            read_option(text, key, value, _ARGUMENTS.get(kind, {}), f"argument of {kind}", values)
        for option in options:
            key, _, value = option.partition("=")
            read_option(text, key, value, _OPTIONS, "option", values)
        return cls(kind=kind, **values)

    def __str__(self) -> str:
        options = [
            key if reader is None else f"{key}={_printed(getattr(self, name))}"
            for key, (name, reader) in _OPTIONS.items()
            if getattr(self, name) != _DEFAULTS[name]
        ]
        arguments = []
        if self.kind == "factored-untied":
            arguments = [f"{self.width}" if self.out_width is None else f"in={self.width},out={self.out_width}"]
        else:
            for key, (name, reader) in _ARGUMENTS.get(self.kind, {}).items():
                value = getattr(self, name)
                if name == "rank" or value != _DEFAULTS[name]:
                    text = key if reader is None else f"{key}={_printed(value)}"
                    arguments.append(text.partition("=")[2] if key in ("k", "r") else text)
        return "+".join([self.kind + (f":{','.join(arguments)}" if arguments else ""), *options])

    @property
    def tables(self) -> int:
        """1 where both ends use the same table, else 2."""
        return 2 if self.kind in ("untied", "factored-untied") or self.two_tables else 1

    @property
    def plain(self) -> bool:
        """Whether any loader reads the resulting checkpoint: two or one matrices of width D and nothing else."""
        extras = (self.bias, self.input_scale, self.output_scale, self.softcap)
        return self.kind in ("tied", "untied") and not any(extras)

    def table_widths(self, d: int) -> tuple[int, int]:
        """Widths (input table, output table) in a model of width `d`."""
        width = self.width or d
        bare_output = self.kind == "projected" and self.two_tables and self.out_map is False
        return width, d if bare_output else self.out_width or width

    def maps(self, d: int) -> tuple[bool, bool]:
        """Whether a linear map stands (behind the lookup, before the head) in a model of width `d`.

        Raises:
            SpecError: where the widths need a map that the spec switches off at the output, or k > d.
        """
        if self.kind in ("factored", "factored-untied"):
            widest = max(self.table_widths(d))
            if widest > d:
                fix = f"choose k ≤ {d}, or projected:{widest} for a wider table"
                raise SpecError(f"{self}: k = {widest} exceeds the model width {d}", fix)
            return True, True
        if self.kind != "projected":
            return False, False
        differs = self.width not in (None, d)
        # Press & Wolf's projection stands before the head; behind the lookup only where the widths ask for it
        in_map = differs if self.in_map is None else self.in_map
        out_map = True if self.out_map is None else self.out_map
        if differs and not out_map and not self.two_tables:
            fix = f"use out=linear, a table of width {d}, or two tables (untied)"
            raise SpecError(f"{self}: hidden width {d} cannot meet a table of width {self.width}", fix)
        return in_map, out_map

    def map_shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter between tables and body in a model of width `d`; raises as `maps`."""
        if self.kind == "residual":
            rank = self.rank or 0
            return {"out_map.p": (d, rank), "out_map.q": (rank, d)}
        if self.kind == "spd":
            return {"out_map.factor": (d, d)}
        (has_in, has_out), (in_width, out_width) = self.maps(d), self.table_widths(d)
        found: dict[str, tuple[int, ...]] = {"in_map.weight": (d, in_width)} if has_in else {}
        found |= {"out_map.weight": (out_width, d)} if has_out else {}
        return found | ({"out_map.bias": (out_width,)} if self.out_bias else {})

    def scales(self, d: int) -> tuple[float, float]:
        """(input scale, output scale) as numbers in a model of width `d`."""
        into, out = (SCALES[s](d) if s in SCALES else float(s or 1) for s in (self.input_scale, self.output_scale))
        return into, out

    def require_tables_alone(self) -> None:
        """Refuse a spec whose function two plain tables cannot have.

        Raises:
            SpecError: a soft-cap stands behind the product, or a bias before it.
        """
        if self.out_bias:
            fix = "keep the boundary, or train without out_bias"
            raise SpecError(f"{self}: the projection's bias is no table", fix)
        if self.softcap is not None:
            raise SpecError(f"{self} has a soft-cap, which is not linear", "densify it without, or keep tiewise")

    def plainly(self) -> BoundarySpec:
        """Return this spec without its schedule, as a model is at any one moment."""
        return replace(self, tie_at=None, untie_at=None)


def largest_rank(rows: int, width: int, maps: int) -> int:
    """Largest k for which a table [V, k] and `maps` maps of D × k hold fewer numbers than a table [V, D]; may be 0."""
    return (rows * width - 1) // (rows + maps * width)


_DEFAULTS = {f.name: f.default for f in fields(BoundarySpec)}


def _reader(kind: type[float], holds: Callable[[float], bool], must: str) -> Callable[[str], Any]:
    """Return what reads a number and raises `ValueError` with what it must be."""

    def read(text: str) -> Any:
        value = kind(text)
        if not holds(value):
            raise ValueError(f"must be {must}")
        return value

    return read


positive = _reader(float, lambda value: 0 < value < math.inf, "a positive number")
not_negative = _reader(float, lambda value: 0 <= value < math.inf, "zero or a positive number")
count = _reader(int, lambda value: value >= 1, "1 or more")
row = _reader(int, lambda value: value >= 0, "a row number, 0 or more")


def scale(text: str) -> str:
    """Read a named scale or a positive number; returns its shortest written form."""
    return text if text in SCALES else _printed(positive(text))


def map_kind(text: str) -> bool:
    """Read whether a linear map stands there."""
    if text not in ("linear", "none"):
        raise ValueError("must be 'linear' or 'none'")
    return text == "linear"


def file_path(text: str) -> str:
    """Read a path, percent-encoded where it holds a plus or a comma."""
    if not text:
        raise ValueError("must be a file path")
    return unquote(text)


def _printed(value: Any) -> str:
    """Print any value as its reader takes it."""
    if isinstance(value, bool):
        return "linear" if value else "none"
    if isinstance(value, float):
        short = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        return short.replace("e+", "e")  # a plus would start the next option
    return quote(value, safe="/.:~_-") if isinstance(value, str) and value not in SCALES else str(value)


# written key -> (field, reader); a reader of None marks a switch without a value
_Table = Mapping[str, tuple[str, Callable[[str], Any] | None]]
_ARGUMENTS: dict[str, _Table] = {
    "factored": {"k": ("width", count)},
    "factored-untied": {"k": ("width", count), "in": ("width", count), "out": ("out_width", count)},
    "projected": {
        "k": ("width", count),
        "in": ("in_map", map_kind),
        "out": ("out_map", map_kind),
        "untied": ("two_tables", None),
        "penalty": ("penalty", not_negative),
        "decay": ("decay", not_negative),
        "out_bias": ("out_bias", None),
    },
    "residual": {"r": ("rank", count), "s": ("strength", positive)},
}
_OPTIONS: _Table = {
    "bias": ("bias", None),
    "input_scale": ("input_scale", scale),
    "output_scale": ("output_scale", scale),
    "softcap": ("softcap", positive),
    "alpha": ("alpha", not_negative),
    "pad": ("pad", row),
    "init": ("init", positive),
    "vectors": ("vectors", file_path),
    "freeze": ("freeze", None),
    "tie_at": ("tie_at", count),
    "untie_at": ("untie_at", count),
}


def split_specs(text: str) -> list[str]:
    """Split boundaries or sharings at commas, but for those within one: `name=…` continues what stands before it.

    `untied` is always a boundary: two projected tables of width 300 are `projected:untied,k=300` here.

    >>> split_specs("all:groups=2,ends=1,none")
    ['all:groups=2,ends=1', 'none']
    """
    return re.split(r",(?!\w+=)", re.sub(r"\s*,\s*", ",", text.strip()))


def read_option(
    text: str, key: str, value: str, table: _Table, what: str, into: dict[str, Any], docs: str = "docs/boundary.md"
) -> None:
    """Read one `key=value` of the written form `text` by its table; raises SpecError, which names the `docs`."""
    if key not in table:
        raise SpecError(f"unknown {what} {key!r} in {text!r}", choices(key, table or ("none",), "known:"))
    name, reader = table[key]
    if name in into:
        raise SpecError(f"{key!r} given twice in {text!r}", f"give it once: see {key} in {docs}")
    if reader is None:
        if value:
            raise SpecError(f"{key!r} in {text!r} takes no value", f"write {key} alone")
        into[name] = True
        return
    try:
        into[name] = reader(value)
    except ValueError as error:
        reason = str(error) if "must" in str(error) else "must be a number"
        raise SpecError(f"{key}={value or '(nothing)'} in {text!r}: {reason}", f"see {key} in {docs}") from None


@dataclass(frozen=True)
class Vocabularies:
    """V_in tokens may be read, V_out may be predicted; either may be the larger."""

    inputs: int  # V_in
    outputs: int  # V_out
    # [V_out]: for each output token the input token that shares its row in a tied table, or -1 where it has none and
    # gets a row of its own. None: output token j is input token j.
    output_to_input: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for count in (self.inputs, self.outputs):
            if not hasattr(count, "__index__") or count < 1:
                raise SpecError(f"a vocabulary of {count!r} tokens", "give a whole number, 1 or more")
        rows = self.output_to_input
        if rows is None:
            return
        if len(rows) != self.outputs:
            raise SpecError(f"an index map of {len(rows)} for {self.outputs} output tokens", "give one entry per token")
        if any(not -1 <= row < self.inputs for row in rows):
            what = f"the index map leaves the input vocabulary of {self.inputs}"
            raise SpecError(what, "use -1 for tokens of their own")

    @classmethod
    def same(cls, vocab: int) -> Vocabularies:
        """One vocabulary at both ends."""
        return cls(vocab, vocab)

    def __str__(self) -> str:
        return str(self.inputs) if self.inputs == self.outputs else f"{self.inputs}->{self.outputs}"

    @property
    def read_and_predicted(self) -> int:
        """Input tokens that are output tokens too: in a tied table one row is both."""
        if self.output_to_input is None:
            return min(self.inputs, self.outputs)
        return len(set(self.output_to_input) - {-1})

    def rows(self, tied: bool) -> int:
        """Rows of the input table; a tied one also holds the output tokens that have no input token."""
        if not tied:
            return self.inputs
        if self.output_to_input is None:
            return max(self.inputs, self.outputs)
        return self.inputs + sum(row < 0 for row in self.output_to_input)

    def output_index(self) -> tuple[int, ...] | None:
        """V_out rows: the row of a tied table that each output token uses; None where that is the token itself."""
        if self.output_to_input is None:
            return None
        own = iter(range(self.inputs, self.rows(tied=True)))
        return tuple(row if row >= 0 else next(own) for row in self.output_to_input)
