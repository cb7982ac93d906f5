"""Which document, or part of a long one, goes where, so that the shares are met in characters.

random: they are taken in a seeded random order. `heldout` takes each one that brings it nearer to its share of the
characters, then `tune` does, and `train` keeps the rest. So each small split ends within half a document of its share,
and a single huge document stays in training. The parts of one long file fall into all splits.

contiguous: training, tuning and held-out text follow each other as they stand; the last parts are held out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiewise.core.errors import DataError

SPLITS = ("train", "tune", "heldout")
RANDOM, CONTIGUOUS = "random", "contiguous"


def assign(sizes: np.ndarray, fractions: Sequence[float], seed: int, how: str = RANDOM) -> np.ndarray:
    """Return the index in `SPLITS` of every document or part, int8[n], from its size in characters, int64[n].

    The same on every machine and every version of numpy: the generator is one whose stream numpy keeps frozen.

    Raises:
        DataError: where there are fewer documents than splits.
    """
    if len(sizes) < len(SPLITS):
        raise DataError(
            f"the text makes {len(sizes)} document{'s' * (len(sizes) != 1)} without its repetitions; "
            f"needs at least {len(SPLITS)} to hold some out",
            "give more text, or plain text, which is cut into parts",
        )
    if how == CONTIGUOUS:
        before = np.cumsum(sizes) / sizes.sum()  # share of the text up to the end of each
        tune = int(np.clip(np.abs(before - fractions[0]).argmin() + 1, 1, len(sizes) - 2))
        heldout = int(np.clip(np.abs(before - sum(fractions[:2])).argmin() + 1, tune + 1, len(sizes) - 1))
        return np.repeat(np.arange(3, dtype=np.int8), np.diff([0, tune, heldout, len(sizes)]))
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(len(sizes))
    where = np.zeros(len(sizes), np.int8)
    free = len(sizes)
    for split in (2, 1):
        wanted = fractions[split] * float(sizes.sum())
        for index in order:
            if wanted <= 0 or free == split:  # one document is left for each split to come
                break
            if where[index] == 0 and sizes[index] < 2 * wanted:
                where[index] = split
                wanted -= float(sizes[index])
                free -= 1
        if not (where == split).any():  # all documents are long; the shortest overshoots least
            left = np.flatnonzero(where == 0)
            where[left[np.argmin(sizes[left])]] = split
            free -= 1
    return where
