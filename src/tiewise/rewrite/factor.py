"""`factor` and `densify`: tables as products of a narrow table and a map, and products as plain tables again.

    tied       W ≈ (W Q) Qᵀ                 factored:k           table [V, k], in_map Q [D, k], out_map Qᵀ [k, D]
    untied     E ≈ (E Q) Qᵀ, U ≈ (U P) Pᵀ   factored-untied:k    two such tables, in_map Q, out_map Pᵀ

What `factor` writes has the config type `tiewise`: `tiewise.load` reads it, and `AutoModelForCausalLM` after
`import tiewise.hf`. `densify` multiplies the maps and scales of any such boundary into its tables: every loader reads
the result, which is tied where both ends come out equal, else untied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import BASE_TYPE, OWN_PREFIX, OWN_TYPE
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of
from tiewise.checkpoint.plain_ends import PlainEnds, plain_ends, tied_names
from tiewise.checkpoint.stored import NUMPY, Reader, Stored, read_header
from tiewise.checkpoint.stored_boundary import Dense, StoredBoundary, read_boundary
from tiewise.checkpoint.untrusted import open_regular, read_json, read_whole, require_memory, short
from tiewise.core.errors import CheckpointError
from tiewise.core.numerals import size
from tiewise.core.progress import doing
from tiewise.core.spec import BoundarySpec
from tiewise.rewrite.change import DELETE, PROBES, Change, Moved, NewTensor, TableRows, copy_of, measure_move
from tiewise.rewrite.engine import verb
from tiewise.rewrite.low_rank import Factors, Fit, low_rank, measure_fit, memory_needed
from tiewise.rewrite.ties import flags

MOST_BYTES = 64 * 2**20  # of a file of counts
_COUNTS_FIX = "give a JSON list, or a map from token id to count; a .npy or .safetensors vector; or one number per line"


@verb
def factor(facts: Facts, *, rank: int, counts: Any = None, force: bool = False) -> Change:
    """Write a checkpoint whose tables are products of a narrow table and a map.

    With `force` two different tables are taken as untied although the config claims one.

    Args:
        rank: k, the width of the narrow tables.
        counts: how often each token occurs: numbers [V] or a file of them (.json, .npy, .safetensors, or text with
            one number per line); the error is then reported by frequency too.
    """
    ends = plain_ends(facts, "factor", force=force)
    maps = 2 if ends.output is None else 1
    most = min(largest_rank(table.rows, table.shape[1], maps) for table in ends.tables)
    if not 1 <= rank <= most:
        sizes = " and ".join(f"{table.rows:,} × {table.shape[1]}" for table in ends.tables)
        fix = f"the largest that does is {most}" if most else "no rank does: leave these tables as they are"
        raise CheckpointError(f"{facts.path}: rank {rank} saves nothing on tables of {sizes}", fix)
    config = _factored_config(facts, ends, rank)
    if counts is not None:
        read = read_counts if isinstance(counts, str | os.PathLike) else checked_counts
        counts = read(counts, ends.input.rows)
    width = max(table.shape[1] for table in ends.tables)
    require_memory(memory_needed(width, rank), f"{facts.path}: the decomposition of a table {width} wide")
    fitted = [_fit(table, rank) for table in ends.tables]
    how = f"every row of both ends, at {PROBES} random hidden vectors of unit root mean square"
    return Change(
        Moved(fitted[-1][1].logits, fitted[0][1].longest, how),
        drop=frozenset(table.name for table in ends.spare),
        put=tuple(_factors(ends, [factors for factors, _ in fitted])),
        config=config,
        notes=tuple(_errors(ends, fitted, counts)),
    )


def largest_rank(rows: int, width: int, maps: int) -> int:
    """Largest k for which a table [V, k] and `maps` maps of D × k hold fewer numbers than a table [V, D]; may be 0."""
    return (rows * width - 1) // (rows + maps * width)


def _factored_config(facts: Facts, ends: PlainEnds, rank: int) -> dict[str, Any]:
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
    shared = any(tied.source == ends.input.name and len(tied.targets) > 1 for tied in tied_names(facts))
    return (flags(facts, True) if shared and not facts.claims.t5_like else {}) | {
        "model_type": OWN_TYPE,
        BASE_TYPE: family,
        SPEC: str(BoundarySpec(kind, width=rank)),
        "architectures": [OWN_PREFIX + name for name in names],
    }


def _fit(table: Stored, rank: int) -> tuple[Factors, Fit]:
    need = size(memory_needed(table.shape[1], rank))
    with doing(f"decomposing {short(table.name)} (needs {need} of memory)", table.nbytes):
        factors = Factors(table, low_rank(table, rank))
    with doing(f"measuring {short(table.name)}", table.nbytes):
        fit = measure_fit(factors)
    if not np.isfinite(fit.errors).all():
        what = f"{table.path}: a row of {short(table.name)} is too long for one of rank {rank} in {table.dtype}"
        raise CheckpointError(what, "cast the checkpoint to BF16 or F32 first")
    return factors, fit


def _factors(ends: PlainEnds, factors: list[Factors]) -> Iterator[NewTensor]:
    """The narrow tables, then the maps of both ends."""
    for made in factors:
        table = made.table
        yield NewTensor(table.name, table.dtype, (table.rows, made.map.shape[1]), table.path.name, made.pieces)
    lookup, head = factors[0], factors[-1]
    maps = {f"{module_of(ends.input.name)[0]}.in_map": (lookup, lookup.map), f"{ends.head}.out_map": (head, head.map.T)}
    for name, (made, values) in maps.items():
        write = partial(iter, [values.tobytes()])
        yield NewTensor(f"{name}.weight", made.table.dtype, values.shape, made.table.path.name, write)


def _errors(ends: PlainEnds, fitted: list[tuple[Factors, Fit]], counts: NDArray[np.float64] | None) -> Iterator[str]:
    for factors, fit in fitted:
        name, (width, rank) = short(factors.table.name), factors.map.shape
        error, best = fit.relative(), factors.found.optimum
        yield f"{name}: relative error {error:.4g} at rank {rank} of {width} (the least that is possible: {best:.4g})"
        for label, chosen in decades(counts) if counts is not None else ():
            yield f"{name}: {int(chosen.sum()):,} tokens seen {label} times: relative error {fit.relative(chosen):.4g}"
    if ends.spare:
        yield f"{', '.join(short(table.name) for table in ends.spare)}: a copy, dropped"


# how often tokens occur


def read_counts(path: str | os.PathLike[str], rows: int) -> NDArray[np.float64]:
    """Return the count of each of `rows` tokens [V], from a file of any kind; tokens beyond its end have 0.

    Raises:
        CheckpointError: the file cannot be read, holds other than counts, or counts a token that the table lacks.
    """
    name = os.fspath(path)
    try:
        found = np.asarray(_stored_counts(name), np.float64)
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError, EOFError) as error:
        raise CheckpointError(f"{name}: no token counts ({short(error)})", _COUNTS_FIX) from None
    return checked_counts(found, rows, name)


def checked_counts(counts: Any, rows: int, name: str = "counts") -> NDArray[np.float64]:
    """Return counts of at most `rows` tokens as fp64 [V].

    Raises:
        CheckpointError: not one number, zero or more, for each token.
    """
    found = np.asarray(counts)
    if found.ndim != 1 or found.dtype.kind not in "iuf" or not np.isfinite(found).all() or (found < 0).any():
        raise CheckpointError(f"{name}: its values are no token counts", _COUNTS_FIX)
    if len(found) > rows:
        fix = "were they made with this model's tokenizer?"
        raise CheckpointError(f"{name}: it counts token {len(found) - 1:,}, and the table has {rows:,} rows", fix)
    return np.pad(found.astype(np.float64), (0, rows - len(found)))


def _stored_counts(name: str) -> Any:
    """What a file holds, by its suffix; ValueError where that is no counts."""
    kind = Path(name).suffix
    if kind == ".npy":
        with os.fdopen(open_regular(name), "rb") as file:
            return np.load(file, allow_pickle=False)
    if kind == ".safetensors":
        tensors = list(read_header(name).tensors.values())
        if len(tensors) != 1 or len(tensors[0].shape) != 1 or tensors[0].dtype not in NUMPY:
            raise ValueError("it holds other than one vector")
        with Reader(tensors[0]) as reader:
            return reader.rows()
    if kind != ".json":
        return [float(line) for line in read_whole(name, MOST_BYTES).split()]
    record = read_json(name, most=MOST_BYTES, unique=True)
    if not isinstance(record, dict):
        return record
    ids = [int(key) for key in record]
    if ids and not 0 <= min(ids) <= max(ids) < MOST_BYTES:
        raise ValueError("its keys are no token ids")
    made = np.zeros(max(ids, default=-1) + 1)
    made[ids] = list(record.values())
    return made


def decades(counts: NDArray[np.float64]) -> list[tuple[str, NDArray[np.bool_]]]:
    """Sort tokens by how often they occur: (label, which tokens, bool [V]) for 0, 1–9, 10–99, …; none is empty."""
    digits = np.floor(np.log10(np.maximum(counts, 1.0))).astype(np.int64) + (counts > 0)
    labels = {0: "0"} | {n: f"{10 ** (n - 1):,}–{10**n - 1:,}" for n in range(1, int(digits.max(initial=0)) + 1)}
    return [(label, digits == n) for n, label in labels.items() if (digits == n).any()]


# plain tables again


@verb
def densify(facts: Facts, *, force: bool = False) -> Change:
    """Write a checkpoint with plain tables that computes what the source computes, up to rounding.

    The source is a checkpoint of config type `tiewise`. With `force` a soft-cap or a bias that no plain table can hold
    is dropped.
    """
    boundary = read_boundary(facts)
    lost = _lost(facts, boundary, force=force)
    lookup, head = boundary.lookup, boundary.head
    one = lookup.mark == head.mark
    merged: frozenset[str] = frozenset() if one else _merged(facts, boundary)
    tied = one or bool(merged)
    moved = measure_move(_rounding(head), _rounding(lookup))
    if not math.isfinite(moved.logits + moved.input_rows):
        what = f"{facts.path}: a product of table and map is not finite in {lookup.table.dtype}"
        raise CheckpointError(what, "look for NaN with tiewise check --deep, or cast the checkpoint to F32 first")
    put = [_dense_tensor(lookup.table.name, lookup)] if lookup.changed else []
    if not tied:
        if head.changed or head.table.name != boundary.head_name:
            put.append(_dense_tensor(boundary.head_name, head))
        put += _parted(facts, boundary)
    return Change(
        moved,
        drop=frozenset(tensor.name for tensor in (*boundary.maps, *lost)) | merged,
        put=tuple(put),
        config=_plain_config(facts) | ({} if one or facts.claims.t5_like else flags(facts, tied)),
        notes=tuple(_what_changes(facts, boundary.spec, tied)),
    )


def _lost(facts: Facts, boundary: StoredBoundary, *, force: bool) -> tuple[Stored, ...]:
    """Tensors that the family's own class has no place for; refused unless forced, as is a soft-cap."""
    spec, fix = boundary.spec, "keep the boundary, and load the model with tiewise.load; --force drops it"
    if spec.softcap is not None and not force:
        what = f"{facts.path}: {spec}: a soft-cap is no matrix, so no dense table does the same"
        raise CheckpointError(what, fix)
    if spec.bias and not force:
        what = f"{facts.path}: {spec}: the family's own head has no bias to keep this one in"
        raise CheckpointError(what, fix)
    bias = facts.folder.tensors.get(boundary.head_name.removesuffix("weight") + "bias")
    return (bias,) if spec.bias and bias is not None else ()


def _merged(facts: Facts, boundary: StoredBoundary) -> frozenset[str]:
    """Tensors that go because two unequal ends come out equal, and the class can keep them as one; mostly none."""
    lookup, head, claims = boundary.lookup, boundary.head, facts.claims
    sizes = [(end.table.dtype, end.table.rows, end.width) for end in (lookup, head)]
    if sizes[0] != sizes[1] or claims.t5_like or claims.fixed is False:
        return frozenset()
    if any(a != b for a, b in zip(lookup.pieces(), head.pieces(), strict=True)):
        return frozenset()
    gone = set()
    for tied in tied_names(facts):
        if any(not facts.same(tied.stored[0], other) for other in tied.stored[1:] if other.name != head.table.name):
            return frozenset()  # BERT's two biases, trained apart
        gone |= {other.name for other in tied.stored if other.name in tied.targets}
    return frozenset(gone)


def _rounding(end: Dense) -> tuple[TableRows, TableRows] | None:
    """The table before and after rounding; None where nothing is computed."""
    if not end.changed:
        return None
    exact = TableRows(end.table.rows, end.width, end.exact)
    return exact, TableRows(end.table.rows, end.width, lambda start, stop: end.rounded(start, stop).astype(float))


def _parted(facts: Facts, boundary: StoredBoundary) -> Iterator[NewTensor]:
    """Whatever else the class ties by the flag that turns false: BART's stacks, BERT's second bias."""
    if facts.claims.t5_like:
        return
    table = boundary.lookup.table
    for tied in tied_names(facts):
        for name in tied.missing:
            if tied.kept is not None and name != boundary.head_name:
                same = tied.kept.name == table.name
                yield _dense_tensor(name, boundary.lookup) if same else copy_of(tied.kept, name)


def _dense_tensor(name: str, dense: Dense) -> NewTensor:
    table = dense.table
    return NewTensor(name, table.dtype, (table.rows, dense.width), table.path.name, dense.pieces)


def _plain_config(facts: Facts) -> dict[str, Any]:
    base, names = facts.config.get(BASE_TYPE), facts.config.get("architectures")
    if not isinstance(base, str):
        fix = f"write {BASE_TYPE}: llama, say, into it"
        raise CheckpointError(f"{facts.path}: its config.json does not name the model's family", fix)
    names = names if isinstance(names, list) else []
    plain = [name.removeprefix(OWN_PREFIX) if isinstance(name, str) else name for name in names]
    return {"model_type": base, BASE_TYPE: DELETE, SPEC: DELETE, "architectures": plain}


def _what_changes(facts: Facts, spec: BoundarySpec, tied: bool) -> Iterator[str]:
    yield "both ends use one table" if tied else "each end has a table of its own"
    if not tied and facts.claims.t5_like:
        yield "this family claims one table whatever its config says: loaders that do not compare the two drop the head"
    dropped = [f"pad={spec.pad}"] if spec.pad is not None else []
    dropped += [f"alpha={spec.alpha:g}"] if spec.alpha != 1.0 else []
    dropped += [f"penalty={spec.penalty:g}"] if spec.penalty else []
    dropped += [f"decay={spec.decay:g}"] if spec.decay else []
    if spec.softcap is not None:
        yield f"softcap={spec.softcap:g} is lost, which changes the logits"
    if spec.bias:
        yield "the head's bias is lost, which changes the logits"
    if dropped:
        yield f"{short(', '.join(dropped))} acts in training only, and plain tables do not know of it"
