"""Reproduction of Inan, Khosravi and Socher, §6.2: the augmented loss aligns the tables' spans.

With the augmented loss alone, the output table moves into the span of the input table.

    python -m benchmarks.subspace CORPUS [--words 20000] [--beta 0 1] [--temperature 10] [--epochs 15]

CORPUS is a text file or a folder with train.txt; its first 20,000 words are the text. The model is a 2×300 LSTM
without regularisation, with input vectors of unit norm and untied tables; its loss is J = β J_aug τ² V + (1 − β) J.
For each β and τ, two measures are printed, before and after training (see `benchmarks.column_spans`): the part of the
output table outside the input table's span, and the distance of the spans with equal weight for every direction. The
paper's limit of large τ is about the first; the second also counts directions that the output table hardly uses.

The paper's text is the Penn Treebank; optimizer, start and length of training are ours. For large τ the gradient of
J_aug by the output table is (W h − L u) hᵀ. Steps proportional to it stay in the joint span of L and W; steps of Adam
do not. The optimizer is therefore SGD with momentum. The initial W decays only in directions that hidden states use.
After so short a training those are few, so W starts near zero (`--init`), for every β.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.column_spans import SubspaceDistance, subspace_distance
from tiewise.boundary.ops.soft_targets import AugmentedOptions, augmented_cross_entropy


class Model(nn.Module):
    """LSTM between two tables; its input vectors have unit norm."""

    def __init__(self, vocab: int, width: int, init: float) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.empty(vocab, width).uniform_(-0.1, 0.1))
        self.output = nn.Parameter(torch.empty(vocab, width).uniform_(-init, init))
        self.body = nn.LSTM(width, width, 2, batch_first=True)

    def measure_distance(self) -> SubspaceDistance:
        """Return the distances of the two tables' spans."""
        return subspace_distance(self.unit().detach().numpy(), self.output.detach().numpy())

    def unit(self) -> torch.Tensor:
        """Return the input table [V, E] with rows of unit norm."""
        return F.normalize(self.input, dim=1)


@dataclass(frozen=True)
class Training:
    """Settings of one training."""

    epochs: int = 15
    rate: float = 0.5  # learning rate
    optimizer: str = "sgd"
    init: float = 1e-4  # the output table starts uniform in ± init
    seed: int = 1
    watch: int = 0  # epochs between printed distances; 0 prints none


def read_first_words(corpus: Path, count: int) -> torch.Tensor:
    """Return the ids [count] of a corpus' first words, numbered by frequency."""
    path = corpus / "train.txt" if corpus.is_dir() else corpus
    words = [word for line in path.read_text(encoding="utf-8").splitlines() for word in [*line.split(), "<eos>"]]
    return number_words(words[:count])


def number_words(words: list[str]) -> torch.Tensor:
    """Return the ids of words, numbered by frequency."""
    ids = {word: i for i, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ids[word] for word in words])


def train(model: Model, ids: torch.Tensor, beta: float, temperature: float, args: Training) -> float:
    """Train on 20 streams in pieces of 35 words; return the last epoch's mean loss."""
    vocab = len(model.input)
    options = AugmentedOptions(alpha=beta * temperature**2 * vocab, hard=1 - beta, temperature=temperature)
    steps = args.epochs * (-(-(len(ids) // 20) // 35))
    if args.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=args.rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9, nesterov=True)
    cooling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    streams = ids[: len(ids) // 20 * 20].view(20, -1)
    for epoch in range(args.epochs):
        state, losses = None, []
        for start in range(0, streams.shape[1] - 1, 35):
            targets = streams[:, start + 1 : start + 36]
            unit = model.unit()
            hidden, state = model.body(F.embedding(streams[:, start : start + targets.shape[1]], unit), state)
            state = tuple(s.detach() for s in state)
            loss = augmented_cross_entropy(hidden, model.output, targets, unit, options=options)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            cooling.step()
            losses.append(loss.item())
        if args.watch and (epoch + 1) % args.watch == 0:
            distance = model.measure_distance()
            mean = sum(losses) / len(losses)
            print(f"  epoch {epoch + 1}: loss {mean:.4g}, outside {distance.residual_b:.3f}", flush=True)
    return sum(losses) / len(losses)


def measure(
    ids: torch.Tensor, width: int, beta: float, temperature: float, args: Training
) -> tuple[SubspaceDistance, SubspaceDistance, float]:
    """Train a model from `args.seed`.

    Return the spans' distances before and after, and the mean loss of the last epoch.
    """
    torch.manual_seed(args.seed)
    model = Model(int(ids.max()) + 1, width, args.init)
    before = model.measure_distance()
    loss = train(model, ids, beta, temperature, args)
    return before, model.measure_distance(), loss


def main() -> None:
    """Train for each β and τ and print one row each."""
    settings = Training()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=300)
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--temperature", type=float, nargs="+", default=[10.0])
    parser.add_argument("--epochs", type=int, default=settings.epochs)
    parser.add_argument("--rate", type=float, default=settings.rate)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default=settings.optimizer)
    parser.add_argument("--init", type=float, default=settings.init, help="the output table starts uniform in ± this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--watch", type=int, default=0, help="print the distance every so many epochs")
    args = parser.parse_args()
    settings = Training(**{f.name: getattr(args, f.name) for f in fields(Training)})
    ids = read_first_words(args.corpus, args.words)
    vocab = int(ids.max()) + 1
    description = (
        f"{args.epochs} epochs of {args.optimizer} at {args.rate:g}, output table ± {args.init:g}, seed {args.seed}"
    )
    print(f"{len(ids):,} words, V = {vocab:,}, width {args.width}; {description}\n")
    print("| β | τ | outside the input table's span, before | after | distance, before | after | loss | CPU seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for beta in args.beta:
        for temperature in args.temperature:
            begin = time.process_time()
            before, after, loss = measure(ids, args.width, beta, temperature, settings)
            seconds = time.process_time() - begin
            print(
                f"| {beta:g} | {temperature:g} | {before.residual_b:.3f} | {after.residual_b:.3f} | "
                f"{before.distance:.3f} | {after.distance:.3f} | {loss:.4g} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
