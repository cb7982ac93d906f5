"""Path A and Path B of a checkpoint's table on a text: their size, direction and share, by token, and in Adam's step.

    windows ─ shuffled into batches → TwoLeaves → a, b [V, E] of each batch ┬ sums: the gradient of the text's mean loss
                                                                          ├ norms of each: what training sees
                                                                          └ AdamPaths: the optimizer's step by path

The norm of a mean gradient falls as the batch grows, and by different factors for the two paths, so a share belongs to
a batch size. Both are given: one batch (mean and interval over batches) and the whole text, and `by_batch` between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiewise.core.errors import DataError
from tiewise.core.progress import progress
from tiewise.data.blocks import token_counts
from tiewise.data.windows import Ids
from tiewise.internals.adam_paths import Adam, AdamPaths
from tiewise.internals.loaded import Opened
from tiewise.internals.path_batches import Activation, AtBatch, PerBatch, Single, activation, by_batch, per_batch
from tiewise.internals.path_rows import Split, cosine_null, row_sums
from tiewise.internals.path_shares import Bin, Rows, by_frequency, by_row
from tiewise.internals.text_loss import TextLoss
from tiewise.internals.two_leaves import parted
from tiewise.training.results import to_record

PERMUTATIONS = 19


@dataclass(frozen=True)
class PathGradients:
    """What `path_gradients` found.

    Args:
        tied: one table. Else A is the input table's gradient, B the output table's, and they have no cosine.
        vocab: rows of the table.
        width: E.
        objective: what is predicted: `next token`, `hidden` or `second half` (see `text_loss`).
        windows: of the text.
        length: T.
        predicted: tokens predicted in all.
        nll: mean loss, nats per predicted token.
        whole: gradient of the mean loss over all windows.
        cosine_null: lowest and highest cosine where Path A's rows are given to other tokens of the text.
        per_batch: gradients of single batches.
        by_batch: norms and share by batch size, from the batches' scatter.
        update: Adam's step from the batches in order (weights held still; no clipping, no decay), per unit of
            learning rate; `update.a` + `update.b` are norms of parts whose sum is the step.
        adam: its constants.
        activation: the older convention, for comparison with published figures.
        bins: by frequency.
        rows: by row.
    """

    tied: bool
    vocab: int
    width: int
    objective: str
    windows: int
    length: int
    predicted: int
    nll: float
    whole: Split
    cosine_null: tuple[float, float]
    per_batch: PerBatch
    by_batch: tuple[AtBatch, ...]
    update: Split
    adam: Adam
    activation: Activation
    bins: tuple[Bin, ...]
    rows: Rows

    def record(self) -> dict[str, Any]:
        """Return everything as strict JSON takes it; what is not a number is None."""
        return to_record(self)


def path_gradients(
    opened: Opened,
    windows: Ids,
    batch: int = 8,
    seed: int = 0,
    counts: NDArray | None = None,
    adam: Adam | None = None,
) -> PathGradients:
    """Measure both paths' gradients on a text; the model is left as it was.

    Memory: ten tables of the model's own size (gradients, their sums and moments) and logits of a few windows.

    Args:
        opened: the checkpoint, in the precision in which gradients are wanted.
        windows: token ids [n, T].
        batch: windows of a batch.
        seed: of the order of windows, and of hidden tokens where the model predicts those.
        counts: how often each token occurs in a longer text [V], for the bins; None counts the windows.
        adam: constants of the optimizer whose step is divided; None is torch's own.

    Raises:
        DataError: windows that this model cannot be run on, fewer than a batch, or gradients that are no numbers.
        UnsupportedError: an encoder-decoder that cannot shift its own labels.
    """
    loss = TextLoss(opened, windows, seed)
    if not 1 <= batch <= len(windows):
        raise DataError(f"batches of {batch} from {len(windows)} windows", "give a longer text or smaller batches")
    one, adam = opened.ends.tied, adam or Adam()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(windows)))
    pieces = order.split(batch)
    full = len(windows) // batch
    singles: list[Single] = []
    nll = 0.0
    with parted(opened.ends) as leaves:
        a, b = torch.zeros_like(leaves.a), torch.zeros_like(leaves.b)
        moments = AdamPaths(a, b, one, adam)
        scatter: tuple[AtBatch, ...] = ()
        for done, which in enumerate(pieces, 1):
            found = leaves.gradient(loss, which)
            weight = len(which) / len(windows)
            nll += weight * found.nll
            a.add_(found.a, alpha=weight)
            b.add_(found.b, alpha=weight)
            if done <= full:
                singles.append((row_sums(found.a, found.b, one).split(), found.rows_l2, found.rows_l1))
                moments.add(found.a, found.b)
            if done == full:
                mean = row_sums(a, b, one).split()
                scale = len(windows) / (full * batch)
                scatter = by_batch([s for s, _, _ in singles], (mean.a * scale, mean.b * scale), batch)
            del found
            progress("gradients", min(done * batch, len(windows)), len(windows))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise DataError(
                f"{opened.folder.path}: gradients that are no numbers", "`tiewise check --deep` names rows of such"
            )
        update = row_sums(*moments.step(), one)
    seen = token_counts(windows.reshape(-1), max(len(a), len(b)))
    gradient = row_sums(a, b, one)
    null = _null(a, b, seed) if one else (math.nan, math.nan)
    return PathGradients(
        one,
        len(seen),
        int(a.shape[1]),
        loss.kind,
        len(windows),
        int(windows.shape[1]),
        loss.per_window * len(windows),
        nll,
        gradient.split(),
        null,
        per_batch([s for s, _, _ in singles], batch),
        scatter,
        update.split(),
        adam,
        activation(singles),
        by_frequency(gradient, update, seen if counts is None else _lengthened(counts, len(seen))),
        by_row(opened, gradient, update, seen),
    )


def _null(a: Tensor, b: Tensor, seed: int) -> tuple[float, float]:
    """Over the rows that Path A reaches: beside the text's tokens, a mask token or a decoder's first."""
    rows = torch.nonzero(torch.linalg.vector_norm(a, dim=1)).reshape(-1)
    return cosine_null(a, b, rows, seed, PERMUTATIONS)


def _lengthened(counts: NDArray, rows: int) -> NDArray:
    return np.pad(np.asarray(counts), (0, max(0, rows - len(counts))))[:rows]
