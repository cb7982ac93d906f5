"""Problem and fp64 reference of `benchmarks.amx`.

W [V, D] ~ N(0, 1/D); targets follow Zipf's law. Features are a standard normal plus a_i · W[t_i] with a ~ N(ln V, 2):
some targets are likely and others are not, as in a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLED_TOKENS, SAMPLED_WORDS = 128, 2048  # rows of the gradients that are compared
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossResult:
    """A loss with its gradients of features and table."""

    loss: Tensor
    by_features: Tensor
    by_table: Tensor


@dataclass(frozen=True)
class Errors:
    """Relative distances from fp64."""

    loss: float
    features: float
    table: float


@dataclass(frozen=True)
class LossProblem:
    """Features [N, D], table [V, D] and targets [N]."""

    features: Tensor
    table: Tensor
    targets: Tensor

    @classmethod
    def random(cls, shape: tuple[int, int, int], kind: torch.dtype) -> LossProblem:
        """Draw a problem of a shape N, V, D."""
        tokens, words, width = shape
        draw = torch.Generator().manual_seed(0)
        ranks = torch.arange(1, words + 1, dtype=torch.float64)
        targets = torch.multinomial(1 / ranks, tokens, replacement=True, generator=draw)
        table = torch.randn(words, width, generator=draw).mul_(width**-0.5)
        strengths = math.log(words) + 2 * torch.randn(tokens, 1, generator=draw)
        features = torch.randn(tokens, width, generator=draw) + strengths * table[targets]
        return cls(features.to(kind), table.to(kind), targets)

    def run(self, loss: LossFunction) -> LossResult:
        """Compute a loss and both gradients in new memory."""
        features, table = self.features.detach().requires_grad_(), self.table.detach().requires_grad_()
        value = loss(features, table, self.targets)
        value.backward()
        assert features.grad is not None, "a loss has a gradient of the features"
        assert table.grad is not None, "a loss has a gradient of the table"
        return LossResult(value.detach(), features.grad, table.grad)

    def run_into(self, loss: Callable[..., Tensor], into: Tensor) -> LossResult:
        """Compute a loss, and add the table's gradient to `into` [V, D]."""
        features = self.features.detach().requires_grad_()
        value = loss(features, self.table, self.targets, into=into)
        value.backward()
        assert features.grad is not None, "the loss has a gradient of the features"
        return LossResult(value.detach(), features.grad, into)


def plain_loss(features: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy from all logits, in fp32 as models compute it."""
    return F.cross_entropy(F.linear(features, table).float(), targets)


def sample_rows(count: int, most: int) -> Tensor:
    """Return the indices of about `most` evenly spaced rows."""
    return torch.arange(0, count, max(1, count // most))


class Reference:
    """Loss and sampled rows of both gradients in fp64, for the same rounded inputs."""

    def __init__(self, problem: LossProblem) -> None:
        """Compute them in chunks of 512 tokens."""
        features, table, targets = problem.features.double(), problem.table.double(), problem.targets
        count = len(targets)
        self.tokens, self.words = sample_rows(count, SAMPLED_TOKENS), sample_rows(len(table), SAMPLED_WORDS)
        by_features, total = torch.empty_like(features), features.new_zeros(())
        self.by_table = features.new_zeros(len(self.words), table.shape[1])
        for part in torch.arange(count).split(512):
            logits = features[part] @ table.T
            log_sums = logits.logsumexp(1, keepdim=True)
            total += (log_sums - logits.gather(1, targets[part, None])).sum()
            slopes = logits.sub_(log_sums).exp_()
            slopes[torch.arange(len(part)), targets[part]] -= 1
            self.by_table += slopes[:, self.words].T @ features[part] / count
            sampled = torch.isin(part, self.tokens)
            by_features[part[sampled]] = slopes[sampled] @ table / count
        self.loss, self.by_features = total / count, by_features[self.tokens]

    def errors(self, result: LossResult) -> Errors:
        """Return the relative distances of a result."""
        return Errors(
            loss=float(abs(result.loss.double() - self.loss) / self.loss),
            features=relative_distance(result.by_features[self.tokens], self.by_features),
            table=relative_distance(result.by_table[self.words], self.by_table),
        )


def relative_distance(x: Tensor, reference: Tensor) -> float:
    """Return ‖x − reference‖ / ‖reference‖; the numerator if that is 0."""
    reference = reference.double()
    distance, norm = (x.double() - reference).norm(), reference.norm()
    return float(distance / norm) if norm > 0 else float(distance)
