"""Studies with planted differences, drawn from a seed."""

import math
import random
from dataclasses import replace
from pathlib import Path

from tiewise.core.estimates import holm_adjusted
from tiewise.training.results import paired
from tiewise.training.study.grid import StudyGrid
from tiewise.training.study.study import Study, SweepResult

AXES = {"width": [32, 64, 128, 256], "train_tokens": [20000, 80000, 320000], "tokenizer": ["bpe:512", "bpe:4096"]}


def gain(width, tokens, vocab):
    """Return the planted loss, tied − untied. It rises with text and width and falls with the vocabulary."""
    return 0.012 * math.log(tokens / 80000) + 0.01 * math.log(width / 64) - 0.006 * math.log(vocab / 1024)


def planted(
    folder=Path("study"), axes=AXES, seeds=4, noise=0.002, between=0.001, arms=("untied", "tied"), true_gain=gain
):
    draw, results = random.Random(5), []
    grid = StudyGrid("Up to which width does tying pay?", {"arms": list(arms), "seeds": seeds}, axes)
    for cell, settings in grid.cells().items():
        vocab = int(settings.tokenizer.split(":")[1])
        for place, arm in enumerate(arms[1:]):
            tokens = settings.train_tokens or 500000
            true = true_gain(settings.width, tokens, vocab) + draw.gauss(0, between) + 0.01 * place
            base = [draw.gauss(5, 0.05) for _ in range(seeds)]
            kinds = [[b + true * scale + draw.gauss(0, noise) for b in base] for scale in (1, 0.5)]
            heldout, training = (paired(base, own, arm=arm) for own in kinds)
            rank = settings.specs()[arm].width
            results.append(
                SweepResult(
                    cell, {axis: getattr(settings, axis) for axis in axes}, arm, arms[0], heldout, training,
                    nll=5 + true, parameters=settings.width * vocab + 1000 * (rank or 0),
                    reference_parameters=2 * settings.width * vocab, rank=rank, alpha=1.0,
                    vocab=vocab, tokens=tokens, seen=10**6, demo=False, command=f"tiewise compare --out {cell}",
                )
            )  # fmt: skip
    for i, p in enumerate(holm_adjusted([result.heldout.p for result in results])):
        results[i] = replace(results[i], heldout=replace(results[i].heldout, p=p, detected=p < 0.05))
    return Study(grid, tuple(results), 0, folder)
