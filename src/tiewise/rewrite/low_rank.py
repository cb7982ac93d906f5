"""The best approximation of rank k of a table that is read row by row, and how far what is stored lies from the table.

W = U S Qᵀ. Of all matrices of rank k, W Qₖ Qₖᵀ is nearest to W in Frobenius norm (Eckart and Young 1936), and its
error is √(σₖ₊₁² + … + σ_D²). Q is needed and U is not: it comes from the eigenvectors of WᵀW, a D × D matrix to which
each chunk of rows adds its share in fp64.

The factors are the table W Qₖ [V, k] and the map Qₖ [D, k]. Of all ways to spread S over the two this one divides by
no singular value, so a table of lower rank than k is no special case; the columns of the map are orthonormal, so the
map enlarges no rounding error of the table; and a row of the narrow table is as long as what it stands for, so norms,
weight decay and step sizes keep their meaning in further training.

Squaring loses singular values below √(D·ε) σ₁, 1e-6 at D = 4096. They could only add as much of ‖W‖ to the error, which
is what rounding the factors to fp32 costs, and far less than what rounding them to bf16 does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import CHUNK_BYTES, NUMPY, Reader, Stored
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import advance
from tiewise.rewrite.change import hidden_vectors

GRAM_BYTES = 32 * 2**20  # of rows in fp64 added at once: reading the Gram matrix then costs less than its products
COLUMNS = 256  # of the Gram matrix updated at once
WORK_MATRICES = 5  # D × D in fp64: WᵀW, LAPACK's copy of it, its workspace of two, the eigenvectors


@dataclass(frozen=True)
class LowRank:
    """Where the rows of a table mostly lie."""

    basis: NDArray[np.float64]  # Qₖ [D, k], with orthonormal columns; the largest entry of each is positive
    singular: NDArray[np.float64]  # all D singular values of the table, largest first

    @property
    def optimum(self) -> float:
        """Relative Frobenius error of the best approximation of this rank, before any rounding to a stored type."""
        total = float(np.square(self.singular).sum())
        tail = float(np.square(self.singular[self.basis.shape[1] :]).sum())
        return (tail / total) ** 0.5 if total else 0.0


def memory_needed(width: int, rank: int) -> int:
    """Bytes that `low_rank` takes at most for a table of width D and rank k, whatever its number of rows."""
    return 8 * (WORK_MATRICES * width * width + 2 * width * rank) + 3 * GRAM_BYTES


def low_rank(table: Stored, rank: int) -> LowRank:
    """Find the best basis of rank k of a table [V, D]; progress in bytes read.

    Raises:
        CheckpointError: the table holds NaN or infinity.
    """
    values, vectors = np.linalg.eigh(_gram(table))  # ascending
    singular = np.sqrt(np.maximum(values[::-1], 0.0))
    basis = vectors[:, : -rank - 1 : -1].copy()
    del vectors
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=0)[None], axis=0)
    return LowRank(basis * np.where(largest < 0, -1.0, 1.0), singular)


def _gram(table: Stored) -> NDArray[np.float64]:
    """WᵀW [D, D] in fp64; only its lower triangle is right, which is what `eigh` reads."""
    width = table.shape[1]
    gram = np.zeros((width, width))
    stored_bytes = GRAM_BYTES * table.nbytes // max(1, 8 * table.rows * width)
    with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):
        for start, stop in reader.spans(max(1, stored_bytes)):
            rows = reader.rows(start, stop).astype(np.float64)
            if not np.isfinite(rows).all():
                what = f"{table.path}: {table.name} holds NaN or infinity in rows {start} to {stop - 1}"
                raise CheckpointError(what, "tiewise check --deep names the rows; repair them first")
            for low in range(0, width, COLUMNS):
                high = min(low + COLUMNS, width)
                gram[low:high, :high] += rows[:, low:high].T @ rows[:, :high]
            advance(stop * reader.row_bytes)
    if not np.isfinite(gram).all():  # of fp64 tables only: squares of all other types fit
        raise CheckpointError(f"{table.path}: the values of {table.name} are too large", "scale the table down first")
    return gram


class Factors:
    """W [V, D] ≈ narrow [V, k] · mapᵀ, with narrow = W Q and map = Q [D, k], both rounded to the type of W."""

    def __init__(self, table: Stored, found: LowRank) -> None:
        self.table, self.found = table, found
        self.kind = NUMPY[table.dtype]
        self.map = found.basis.astype(self.kind)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Row ranges whose products fit in a few MB."""
        step = max(1, CHUNK_BYTES // (8 * self.table.shape[1]))
        for start in range(0, self.table.rows, step):
            yield start, min(start + step, self.table.rows)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the narrow table."""
        with Reader(self.table) as reader:
            for start, stop in self.spans():
                yield self.narrow(reader.rows(start, stop)).tobytes()

    def narrow(self, rows: NDArray) -> NDArray:
        """Rows [., k] of the narrow table for rows [., D] of the table."""
        return (rows.astype(np.float64) @ self.found.basis).astype(self.kind)

    def error(self, rows: NDArray) -> NDArray[np.float64]:
        """What stands for rows [., D], minus them."""
        return self.narrow(rows).astype(np.float64) @ self.map.astype(np.float64).T - rows.astype(np.float64)


@dataclass(frozen=True)
class Fit:
    """How far a product of stored factors lies from its table."""

    errors: NDArray[np.float64]  # squared length of each row's error [V]
    norms: NDArray[np.float64]  # squared length of each row [V]
    logits: float  # largest change of a logit at the hidden vectors of `change`

    @property
    def longest(self) -> float:
        """Length of the longest error of a row."""
        return float(self.errors.max(initial=0.0) ** 0.5)

    def relative(self, chosen: NDArray[np.bool_] | slice = slice(None)) -> float:
        """Frobenius norm of the error over that of the table, of the chosen rows."""
        norm = float(self.norms[chosen].sum())
        return float(self.errors[chosen].sum() / norm) ** 0.5 if norm else 0.0


def measure_fit(factors: Factors) -> Fit:
    """Hold the factors against their table; progress in bytes read."""
    table = factors.table
    errors, norms = np.zeros(table.rows), np.zeros(table.rows)
    probes = hidden_vectors(table.shape[1]).T
    logits = 0.0
    with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the result
        for start, stop in factors.spans():
            rows = reader.rows(start, stop)
            error = factors.error(rows)
            errors[start:stop] = np.square(error).sum(axis=1)
            norms[start:stop] = np.square(rows.astype(np.float64)).sum(axis=1)
            logits = max(logits, float(np.abs(error @ probes).max(initial=0.0)))
            advance(stop * reader.row_bytes)
    return Fit(errors, norms, logits)
