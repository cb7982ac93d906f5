"""Orthogonal matching pursuit: each target as a combination of few anchors (Pati, Rezaiifar & Krishnaprasad 1993).

    r = x, S = {}           repeat: S ∪= {argmaxⱼ |⟨aⱼ, r⟩| / ‖aⱼ‖},  c = argmin ‖x − Σ_S cⱼ aⱼ‖,  r = x − Σ_S cⱼ aⱼ

The chosen anchors are kept as an orthonormal basis (Gram–Schmidt, twice, which is enough: Giraud et al. 2005), so that
a step costs its products with the anchors and no new solution; coefficients come from one triangular system at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiewise.core.long_work import progress

BLOCK_BYTES = 64 * 2**20  # held at a time beside the anchors
SMALL = 1e-6  # a residual or a new direction below this share of its vector is rounding


def pursue(
    anchors: NDArray, targets: NDArray, most: int, what: str = "matching"
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Write each target as a combination of at most `most` anchors; those are chosen in fp32, and combined in fp64.

    Args:
        anchors: [S, D], none of them zero.
        targets: [n, D], in the same space.
        most: k, anchors of one combination; no more than there are, and no more than D, are taken.
        what: names the work in progress.

    Returns:
        (places among the anchors [n, k], coefficients [n, k]: 0 where fewer were needed).
    """
    most = min(most, *anchors.shape)
    lengths = np.sqrt(np.einsum("sd,sd->s", anchors, anchors, dtype=np.float64))
    unit = (anchors / lengths[:, None]).astype(np.float32)
    chosen = np.zeros((len(targets), most), np.int64)
    coefficients = np.zeros((len(targets), most))
    step = max(1, BLOCK_BYTES // (4 * len(anchors) + 8 * most * (anchors.shape[1] + most)))
    for start in range(0, len(targets), step):
        block = slice(start, start + step)
        chosen[block], coefficients[block] = _block(anchors, lengths, unit, targets[block].astype(np.float64), most)
        progress(what, min(start + step, len(targets)), len(targets))
    return chosen, coefficients


def _block(
    anchors: NDArray, lengths: NDArray[np.float64], unit: NDArray[np.float32], x: NDArray[np.float64], most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """As `pursue`; `unit` [S, D] are the anchors with length 1."""
    n, rest, least = np.arange(len(x)), x.copy(), SMALL * np.linalg.norm(x, axis=1)
    basis, triangle = np.zeros((len(x), most, x.shape[1])), np.tile(np.eye(most), (len(x), 1, 1))
    places, along = np.zeros((len(x), most), np.int64), np.zeros((len(x), most))
    for k in range(most):
        alike = np.abs(rest.astype(np.float32) @ unit.T)
        alike[n[:, None], places[:, :k]] = -1
        places[:, k] = alike.argmax(axis=1)
        new = anchors[places[:, k]] / lengths[places[:, k], None]
        for _ in range(2):
            part = np.einsum("nkd,nd->nk", basis[:, :k], new)
            new -= np.einsum("nk,nkd->nd", part, basis[:, :k])
            triangle[:, :k, k] += part
        length = np.linalg.norm(new, axis=1)
        # what the anchors so far hold already, and what is no longer needed, gets the coefficient 0
        useful = (length > SMALL) & (np.linalg.norm(rest, axis=1) > least)
        triangle[:, :k, k] *= useful[:, None]
        triangle[:, k, k] = np.where(useful, length, 1.0)
        basis[:, k] = np.where(useful[:, None], new / np.where(useful, length, 1.0)[:, None], 0.0)
        along[:, k] = np.einsum("nd,nd->n", basis[:, k], rest)
        rest -= along[:, k, None] * basis[:, k]
    return places, np.linalg.solve(triangle, along[:, :, None])[:, :, 0] / lengths[places]
