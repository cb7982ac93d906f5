"""Logit lens and tuned lens: what each layer's states already say of the model's final distribution.

    lenses(opened, windows, held_out, steps=250).layers[0].tuned.kl

The logit lens (nostalgebraist 2020) reads the states after a layer as if no layer followed. The tuned lens (Belrose et
al. 2023, arXiv:2303.08112) puts a trained affine map before that (`translators`). KL(final ‖ lens), held out, with
the chance levels of three fixed distributions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiewise.analysis.estimates import Estimate, mean_interval
from tiewise.core.errors import DataError, UnsupportedError
from tiewise.core.progress import progress
from tiewise.internals.loaded import Opened
from tiewise.internals.stack import AppliedStack, find_stack
from tiewise.internals.tuned_lens import (
    RATE,
    Translator,
    batch_size,
    batches,
    chunks,
    passes,
    start,
    train_step,
)

LEAST_STEPS = 20  # fewer leave no last tenth to look at
MARKS = 20  # times that the held-out KL is read over training
ZERO = 1e-6  # nats: rounding of fp32
CONVERGED = 0.01  # of the KL: what the last tenth of the steps may still change
BITS = 1 / math.log(2)
_Lens = tuple[int, Callable[[Tensor], Tensor]]  # depth, and what is done to its states before they are read


@dataclass(frozen=True)
class LensRead:
    """One lens at one layer, on held-out windows."""

    kl: Estimate  # KL(final ‖ lens), nats per position
    nll: Estimate  # cross-entropy of the lens against the text's next token, nats
    agreement: Estimate  # share of positions where lens and model name the same token first

    @property
    def bits(self) -> float:
        """KL in bits per position."""
        return self.kl.value * BITS


@dataclass(frozen=True)
class LensLayer:
    """Both lenses on the residual stream at one place; of the tuned one nothing after the last layer."""

    depth: int  # layers applied before it; 0 is what the first layer reads
    name: str  # of the layer that wrote it, `input` at depth 0
    logit: LensRead
    tuned: LensRead | None  # after the last layer both are the model itself
    curve: tuple[float, ...]  # held-out KL of the tuned lens at `Lenses.marks`, nats
    fitted: float | None  # mean KL on the training batches of the last tenth of the steps, each before its step
    improvement: float | None  # 1 − KL at the end / KL before the last tenth of the steps

    @property
    def converged(self) -> bool | None:
        """Whether the last tenth of the steps changed the held-out KL by less than 1 %."""
        return None if self.improvement is None else abs(self.improvement) < CONVERGED


@dataclass(frozen=True)
class Lenses:
    """Every layer's lenses, how they were trained, and what fixed distributions reach."""

    layers: tuple[LensLayer, ...]  # by depth, 0 to L
    nll: Estimate  # of the model itself on the held-out windows, nats
    uniform: Estimate  # KL from the final distribution to the uniform one, nats
    unigram: Estimate  # to the training windows' token counts, one added to each
    constant: Estimate  # to the model's mean distribution there: none that is the same everywhere is nearer
    tied: bool  # whether input and output table are one
    steps: int  # that each translator was trained for
    marks: tuple[int, ...]  # steps at which the curves were read
    batch: int  # windows per step
    rate: float  # Adam's
    windows: int  # training windows
    held_out: int  # held-out windows, each with `length` − 1 positions read
    length: int
    seed: int  # of the order of training windows

    @property
    def passes(self) -> float:
        """Times that training went over its windows."""
        return self.steps * self.batch / self.windows

    @property
    def converged(self) -> bool:
        """Whether every layer's translator did."""
        return all(layer.converged is not False for layer in self.layers)


def lenses(
    opened: Opened,
    windows: NDArray[np.int64],
    held_out: NDArray[np.int64],
    steps: int = 250,
    seed: int = 0,
) -> Lenses:
    """Read every layer with both lenses.

    Args:
        opened: a causal model.
        windows: ids [n, T] to train translators on.
        held_out: ids [m, T] to read everything on; apart from `windows`.
        steps: of training, 20 or more.
        seed: of the order of the windows.

    Raises:
        DataError: windows that are too few, too short or too long, ids outside the vocabulary, too few steps.
        UnsupportedError: a model whose layers are no stack (`find_stack`), or that reads both sides of a token.
    """
    _check(opened, windows, held_out, steps)
    stack = find_stack(opened)
    if not stack.causal:
        what = (
            f"{type(opened.model).__name__} reads both sides of a token, and its final distribution names what it sees"
        )
        raise UnsupportedError(what, "give a causal language model")
    texts, apart = torch.as_tensor(windows), torch.as_tensor(held_out)
    fixed = _fixed(stack, texts)
    translators = start(stack, texts)
    marks, curves, fitted = _train(stack, translators, (texts, apart), steps, seed)
    logit: list[_Lens] = [(i, lambda states: states) for i in range(len(translators) + 1)]
    reads, baselines, nll = _measure(stack, apart, [*logit, *enumerate(translators)], fixed)
    uniform, unigram, constant = baselines
    return Lenses(
        layers=tuple(_joined(stack, reads, marks, curves, fitted)),
        nll=nll,
        uniform=uniform,
        unigram=unigram,
        constant=constant,
        tied=opened.ends.tied,
        steps=steps,
        marks=tuple(marks),
        batch=min(batch_size(windows.shape[1]), len(windows)),
        rate=RATE / stack.width**0.5,
        windows=len(windows),
        held_out=len(held_out),
        length=windows.shape[1],
        seed=seed,
    )


def _check(opened: Opened, windows: NDArray[np.int64], held_out: NDArray[np.int64], steps: int) -> None:
    if steps < LEAST_STEPS:
        fix = f"give {LEAST_STEPS} or more: convergence is read off their last tenth"
        raise DataError(f"{steps} steps of training", fix)
    if windows.ndim != 2 or held_out.ndim != 2 or windows.shape[1] != held_out.shape[1]:
        raise DataError("windows and held-out windows differ in length", "cut both from one text, [n, T] and [m, T]")
    if len(windows) < 1 or len(held_out) < 2 or windows.shape[1] < 2:
        what = f"{len(windows)} windows and {len(held_out)} held-out ones of {windows.shape[1]} tokens"
        raise DataError(what, "give a longer text: an interval needs two held-out windows, a next token two tokens")
    if opened.longest is not None and windows.shape[1] > opened.longest:
        what = f"windows of {windows.shape[1]} tokens, the model has {opened.longest} positions"
        raise DataError(what, f"give windows of at most {opened.longest}")
    top = int(max(windows.max(), held_out.max()))
    if top >= opened.vocab or min(windows.min(), held_out.min()) < 0:
        raise DataError(f"token {top} is outside a vocabulary of {opened.vocab:,}", "use the model's own tokenizer")


@torch.no_grad()
def _fixed(stack: AppliedStack, texts: Tensor) -> Tensor:
    """Logarithms of three distributions [3, V]: uniform, the text's tokens, the model's mean."""
    total, count = torch.zeros(0), 0
    for states, targets in passes(stack, texts):
        for part in chunks(len(targets), stack.opened.vocab):
            shares = stack.to_logits(states[-1][part]).softmax(-1).double().sum(0)
            total = shares if not count else total + shares
            count += part.stop - part.start
    size = len(total)
    counts = torch.bincount(texts.reshape(-1), minlength=size).double()[:size] + 1
    rows = [torch.ones_like(total) / size, counts / counts.sum(), (total / count).clamp_min(1e-300)]
    return torch.stack(rows).log().to(stack.opened.ends.head.weight.dtype)


def _train(
    stack: AppliedStack,
    translators: list[Translator],
    texts: tuple[Tensor, Tensor],
    steps: int,
    seed: int,
) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """Train; (marks, held-out KL [marks, layers], KL on the batches of the last tenth [layers])."""
    marks = sorted({steps * i // MARKS for i in range(MARKS + 1)})
    drawn = batches(texts[0], torch.Generator().manual_seed(seed))
    curves, fitted = [], []
    for done in range(steps + 1):
        progress("training a lens at every layer", done, steps)
        if done in marks:
            reads, _, _ = _measure(stack, texts[1], list(enumerate(translators)))
            curves.append([read.kl.value for read in reads])
        if done < steps:
            losses = train_step(stack, translators, next(drawn), done, steps)
            fitted += [losses] if done >= 0.9 * steps else []
    return marks, np.array(curves), np.mean(fitted, axis=0)


@torch.no_grad()
def _measure(
    stack: AppliedStack, texts: Tensor, found: Sequence[_Lens], fixed: Tensor | None = None
) -> tuple[list[LensRead], list[Estimate], Estimate]:
    """Read lenses on windows [m, T]: (what each reads, KL to the fixed distributions [k, V], the model's own nll)."""
    rows: list[Tensor] = []
    fixed = torch.empty(0, 0) if fixed is None else fixed
    for states, targets in passes(stack, texts):
        for part in chunks(len(targets), stack.opened.vocab):
            final = stack.to_logits(states[-1][part]).log_softmax(-1)
            own = -final.gather(1, targets[part, None])[:, 0]
            columns = [own]
            for logs in fixed:
                columns.append((final.exp() * (final - logs)).sum(-1))
            for depth, translated in found:
                lens = stack.to_logits(translated(states[depth][part])).log_softmax(-1)
                columns.append((final.exp() * (final - lens)).sum(-1))
                columns.append(-lens.gather(1, targets[part, None])[:, 0])
                columns.append((lens.argmax(-1) == final.argmax(-1)).to(own.dtype))
            rows.append(torch.stack(columns).double())
    means = torch.cat(rows, 1).reshape(len(rows[0]), len(texts), -1).mean(-1).numpy()  # by window
    nll, *others = [mean_interval(row) for row in means]
    reads = others[len(fixed) :]
    return [LensRead(*reads[i : i + 3]) for i in range(0, len(reads), 3)], others[: len(fixed)], nll


def _joined(
    stack: AppliedStack,
    reads: list[LensRead],
    marks: list[int],
    curves: NDArray[np.float64],
    fitted: NDArray[np.float64],
) -> list[LensLayer]:
    names = ["input", *(one.name for one in stack.applications)]
    depth = len(stack.applications)
    before = max(i for i, mark in enumerate(marks) if mark <= 0.9 * marks[-1])
    layers = []
    for i, name in enumerate(names):
        if i == depth:
            layers.append(LensLayer(i, name, reads[i], None, (), None, None))
            continue
        late, end = curves[before, i], curves[-1, i]
        improvement = 0.0 if max(late, end) <= ZERO else float(1 - end / late)
        curve = tuple(float(value) for value in curves[:, i])
        layers.append(LensLayer(i, name, reads[i], reads[depth + 1 + i], curve, float(fitted[i]), improvement))
    return layers
