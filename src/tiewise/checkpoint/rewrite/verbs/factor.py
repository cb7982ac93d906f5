"""`factor`: tables as products of a narrow table and a map.

    tied       W ≈ (W Q) Qᵀ                 factored:k           table [V, k], in_map Q [D, k], out_map Qᵀ [k, D]
    untied     E ≈ (E Q) Qᵀ, U ≈ (U P) Pᵀ   factored-untied:k    two such tables, in_map Q, out_map Pᵀ

What `factor` writes has the config type `tiewise`: `tiewise.load` reads it, and `AutoModelForCausalLM` after
`import tiewise.hf`. `densify` leads back to plain tables.

W = U S Qᵀ. Of all matrices of rank k, W Qₖ Qₖᵀ is nearest to W in Frobenius norm (Eckart and Young 1936), and its
error is √(σₖ₊₁² + … + σ_D²). Q comes from the eigenvectors of WᵀW, a D × D matrix to which each chunk of rows adds its
share in fp64. Squaring loses singular values below √(D·ε) σ₁, 1e-6 at D = 4096: no more than rounding to fp32 costs.

Spread so over the two factors, S is no divisor, and a table of lower rank than k no special case; the orthonormal map
enlarges no rounding error; and a row of the narrow table is as long as what it stands for, so norms, weight decay and
step sizes keep their meaning in training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import BASE_TYPE, OWN_PREFIX, OWN_TYPE
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.numeric_ends import plain_ends, tied_names
from tiewise.checkpoint.rewrite.change import PROBES, Change, Moved, NewTensor, hidden_vectors, require_plain_head
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.ties import flags
from tiewise.checkpoint.rewrite.tokenizer_file import count_tokens
from tiewise.checkpoint.rules.rule import names
from tiewise.checkpoint.stored import CHUNK_BYTES, NUMPY, Reader, Stored, read_header
from tiewise.checkpoint.untrusted import open_regular, read_json, read_whole, require_memory, short
from tiewise.core.errors import CheckpointError, advance, doing
from tiewise.core.files import size
from tiewise.core.spec import BoundarySpec, largest_rank
from tiewise.core.text import BINS, bin_of

GRAM_BYTES = 32 * 2**20  # of rows in fp64 added at once: reading the Gram matrix then costs less than its products
WORK_MATRICES = 5  # D × D in fp64: WᵀW, LAPACK's copy of it, its workspace of two, the eigenvectors
MOST_BYTES = 64 * 2**20  # of a file of counts


@verb(
    order=30,
    details="With counts or a text, the error is told for frequent and rare tokens apart.",
    live='tiewise.install(model, "factored:128")',
    example="untied --rank=4",
)
def factor(
    facts: Facts,
    *,
    rank: Annotated[int, Option("Width k of the factored tables.")],
    counts: Annotated[
        Any, Option("How often each token occurs (JSON, .npy, .safetensors, or a number a line).", metavar="FILE")
    ] = None,
    text: Annotated[
        str | os.PathLike[str] | None,
        Option("Or a text, counted with the checkpoint's own tokenizer.json.", metavar="FILE"),
    ] = None,
    force: bool = False,
) -> Change:
    """Replace each table by its best approximation of rank k, as a narrow table and a map.

    With `force` two different tables are taken as untied although the config claims one.

    Args:
        rank: k, the width of the narrow tables.
        counts: how often each token occurs: numbers [V] or a file of them (.json, .npy, .safetensors, or text with
            one number per line); the error is then reported by frequency too.
        text: or a text, counted with the checkpoint's own tokenizer.json.
    """
    if counts is not None and text is not None:
        raise CheckpointError("counts and text both say how often each token occurs", "give one of them")
    forced = require_plain_head(facts, "factor", force)
    ends = plain_ends(facts, "factor", force=force)
    most = min(largest_rank(table.rows, table.shape[1], 2 if ends.output is None else 1) for table in ends.tables)
    if not 1 <= rank <= most:
        sizes = " and ".join(f"{table.rows:,} × {table.shape[1]}" for table in ends.tables)
        fix = f"the largest that does is {most}" if most else "no rank does: leave these tables as they are"
        raise CheckpointError(f"{facts.path}: rank {rank} saves nothing on tables of {sizes}", fix)
    family, classes = facts.config.get("model_type"), facts.config.get("architectures")
    if not isinstance(family, str) or not isinstance(classes, list) or not all(isinstance(n, str) for n in classes):
        fix = "write model_type and architectures into config.json"
        raise CheckpointError(f"{facts.path}: its config.json does not name the model's class", fix)
    if "auto_map" in facts.config:
        fix = "only families that transformers itself has can be factored"
        raise CheckpointError(f"{facts.path}: its classes ({short(classes)}) come as custom code", fix)
    groups = []
    if counts is not None or text is not None:
        seen = read_counts(counts if text is None else count_tokens(facts.path, Path(text)), ends.input.rows)
        groups = [(label, its) for i, label in enumerate(BINS) if (its := bin_of(seen) == i).any()]
    widest = max(table.shape[1] for table in ends.tables)
    require_memory(memory_needed(widest, rank), f"{facts.path}: the decomposition of a table {widest} wide")

    made: list[Factored] = []
    put: list[NewTensor] = []
    notes = list(forced)
    lost: list[str] = []
    moves: list[tuple[float, float]] = []  # of each table: largest change of a logit, and of a row
    for table in ends.tables:
        name, width = short(table.name), table.shape[1]
        with doing(f"decomposing {name} (needs {size(memory_needed(width, rank))} of memory)", table.nbytes):
            factored = low_rank(table, rank)
        with doing(f"measuring {name}", table.nbytes):
            errors, norms, logits = factored.measured()
        if not np.isfinite(errors).all():
            what = f"{table.path}: a row of {name} is too long for one of rank {rank} in {table.dtype}"
            raise CheckpointError(what, "cast the checkpoint to BF16 or F32 first")
        made.append(factored)
        put.append(NewTensor.like(table, factored.pieces, shape=(table.rows, rank)))
        moves.append((logits, float(errors.max(initial=0.0) ** 0.5)))
        squares = np.square(factored.singular)
        least = f"(the least that is possible: {relative(squares[rank:], squares):.4g})"
        notes.append(f"{name}: relative error {relative(errors, norms):.4g} at rank {rank} of {width} {least}")
        lost.append(f"{name}: {relative(errors, norms):.1%} of its length is beyond rank {rank}")
        for label, its in groups:
            error = f"relative error {relative(errors[its], norms[its]):.4g}"
            notes.append(f"{name}: {int(its.sum()):,} tokens seen {label} times: {error}")
    if ends.spare:
        notes.append(f"{', '.join(short(table.name) for table in ends.spare)}: a copy, dropped")
    if facts.roles.others:
        left = names([other.tensor.name for other in facts.roles.others])
        notes.append(f"{left}: left as they are, since only the two ends are factored")
    in_map, out_map = f"{module_of(ends.input.name)[0]}.in_map.weight", f"{ends.head}.out_map.weight"
    for name, table, values in ((in_map, ends.input, made[0].map), (out_map, ends.tables[-1], made[-1].map.T)):
        put.append(NewTensor.like(table, partial(iter, [values.tobytes()]), name=name, shape=values.shape))

    kind = "factored" if ends.output is None else "factored-untied"
    # stacks that share one input table do so by the flag, whatever the head has
    shared = any(tied.source == ends.input.name and len(tied.targets) > 1 for tied in tied_names(facts))
    config: dict[str, Any] = {**flags(facts, True)} if shared and not facts.claims.t5_like else {}
    config |= {"model_type": OWN_TYPE, BASE_TYPE: family, SPEC: str(BoundarySpec(kind, width=rank))}
    config["architectures"] = [OWN_PREFIX + name for name in classes]
    how = f"every row of both ends, at {PROBES} random hidden vectors of unit root mean square"
    drop = frozenset(table.name for table in ends.spare)
    moved = Moved(moves[-1][0], moves[0][1], how)
    return Change(moved, drop, tuple(put), config, notes=tuple(notes), lost=tuple(lost))


def memory_needed(width: int, rank: int) -> int:
    """Bytes that `low_rank` takes at most for a table of width D and rank k, whatever its number of rows."""
    return 8 * (WORK_MATRICES * width * width + 2 * width * rank) + 3 * GRAM_BYTES


def relative(errors: NDArray[np.float64], norms: NDArray[np.float64]) -> float:
    """Frobenius norm of an error over that of its table, from the squared lengths of rows."""
    norm = float(norms.sum())
    return float(errors.sum() / norm) ** 0.5 if norm else 0.0


@dataclass(frozen=True)
class Factored:
    """W [V, D] ≈ narrow [V, k] · mapᵀ, with narrow = W Q and map = Q [D, k], both rounded to the type of W."""

    table: Stored
    basis: NDArray[np.float64]  # Q [D, k], with orthonormal columns; the largest entry of each is positive
    singular: NDArray[np.float64]  # all D singular values of W, largest first

    @property
    def map(self) -> NDArray:
        """Q, rounded."""
        return self.basis.astype(NUMPY[self.table.dtype])

    def chunks(self) -> Iterator[tuple[NDArray[np.float64], NDArray]]:
        """Yield (rows of W [., D], rows of the narrow table [., k]), a few MB at a time; progress in bytes read."""
        step = max(1, CHUNK_BYTES // (8 * self.table.shape[1]))
        with Reader(self.table) as reader:
            for start in range(0, self.table.rows, step):
                rows = reader.rows(start, start + step).astype(np.float64)
                yield rows, (rows @ self.basis).astype(NUMPY[self.table.dtype])
                advance((start + len(rows)) * reader.row_bytes)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the narrow table."""
        return (narrow.tobytes() for _, narrow in self.chunks())

    def measured(self) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Hold the factors against W: squared length of each row's error [V], of each row [V], largest logit change."""
        back, probes = self.map.astype(np.float64).T, hidden_vectors(self.table.shape[1]).T
        errors, norms, logits = [np.zeros(0)], [np.zeros(0)], 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the result
            for rows, narrow in self.chunks():
                error = narrow.astype(np.float64) @ back - rows
                errors.append(np.square(error).sum(axis=1))
                norms.append(np.square(rows).sum(axis=1))
                logits = max(logits, float(np.abs(error @ probes).max(initial=0.0)))
        return np.concatenate(errors), np.concatenate(norms), logits


def low_rank(table: Stored, rank: int) -> Factored:
    """Find the best factors of rank k of a table [V, D]; refuse NaN and infinity. Progress in bytes read."""
    width = table.shape[1]
    gram = np.zeros((width, width))  # WᵀW
    stored_bytes = GRAM_BYTES * table.nbytes // max(1, 8 * table.rows * width)
    with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):
        for start, stop in reader.spans(max(1, stored_bytes)):
            rows = reader.rows(start, stop).astype(np.float64)
            if not np.isfinite(rows).all():
                what = f"{table.path}: {table.name} holds NaN or infinity in rows {start} to {stop - 1}"
                raise CheckpointError(what, "tiewise check --deep names the rows; repair them first")
            gram += rows.T @ rows  # of which numpy computes one half, and mirrors it
            advance(stop * reader.row_bytes)
    if not np.isfinite(gram).all():  # of fp64 tables only: squares of all other types fit
        raise CheckpointError(f"{table.path}: the values of {table.name} are too large", "scale the table down first")
    values, vectors = np.linalg.eigh(gram)  # ascending
    del gram
    basis = vectors[:, : -rank - 1 : -1].copy()
    del vectors
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=0)[None], axis=0)
    return Factored(table, basis * np.where(largest < 0, -1.0, 1.0), np.sqrt(np.maximum(values[::-1], 0.0)))


def read_counts(counts: Any, rows: int) -> NDArray[np.float64]:
    """Return how often each of `rows` tokens occurs [V], from numbers or a file of them; 0 beyond its end."""
    name, found = "counts", counts
    fix = "give a JSON list, or a map from token id to count; a .npy or .safetensors vector; or one number per line"
    try:
        if isinstance(counts, str | os.PathLike):
            name = os.fspath(counts)
            if name.endswith(".npy"):
                with os.fdopen(open_regular(name), "rb") as file:
                    found = np.load(file, allow_pickle=False)
            elif name.endswith(".safetensors"):
                (vector,) = read_header(name).tensors.values()
                found = vector.read()
            elif name.endswith(".json"):
                found = read_json(name, most=MOST_BYTES, unique=True)
            else:
                found = [float(line) for line in read_whole(name, MOST_BYTES).split()]
        if isinstance(found, dict):
            ids, values = [int(key) for key in found], list(found.values())
            if ids and not 0 <= min(ids) <= max(ids) < MOST_BYTES:
                raise ValueError("its keys are no token ids")
            found = np.zeros(max(ids, default=-1) + 1)
            found[ids] = values
        found = np.asarray(found, np.float64)
    except CheckpointError:
        raise
    except (ValueError, TypeError, OverflowError, EOFError) as error:
        raise CheckpointError(f"{name}: no token counts ({short(error)})", fix) from None
    if found.ndim != 1 or not np.isfinite(found).all() or (found < 0).any():
        raise CheckpointError(f"{name}: its values are no token counts", fix)
    if len(found) > rows:
        fix = "were they made with this model's tokenizer?"
        raise CheckpointError(f"{name}: it counts token {len(found) - 1:,}, and the table has {rows:,} rows", fix)
    return np.pad(found, (0, rows - len(found)))
