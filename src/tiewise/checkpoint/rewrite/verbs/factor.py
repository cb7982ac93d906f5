"""`factor`: replace each table by a product of a narrow table and a map.

    tied       W ≈ (W Q) Qᵀ                 factored:k           table [V, k], in_map Q [D, k], out_map Qᵀ [k, D]
    untied     E ≈ (E Q) Qᵀ, U ≈ (U P) Pᵀ   factored-untied:k    two such tables, in_map Q, out_map Pᵀ

The result has the config type `tiewise`. `tiewise.load` reads it, and so does `AutoModelForCausalLM` after
`import tiewise.hf`. `undo` turns it back into plain tables (`plain_tables.py`). `low_rank.py` computes Q and P.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import BASE_TYPE, SPEC, TIEWISE_PREFIX, TIEWISE_TYPE, architecture
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.numeric_ends import PlainEnds, find_tied_names, require_plain_ends
from tiewise.checkpoint.rewrite.change import (
    RANDOM_VECTORS,
    Change,
    Movement,
    NewTensor,
    Rows,
    require_plain_head,
)
from tiewise.checkpoint.rewrite.low_rank import Errors, LowRankFactors, low_rank, memory_needed
from tiewise.checkpoint.rewrite.plain_tables import plain_tables
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.ties import flag_changes
from tiewise.checkpoint.rewrite.token_counts import read_counts
from tiewise.checkpoint.rewrite.token_rows import head_columns
from tiewise.checkpoint.rewrite.tokenizer_text import count_tokens
from tiewise.checkpoint.rules.rule import counted, names
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import items_of, require_memory, short
from tiewise.core.errors import CheckpointError
from tiewise.core.files import format_bytes
from tiewise.core.measurement import percent
from tiewise.core.progress import progress_of
from tiewise.core.spec import BoundarySpec, largest_rank
from tiewise.core.text import BINS, frequency_bins
from tiewise.core.written_options import written_option

MEASURED = f"every row of both ends, at {RANDOM_VECTORS} random hidden vectors of unit root mean square"


@verb(
    order=40,
    details="With counts or a text, it reports the error of frequent and of rare tokens. --undo multiplies the factors "
    "into plain tables, which every loader reads.",
    live='tiewise.install(model, "factored:128")',
    example="untied --rank=4",
)
def factor(
    facts: Facts,
    *,
    rank: Annotated[int | None, Option("Width k of the factored tables.", metavar="K")] = None,
    counts: Annotated[
        Any, Option("How often each token occurs (JSON, .npy, .safetensors, or a number a line).", metavar="FILE")
    ] = None,
    text: Annotated[
        str | os.PathLike[str] | None,
        Option("Or a text, counted with the checkpoint's own tokenizer.json.", metavar="FILE"),
    ] = None,
    undo: Annotated[bool, Option("Turn factored or mapped tables into plain ones.")] = False,
    force: bool = False,
) -> Change:
    """Replace each table by a narrow table and a map, its best approximation of rank k.

    It is the best one in Frobenius norm (Eckart and Young 1936). With `force`, two different tables count as untied
    although the config claims that they are tied.

    >>> import tiewise  # `untied` is a folder with two tables [V, 8]
    >>> for line in tiewise.factor("untied", "narrow", rank=4).lost:
    ...     print(line)
    model.embed_tokens.weight: 55 % of its norm is beyond rank 4
    lm_head.weight: 55 % of its norm is beyond rank 4
    >>> tiewise.factor("factored", "plain", undo=True).written  # `factored` has tables [V, 4] and maps
    ('lm_head.weight', 'model.embed_tokens.weight')

    Args:
        rank: k, the width of the narrow tables.
        counts: how often each token occurs: numbers [V], or a file of them (.json, .npy, .safetensors, or text with
            one number per line). The receipt then also reports the error by token frequency.
        text: a text file instead of `counts`; the checkpoint's tokenizer.json counts its tokens.
        undo: do the reverse: turn factored or mapped tables into plain tables, which every loader reads. The other
            options are refused with it. Plain tables hold neither a soft-cap nor a bias, which `force` drops.
    """
    rank = _require_arguments(rank, counts, text, undo)
    if rank is None:
        return plain_tables(facts, force)
    notes = list(require_plain_head(facts, "factor", force))
    ends = require_plain_ends(facts, "factor", force=force)
    _require_rank(facts, ends, rank)
    _require_plain_modules(facts, ends)
    named = _named_class(facts)
    if text is not None:
        counts = count_tokens(facts.path, Path(text))
    groups = _groups(counts, ends.input.rows)
    widest = max(table.shape[1] for table in ends.tables)
    require_memory(memory_needed(widest, rank), f"{facts.path}: the decomposition of a table {widest} wide")

    results = [_factored(table, rank) for table in ends.tables]
    for result in results:
        notes += result.notes(groups)
    notes += _notes_on_others(facts, ends)
    lookup, head = results[0], results[-1]
    narrow_tables = [result.narrow_table() for result in results]
    return Change(
        Movement(head.errors.logits, lookup.longest_error(), MEASURED),
        drop=frozenset(table.name for table in ends.spare),
        put=(*narrow_tables, *_maps(ends, lookup.factored, head.factored)),
        config=_config(facts, ends, named, rank),
        notes=tuple(notes),
        summary=_summary(results, rank),
        lost=tuple(result.lost() for result in results),
        lost_share=max(result.errors.relative() for result in results),
    )


def _summary(results: Sequence[FactoredTable], rank: int) -> str:
    """Return the change in one clause: number of tables, rank, and lost share of their norm."""
    share = percent(max(result.errors.relative() for result in results))
    if len(results) == 1:
        return f"one table of rank {rank}; {share} of the table's norm is lost"
    return f"two tables of rank {rank}; up to {share} of a table's norm is lost"


def _require_arguments(rank: int | None, counts: Any, text: object, undo: bool) -> int | None:
    """Return the rank, None with `undo`. Raise if the options contradict each other."""
    values = {"rank": rank, "counts": counts, "text": text}
    others = [written_option(name) for name, value in values.items() if value is not None]
    if undo and others:
        problem = f"{written_option('undo', True)} with {', '.join(others)}"
        raise CheckpointError(problem, f"leave {' and '.join(others)} out")
    if not undo and rank is None:
        remedy = f"give {written_option('rank')}, the width of the narrow tables, or {written_option('undo', True)}"
        raise CheckpointError("no rank to factor to", remedy)
    if counts is not None and text is not None:
        problem = f"{written_option('counts')} and {written_option('text')} both say how often each token occurs"
        raise CheckpointError(problem, "give one of them")
    return rank


def _notes_on_others(facts: Facts, ends: PlainEnds) -> list[str]:
    """Return notes on dropped copies, and on other tables that `factor` leaves unchanged."""
    notes = []
    if ends.spare:
        copies = ", ".join(short(table.name) for table in ends.spare)
        notes.append(f"removed the equal copy {copies}")
    if facts.roles.indexed_tensors:
        left = names([other.tensor.name for other in facts.roles.indexed_tensors])
        notes.append(f"only the two ends are factored; these tables stay as they are: {left}")
    return notes


def _require_rank(facts: Facts, ends: PlainEnds, rank: int) -> None:
    """Raise unless the factors have fewer numbers than each table."""
    maps = 2 // len(ends.tables)  # maps per table: a tied table has one for each end
    most = min(largest_rank(table.rows, table.shape[1], maps) for table in ends.tables)
    if 1 <= rank <= most:
        return
    sizes = " and ".join(f"{table.rows:,} × {table.shape[1]}" for table in ends.tables)
    remedy = "no rank makes them smaller: leave these tables as they are"
    if most:
        remedy = f"choose a rank from 1 to {most}"
    raise CheckpointError(f"{facts.path}: rank {rank} does not make tables of {sizes} smaller", remedy)


def _require_plain_modules(facts: Facts, ends: PlainEnds) -> None:
    """Raise if `tiewise.load` cannot give the class factored tables."""
    problem = facts.class_ends.no_boundary
    if ends.output is not None and ends.output.rows != ends.input.rows:
        problem = f"its tables have {ends.input.rows:,} and {ends.output.rows:,} rows"
    for matrix in head_columns(facts, ends.input.rows):
        problem = f"{short(matrix.name)}, a part of its head, has a column for each token"
    if problem:
        name = short(architecture(facts.config) or "its class")
        raise CheckpointError(f"{facts.path}: {name} cannot have factored tables: {problem}", "keep its plain tables")


@dataclass(frozen=True)
class NamedClass:
    """The class of a model as its config names it."""

    family: str  # `model_type` of the config
    architectures: list[str]


def _named_class(facts: Facts) -> NamedClass:
    """Return the class of a model.

    Raise if the config does not name the class, or if the class is custom code.
    """
    family, classes = facts.config.get("model_type"), facts.config.get("architectures")
    architectures = list(items_of(str, classes))
    if not isinstance(family, str) or architectures != classes:
        remedy = "write model_type and architectures into config.json"
        raise CheckpointError(f"{facts.path}: its config.json does not name the model's class", remedy)
    if "auto_map" in facts.config:
        remedy = "factor only models whose classes transformers contains"
        raise CheckpointError(f"{facts.path}: its classes ({short(classes)}) are custom code", remedy)
    return NamedClass(family, architectures)


@dataclass(frozen=True)
class TokenGroup:
    """Tokens that occur about equally often."""

    label: str  # range of their counts, such as "10–99"
    mask: NDArray[np.bool_]  # [V]


def _groups(counts: Any, rows: int) -> list[TokenGroup]:
    """Return the tokens in groups by decade of their counts.

    Empty groups are left out. Without counts, the list is empty.

    Args:
        counts: numbers or a file of them, as `read_counts` takes them; None if the caller has none.
        rows: number of tokens.
    """
    if counts is None:
        return []
    bins = frequency_bins(read_counts(counts, rows))
    groups = [TokenGroup(label, bins == number) for number, label in enumerate(BINS)]
    return [group for group in groups if group.mask.any()]


@dataclass(frozen=True)
class FactoredTable:
    """A table, its factors, and the error of their product."""

    table: Stored
    rank: int  # width of the narrow table
    factored: LowRankFactors
    errors: Errors

    def longest_error(self) -> float:
        """Return the largest Euclidean length of a row's error."""
        return float(self.errors.rows.max(initial=0.0) ** 0.5)

    def narrow_table(self) -> NewTensor:
        """Return the narrow table [V, k], stored under the name of the table that it replaces."""
        return NewTensor.like(self.table, self.factored.pieces, shape=(self.table.rows, self.rank))

    def notes(self, groups: Sequence[TokenGroup]) -> list[str]:
        """Return notes on the error of all rows and of each group of tokens."""
        name, width = short(self.table.name), self.table.shape[1]
        least = f"no matrix of this rank is below {self.factored.least_error():.4g}"
        notes = [f"{name}: relative error {self.errors.relative():.4g} at rank {self.rank} of {width}; {least}"]
        for group in groups:
            tokens = f"{counted(int(group.mask.sum()), 'token')} seen {group.label} times"
            notes.append(f"{name}: relative error {self.errors.relative(group.mask):.4g} for {tokens}")
        return notes

    def lost(self) -> str:
        """Return a sentence on the share of the table that its factors lack."""
        return f"{short(self.table.name)}: {percent(self.errors.relative())} of its norm is beyond rank {self.rank}"


def _factored(table: Stored, rank: int) -> FactoredTable:
    """Decompose a table and measure the error.

    Raise if a row of the narrow table overflows the table's type.
    """
    name, memory = short(table.name), format_bytes(memory_needed(table.shape[1], rank))
    with progress_of(f"decomposing {name} (needs {memory} of memory)", table.nbytes):
        factored = low_rank(table, rank)
    with progress_of(f"measuring {name}", table.nbytes):
        errors = factored.errors()
    if not np.isfinite(errors.rows).all():
        problem = f"{table.path}: a row of {name} is too long for one of rank {rank} in {table.dtype}"
        raise CheckpointError(problem, "cast the checkpoint to BF16 or F32 first")
    return FactoredTable(table, rank, factored, errors)


def _maps(ends: PlainEnds, lookup: LowRankFactors, head: LowRankFactors) -> list[NewTensor]:
    """Return the maps of both ends: the boundary's Parameters `in_map` and `out_map`."""
    in_map = f"{module_of(ends.input.name)[0]}.in_map.weight"
    out_map = f"{ends.head}.out_map.weight"
    return [_stored_map(lookup.table, in_map, lookup.map), _stored_map(head.table, out_map, head.map.T)]


def _stored_map(table: Stored, name: str, values: Rows) -> NewTensor:
    """Return a map as a tensor in the file of its table."""
    return NewTensor.like(table, partial(iter, [values.tobytes()]), name=name, shape=values.shape)


def _config(facts: Facts, ends: PlainEnds, named: NamedClass, rank: int) -> dict[str, Any]:
    """Return the new entries of config.json: the boundary and its class."""
    kind = "factored-untied"
    if ends.output is None:
        kind = "factored"
    # stacks share an input table by the same flag, which must then be true even if the head has a separate table
    shared_tables = {tied.source for tied in find_tied_names(facts) if len(tied.targets) > 1}
    config: dict[str, Any] = {}
    if ends.input.name in shared_tables and not facts.claims.t5_like:
        config |= flag_changes(facts, True)
    spec = BoundarySpec(kind, width=rank)
    config |= {"model_type": TIEWISE_TYPE, BASE_TYPE: named.family, SPEC: str(spec)}
    config["architectures"] = [TIEWISE_PREFIX + name for name in named.architectures]
    return config
