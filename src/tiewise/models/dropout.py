"""What recurrent language models drop in training: tokens' features, sequences' features, words, and weights.

    fresh      a mask per token                     Zaremba et al., arXiv:1409.2329
    locked     a mask per sequence, at every token  Gal & Ghahramani, arXiv:1512.05287
    of words   whole rows of a table                the same
    of weights a mask per matrix (DropConnect)      Merity et al., arXiv:1708.02182

What is kept is divided by the share that is kept, so that evaluation needs no correction. A mask is drawn anew by every
forward: for a text in pieces a sequence is one piece.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mask(like: Tensor, shape: tuple[int, ...], share: float) -> Tensor:
    """Factors of `shape`: 0 with probability `share`, else 1 / (1 - share)."""
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - share).div_(1 - share)


def drop(x: Tensor, share: float, locked: bool) -> Tensor:
    """Drop features of x [B, T, D], anew at every token or alike over each sequence."""
    if share == 0:
        return x
    return x * mask(x, (x.shape[0], 1, x.shape[2]), share) if locked else F.dropout(x, share, training=True)


def drop_words(x: Tensor, ids: Tensor, words: int, share: float) -> Tensor:
    """Drop words from x [B, T, D], the vectors of `ids` [B, T]: every occurrence of a dropped one, of `words` in all.

    The same as dropping rows of the table (and it may be done behind a linear map), without a second table.
    """
    return x if share == 0 else x * mask(x, (words, 1), share)[ids]
