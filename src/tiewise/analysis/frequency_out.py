"""What of two tables is no function of how often each token occurs: directions to take out of their columns.

Rows of one frequency are alike in any language model's tables, whatever they mean. Each column w is regressed on powers
of f = log(count + 1) over the paired rows, and what is left is compared. One power takes out a straight line only;
three follow a curve. That is a projection, and takes a few columns of AᵀQ beside AᵀA, BᵀB and AᵀB.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.errors import DataError

LINE, CURVE = 1, 3  # powers of f that are taken out
_NEW = 1e-9  # share of a power's norm below which it is a combination of lower ones


def directions(counts: ArrayLike, powers: int = CURVE) -> NDArray[np.float64]:
    """Return q [n, k]: orthonormal, orthogonal to 1; the first j columns span f, …, f^j beside 1, for any j ≤ k.

    k is less than `powers` where there are too few different counts: then a lower power says all of it.

    Args:
        counts: how often each of n tokens occurs.
        powers: the highest power of f = log(count + 1).

    Raises:
        DataError: counts that are negative, not finite, or not of one dimension.
    """
    given = np.asarray(counts, np.float64)
    if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any():
        raise DataError("counts of tokens must be one number of 0 or more for each", "count them in the training text")
    f = np.log1p(given)
    spread = float(np.ptp(f))
    x = (2 * f - f.max() - f.min()) / spread if spread else np.zeros_like(f)
    basis = np.full((len(x), 1), max(1, len(x)) ** -0.5)
    for _ in range(powers if spread else 0):
        power = x * basis[:, -1]  # spans the same with the lower ones as x to the next power, and is better conditioned
        scale = float(np.linalg.norm(power))
        for _ in range(2):  # once loses orthogonality where little is left
            power = power - basis @ (basis.T @ power)
        left = float(np.linalg.norm(power))
        if left <= _NEW * scale:
            break
        basis = np.column_stack([basis, power / left])
    return basis[:, 1:]
