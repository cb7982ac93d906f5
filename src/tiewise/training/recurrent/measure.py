"""Per-word loss of a split as the papers take it: one pass, the state carried from end to end, `<eos>` a word too.

The split is read in a few streams side by side, for speed: each has no state where it begins, and each word but the
first is predicted once, the first word of a stream from the word before it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.install import Installed
from tiewise.data.frequency import bin_of, frequency_bins
from tiewise.training.evaluate import Measured
from tiewise.training.results import BinNll

_AT_ONCE = 4096  # words of a forward pass
_IGNORED = -100


@torch.no_grad()
def measure_streams(
    installed: Installed, tokens: np.ndarray, counts: np.ndarray, parallel: int, most: int | None = None
) -> Measured:
    """Evaluate a split, or its first `most` words.

    Args:
        installed: the model, put into evaluation mode and back.
        tokens: the split [N].
        counts: how often each word occurs in training [V], for the bins.
        parallel: streams side by side.
        most: words to read at most; None reads all.
    """
    inputs, targets = side_by_side(np.asarray(tokens[:most]), parallel)
    where = torch.from_numpy(bin_of(counts))
    labels = [b.label for b in frequency_bins(counts)]
    sums, sizes = torch.zeros(len(labels), dtype=torch.float64), torch.zeros(len(labels), dtype=torch.long)
    device = installed.tables()[0].device
    length = max(1, _AT_ONCE // len(inputs))
    was_training = installed.model.training
    installed.model.eval()
    state = None
    try:
        for start in range(0, inputs.shape[1], length):
            part = slice(start, start + length)
            wanted = targets[:, part].to(device)
            losses, state = word_losses(installed, inputs[:, part].to(device), wanted, state)
            known = (wanted != _IGNORED).cpu().flatten()
            bins = where[targets[:, part].flatten()[known]]
            sums.index_add_(0, bins, losses.flatten().double().cpu()[known])
            sizes += bins.bincount(minlength=len(labels))
    finally:
        installed.model.train(was_training)
    found = [
        BinNll(label, int(n), float(s / n) if n else None) for label, s, n in zip(labels, sums, sizes, strict=True)
    ]
    total = int(sizes.sum())
    return Measured(float(sums.sum() / total) if total else math.nan, total, found)


def side_by_side(tokens: np.ndarray, parallel: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) [streams, n] of a split: every word but the first is a target once; padding is ignored."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    predicted = len(ids) - 1
    streams = max(1, min(parallel, predicted))
    each = -(-predicted // streams)
    padding = streams * each - predicted
    inputs = F.pad(ids[:-1], (0, padding)).view(streams, each)
    return inputs, F.pad(ids[1:], (0, padding), value=_IGNORED).view(streams, each)


def word_losses(installed: Installed, inputs: Tensor, targets: Tensor, state: object) -> tuple[Tensor, object]:
    """(loss of each word [streams, n], the state after it), without logits."""
    with installed.deferred():
        output = installed.model(input_ids=inputs, state=state)
        logits = output.logits.reshape(-1, output.logits.shape[-1])
        losses = F.cross_entropy(logits, targets.reshape(-1), reduction="none", ignore_index=_IGNORED)
    return losses.view(targets.shape), output.state
