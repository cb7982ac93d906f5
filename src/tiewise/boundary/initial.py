"""Where a boundary starts: the loss that its table's scale predicts, a sound scale, and drawing it."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from tiewise.random_logits import logit_std, predicted_nll
from tiewise.spec import BoundarySpec


def starting_nll(spec: BoundarySpec, vocab: int, d: int, std: float) -> float:
    """Expected step-0 nll of `spec`'s boundary, tables drawn N(0, std²), under a body that knows nothing yet.

    That is: hidden states of norm √d that are independent of their tokens. A tied table far above `sound_std` starts
    higher still, because it meets itself.
    """
    return predicted_nll(vocab, logit_std(spec, d, std), softcap=spec.softcap)


def sound_std(d: int) -> float:
    """Return the default scale of a table's entries, d^-½: rows of unit norm.

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
