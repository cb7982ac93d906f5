"""Which document goes where: whole documents, at random by a seed, so that the shares are met in characters.

Documents are taken in a seeded random order. `heldout` takes each one that brings it nearer to its share of the
characters, then `tune` does, and `train` keeps the rest. So each small split ends within half a document of its share,
and a single huge document stays in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiewise.errors import DataError

SPLITS = ("train", "tune", "heldout")


def assign(sizes: np.ndarray, fractions: Sequence[float], seed: int) -> np.ndarray:
    """Return the index in `SPLITS` of every document, int8[n], from its size in characters, int64[n].

    The same on every machine and every version of numpy: the generator is one whose stream numpy keeps frozen.

    Raises:
        DataError: where there are fewer documents than splits.
    """
    if len(sizes) < len(SPLITS):
        raise DataError(
            f"the text makes {len(sizes)} document{'s' * (len(sizes) != 1)} without its repetitions; "
            f"needs at least {len(SPLITS)} to hold some out",
            "give more text, or plain text, which is cut into documents",
        )
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
