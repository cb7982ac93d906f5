"""Figures of `benchmarks.amx` that have a limit: the bf16 kernel for AMX compared with fp64 and with its emulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.amx_problem import relative_distance
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy, oracle
from tiewise.boundary.ops.native_loss import KernelProducts

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.3, "chunk": 100},
    {"label_smoothing": 0.2},
    {"z_loss": 0.05},
    {"softcap": 2.0, "scale": 1.3, "z_loss": 0.02},
)
SHAPES = ((777, 1009, 34), (1111, 5000, 768), (1111, 3001, 513), (300, 2081, 2048), (33, 57, 12))
LOSS_LIMIT, GRADIENT_LIMIT = 1e-5, 6e-3
# ragged shapes for the comparison with the emulation
TOKENS, WORDS, WIDTHS = (32, 33, 100, 700), (2, 31, 33, 257, 1009), (1, 31, 64, 100)


@dataclass(frozen=True)
class LimitedFigure:
    """A measured figure and the largest value that is right."""

    name: str
    value: float
    limit: float

    @property
    def is_right(self) -> bool:
        """Whether the value is within the limit; a nan is not."""
        return self.value <= self.limit


class Draw:
    """Random problems in bf16."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def normal(self, *shape: int, factor: float = 1.0) -> Tensor:
        """Return random numbers of this standard deviation."""
        return (torch.randn(*shape, generator=self.generator) * factor).bfloat16()

    def targets(self, count: int, words: int) -> Tensor:
        """Return random targets."""
        return torch.randint(0, words, (count,), generator=self.generator)


def list_figures(library: Any, products: KernelProducts, thread_counts: tuple[int, ...]) -> Iterator[LimitedFigure]:
    """Yield all figures, computed with each of the numbers of threads."""
    before = torch.get_num_threads()
    try:
        for threads in thread_counts:
            torch.set_num_threads(threads)
            if products == KernelProducts.TILES:
                yield count_differences(library, threads)
            yield from compare_with_fp64(threads)
    finally:
        torch.set_num_threads(before)


def compare_with_fp64(threads: int) -> Iterator[LimitedFigure]:
    """Yield the errors of losses and gradients: options, shapes, and targets that are very unlikely."""
    draw = Draw()
    for options in OPTIONS:
        yield from _errors(draw, SHAPES[0], f"{options or 'plain'}, {threads} threads", 1.0, options)
    for shape in SHAPES[1:]:
        yield from _errors(draw, shape, f"{shape}, {threads} threads", 1.0, {})
    yield from _errors(draw, (200, 3000, 96), f"unlikely targets, {threads} threads", 60.0, {"reduction": "none"})


def _errors(
    draw: Draw, shape: tuple[int, int, int], name: str, factor: float, options: dict[str, Any]
) -> Iterator[LimitedFigure]:
    """Yield the largest error of a loss, and those of its gradients."""
    tokens, words, width = shape
    features, table = draw.normal(tokens, width, factor=factor), draw.normal(words, width, factor=2 / width**0.5)
    bias, targets = draw.normal(words), draw.targets(tokens, words)
    inputs = (features, table, bias)
    ours = _gradients(linear_cross_entropy, inputs, targets, options)
    exact_options = {name: value for name, value in options.items() if name != "chunk"}
    exact = _gradients(oracle, tuple(x.double() for x in inputs), targets, exact_options)
    yield LimitedFigure(f"{name}: loss", relative_distance(ours[0], exact[0]), LOSS_LIMIT)
    for what, mine, reference in zip(("features", "table", "bias"), ours[1:], exact[1:], strict=True):
        yield LimitedFigure(f"{name}: gradient of {what}", relative_distance(mine, reference), GRADIENT_LIMIT)


def _gradients(loss: Any, inputs: tuple[Tensor, ...], targets: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Return the loss and its three gradients."""
    features, table, bias = (x.detach().requires_grad_() for x in inputs)
    value = loss(features, table, targets, bias, **options)
    return [value.detach(), *torch.autograd.grad(value.sum(), (features, table, bias))]


def count_differences(library: Any, threads: int) -> LimitedFigure:
    """Return how many results of the processor's tiles differ from those of the emulation in any bit."""
    draw, different, cases = Draw(), 0, 0
    for tokens, words, width in itertools.product(TOKENS, WORDS, WIDTHS):
        features, table = draw.normal(tokens, width), draw.normal(words, width, factor=2 / width**0.5)
        targets, bias = draw.targets(tokens, words), draw.normal(words).float()
        rows = (tokens, 64, 7, 1000)[cases % 4]
        softcap, has_entropy = (0.0, 3.0, 0.0)[cases % 3], cases % 3 == 2
        coefficients = torch.linspace(0.5, 1.5, tokens)
        results = [
            library.vocabulary_loss(
                *(features, table, bias, targets, coefficients, coefficients, None, None, None, 0.8, softcap),
                *(rows, products, True, has_entropy, True, True, True),
            )
            for products in (KernelProducts.TILES, KernelProducts.EMULATED_TILES)
        ]
        different += sum(not torch.equal(a, b) for a, b in zip(*results, strict=True))
        cases += 1
    return LimitedFigure(f"results of {cases} problems that differ from the emulation, {threads} threads", different, 0)
