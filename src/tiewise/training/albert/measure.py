"""What a pretrained ALBERT is measured by: loss and accuracy on masked tokens and on pairs, on rows that never change.

The rows of a split are drawn from a seed of their own, the same for all arms and seeds, pairs half and half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tiewise.boundary.install import Installed
from tiewise.data.frequency import bin_of, frequency_bins
from tiewise.data.prepared import PreparedText
from tiewise.data.training_rows import Marks, PairRows, split_sentences
from tiewise.training.albert.model import options
from tiewise.training.evaluate import Measured
from tiewise.training.results import MASKED, BinNll, Share
from tiewise.training.settings import Settings

MEASURED_SEED = 20_191
_BATCH = 16


@dataclass(frozen=True)
class Pretrained:
    """What was found on a split: masked tokens, pairs, and what knowing nothing but frequencies gives.

    Attributes:
        tokens: masked tokens predicted right, and their nll.
        pairs: pairs judged right, by objective.
        unigram_nll: nll of the same masked tokens under the training text's frequencies (each count plus one).
        bins: nll by how often a token occurs in training.
    """

    tokens: Share
    pairs: dict[str, Share]
    unigram_nll: float
    bins: list[BinNll]

    def measured(self) -> Measured:
        """As every run's result holds it: its losses are those of the masked tokens."""
        shares = {MASKED: self.tokens, **self.pairs}
        return Measured(self.tokens.nll, self.tokens.count, self.bins, shares, self.unigram_nll)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        found = asdict(replace(self, bins=[]))
        del found["bins"]
        return found


def rows_of(
    settings: Settings,
    text: PreparedText,
    split: str,
    *,
    seed: int,
    count: int | None = None,
    objective: str | None = None,
) -> PairRows:
    """Rows of a split as a run's settings make them, from `seed`.

    Raises:
        DataError: a text that makes no pairs.
    """
    o = options(settings)
    packing = o.packing(settings.length, objective)
    most = None if split == "train" and count is not None else 8 * settings.measured
    return PairRows(split_sentences(text, split, most), Marks.of(text), packing, o.masks(), seed=seed, count=count)


def measured_rows(
    settings: Settings, text: PreparedText, split: str, objectives: tuple[str, ...], most: int
) -> dict[str, PairRows]:
    """Up to `most` rows of a split for each objective, always the same ones."""
    found = {}
    for objective in objectives:
        found[objective] = rows = rows_of(settings, text, split, seed=MEASURED_SEED, objective=objective)
        rows.count = min(most, len(rows))
    return found


def measure_pretrained(installed: Installed, rows: Mapping[str, PairRows], counts: np.ndarray) -> Pretrained:
    """Evaluate a model on rows by the objective of their pairs; masked tokens are taken from the first of them.

    Args:
        installed: the model, put into evaluation mode and back.
        rows: what `measured_rows` gave.
        counts: how often each token occurs in training [V].
    """
    model, was_training = installed.model, installed.model.training
    model.eval()
    try:
        found = {name: _outputs(model, own, installed.tables()[0].device) for name, own in rows.items()}
    finally:
        model.train(was_training)
    losses, targets, right = next(iter(found.values()))[:3]
    pairs = {
        name: Share.of(int(judged.sum()), len(judged), float(pair_losses.mean()))
        for name, (*_, pair_losses, judged) in found.items()
        if len(judged)
    }
    frequencies = np.log((counts + 1) / (counts.sum() + len(counts)))
    return Pretrained(
        Share.of(int(right.sum()), len(right), float(losses.mean())),
        pairs,
        float(-frequencies[targets.numpy()].mean()),
        _bins(losses, targets, counts),
    )


@torch.no_grad()
def _outputs(model: Any, rows: PairRows, device: torch.device) -> tuple[Tensor, ...]:
    """(nll, target, whether right) of masked tokens and (nll, whether right) of pairs, on the CPU in fp64."""
    tokens, pairs = [], []
    for batch in DataLoader(rows, _BATCH):
        given = {name: value.to(device) for name, value in batch.items()}
        labels, order = given.pop("labels"), given.pop("pair_labels", None)
        masked = labels != -100
        output = model(**given, predict=masked)
        wanted, logits = labels[masked], output.logits.float()
        tokens.append((F.cross_entropy(logits, wanted, reduction="none").double(), wanted, logits.argmax(-1) == wanted))
        if order is not None:
            judged = output.pair_logits.float()
            pairs.append((F.cross_entropy(judged, order, reduction="none").double(), judged.argmax(-1) == order))
    found = [torch.cat(part).cpu() for part in zip(*tokens, strict=True)]
    judged_all = [torch.cat(part).cpu() for part in zip(*pairs, strict=True)] if pairs else [torch.zeros(0)] * 2
    return (*found, *judged_all)


def _bins(losses: Tensor, targets: Tensor, counts: np.ndarray) -> list[BinNll]:
    where = torch.from_numpy(bin_of(counts))[targets]
    found = []
    for index, b in enumerate(frequency_bins(counts)):
        inside = losses[where == index]
        found.append(BinNll(b.label, len(inside), float(inside.mean()) if len(inside) else None))
    return found
