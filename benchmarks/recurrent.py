"""Time of a stateful training step of a recurrent model, in plain PyTorch and tiewise.

python -m benchmarks.recurrent [BATCH LENGTH WIDTH VOCAB [DROPOUT]]

The plain model has nn.Embedding, nn.LSTM, nn.Linear, [N, V] logits and F.cross_entropy; if tied, one weight by
assignment. Both clip the gradient and take a step of SGD. Words follow Zipf's law. A round is five steps of each model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.measure import alternate, format_spread, median_ratio
from tiewise.boundary.installation import install
from tiewise.training.models import RNNConfig, detached
from tiewise.training.optimizers import AveragedSGD

SHAPES = ((20, 35, 200, 10_000, 0.2), (20, 35, 200, 33_278, 0.2), (20, 35, 650, 10_000, 0.5))


class PlainModel(nn.Module):
    """LSTM language model in plain PyTorch."""

    def __init__(self, width: int, vocab: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.body = nn.LSTM(width, width, 2, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits [B, T, V] and the state after the last position."""
        hidden, state = self.body(self.dropout(self.embedding(ids)), state)
        return self.head(self.dropout(hidden)), state


def render_table(batch: int, length: int, width: int, vocab: int, dropout: float, rounds: int = 7) -> str:
    """Return the Markdown table of one shape."""
    threads = torch.get_num_threads()
    weights = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    ids = torch.multinomial(weights, batch * (length + 1), replacement=True, generator=generator).view(
        batch, length + 1
    )
    lines = [
        f"B = {batch}, T = {length}, E = H = {width}, V = {vocab:,}, dropout {dropout:g}, {threads} threads",
        "",
        "| | plain, ms for five steps (range) | tiewise | words/s, plain | words/s, tiewise | × |",
        "|---|---|---|---|---|---|",
    ]
    for arm in ("untied", "tied"):
        steps = {
            "plain": _make_plain_step(PlainModel(width, vocab, dropout, arm == "tied"), ids),
            "tiewise": _make_tiewise_step(width, vocab, dropout, arm, ids),
        }
        times = alternate(
            {name: (lambda step=step: [step() for _ in range(5)]) for name, step in steps.items()}, rounds
        )
        rates = [5 * batch * length / sorted(times[name])[len(times[name]) // 2] for name in steps]
        lines.append(
            f"| {arm} | {format_spread(times['plain'])} | {format_spread(times['tiewise'])} | "
            f"{rates[0]:,.0f} | {rates[1]:,.0f} | {median_ratio(times, 'plain', 'tiewise'):.2f} |"
        )
    return "\n".join(lines)


def _make_plain_step(model: PlainModel, ids: Tensor) -> Callable[[], None]:
    """Return a training step of the plain model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    carried: list[tuple[Tensor, ...] | None] = [None]

    def step() -> None:
        """Train on the batch and carry the state over."""
        optimizer.zero_grad()
        logits, state = model(ids[:, :-1], carried[0])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        carried[0] = tuple(s.detach() for s in state)

    return step


def _make_tiewise_step(width: int, vocab: int, dropout: float, arm: str, ids: Tensor) -> Callable[[], None]:
    """Return a training step of a recurrent model with an installed boundary."""
    shares = dict.fromkeys(("input_dropout", "layer_dropout", "output_dropout"), dropout)
    config = RNNConfig(vocab_size=vocab, hidden_size=width, lstm_bias="two", **shares)
    model = AutoModelForCausalLM.from_config(config).train()
    install(model, arm)
    optimizer = AveragedSGD(model.parameters(), lr=0.1)
    carried: list[object] = [None]

    def step() -> None:
        """Train on the batch and carry the state over."""
        optimizer.zero_grad()
        output = model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:].contiguous(), state=carried[0])
        output.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        carried[0] = detached(output.state)

    return step


def main() -> None:
    """Print the table of the requested shape, or of all shapes."""
    if sys.argv[1:]:
        batch, length, width, vocab = map(int, sys.argv[1:5])
        print(render_table(batch, length, width, vocab, float(sys.argv[5]) if len(sys.argv) > 5 else 0.0))
        return
    print("\n\n".join(render_table(*shape) for shape in SHAPES))


if __name__ == "__main__":
    main()
