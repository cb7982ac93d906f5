"""Reproduction of Inan, Khosravi and Socher, §6.2: the augmented loss aligns the tables' spans.

The augmented loss alone draws the output table into the span of the input table.

    python -m benchmarks.subspace CORPUS [--words 20000] [--beta 0 1] [--temperature 10] [--epochs 15]

CORPUS is a text file or a folder with train.txt; the first 20,000 words of it are the text. A 2×300 LSTM without
regularisation, input vectors of unit norm, tables not tied, J = β J_aug τ² V + (1 − β) J. Printed for each β and τ,
before and after training: the part of the output table that lies outside the input table's span, and the distance of
the two spans with every direction counted alike (see `benchmarks.column_spans`). The first is what the paper's limit
of large τ is about; the second also counts directions that the output table hardly uses.

The paper's text is that of the Penn Treebank; optimizer, start and length of training are ours. The gradient of J_aug
by the output table is (W h − L u) hᵀ for large τ: what is added in proportion to it lies in the span that L and W have
already, which is not so of Adam's steps. So it is SGD with momentum. What W started with decays only in directions that
hidden states use, and those are few after so short a training, so W starts near zero (`--init`), at every β alike.
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
    """Two tables and an LSTM between them; the input vectors are taken at unit norm."""

    def __init__(self, vocab: int, width: int, init: float) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.empty(vocab, width).uniform_(-0.1, 0.1))
        self.output = nn.Parameter(torch.empty(vocab, width).uniform_(-init, init))
        self.body = nn.LSTM(width, width, 2, batch_first=True)

    def apart(self) -> SubspaceDistance:
        return subspace_distance(self.unit().detach().numpy(), self.output.detach().numpy())

    def unit(self) -> torch.Tensor:
        return F.normalize(self.input, dim=1)


@dataclass(frozen=True)
class Training:
    """How long and how fast; the start of the output table; how often the distance is printed meanwhile."""

    epochs: int = 15
    rate: float = 0.5
    optimizer: str = "sgd"
    init: float = 1e-4
    seed: int = 1
    watch: int = 0


def first_words(corpus: Path, count: int) -> torch.Tensor:
    """Ids [count] of the first words of a corpus, numbered by frequency."""
    path = corpus / "train.txt" if corpus.is_dir() else corpus
    words = [word for line in path.read_text(encoding="utf-8").splitlines() for word in [*line.split(), "<eos>"]]
    return numbered(words[:count])


def numbered(words: list[str]) -> torch.Tensor:
    """Ids of words, numbered by frequency."""
    ids = {word: i for i, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([ids[word] for word in words])


def train(model: Model, ids: torch.Tensor, beta: float, temperature: float, args: Training) -> float:
    """Train for `args.epochs` epochs of 20 streams and 35 steps; return the mean loss of the last one."""
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
            found = model.apart()
            mean = sum(losses) / len(losses)
            print(f"  epoch {epoch + 1}: loss {mean:.4g}, outside {found.residual_b:.3f}", flush=True)
    return sum(losses) / len(losses)


def measure(
    ids: torch.Tensor, width: int, beta: float, temperature: float, args: Training
) -> tuple[SubspaceDistance, SubspaceDistance, float]:
    """(before, after, mean loss of the last epoch) of a model trained from `args.seed`."""
    torch.manual_seed(args.seed)
    model = Model(int(ids.max()) + 1, width, args.init)
    before = model.apart()
    loss = train(model, ids, beta, temperature, args)
    return before, model.apart(), loss


def main() -> None:
    chosen = Training()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=300)
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--temperature", type=float, nargs="+", default=[10.0])
    parser.add_argument("--epochs", type=int, default=chosen.epochs)
    parser.add_argument("--rate", type=float, default=chosen.rate)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default=chosen.optimizer)
    parser.add_argument("--init", type=float, default=chosen.init, help="the output table starts uniform in ± this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--watch", type=int, default=0, help="print the distance every so many epochs")
    args = parser.parse_args()
    chosen = Training(**{f.name: getattr(args, f.name) for f in fields(Training)})
    ids = first_words(args.corpus, args.words)
    vocab = int(ids.max()) + 1
    how = f"{args.epochs} epochs of {args.optimizer} at {args.rate:g}, output table ± {args.init:g}, seed {args.seed}"
    print(f"{len(ids):,} words, V = {vocab:,}, width {args.width}; {how}\n")
    print("| β | τ | outside the input table's span, before | after | distance, before | after | loss | CPU seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for beta in args.beta:
        for temperature in args.temperature:
            begin = time.process_time()
            before, after, loss = measure(ids, args.width, beta, temperature, chosen)
            seconds = time.process_time() - begin
            print(
                f"| {beta:g} | {temperature:g} | {before.residual_b:.3f} | {after.residual_b:.3f} | "
                f"{before.distance:.3f} | {after.distance:.3f} | {loss:.4g} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
