"""What a tied table's two gradients are summed up to, whichever backend computed them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PathNorms:
    """Frobenius norms of Path A, of Path B and of their sum [V, E], and the cosine between the two paths."""

    a: float
    b: float
    total: float
    cosine: float

    @property
    def share_b(self) -> float:
        """‖B‖ / (‖A‖ + ‖B‖); nan where both are zero."""
        both = self.a + self.b
        return self.b / both if both else math.nan
