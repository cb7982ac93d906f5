"""Best approximation of a table by the product of a narrow table and a map.

W = U S Qᵀ. Of all matrices of rank k, W Qₖ Qₖᵀ is nearest to W in Frobenius norm (Eckart and Young 1936), and its
error is √(σₖ₊₁² + … + σ_D²). Q comes from the eigenvectors of WᵀW, a D × D matrix to which each chunk of rows adds its
share in fp64. Squaring loses singular values below √(D·ε) σ₁, 1e-6 at D = 4096: no more than rounding to fp32 costs.

The singular values S stay in the narrow table, for three reasons. Nothing is divided by S, so a table whose rank is
lower than k is no special case. The orthonormal map amplifies no rounding error. A row of the narrow table is as long
as the row of W Q Qᵀ that it represents, so norms, weight decay and step sizes keep their meaning in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.rewrite.change import Rows, hidden_vectors
from tiewise.checkpoint.stored import CHUNK_BYTES, NUMPY, Reader, Stored
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import advance_progress

# rows in fp64 added in one step; at this size, reading the Gram matrix costs less than the products
GRAM_BYTES = 32 * 2**20
WORK_MATRICES = 5  # D × D in fp64: WᵀW, LAPACK's copy of it, its workspace of two, the eigenvectors


def memory_needed(width: int, rank: int) -> int:
    """Return the largest memory that `low_rank` needs, in bytes.

    It depends on the width D and the rank k, not on the number of rows.
    """
    return 8 * (WORK_MATRICES * width * width + 2 * width * rank) + 3 * GRAM_BYTES


@dataclass(frozen=True)
class Errors:
    """Errors of a factored table, compared with the table that it replaces."""

    rows: NDArray[np.float64]  # [V] squared Euclidean length of each row's error
    norms: NDArray[np.float64]  # [V] squared Euclidean length of each row of the table
    logits: float  # largest change of a logit

    def relative(self, mask: NDArray[np.bool_] | slice = slice(None)) -> float:
        """Return the relative error in Frobenius norm over the rows of a mask."""
        return relative(self.rows[mask], self.norms[mask])


def relative(errors: NDArray[np.float64], norms: NDArray[np.float64]) -> float:
    """Return the Frobenius norm of an error divided by that of its table.

    Args:
        errors: squared lengths of the rows of the error.
        norms: squared lengths of the rows of the table.
    """
    norm = float(norms.sum())
    return float(errors.sum() / norm) ** 0.5 if norm else 0.0


@dataclass(frozen=True)
class LowRankFactors:
    """Two factors of a table: W [V, D] ≈ narrow [V, k] · mapᵀ.

    narrow = W Q and map = Q [D, k], both rounded to the type of W.
    """

    table: Stored
    basis: NDArray[np.float64]  # Q [D, k], with orthonormal columns; the largest entry of each is positive
    singular: NDArray[np.float64]  # all D singular values of W, largest first

    @property
    def map(self) -> Rows:
        """Q, rounded to the table's type."""
        return self.basis.astype(NUMPY[self.table.dtype])

    def least_error(self) -> float:
        """Return the smallest relative error of any matrix of this rank."""
        squares = np.square(self.singular)
        return relative(squares[self.basis.shape[1] :], squares)

    def chunks(self) -> Iterator[tuple[NDArray[np.float64], Rows]]:
        """Yield (rows of W [., D], rows of the narrow table [., k]).

        A pair takes a few MB.

        The progress display counts bytes read.
        """
        step = max(1, CHUNK_BYTES // (8 * self.table.shape[1]))
        with Reader(self.table) as reader:
            for start in range(0, self.table.rows, step):
                rows = reader.rows(start, start + step).astype(np.float64)
                yield rows, (rows @ self.basis).astype(NUMPY[self.table.dtype])
                advance_progress((start + len(rows)) * reader.row_bytes)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the narrow table."""
        for _, narrow in self.chunks():
            yield narrow.tobytes()

    def errors(self) -> Errors:
        """Return the errors of the product of the two factors, compared with W."""
        back, vectors = self.map.astype(np.float64).T, hidden_vectors(self.table.shape[1]).T
        errors, norms, logits = [np.zeros(0)], [np.zeros(0)], 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the result
            for rows, narrow in self.chunks():
                error = narrow.astype(np.float64) @ back - rows
                errors.append(np.square(error).sum(axis=1))
                norms.append(np.square(rows).sum(axis=1))
                logits = max(logits, float(np.abs(error @ vectors).max(initial=0.0)))
        return Errors(np.concatenate(errors), np.concatenate(norms), logits)


def low_rank(table: Stored, rank: int) -> LowRankFactors:
    """Return the best factors of rank k of a table [V, D].

    Raises:
        CheckpointError: the table contains NaN or infinity, or values whose squares are infinite.
    """
    gram = _gram(table)
    values, vectors = np.linalg.eigh(gram)  # in ascending order
    del gram  # frees memory: these matrices are most of it
    basis = vectors[:, : -rank - 1 : -1].copy()
    del vectors
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=0)[None], axis=0)
    basis = basis * np.where(largest < 0, -1.0, 1.0)
    return LowRankFactors(table, basis, np.sqrt(np.maximum(values[::-1], 0.0)))


def _gram(table: Stored) -> NDArray[np.float64]:
    """Return WᵀW [D, D] of a table W [V, D]."""
    width = table.shape[1]
    gram = np.zeros((width, width))
    bytes_at_once = GRAM_BYTES * table.nbytes // max(1, 8 * table.rows * width)
    with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):
        for start, stop in reader.spans(max(1, bytes_at_once)):
            rows = reader.rows(start, stop).astype(np.float64)
            if not np.isfinite(rows).all():
                problem = f"{table.path}: {table.name} holds NaN or infinity in rows {start} to {stop - 1}"
                raise CheckpointError(problem, "tiewise check --deep names the rows; repair them first")
            gram += rows.T @ rows  # numpy computes one triangle and mirrors it
            advance_progress(stop * reader.row_bytes)
    if not np.isfinite(gram).all():  # possible for fp64 tables only; squares of all other types are finite
        raise CheckpointError(f"{table.path}: the values of {table.name} are too large", "scale the table down first")
    return gram
