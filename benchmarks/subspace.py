"""Inan, Khosravi and Socher, §6.2: the augmented loss alone draws the output table into the input table's span.

    python benchmarks/subspace.py CORPUS [--words 20000] [--beta 0 0.5 1] [--temperature 10] [--epochs 40]

CORPUS is a text file or a folder with train.txt; the first 20,000 words of it are the text. A 2×300 LSTM without
regularisation, input vectors of unit norm, tables not tied, J = β J_aug τ² V + (1 − β) J. Printed for each β and τ,
before and after training: the part of the output table that lies outside the input table's span, and the distance of
the two spans with every direction counted alike (see `tiewise.analysis.subspace`). The first is what the paper's limit
of large τ is about; the second also counts directions that the output table hardly uses.

The paper's text is that of the Penn Treebank and it gives neither optimizer nor length of training: here Adam.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tiewise.analysis.subspace import SubspaceDistance, subspace_distance
from tiewise.ops.augmented_loss import augmented_cross_entropy


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


def first_words(corpus: Path, count: int) -> torch.Tensor:
    """Ids [count] of the first words of a corpus, numbered by frequency."""
    path = corpus / "train.txt" if corpus.is_dir() else corpus
    words = [word for line in path.read_text(encoding="utf-8").splitlines() for word in [*line.split(), "<eos>"]]
    ids = {word: i for i, (word, _) in enumerate(Counter(words[:count]).most_common())}
    return torch.tensor([ids[word] for word in words[:count]])


def train(model: Model, ids: torch.Tensor, beta: float, temperature: float, args: argparse.Namespace) -> float:
    """Train for `args.epochs` epochs of 20 streams and 35 steps; return the mean loss of the last one."""
    vocab = len(model.input)
    options = {"alpha": beta * temperature**2 * vocab, "hard": 1 - beta, "temperature": temperature}
    steps = args.epochs * (-(-(len(ids) // 20) // 35))
    kind = torch.optim.Adam if args.optimizer == "adam" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=args.rate)
    cooling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    streams = ids[: len(ids) // 20 * 20].view(20, -1)
    for epoch in range(args.epochs):
        state, losses = None, []
        for start in range(0, streams.shape[1] - 1, 35):
            targets = streams[:, start + 1 : start + 36]
            unit = model.unit()
            hidden, state = model.body(F.embedding(streams[:, start : start + targets.shape[1]], unit), state)
            state = tuple(s.detach() for s in state)
            loss = augmented_cross_entropy(hidden, model.output, targets, unit, **options)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            cooling.step()
            losses.append(loss.item())
        if args.watch and (epoch + 1) % args.watch == 0:
            found = model.apart()
            mean = sum(losses) / len(losses)
            print(f"  epoch {epoch + 1}: loss {mean:.4g}, outside {found.residual_b:.3f}", flush=True)
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=300)
    parser.add_argument("--beta", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--temperature", type=float, nargs="+", default=[10.0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="adam")
    parser.add_argument("--init", type=float, default=0.1, help="the output table starts uniform in ± this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--watch", type=int, default=0, help="print the distance every so many epochs")
    args = parser.parse_args()
    ids = first_words(args.corpus, args.words)
    vocab = int(ids.max()) + 1
    print(f"{len(ids):,} words, V = {vocab:,}, width {args.width}; {args.epochs} × {args.optimizer} at {args.rate:g}")
    print("| β | τ | outside the input table's span, before | after | distance, before | after | loss | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for beta in args.beta:
        for temperature in args.temperature:
            torch.manual_seed(args.seed)
            model = Model(vocab, args.width, args.init)
            before, begin = model.apart(), time.perf_counter()
            loss = train(model, ids, beta, temperature, args)
            after, seconds = model.apart(), time.perf_counter() - begin
            print(
                f"| {beta:g} | {temperature:g} | {before.residual_b:.3f} | {after.residual_b:.3f} | "
                f"{before.distance:.3f} | {after.distance:.3f} | {loss:.4g} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
