"""Tables as the model meets them: rows of a stored table times its map, times its scale.

    input    E = in_map(table) · input_scale          output    U with h·Uᵀ = out_map(h)·tableᵀ · output_scale

    factored, projected   E = T Aᵀ            A = in_map.weight [D, k]       U = T B        B = out_map.weight [k, D]
    residual, strength s  E = T                                              U = T + s T P Q
    spd, S = C Cᵀ         E = T S⁻¹                                          U = T S

Computed in fp64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import CHUNK_BYTES, Reader, Stored, rounded
from tiewise.rewrite.measure import Rows

Apply = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Dense:
    """One end's table [V, D] that acts as a stored table, a map and a scale do.

    Args:
        table: the stored table [V, E].
        width: D.
        map: rows [., E] to rows [., D]; None for the identity.
        scale: factor of the result.
        mark: equal for two ends that give the same table.
    """

    table: Stored
    width: int
    map: Apply | None
    scale: float
    mark: tuple[object, ...]

    @property
    def changed(self) -> bool:
        """Whether it differs from the stored table."""
        return self.map is not None or self.scale != 1.0

    def rows(self, reader: Reader, start: int, stop: int) -> NDArray[np.float64]:
        """Rows [start, stop), not rounded yet."""
        rows = reader.rows(start, stop).astype(np.float64)
        return (rows if self.map is None else self.map(rows)) * self.scale

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the dense table, in the type of the stored one."""
        step = max(1, CHUNK_BYTES // (8 * self.width))
        with Reader(self.table) as reader, np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, self.table.rows, step):
                yield rounded(self.rows(reader, start, start + step), self.table.dtype).tobytes()

    def exact(self) -> Rows:
        """Its rows before rounding, for measuring."""
        return Rows(self.table.rows, self.width, self._read)

    def rounded(self) -> Rows:
        """Its rows after rounding, for measuring."""
        kind = self.table.dtype
        return Rows(
            self.table.rows, self.width, lambda start, stop: rounded(self._read(start, stop), kind).astype(float)
        )

    def _read(self, start: int, stop: int) -> NDArray[np.float64]:
        with Reader(self.table) as reader:
            return self.rows(reader, start, stop)


def product(matrix: NDArray[np.float64]) -> Apply:
    """Rows times a matrix [E, D]."""
    return lambda rows: rows @ matrix


def correction(p: NDArray[np.float64], q: NDArray[np.float64], strength: float) -> Apply:
    """Rows plus s · rows P Q, with P [D, r] and Q [r, D]; P Q is never formed."""
    return lambda rows: rows + strength * ((rows @ p) @ q)


def definite(factor: NDArray[np.float64]) -> tuple[Apply, Apply]:
    """(rows S⁻¹, rows S), where `factor` [D, D] holds C below its diagonal and log C on it."""
    c = np.tril(factor, -1) + np.diag(np.exp(np.diagonal(factor)))
    inverse = np.linalg.inv(c)
    return lambda rows: (rows @ inverse.T) @ inverse, lambda rows: (rows @ c) @ c.T
