"""Bins of tokens by how often they occur: the decades that every measure by frequency is told in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_EDGES = (1, 10, 100, 1000, 10_000)  # where a bin of training counts begins; the first bin holds 0


@dataclass(frozen=True)
class FrequencyBin:
    """Tokens that occur `low` to `high` times in training, both included; `high` is None in the last bin.

    `tokens` is how many entries of the vocabulary these are, `occurrences` how often they occur together.
    """

    low: int
    high: int | None
    label: str
    tokens: int = 0
    occurrences: int = 0


def frequency_bins(counts: np.ndarray) -> list[FrequencyBin]:
    """Return the decades of training counts, int64[V]: 0, 1–9, … 1000–9999, ≥10000; empty ones too."""
    where = bin_of(counts)
    bins = []
    for index, low in enumerate((0, *_EDGES)):
        high = _EDGES[index] - 1 if index < len(_EDGES) else None
        label = f"≥{low}" if high is None else f"{low}–{high}" if high else "0"
        inside = counts[where == index]
        bins.append(FrequencyBin(low, high, label, len(inside), int(inside.sum())))
    return bins


def bin_of(counts: np.ndarray) -> np.ndarray:
    """Return the index in `frequency_bins` of every token, int64[V]."""
    return np.searchsorted(_EDGES, counts, side="right").astype(np.int64)
