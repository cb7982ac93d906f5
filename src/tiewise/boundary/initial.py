"""Where a boundary starts: a sound scale of its tables, and drawing them."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor


def sound_std(d: int) -> float:
    """Return the default scale of a table's entries, d^-½: embedded rows of unit norm, whatever the table's width.

    The body gets an input of the size that its norms expect to add to, and the loss starts within half a nat of ln V at
    both ends. Half and twice this scale end higher for every arm on the built-in text (the table in docs/compare.md).
    """
    return d**-0.5


def draw(table: Tensor, std: float, pad: int | None = None) -> None:
    """Fill `table` [V, E] with N(0, std²) from torch's global generator; the padding row becomes zero."""
    with torch.no_grad():
        nn.init.normal_(table, std=std)
        if pad is not None:
            table[pad].zero_()
