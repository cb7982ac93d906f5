"""Tuned lenses: an affine map per layer, trained so that what the layer wrote gives the model's final distribution.

    T(h) = h + s·(A·W(h − μ) + b),     A = 0 and b = 0 at first: the logit lens      (Belrose et al. 2023, section 3)

μ and W are the mean and the whitening of the layer's states on the training windows, s their root mean square: the
same affine maps in other coordinates, where all directions are learnt alike. Trained by Adam at a constant rate; what
is read is an average of the last steps. A rate that falls to zero would flatten any curve, trained enough or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiewise.internals.stack import AppliedStack

RATE = 0.15  # Adam's rate is RATE / √D: about the share by which a step may change a state
BETAS = (0.9, 0.99)
EPSILON = 1e-6  # Adam's: gradients that are rounding alone move nothing
AVERAGED = 20  # the average reaches back about a 20th of all steps
TOKENS = 256  # positions per step, at least
SHRINK = 1e-3  # of the mean eigenvalue: directions that hardly occur are not blown up


@dataclass
class Translator:
    """One layer's map, in the coordinates of its states."""

    mean: Tensor  # μ [D]
    whiten: Tensor  # W [D, D], symmetric
    scale: float  # s
    trained: tuple[Tensor, Tensor]  # A [D, D] and b [D], as the optimizer moves them
    average: tuple[Tensor, Tensor]  # the same, averaged over the last steps: what is read
    optimizer: torch.optim.Adam  # of `trained`

    @classmethod
    def identity(cls, mean: Tensor, second: Tensor) -> Translator:
        """Start at the identity, from the mean [D] of states and the mean [D, D] of their outer products."""
        width = len(mean)
        values, vectors = torch.linalg.eigh((second - torch.outer(mean, mean)).double())
        values = values.clamp_min(0)
        roots = (values + SHRINK * values.mean().clamp_min(torch.finfo(torch.float32).tiny)).rsqrt()
        whiten = (vectors * roots @ vectors.T).to(mean.dtype)
        trained = torch.zeros(width, width).to(mean), torch.zeros_like(mean)
        average = tuple(part.clone() for part in trained)
        optimizer = torch.optim.Adam([part.requires_grad_() for part in trained], RATE / width**0.5, BETAS, EPSILON)
        return cls(mean, whiten, float(second.diagonal().mean().sqrt()), trained, (average[0], average[1]), optimizer)

    def __call__(self, states: Tensor) -> Tensor:
        """Translate states [N, D] by the average."""
        return self._map(states, self.average)

    def _map(self, states: Tensor, parts: tuple[Tensor, Tensor]) -> Tensor:
        weight, shift = parts
        return states + self.scale * ((states - self.mean) @ self.whiten @ weight.T + shift)

    def descend(self, stack: AppliedStack, states: Tensor, wanted: Tensor, share: float) -> float:
        """Add the gradient of `share` times the summed KL of states [N, D] to final log-probabilities [N, V].

        Returns that share of Σ p log q, in nats: the part of −KL that depends on the lens.
        """
        logits = stack.to_logits(self._map(states, self.trained))
        lens = logits.detach().log_softmax(-1)
        target = wanted.exp()
        slope = (lens.exp() - target) * share  # of the mean KL, in the lens's logits
        for weight, more in zip(self.trained, torch.autograd.grad(logits, self.trained, slope), strict=True):
            weight.grad = more if weight.grad is None else weight.grad + more
        return float((target * lens).sum()) * share

    def move(self, keep: float) -> None:
        """Take Adam's step along the gradient added up; `keep` is the share of the average that stays."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        for held, weight in zip(self.average, self.trained, strict=True):
            held.lerp_(weight.detach(), 1 - keep)


def start(stack: AppliedStack, texts: Tensor) -> list[Translator]:
    """Identity translators for every layer but the last, in the coordinates of their states on windows [n, T]."""
    depth, width = len(stack.applications), stack.width
    means, seconds = torch.zeros(depth, width), torch.zeros(depth, width, width)
    count = 0
    for states, _ in passes(stack, texts):
        count += len(states[0])
        for i, held in enumerate(states[:-1]):
            means[i] += held.sum(0)
            seconds[i] += held.T @ held
    return [Translator.identity(mean / count, second / count) for mean, second in zip(means, seconds, strict=True)]


def train_step(
    stack: AppliedStack, translators: Sequence[Translator], ids: Tensor, done: int, steps: int
) -> list[float]:
    """Take step number `done` of `steps` with every translator on windows [B, T]; their mean KL in nats before it."""
    states = positions(stack.states(ids))
    found = [0.0] * len(translators)
    for part in stack.parts(len(states[0])):
        with torch.no_grad():
            wanted = stack.to_logits(states[-1][part]).log_softmax(-1)
        own = float((wanted.exp() * wanted).sum()) / len(states[0])
        for i, one in enumerate(translators):
            found[i] += own - one.descend(stack, states[i][part], wanted, 1 / len(states[0]))
    keep = min(1 - AVERAGED / max(steps, AVERAGED), (done + 1) / (done + 10))
    for one in translators:
        one.move(keep)
    return found


def batches(texts: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Windows [B, T] with at least TOKENS positions, without end: every window once, shuffled, then again."""
    size = min(batch_size(texts.shape[1]), len(texts))
    while True:
        order = torch.randperm(len(texts), generator=generator)
        for i in range(0, len(texts) - size + 1, size):
            yield texts[order[i : i + size]]


def batch_size(length: int) -> int:
    """Windows of a length that make a step."""
    return -(-TOKENS // (length - 1))


def positions(states: Sequence[Tensor]) -> list[Tensor]:
    """States [B, T, D] of the positions that have a next token, as [B·(T − 1), D]."""
    return [held[:, :-1].reshape(-1, held.shape[-1]) for held in states]


def passes(stack: AppliedStack, texts: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """States before each layer and after the last [N, D], and next tokens [N], a few windows at a time."""
    wide = (len(stack.applications) + 1) * stack.width * texts.shape[1]
    for group in texts.split(max(1, min(2**12 // texts.shape[1], 2**26 // wide))):
        yield positions(stack.states(group)), group[:, 1:].reshape(-1)
