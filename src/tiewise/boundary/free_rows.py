"""Separate output rows of the most frequent tokens in a tied boundary: `+free=K`.

    rows of the head     W = E,  W[ids] = E[ids] + Δ           ids [K] in ascending order, Δ [K, D]
    gradients            of E: as of a tied table              of Δ: the rows `ids` of the gradient of W

Losses multiply by W. It is computed in each forward pass and is no parameter: optimizer and checkpoints have E and Δ.
The gradient of W is that of E, so both share one buffer. Logits of a few tokens instead add h Δᵀ to K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiewise.core.errors import SpecError


def free_rows_of(head: Any) -> FreeRows | None:
    """Return the free rows of a head; None without any."""
    free: FreeRows | None = getattr(head, "free", None)
    return free


def output_table(head: Any) -> Tensor:
    """Return the rows [V, E] by which a head multiplies.

    They are its weight, with its free rows if it has some.
    """
    free = free_rows_of(head)
    if free is None:
        weight: Tensor = head.weight
        return weight
    return free.table(head.weight)


class FreeRows(nn.Module):
    """Correction Δ of the output rows of K tokens.

    >>> free = FreeRows([0, 2], width=4)
    >>> free.table(torch.ones(3, 4)).shape
    torch.Size([3, 4])

    Args:
        ids: K token ids in ascending order.
        width: width D of the table.

    Attributes:
        rows: Δ [K, D], a Parameter that starts at zero, where the boundary is exactly tied.
        ids: int32 [K], saved with the rows.
    """

    ids: Tensor

    def __init__(self, ids: Sequence[int], width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(len(ids), width))
        self.register_buffer("ids", torch.tensor(ids, dtype=torch.int32))

    def reset_parameters(self) -> None:
        """Set Δ to zero."""
        nn.init.zeros_(self.rows)

    def table(self, table: Tensor) -> Tensor:
        """Return the output table W [V, D] of a tied table E [V, D]."""
        return table.index_add(0, self.ids, self.rows.to(table.dtype))

    def add_logits(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Add h Δᵀ to the logits [.., V] of hidden states h [.., D]."""
        correction = F.linear(hidden, self.rows.to(hidden.dtype))
        return logits.index_add_(-1, self.ids, correction.to(logits.dtype))

    def check_ids(self, vocab: int) -> None:
        """Refuse ids, read from a checkpoint, that are not ascending tokens.

        Raises:
            SpecError: ids repeat, are not in ascending order, or are outside [0, `vocab`).
        """
        ids = self.ids.long()
        limits = torch.tensor([-1, vocab], device=ids.device)
        steps = torch.cat([limits[:1], ids, limits[1:]]).diff()
        if int(steps.min()) < 1:
            problem = f"the free rows' ids are not {len(ids)} ascending tokens below {vocab}"
            raise SpecError(problem, "keep these tokens; a damaged checkpoint must be taken from its source again")
