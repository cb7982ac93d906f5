"""Everything of a checkpoint with a row for each token: what `resize`, `trim` and `transplant` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tiewise.checkpoint.claims import in_layer
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.indexed_tensors import PER_LAYER
from tiewise.checkpoint.numeric_ends import readable, require_loadable_options
from tiewise.checkpoint.rewrite.change import Moved, NewTensor, Pieces, refuse
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

KEPT = Moved(0.0, 0.0, "nothing: every row that stays keeps its bytes")
PER_LAYER_SIZE = "vocab_size_per_layer_input"


def parts_of_tokens(
    facts: Facts, verb: str, *, may_lack_rows: bool = False
) -> tuple[tuple[Stored, ...], tuple[Stored, ...], tuple[Stored, ...]]:
    """(both ends' tables, biases as [V], other tables): everything stored with a row for each token, or a refusal."""
    require_loadable_options(facts)
    tables = tuple(readable(facts, verb))
    biases = tuple(replace(bias, shape=(bias.shape[-1],)) for bias in facts.roles.biases)  # [V] or [1, V]
    beside = tuple(other.tensor for other in facts.roles.others if other.by_id)
    rows = tables[0].rows
    if facts.unequal_on_purpose is not None:
        what = f"{facts.path}: {facts.unequal_on_purpose}, and {verb} keeps one number of rows at both ends"
        raise CheckpointError(what, "no verb changes such a vocabulary: keep it, or train another model")
    for part in (*tables, *biases, *beside):
        lacks = part.rows < rows and not (may_lack_rows and part in beside)
        if part.rows > rows or lacks or part.dtype not in FLOATING:
            what = f"{facts.path}: {short(part.name)} is {part.dtype} of {part.rows:,} rows, not {rows:,}"
            fix = "both ends, every bias and every other table of tokens must have one number of rows first"
            raise CheckpointError(what, fix)
    return tables, biases, beside


def with_rows(
    facts: Facts, parts: Iterable[Stored], count: int, pieces: Callable[[Stored], Pieces]
) -> tuple[NewTensor, ...]:
    """Return what becomes of `parts_of_tokens` with so many rows, whose bytes `pieces` gives; a bias may be [1, V]."""

    def shape(part: Stored) -> tuple[int, ...]:
        stored = facts.folder.tensors[part.name].shape
        return (*stored[:-1], count) if part.shape != stored or len(stored) == 1 else (count, *stored[1:])

    return tuple(NewTensor.like(part, partial(pieces, part), shape=shape(part)) for part in parts)


def sizes_of(facts: Facts, before: int, count: int) -> dict[str, int]:
    """Return the config's entries that give the number of rows, now `count`: those that said `before`, else a new one.

    A table of layers may have had fewer rows. A type is one of BERT's segments.
    """
    level, found = facts.text.level if facts.text.level in facts.levels else "", dict[str, int]()
    per_layer = any(other.role == PER_LAYER for other in facts.roles.others)
    for key in ("vocab_size", PER_LAYER_SIZE)[: 1 + per_layer] if facts.folder.config is not None else ():
        paths = [p for p, n in leaves_of(facts.config) if p.endswith(key) and (n == before or key == PER_LAYER_SIZE)]
        paths = [path for path in paths if not path.endswith("type_vocab_size")]
        found |= dict.fromkeys(paths or [f"{level}.{key}".lstrip(".")], count)
    return found


def still_to_do(facts: Facts, resized: set[str], rows: int, force: bool) -> tuple[str, ...]:
    """What else the user should see to; refused unless forced where a table of no known role has as many rows."""
    notes: tuple[str, ...] = ()
    if facts.folder.config is None:
        notes = ("there is no config.json: write the new vocab_size into the one that goes with this file",)
    for what in unknown_tables(facts, resized, rows):
        notes += refuse(what, "nothing here resizes it: resize the model in transformers", force)
    return notes


def unknown_tables(facts: Facts, known: set[str], rows: int) -> Iterator[str]:
    """Say of every table with as many rows that it is neither `known` nor of positions: they may be tokens'."""
    for name, tensor in facts.folder.tensors.items():
        # any but a matrix within a layer has its rows for tokens
        of_tokens = not in_layer(name) or "embed" in name or "head" in module_of(name)[0].rpartition(".")[2]
        passed = name in known or tensor in facts.roles.positions
        if not passed and len(tensor.shape) == 2 and tensor.rows == rows and of_tokens:
            yield f"{facts.path}: {short(name)} has {rows:,} rows too, and plays no part that is known"


def leaves_of(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything in a config, at any level."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{path}", leaf) for path, leaf in leaves_of(value))
        else:
            yield str(key), value
