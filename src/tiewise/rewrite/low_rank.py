"""The best approximation of rank k of a table that is read row by row.

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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import Reader, Stored
from tiewise.core.errors import CheckpointError

GRAM_BYTES = (
    32 * 2**20
)  # of rows in fp64 added at once: enough that reading the Gram matrix costs less than its products
COLUMNS = 256  # of the Gram matrix updated at once
WORK_MATRICES = 5  # D × D in fp64: WᵀW, LAPACK's copy of it, its workspace of two, the eigenvectors

Tick = Callable[[int], None]


@dataclass(frozen=True)
class LowRank:
    """Where the rows of a table mostly lie.

    Args:
        basis: Qₖ, fp64 [D, k], with orthonormal columns; the largest entry of each is positive.
        singular: all D singular values of the table, largest first.
    """

    basis: NDArray[np.float64]
    singular: NDArray[np.float64]

    @property
    def optimum(self) -> float:
        """Relative Frobenius error of the best approximation of this rank, before any rounding to a stored type."""
        total = float(np.square(self.singular).sum())
        tail = float(np.square(self.singular[self.basis.shape[1] :]).sum())
        return (tail / total) ** 0.5 if total else 0.0


def memory_needed(width: int, rank: int) -> int:
    """Bytes that `low_rank` takes at most for a table of width D and rank k, whatever its number of rows."""
    return 8 * (WORK_MATRICES * width * width + 2 * width * rank) + 3 * GRAM_BYTES


def low_rank(table: Stored, rank: int, tick: Tick = lambda done: None) -> LowRank:
    """Find the best basis of rank k of a table [V, D]; `tick` hears the bytes read so far.

    Raises:
        CheckpointError: the table holds NaN or infinity.
    """
    values, vectors = np.linalg.eigh(_gram(table, tick))  # ascending
    singular = np.sqrt(np.maximum(values[::-1], 0.0))
    basis = vectors[:, : -rank - 1 : -1].copy()
    del vectors
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=0)[None], axis=0)
    return LowRank(basis * np.where(largest < 0, -1.0, 1.0), singular)


def _gram(table: Stored, tick: Tick) -> NDArray[np.float64]:
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
            tick(stop * reader.row_bytes)
    if not np.isfinite(gram).all():  # of fp64 tables only: squares of all other types fit
        raise CheckpointError(f"{table.path}: the values of {table.name} are too large", "scale the table down first")
    return gram
