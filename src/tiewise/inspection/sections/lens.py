"""How much of the final prediction can be read off before the last layer? Logit lens and tuned lens.

The logit lens (nostalgebraist 2020) reads the states after a layer as if no layer followed. The tuned lens (Belrose et
al. 2023, arXiv:2303.08112) puts a trained affine map before that (`tiewise.internals.tuned_lens`). KL(final ‖ lens),
held out, with the chance levels of three fixed distributions. See docs/lens.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiewise.core.errors import DataError, UnsupportedError
from tiewise.core.estimates import Estimate, mean_interval
from tiewise.core.found import NONE, Curve, Found, Listing, Quantity, plain
from tiewise.core.long_work import progress
from tiewise.data.tokenizer import Ids
from tiewise.inspection.request import Bench, Subject
from tiewise.inspection.section import section
from tiewise.internals.loaded import Opened
from tiewise.internals.stack import AppliedStack, find_stack
from tiewise.internals.tuned_lens import batch_size, batches, passes, start, train_step

LEAST_STEPS = 20  # fewer leave no last tenth to look at
MARKS = 20  # times that the held-out KL is read over training
ZERO = 1e-6  # nats: rounding of fp32
CONVERGED = 0.01  # of the KL: what the last tenth of the steps may still change
KL = "nats to the final distribution"
_Lens = tuple[int, Callable[[Tensor], Tensor]]  # depth, and what is done to its states before they are read


@section(
    asks="How much of the final prediction can be read off before the last layer?", place=100, text=True, weight=20
)
def lens(subject: Subject, bench: Bench) -> Found:
    """Read every layer's states by the head itself (logit lens) and after a trained map (tuned lens)."""
    (run_on, held_out), steps = bench.windows(subject), bench.request.effort.lens_steps
    return found_of(lenses(bench.opened(subject), run_on, held_out, steps, bench.request.seed))


@dataclass(frozen=True)
class LensRead:
    """One lens at one layer, on held-out windows."""

    kl: Estimate  # KL(final ‖ lens), nats per position
    nll: Estimate  # cross-entropy of the lens against the text's next token, nats
    agreement: Estimate  # share of positions where lens and model name the same token first

    @property
    def bits(self) -> float:
        """KL in bits per position."""
        return self.kl.value / math.log(2)


@dataclass(frozen=True)
class LensLayer:
    """Both lenses on the residual stream at one place; after the last layer both are the model, and none is trained."""

    depth: int  # layers applied before it; 0 is what the first layer reads
    name: str  # of the layer that wrote it, `input` at depth 0
    logit: LensRead
    tuned: LensRead | None = None
    curve: tuple[float, ...] = ()  # held-out KL of the tuned lens at `Lenses.marks`, nats
    fitted: float | None = None  # mean KL on the training batches of the last tenth of the steps, each before its step
    improvement: float | None = None  # 1 − KL at the end / KL before the last tenth of the steps

    @property
    def converged(self) -> bool | None:
        """Whether the last tenth of the steps changed the held-out KL by less than 1 %."""
        return None if self.improvement is None else abs(self.improvement) < CONVERGED


@dataclass(frozen=True)
class Lenses:
    """Every layer's lenses, and what fixed distributions reach."""

    layers: tuple[LensLayer, ...]  # by depth, 0 to L
    nll: Estimate  # of the model itself on the held-out windows, nats
    uniform: Estimate  # KL from the final distribution to the uniform one, nats
    unigram: Estimate  # to the training windows' token counts, one added to each
    constant: Estimate  # to the model's mean distribution there: none that is the same everywhere is nearer
    marks: tuple[int, ...]  # steps of training at which the curves were read; the last is their number
    passes: float  # times that training went over its windows

    @property
    def converged(self) -> bool:
        """Whether every layer's translator did."""
        return all(layer.converged is not False for layer in self.layers)


def lenses(opened: Opened, windows: Ids, held_out: Ids, steps: int = 250, seed: int = 0) -> Lenses:
    """Read every layer with both lenses.

    Args:
        opened: a causal model.
        windows: ids [n, T] to train translators on.
        held_out: ids [m, T] to read everything on; apart from `windows`.
        steps: of training, 20 or more.
        seed: of the order of the windows.

    Raises:
        DataError: windows that the model cannot be run on or that are too few, too few steps.
        UnsupportedError: a model whose layers are no stack (`find_stack`), or that reads both sides of a token.
    """
    if steps < LEAST_STEPS:
        fix = f"give {LEAST_STEPS} or more: convergence is read off their last tenth"
        raise DataError(f"{steps} steps of training", fix)
    texts, apart = opened.checked(windows), opened.checked(held_out)
    if texts.shape[1] != apart.shape[1]:
        raise DataError("windows and held-out windows differ in length", "cut both from one text, [n, T] and [m, T]")
    if len(apart) < 2:
        raise DataError("1 held-out window", "give a longer text: an interval needs two held-out windows")
    stack = find_stack(opened)
    if not stack.causal:
        what = (
            f"{type(opened.model).__name__} reads both sides of a token, and its final distribution names what it sees"
        )
        raise UnsupportedError(what, "give a causal language model")
    fixed, translators = _fixed(stack, texts), start(stack, texts)
    marks = sorted({steps * i // MARKS for i in range(MARKS + 1)})
    drawn = batches(texts, torch.Generator().manual_seed(seed))
    curves, fitted = [], []
    for done in range(steps + 1):
        progress("training a lens at every layer", done, steps)
        if done in marks:
            curves.append([read.kl.value for read in _read(stack, apart, list(enumerate(translators)))[0]])
        if done < steps:
            losses = train_step(stack, translators, next(drawn), done, steps)
            fitted += [losses] if done >= 0.9 * steps else []
    depth = len(translators)
    logit: list[_Lens] = [(i, lambda states: states) for i in range(depth + 1)]
    reads, (uniform, unigram, constant), nll = _read(stack, apart, [*logit, *enumerate(translators)], fixed)
    before = max(i for i, mark in enumerate(marks) if mark <= 0.9 * steps)
    layers = []
    names, last = ["input", *(one.name for one in stack.applications)], np.mean(fitted, axis=0)
    for i, curve in enumerate(zip(*curves, strict=True)):
        late, end = curve[before], curve[-1]
        moved = 0.0 if max(late, end) <= ZERO else 1 - end / late
        layers.append(LensLayer(i, names[i], reads[i], reads[depth + 1 + i], curve, float(last[i]), moved))
    layers.append(LensLayer(depth, names[-1], reads[depth]))
    went_over = steps * min(batch_size(texts.shape[1]), len(texts)) / len(texts)
    return Lenses(tuple(layers), nll, uniform, unigram, constant, tuple(marks), went_over)


@torch.no_grad()
def _fixed(stack: AppliedStack, texts: Tensor) -> Tensor:
    """Logarithms of three distributions [3, V]: uniform, the text's tokens, the model's mean."""
    total, count = torch.zeros(0), 0
    for states, targets in passes(stack, texts):
        for part in stack.parts(len(targets)):
            shares = stack.to_logits(states[-1][part]).softmax(-1).double().sum(0)
            total = shares if not count else total + shares
            count += part.stop - part.start
    size = len(total)
    counts = torch.bincount(texts.reshape(-1), minlength=size).double()[:size] + 1
    rows = [torch.ones_like(total) / size, counts / counts.sum(), (total / count).clamp_min(1e-300)]
    return torch.stack(rows).log().to(stack.opened.ends.head.weight.dtype)


@torch.no_grad()
def _read(
    stack: AppliedStack, texts: Tensor, found: Sequence[_Lens], fixed: Tensor | None = None
) -> tuple[list[LensRead], list[Estimate], Estimate]:
    """Read lenses on windows [m, T]: (what each reads, KL to the fixed distributions [k, V], the model's own nll)."""
    rows: list[Tensor] = []
    fixed = torch.empty(0, 0) if fixed is None else fixed
    for states, targets in passes(stack, texts):
        for part in stack.parts(len(targets)):
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


def found_of(found: Lenses) -> Found:
    """Say how near the first states are to the final prediction, where half of it stands, and if training sufficed."""
    inner = [layer for layer in found.layers if layer.tuned is not None]
    half = next((layer.depth for layer in inner if layer.tuned and layer.tuned.agreement.low > 0.5), None)
    where = f"after layer {half} of {len(inner)}" if half else "before any layer"
    return Found(
        answer="not the first choice at half of the positions"
        if half is None
        else f"the first choice at most positions, {where}",
        quantities=tuple(_quantities(found)),
        curves=tuple(_curves(found, inner)),
        listings=(_listing(found),),
        notes=tuple(_notes(found, inner)),
    )


def _quantities(found: Lenses) -> Iterator[Quantity]:
    first = found.layers[0]
    for name, read in (("tuned lens, before any layer", first.tuned), ("logit lens there", first.logit)):
        if read is not None:
            why = f"{plain(read.bits, 2)} bits; beside it: the model's mean distribution"
            yield Quantity.of_estimate(name, read.kl, unit=KL, chance=found.constant.value, why=why)
            yield Quantity.of_estimate(f"same first choice, {name}", read.agreement, unit="%", main=False)
    yield Quantity.of_estimate("the model's own nll", found.nll, unit="nats per token", main=False)
    why = "the same at every position: what no lens gives"
    yield Quantity.of_estimate("uniform distribution", found.uniform, unit=KL, main=False, why=why)
    yield Quantity.of_estimate("text's token frequencies", found.unigram, unit=KL, main=False, why=why)
    yield Quantity.of_estimate("model's mean distribution", found.constant, unit=KL, main=False, why=why)


def _curves(found: Lenses, inner: list[LensLayer]) -> Iterator[Curve]:
    both = {
        "tuned lens": [(layer.depth, layer.tuned) for layer in inner if layer.tuned],
        "logit lens": [(layer.depth, layer.logit) for layer in inner],
    }
    for which, reads in both.items():
        yield Curve.through(
            "How far is each layer from the final distribution?", ((depth, read.kl) for depth, read in reads),
            which=which, along="layers applied", unit=KL, log=True,
            level=found.constant.value, level_name="the model's mean distribution",
            why="KL(final ‖ lens) on held-out windows. Above the dotted line a lens says less of the final prediction "
            "than one distribution that is the same everywhere.",
        )  # fmt: skip
    for which, reads in both.items():
        yield Curve.through(
            "Does a layer already name the model's first choice?", ((depth, read.agreement) for depth, read in reads),
            which=which, along="layers applied", unit="share of positions",
            why="Held-out positions at which lens and model name the same token first.",
        )  # fmt: skip
    for layer in inner[:: max(1, (len(inner) - 1) // 2)]:  # the first, one in the middle, the last
        yield Curve(
            "Were the tuned lenses trained long enough?", found.marks, layer.curve, which=f"depth {layer.depth}",
            along="step of training", unit=KL, log=True,
            why=f"Held-out KL. A lens has converged if the last tenth of steps changes it by under {CONVERGED:.0%}.",
        )  # fmt: skip


def _notes(found: Lenses, inner: list[LensLayer]) -> Iterator[str]:
    worse = sum(layer.logit.kl.low > found.constant.high for layer in inner)
    yield f"at {worse} of {len(inner)} places the logit lens is clearly further off than the model's mean distribution"
    unfinished = [layer for layer in inner if layer.converged is False]
    if unfinished:
        yield (
            f"{len(unfinished)} of {len(inner)} tuned lenses still moved in the last tenth of {found.marks[-1]} steps: "
            "their KL says how far they were trained; give more --lens-steps"
        )
    over = [
        one for one in inner if one.tuned is not None and one.fitted is not None and one.fitted < 0.9 * one.tuned.kl.low
    ]
    if over:
        yield (
            f"at {len(over)} place{'s' if len(over) > 1 else ''} the tuned lens fits the windows better that it was "
            f"trained on, {plain(found.passes, 1)} times each: give more text"
        )


def _listing(found: Lenses) -> Listing:
    header = ("place", "logit lens, nats", "tuned lens, nats", "logit, bits", "tuned, bits", "nll, logit", "nll, tuned")
    ends = ("same token, logit", "same token, tuned", "last tenth", "converged")
    rows = []
    for layer in found.layers:
        logit, tuned = layer.logit, layer.tuned
        pairs = [(getattr(logit, x), tuned and getattr(tuned, x)) for x in ("kl", "nll", "agreement")]
        kl, nll, agreement = [[str(Quantity.of_estimate("", e, unit="value")) for e in pair] for pair in pairs]
        bits = [plain(logit.bits, 2), plain(tuned.bits if tuned else None, 2)]
        moved = NONE if layer.improvement is None else plain(-100 * layer.improvement, 2) + " %"
        converged = NONE if layer.converged is None else "yes" if layer.converged else "no"
        place = layer.name if not layer.depth else f"{layer.depth} · {layer.name}"
        rows.append((place, *kl, *bits, *nll, *agreement, moved, converged))
    return Listing("Both lenses at each place", header + ends, tuple(rows))
