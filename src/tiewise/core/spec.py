"""`BoundarySpec`: the written form of a boundary between model and vocabulary.

The same string is typed on the command line, written in YAML, passed in Python and saved in a model's config:

    tied                        one table [V, D], looked up and multiplied
    untied                      two tables [V, D]
    factored:128                one table [V, 128] and two linear maps (ALBERT)
    factored-untied:in=64,out=128   two tables of separate widths, each with its map
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
from dataclasses import dataclass, replace
from typing import Any

from tiewise.core.errors import SpecError, suggest_choices
from tiewise.core.spec_options import (
    ALBERT_RUN,
    AS_SAVED,
    AS_TABLES,
    BACKENDS,
    FLAX_RUN,
    GRADIENT,
    INPUT_ROWS,
    LOGITS,
    LOSS,
    MODULES,
    NEVER,
    PLAN,
    PRETRAINED,
    RUN,
    RUNS,
    SCALES,
    SCHEDULE,
    SHARDED,
    START,
    STORED,
    TRAINED,
    OptionEntry,
    Refusal,
    argument,
    arguments,
    count,
    file_path,
    map_kind,
    not_negative,
    option,
    option_entries,
    options,
    positive,
    row_number,
    scale,
    token_count,
)

MODEL_TYPE = "tiewise"  # `model_type` of a saved model whose boundary no other tool supports
KINDS = ("untied", "tied", "factored", "factored-untied", "projected", "residual", "spd")
FREE_ROWS = "free.rows"  # name of Δ [K, D]
EXPORTED = "exported_boundary"  # entry of the config of dense tables: the spec whose free rows they have
_IN_TRAINING = Refusal(" changes during training", "give the schedule to a training run; build the boundary without it")


@dataclass(frozen=True)
class BoundarySpec:
    """One point of the spectrum: a kind, its sizes, and options that any kind takes.

    `embed(ids) = in_map(table_in[ids]) · input_scale`;
    `logits(h) = softcap(out_map(h) · table_outᵀ · output_scale + bias)`. Letters as in `tiewise.core`.
    The fields are the arguments and options of the tables in docs/boundary.md.

    Args:
        kind: `untied`, `tied`, `factored`, `factored-untied`, `projected`, `residual` or `spd`.
        options: every other field, by its name. The kind decides which sizes it takes.

    Raises:
        SpecError: on an unknown kind, a size that the kind does not take or lacks, or a value out of range.

    >>> spec = BoundarySpec.parse("factored:64+bias")
    >>> spec.kind, spec.width, spec.bias
    ('factored', 64, True)
    >>> str(BoundarySpec("factored", width=64, bias=True))
    'factored:64+bias'
    """

    kind: str = "tied"
    # sizes and arguments of a kind, written after its colon
    width: int | None = argument(
        None,
        {"factored": ("k",), "factored-untied": ("k", "in"), "projected": ("k",)},
        count,
        "a number",
        "table width",
    )
    out_width: int | None = argument(
        None, {"factored-untied": ("out",)}, count, "`in=`, `out=`", "widths of the two tables"
    )
    rank: int | None = argument(None, {"residual": ("r",)}, count, "a number", "rank r")
    strength: float = argument(0.03, {"residual": ("s",)}, positive, "`s=`", "strength s (0.03)", changes=LOGITS)
    in_map: bool | None = argument(  # None: where the widths need one
        None,
        {"projected": ("in",)},
        map_kind,
        r"`in=linear\|none`",
        "a map after the lookup, or none",
    )
    out_map: bool | None = argument(
        None,
        {"projected": ("out",)},
        map_kind,
        r"`out=linear\|none`",
        "a map before the head, or none; with `untied` and `none` the output table is [V, D]",
    )
    two_tables: bool = argument(False, {"projected": ("untied",)}, None, "`untied`", "two tables")
    penalty: float = argument(  # as printed (Press & Wolf 2017, §3)
        0.0,
        {"projected": ("penalty",)},
        not_negative,
        "`penalty=λ`",
        "adds λ‖P_out‖₂ to the training loss (λ = 0.15 in the paper)",
        changes=LOSS,
    )
    decay: float = argument(
        0.0,
        {"projected": ("decay",)},
        not_negative,
        "`decay=c`",
        "adds c/2 ‖P_out‖²_F, as the authors' code does",
        changes=LOSS,
    )
    out_bias: bool = argument(  # their code has it, and their counts leave it out
        False,
        {"projected": ("out_bias",)},
        None,
        "`out_bias`",
        "a bias [E] after P_out, as the authors' code has; no plain tables do the same, so `factor --undo` refuses it",
        changes=LOGITS,
        backends=BACKENDS - STORED,
        other_tools=NEVER,
        no_tables=Refusal(": the projection's bias is no table", "keep the boundary, or train without out_bias"),
        refusal=Refusal(
            ": the projection's bias is no table, so no plain tables do the same",
            "keep the boundary, and load the model with tiewise.load",
        ),
    )
    # options of every kind, each written after a plus
    bias: bool = option(False, None, "`bias`", "output bias [V]", LOGITS, backends=BACKENDS, other_tools=AS_TABLES)
    input_scale: str | None = option(
        None,
        scale,
        "`input_scale=x`",
        "input rows times a number, `sqrt_d`, `1/sqrt_d` or `1/d` (μP)",
        INPUT_ROWS,
        backends=BACKENDS,
        other_tools=AS_TABLES,
    )
    output_scale: str | None = option(
        None,
        scale,
        "`output_scale=x`",
        "logits times x, before the bias",
        LOGITS,
        backends=BACKENDS,
        other_tools=AS_TABLES,
    )
    softcap: float | None = option(
        None,
        positive,
        "`softcap=c`",
        "c·tanh(logit / c)",
        LOGITS,
        backends=BACKENDS,
        other_tools=NEVER,
        no_tables=Refusal(" has a soft-cap, which is not linear", "save it without the soft-cap, or keep tiewise"),
    )
    free: int | None = option(
        None,
        token_count,
        "`free=K`",
        "`tied` only: the K most frequent tokens have separate output rows, E + Δ; Δ [K, D] starts at zero",
        LOGITS,
        backends=BACKENDS - {SHARDED, ALBERT_RUN, FLAX_RUN},
        other_tools=AS_TABLES,
    )
    alpha: float = option(
        1.0,
        not_negative,
        "`alpha=α`",
        "factor on the lookup path, the gradient through the lookup",
        GRADIENT,
        backends=BACKENDS,
    )
    pad: int | None = option(
        None,
        row_number,
        "`pad=row`",
        "this row stays zero and gets no gradient from either path "
        "(`padding_idx` of torch stops the lookup path alone)",
        GRADIENT,
        backends=BACKENDS,
    )
    init: float | None = option(
        None,
        positive,
        "`init=σ`",
        "tables start N(0, σ²); without it, σ = D^-½: *embedded* rows of unit norm, "
        "rows of a table of width E of norm √(E/D)",
        START,
        backends=BACKENDS,
    )
    vectors: str | None = option(
        None,
        file_path,
        "`vectors=FILE`",
        "the input table starts from pretrained vectors (below)",
        PRETRAINED,
        backends=MODULES | STORED | {PLAN, RUN},
    )
    freeze: bool = option(
        False,
        None,
        "`freeze`",
        "keeps the table of `vectors` fixed; without it training tunes it",
        TRAINED,
        backends=MODULES | STORED | {PLAN, RUN},
    )
    tie_at: int | None = option(
        None,
        count,
        "`tie_at=step`",
        "the two tables become their mean at this step of training",
        SCHEDULE,
        backends=(RUNS - {FLAX_RUN}) | STORED | {PLAN},
        refusal=_IN_TRAINING,
    )
    untie_at: int | None = option(
        None,
        count,
        "`untie_at=step`",
        "the head gets a copy of the table at this step of training",
        SCHEDULE,
        backends=(RUNS - {FLAX_RUN}) | STORED | {PLAN},
        refusal=_IN_TRAINING,
    )

    def __post_init__(self) -> None:
        if self.out_width == self.width:
            object.__setattr__(self, "out_width", None)  # one written form for one meaning
        self._check_kind()
        self._check_numbers()
        self._check_combinations()
        self._check_free_rows()

    def _check_kind(self) -> None:
        """Refuse an unknown kind, a missing size, and an argument that the kind does not take."""
        if self.kind not in KINDS:
            raise SpecError(f"unknown boundary {self.kind!r}", suggest_choices(self.kind, KINDS))
        if self.is_factored and self.width is None:
            raise SpecError(f"{self.kind} needs the table width k", f"write {self.kind}:128, say")
        if self.kind == "residual" and self.rank is None:
            raise SpecError("residual needs the rank r", "write residual:32, say")
        for name in sorted(entry.field for entry in self.changed_rows() if not entry.is_of(self.kind)):
            raise SpecError(f"{self.kind} takes no {name}", "leave it out")

    def _check_numbers(self) -> None:
        """Refuse infinities, NaN, and sizes below 1."""
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise SpecError(f"{name} = {value} in {self.kind}", "give a finite number")
        for name in ("width", "out_width", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} = {value} in {self.kind}", "sizes are 1 or more")

    def _check_combinations(self) -> None:
        """Refuse options that contradict each other or the kind."""
        if self.out_bias and self.out_map is False:
            raise SpecError("out_bias stands behind a map that out=none leaves out", "leave one of the two out")
        if self.freeze and self.vectors is None:
            raise SpecError("freeze without vectors would keep a random table", "add vectors=FILE, or leave freeze out")
        if self.tie_at is not None and self.kind != "untied":
            raise SpecError(f"tie_at on {self.kind}: there is nothing to tie", "use untied+tie_at=STEP")
        if self.untie_at is not None and self.kind != "tied":
            raise SpecError(f"untie_at on {self.kind}: there is nothing to untie", "use tied+untie_at=STEP")

    def _check_free_rows(self) -> None:
        """Refuse a wrong number of free rows, and kinds without a tied table."""
        if self.free is None:
            return
        if type(self.free) is not int or self.free < 1:
            raise SpecError(f"free = {self.free!r} in {self.kind}", "give a whole number of tokens, 1 or more")
        if self.kind != "tied":
            raise SpecError(f"free on {self.kind}: only a tied table has rows to free", "use tied+free=K")
        if self.untie_at is not None:
            raise SpecError("free with untie_at, which frees all rows", "leave one of the two out")

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
        head, *written_options = text.strip().split("+")
        kind, _, sizes = head.partition(":")
        if kind not in KINDS:
            place = "" if kind == text.strip() else f" in {text!r}"
            raise SpecError(f"unknown boundary {kind!r}{place}", suggest_choices(kind, KINDS))
        values: dict[str, Any] = {}  # by field; `read_option` adds to it
        argument_readers = _readers(arguments(cls, kind))
        for item in sizes.split(","):
            if item:
                key, value = _split_argument(item, kind)
                read_option(text, key, value, argument_readers, f"argument of {kind}", values)
        option_readers = _readers(options(cls))
        for item in written_options:
            key, _, value = item.partition("=")
            read_option(text, key, value, option_readers, "option", values)
        return cls(kind=kind, **values)

    def __str__(self) -> str:
        sizes = self._written_sizes()
        head = f"{self.kind}:{sizes}" if sizes else self.kind
        written_options = [
            entry.written(getattr(self, entry.field)) for entry in self.changed_rows() if entry.kinds is None
        ]
        return "+".join([head, *written_options])

    def _written_sizes(self) -> str:
        """Return the arguments after the kind's colon, in their shortest form."""
        if self.kind == "factored-untied":
            return str(self.width) if self.out_width is None else f"in={self.width},out={self.out_width}"
        sizes = []
        for key, entry in arguments(type(self), self.kind).items():
            value = getattr(self, entry.field)
            if value == entry.default:
                continue
            text = entry.written(value, key)
            if key in _UNNAMED:
                text = text.removeprefix(f"{key}=")
            sizes.append(text)
        return ",".join(sizes)

    @property
    def is_factored(self) -> bool:
        """Tells whether a narrower table and a linear map replace a table of the model's width."""
        return self.kind in ("factored", "factored-untied")

    def changed_rows(self) -> list[OptionEntry]:
        """Return the entries of options and arguments that differ from their defaults."""
        return [entry for entry in option_entries(type(self)) if getattr(self, entry.field) != entry.default]

    def unsupported(self, backend: str) -> list[OptionEntry]:
        """Return the entries of this spec's options that the backend does not honour."""
        return [entry for entry in self.changed_rows() if backend not in entry.backends]

    def require(self, backend: str) -> None:
        """Refuse a spec with an option that a backend does not honour.

        Raises:
            SpecError: names the first such option and the backend.
        """
        for entry in self.unsupported(backend):
            refusal = entry.refusal
            if refusal is None:
                where = ", ".join(sorted(entry.backends)) or "nothing yet"
                refusal = Refusal(f": {backend} does not honour {entry.key!r}", f"leave it out; it acts in: {where}")
            raise SpecError(f"{self}{refusal.problem}", refusal.remedy)

    @property
    def tables(self) -> int:
        """Number of tables: 1 if input embedding and output head share one, else 2."""
        has_two = self.two_tables or self.kind in ("untied", "factored-untied")
        return 2 if has_two else 1

    @property
    def plain(self) -> bool:
        """Tells whether any loader reads the resulting checkpoint.

        It then has one or two tables of width D and nothing else.
        """
        return self.kind in ("tied", "untied") and all(entry.other_tools == AS_SAVED for entry in self.changed_rows())

    def table_widths(self, d: int) -> tuple[int, int]:
        """Return the widths (input table, output table) in a model of width `d`."""
        width = self.width or d
        has_bare_output = self.kind == "projected" and self.two_tables and self.out_map is False
        if has_bare_output:
            return width, d
        return width, self.out_width or width

    def maps(self, d: int) -> tuple[bool, bool]:
        """Return whether there is a linear map (after the lookup, before the head).

        `d` is the width of the model.

        Raises:
            SpecError: k > d, or the widths need an output map that the spec switches off.
        """
        if self.is_factored:
            widest = max(self.table_widths(d))
            if widest > d:
                remedy = f"choose k ≤ {d}, or projected:{widest} for a wider table"
                raise SpecError(f"{self}: k = {widest} exceeds the model width {d}", remedy)
            return True, True
        if self.kind != "projected":
            return False, False
        differs = self.width not in (None, d)
        in_map, out_map = self.in_map, self.out_map
        if in_map is None:  # Press & Wolf project before the head; after the lookup only if the widths differ
            in_map = differs
        if out_map is None:
            out_map = True
        has_one_table_of_wrong_width = differs and not out_map and not self.two_tables
        if has_one_table_of_wrong_width:
            remedy = f"use out=linear, a table of width {d}, or two tables (untied)"
            raise SpecError(f"{self}: hidden width {d} cannot meet a table of width {self.width}", remedy)
        return in_map, out_map

    def map_shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Return name → shape of every parameter between tables and body.

        `d` is the width of the model. Raises as `maps`.
        """
        if self.kind == "residual":
            rank = self.rank or 0
            return {"out_map.p": (d, rank), "out_map.q": (rank, d)}
        if self.free is not None:
            return {FREE_ROWS: (self.free, d)}
        if self.kind == "spd":
            return {"out_map.factor": (d, d)}
        has_in, has_out = self.maps(d)
        in_width, out_width = self.table_widths(d)
        shapes: dict[str, tuple[int, ...]] = {}
        if has_in:
            shapes["in_map.weight"] = (d, in_width)
        if has_out:
            shapes["out_map.weight"] = (out_width, d)
        if self.out_bias:
            shapes["out_map.bias"] = (out_width,)
        return shapes

    def require_free_tokens(self, vocab: int) -> None:
        """Refuse more free rows than the `vocab` output tokens."""
        if self.free is not None and self.free > vocab:
            raise SpecError(f"{self}: the vocabulary has {vocab} tokens", f"choose K ≤ {vocab}")

    def export_entry(self) -> dict[str, str]:
        """Return the config's entry by which `check` knows why K dense rows differ."""
        if self.free is None:
            return {}
        return {EXPORTED: str(self)}

    def scales(self, d: int) -> tuple[float, float]:
        """Return (input scale, output scale) as numbers in a model of width `d`."""
        return _scale_factor(self.input_scale, d), _scale_factor(self.output_scale, d)

    def require_tables_alone(self) -> None:
        """Refuse a spec whose function two plain tables cannot have.

        Raises:
            SpecError: a soft-cap follows the product, or a bias precedes it.
        """
        for entry in self.changed_rows():
            if entry.no_tables is not None:
                raise SpecError(f"{self}{entry.no_tables.problem}", entry.no_tables.remedy)

    def plainly(self) -> BoundarySpec:
        """Return this spec without its schedule, as a model is at one step."""
        schedule = {entry.field: entry.default for entry in self.changed_rows() if entry.changes == SCHEDULE}
        return replace(self, **schedule)


def largest_rank(rows: int, width: int, maps: int) -> int:
    """Return the largest k at which factoring saves parameters; it may be 0.

    A table [V, k] and `maps` maps of D × k then hold fewer numbers than a table [V, D].
    """
    return (rows * width - 1) // (rows + maps * width)


def _scale_factor(written: str | None, d: int) -> float:
    """Return a written scale as the factor in a model of width `d`; 1 without one."""
    if written is None:
        return 1.0
    named_scale = SCALES.get(written)
    return float(written) if named_scale is None else named_scale(d)


# written key -> (field, reader); a reader of None marks a switch without a value
_Readers = Mapping[str, tuple[str, Callable[[str], Any] | None]]
_UNNAMED = ("k", "r")  # arguments that are written as a number alone: `factored:128`
_SWITCHES = ("untied", "out_bias")  # arguments without a value


def _readers(table: Mapping[str, OptionEntry]) -> _Readers:
    """Return the fields and readers of some entries by their written key."""
    return {key: (entry.field, entry.read) for key, entry in table.items()}


def _split_argument(item: str, kind: str) -> tuple[str, str]:
    """Split one argument of a kind into its key and its value.

    A number alone is the kind's size.
    """
    key, equals, value = item.partition("=")
    if equals or key in _SWITCHES:
        return key, value
    return ("r" if kind == "residual" else "k"), item


def split_specs(text: str) -> list[str]:
    """Split a list of boundaries or sharings at the commas between them.

    `name=…` continues the item before it. `untied` is always a boundary: two projected tables of width 300 are
    `projected:untied,k=300` here.

    >>> split_specs("all:groups=2,ends=1,none")
    ['all:groups=2,ends=1', 'none']
    """
    return re.split(r",(?!\w+=)", re.sub(r"\s*,\s*", ",", text.strip()))


def read_option(
    text: str, key: str, value: str, table: _Readers, role: str, into: dict[str, Any], docs: str = "docs/boundary.md"
) -> None:
    """Read one `key=value` of a written spec and store it in `into` by field name.

    `text` is the full spec and `role` the word for such an item, both for messages.

    Raises:
        SpecError: the key is unknown or given twice, or its value is not valid; the message names the `docs`.
    """
    if key not in table:
        raise SpecError(f"unknown {role} {key!r} in {text!r}", suggest_choices(key, table or ("none",), "known:"))
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
    """Sizes of an input vocabulary V_in and an output vocabulary V_out.

    Either may be the larger.

    Attributes:
        inputs: V_in.
        outputs: V_out.
        output_to_input: [V_out]: for each output token the input token that shares its row in a tied table, or -1 for
            a separate row. None: output token j is input token j.

    >>> str(Vocabularies(32000, 32064))
    '32000->32064'
    """

    inputs: int
    outputs: int
    output_to_input: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for size in (self.inputs, self.outputs):
            if not hasattr(size, "__index__") or size < 1:
                raise SpecError(f"a vocabulary of {size!r} tokens", "give a whole number, 1 or more")
        if self.output_to_input is not None:
            self._check_index(self.output_to_input)

    def _check_index(self, rows: tuple[int, ...]) -> None:
        """Refuse an index map of another length, or with a row that the input vocabulary lacks."""
        if len(rows) != self.outputs:
            raise SpecError(f"an index map of {len(rows)} for {self.outputs} output tokens", "give one entry per token")
        if rows and not -1 <= min(rows) <= max(rows) < self.inputs:
            problem = f"the index map leaves the input vocabulary of {self.inputs}"
            raise SpecError(problem, "use -1 for tokens of their own")

    @classmethod
    def same(cls, vocab: int) -> Vocabularies:
        """Return one vocabulary for input and output."""
        return cls(vocab, vocab)

    def __str__(self) -> str:
        if self.inputs == self.outputs:
            return str(self.inputs)
        return f"{self.inputs}->{self.outputs}"

    @property
    def read_and_predicted(self) -> int:
        """The number of input tokens that are also output tokens; they share a row if tied."""
        if self.output_to_input is None:
            return min(self.inputs, self.outputs)
        return len(set(self.output_to_input) - {-1})

    def rows(self, tied: bool) -> int:
        """Return the number of rows of the input table.

        A tied table also holds the output tokens that are no input tokens.
        """
        if not tied:
            return self.inputs
        if self.output_to_input is None:
            return max(self.inputs, self.outputs)
        return self.inputs + sum(row < 0 for row in self.output_to_input)

    def output_index(self) -> tuple[int, ...] | None:
        """Return the row of a tied table for each of the V_out output tokens.

        None means that each token's row is its id.
        """
        if self.output_to_input is None:
            return None
        separate_rows = iter(range(self.inputs, self.rows(tied=True)))
        return tuple(row if row >= 0 else next(separate_rows) for row in self.output_to_input)
