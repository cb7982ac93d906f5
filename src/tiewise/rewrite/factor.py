"""`factor`: each table as the product of a narrow table and a map, by truncated singular value decomposition.

    tied       W ≈ (W Q) Qᵀ                 factored:k           table [V, k], in_map Q [D, k], out_map Qᵀ [k, D]
    untied     E ≈ (E Q) Qᵀ, U ≈ (U P) Pᵀ   factored-untied:k    two such tables, in_map Q, out_map Pᵀ

The result has the config type `tiewise`: `tiewise.load` reads it, and `AutoModelForCausalLM` after `import tiewise.hf`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import BASE_TYPE, OWN_PREFIX, OWN_TYPE
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import progress
from tiewise.core.spec import BoundarySpec
from tiewise.rewrite import memory
from tiewise.rewrite.change import Change, Measured, NewTensor
from tiewise.rewrite.counts import checked_counts, decades, read_counts
from tiewise.rewrite.ends import opened
from tiewise.rewrite.fit import Factors, Fit, measure_fit
from tiewise.rewrite.flags import flags
from tiewise.rewrite.groups import groups
from tiewise.rewrite.low_rank import low_rank, memory_needed
from tiewise.rewrite.measure import PROBES
from tiewise.rewrite.plain_ends import PlainEnds, plain_ends
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.transaction import apply


def factor(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    rank: int,
    counts: Any = None,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Write a checkpoint whose tables are products of a narrow table and a map.

    Args:
        source: the checkpoint.
        to: the new folder.
        rank: k, the width of the narrow tables.
        counts: how often each token occurs: a file (see `read_counts`) or numbers [V]; the error is then reported by
            frequency too.
        dry_run: decompose and measure, write nothing.
        force: take two different tables as untied although the config claims one.

    Raises:
        CheckpointError: the rank saves nothing, the memory is not there, or the checkpoint is not one of plain tables.
    """
    facts = opened(Path(source))
    ends = plain_ends(facts, "factor", force=force)
    _check_rank(facts, ends, rank)
    config = _declared(facts, ends, rank)
    known = None if counts is None else _counts(counts, ends.input.rows)
    width = max(table.shape[1] for table in ends.tables)
    memory.require(memory_needed(width, rank), f"{facts.path}: the decomposition of a table {width} wide")
    fitted = [_fit(table, rank) for table in ends.tables]
    change = Change(
        _measured(fitted),
        drop=frozenset(table.name for table in ends.spare),
        put=tuple(_tensors(ends, [factors for factors, _ in fitted])),
        config=config,
        notes=tuple(_notes(ends, fitted, known)),
    )
    return apply(facts.folder, change, Path(to), command="factor", dry_run=dry_run, force=force)


def largest_rank(rows: int, width: int, maps: int) -> int:
    """Largest k for which a table [V, k] and `maps` maps of D × k hold fewer numbers than a table [V, D]; may be 0."""
    return (rows * width - 1) // (rows + maps * width)


def _check_rank(facts: Facts, ends: PlainEnds, rank: int) -> None:
    maps = 2 if ends.output is None else 1
    most = min(largest_rank(table.rows, table.shape[1], maps) for table in ends.tables)
    if not 1 <= rank <= most:
        sizes = " and ".join(f"{table.rows:,} × {table.shape[1]}" for table in ends.tables)
        fix = f"the largest that does is {most}" if most else "no rank does: leave these tables as they are"
        raise CheckpointError(f"{facts.path}: rank {rank} saves nothing on tables of {sizes}", fix)


def _declared(facts: Facts, ends: PlainEnds, rank: int) -> dict[str, Any]:
    config = facts.config
    family, names = config.get("model_type"), config.get("architectures")
    if not isinstance(family, str) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        fix = "write model_type and architectures into config.json"
        raise CheckpointError(f"{facts.path}: its config.json does not name the model's class", fix)
    if "auto_map" in config:
        fix = "only families that transformers itself has can be factored"
        raise CheckpointError(f"{facts.path}: its classes ({short(names)}) come as custom code", fix)
    kind = "factored" if ends.output is None else "factored-untied"
    # stacks that share one input table do so by the flag, whatever the head has
    shared = any(group.source == ends.input.name and len(group.targets) > 1 for group in groups(facts))
    return (flags(facts, True) if shared and not facts.claims.t5_like else {}) | {
        "model_type": OWN_TYPE,
        BASE_TYPE: family,
        SPEC: str(BoundarySpec(kind, width=rank)),
        "architectures": [OWN_PREFIX + name for name in names],
    }


def _counts(given: Any, rows: int) -> NDArray[np.float64]:
    return read_counts(given, rows) if isinstance(given, str | os.PathLike) else checked_counts(given, rows)


def _fit(table: Stored, rank: int) -> tuple[Factors, Fit]:
    need = memory.gigabytes(memory_needed(table.shape[1], rank))
    what = f"decomposing {short(table.name)} (needs {need} of memory)"
    factors = Factors(table, low_rank(table, rank, lambda done: progress(what, done, table.nbytes)))
    fit = measure_fit(factors, lambda done: progress(f"measuring {short(table.name)}", done, table.nbytes))
    if not np.isfinite(fit.errors).all():
        what = f"{table.path}: a row of {short(table.name)} is too long for one of rank {rank} in {table.dtype}"
        raise CheckpointError(what, "cast the checkpoint to BF16 or F32 first")
    return factors, fit


def _measured(fitted: list[tuple[Factors, Fit]]) -> Measured:
    how = f"every row of both ends, at {PROBES} random hidden vectors of unit root mean square"
    return Measured(fitted[-1][1].logits, fitted[0][1].longest, how)


def _tensors(ends: PlainEnds, factors: list[Factors]) -> Iterator[NewTensor]:
    for made in factors:
        rank = made.map.shape[1]
        yield NewTensor(made.table.name, made.table.dtype, (made.table.rows, rank), _file(made.table), made.pieces)
    lookup, head = factors[0], factors[-1]
    yield _map(f"{ends.input_module}.in_map.weight", lookup, lookup.map)
    yield _map(f"{ends.head}.out_map.weight", head, head.map.T)


def _map(name: str, of: Factors, values: NDArray) -> NewTensor:
    shape = (values.shape[0], values.shape[1])
    return NewTensor(name, of.table.dtype, shape, _file(of.table), lambda: iter([values.tobytes()]))


def _file(table: Stored) -> str:
    return table.path.name


def _notes(ends: PlainEnds, fitted: list[tuple[Factors, Fit]], counts: NDArray[np.float64] | None) -> Iterator[str]:
    for factors, fit in fitted:
        name, (width, rank) = short(factors.table.name), factors.map.shape
        error, best = fit.relative(), factors.found.optimum
        yield f"{name}: relative error {error:.4g} at rank {rank} of {width} (the least that is possible: {best:.4g})"
        for label, chosen in decades(counts) if counts is not None else ():
            yield f"{name}: {int(chosen.sum()):,} tokens seen {label} times: relative error {fit.relative(chosen):.4g}"
    if ends.spare:
        yield f"{', '.join(short(table.name) for table in ends.spare)}: a copy, dropped"
