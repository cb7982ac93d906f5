"""Logit lens and tuned lens: predictions from states before the last layer.

The logit lens (nostalgebraist 2020) reads the states after a layer as if no layer followed. The tuned lens (Belrose et
al. 2023, arXiv:2303.08112, section 3) puts a trained affine map before that:

    T(h) = h + s·(A·W(h − μ) + b),     A = 0 and b = 0 at first: the logit lens

μ and W are the mean and the whitening of the layer's states on the training windows, s their root mean square: the same
affine maps in other coordinates, where all directions are learnt equally fast. They are trained by Adam at a constant
rate; the lens uses an average of the last steps. A rate that falls to zero would flatten any curve, also one that has
not converged.

The results are KL(final ‖ lens) on held-out windows, with the chance levels of three fixed distributions. See
docs/inspect.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiewise.core.errors import DataError, UnsupportedError
from tiewise.core.estimates import Estimate, mean_interval
from tiewise.core.measurement import NATS, NONE, Curve, Listing, Measurement, Quantity, plain
from tiewise.core.progress import report_progress
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.stack import AppliedStack, find_stack
from tiewise.inspection.workspace import InspectedModel, Workspace, section
from tiewise.training.data.tokenizer import Ids

RATE = 0.15  # Adam's rate is RATE / √D: about the largest relative change of a state in one step
BETAS = (0.9, 0.99)
EPSILON = 1e-6  # Adam's ε: gradients that are only rounding change nothing
AVERAGED = 20  # 1 / AVERAGED of all steps: the span of the average
TOKENS = 256  # least positions per step
SHRINK = 1e-3  # relative to the mean eigenvalue: rare directions are not magnified
LEAST_STEPS = 20  # fewer have no last tenth to compare
MARKS = 20  # number of held-out readings during training
ZERO = 1e-6  # nats: rounding of fp32
NEVER = "no earlier layer gives the final first choice at half of the positions"
APPLIED = "layers applied"
CONVERGED = 0.01  # relative change of the KL in the last tenth of the steps that counts as converged
KL = "nats to the final distribution"
UNIFORM, UNIGRAM, CONSTANT = "uniform distribution", "text's token frequencies", "model's mean distribution"


@section(question="After which layer can the prediction be read?", order=100, text=True, weight=20)
def lens(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Decode every layer's states by the head (logit lens) and after a trained map (tuned lens)."""
    (run_on, heldout), steps = workspace.windows(model), workspace.request.effort.lens_steps
    return lens_of(workspace.opened(model), run_on, heldout, steps, workspace.request.seed)


class LensReadout(NamedTuple):
    """One lens at one layer, on held-out windows."""

    kl: Estimate  # KL(final ‖ lens), nats per position
    nll: Estimate  # cross-entropy of the lens against the text's next token, nats
    agreement: Estimate  # share of positions where lens and model have the same first choice


@leaves_model
def lens_of(opened: Opened, windows: Ids, heldout: Ids, steps: int = 250, seed: int = 0) -> Measurement:
    """Measure both lenses at every layer of a causal model.

    Translators are trained for `steps` steps, 20 or more, on `windows` of ids [n, T], whose order `seed` draws. All
    results are from other windows, `heldout` [m, T].

    Raises:
        DataError: windows that the model cannot run on or that are too few, or too few steps.
        UnsupportedError: a model whose layers are no stack (`find_stack`), or that reads both sides of a token.
    """
    if steps < LEAST_STEPS:
        raise DataError(f"{steps} steps of training", f"give {LEAST_STEPS} or more")
    texts, heldout_texts = opened.checked(windows), opened.checked(heldout)
    if texts.shape[1] != heldout_texts.shape[1]:
        raise DataError("windows and held-out windows differ in length", "cut both from one text")
    if len(heldout_texts) < 2:
        raise DataError("1 held-out window", "an interval needs two: give a longer text")
    stack = find_stack(opened)
    if not stack.causal:
        problem = f"{type(opened.model).__name__} reads both sides of a token"
        raise UnsupportedError(problem, "give a causal language model")
    fixed, translators = _fixed(stack, texts), _identities(stack, texts)
    training = _train(stack, translators, texts, heldout_texts, steps, seed)
    return _report(stack, _measure_both(stack, heldout_texts, translators, fixed), training)


# --- training


class Translator:
    """One layer's map, in the coordinates of its states; the identity at first."""

    def __init__(self, mean: Tensor, second: Tensor) -> None:
        """Store the mean μ [D] of states, and the mean [D, D] of their outer products."""
        values, vectors = torch.linalg.eigh((second - torch.outer(mean, mean)).double())
        values = values.clamp_min(0)
        floor = SHRINK * values.mean().clamp_min(torch.finfo(torch.float32).tiny)
        roots = (values + floor).rsqrt()
        self.whiten = (vectors * roots @ vectors.T).to(mean.dtype)  # W [D, D], symmetric
        self.mean, self.scale = mean, float(second.diagonal().mean().sqrt())  # μ and s
        # A [D, D] and b [D]: the optimizer's values, then their average over the last steps, which the lens uses
        self.trained = torch.zeros_like(second).requires_grad_(), torch.zeros_like(mean).requires_grad_()
        self.average = torch.zeros_like(second), torch.zeros_like(mean)
        self.optimizer = torch.optim.Adam(self.trained, RATE / len(mean) ** 0.5, BETAS, EPSILON)

    def __call__(self, states: Tensor, parts: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Translate states [N, D], by default with the averaged weights."""
        weight, shift = parts or self.average
        translated: Tensor = states + self.scale * ((states - self.mean) @ self.whiten @ weight.T + shift)
        return translated

    def step(self, decay: float) -> None:
        """Take one step along the gradient, and update the average.

        The average moves by 1 − `decay` towards the new weights.
        """
        self.optimizer.step()
        self.optimizer.zero_grad()
        for average, weight in zip(self.average, self.trained, strict=True):
            average.lerp_(weight.detach(), 1 - decay)


_Lens = tuple[int, Callable[[Tensor], Tensor]]  # (number of the layer, map of its states)


def _identities(stack: AppliedStack, texts: Tensor) -> list[Translator]:
    """Return untrained translators for every layer but the last.

    Their coordinates are those of the states on windows [n, T].
    """
    depth, width, count = len(stack.applications), stack.width, 0
    means, seconds = torch.zeros(depth, width), torch.zeros(depth, width, width)
    for states, _ in _passes(stack, texts):
        count += len(states[0])
        for i, of_layer in enumerate(states[:-1]):
            means[i] += of_layer.sum(0)
            seconds[i] += of_layer.T @ of_layer
    return [Translator(mean / count, second / count) for mean, second in zip(means, seconds, strict=True)]


@dataclass(frozen=True)
class _Training:
    """Course of the training of all translators."""

    steps: int
    marks: tuple[int, ...]  # numbers of steps before which the held-out KL was measured, from 0 to `steps`
    curves: NDArray[np.float64]  # held-out KL at these steps [marks, L], nats
    fit: NDArray[np.float64]  # mean KL on the training batches of the last tenth, each before its step [L], nats
    times: float  # number of passes over the windows

    @property
    def moved(self) -> NDArray[np.float64]:
        """Return the relative decrease of the held-out KL in the last tenth of the steps [L]."""
        before, end = self.curves[np.array(self.marks) <= 0.9 * self.steps][-1], self.curves[-1]
        is_rounding = np.maximum(before, end) <= ZERO
        moved: NDArray[np.float64] = 1 - np.divide(end, before, out=np.ones(len(end)), where=~is_rounding)
        return moved


def _train(
    stack: AppliedStack, translators: list[Translator], texts: Tensor, heldout: Tensor, steps: int, seed: int
) -> _Training:
    """Train all translators on `texts` [n, T].

    At some steps they are measured on other windows `heldout` [m, T].
    """
    marks = sorted({steps * i // MARKS for i in range(MARKS + 1)})
    size = min(-(-TOKENS // (texts.shape[1] - 1)), len(texts))  # windows of a step
    batches = _batches(texts, size, torch.Generator().manual_seed(seed))
    kl_at_marks: list[list[float]] = []
    last_losses: list[list[float]] = []
    for done in range(steps + 1):
        report_progress("training a lens at every layer", done, steps)
        if done in marks:
            readouts, _ = _measure_lenses(stack, heldout, [*enumerate(translators)])
            kl_at_marks.append([readout.kl.value for readout in readouts])
        if done < steps:
            losses = _train_step(stack, translators, next(batches), done, steps)
            if done >= 0.9 * steps:
                last_losses.append(losses)
    return _Training(steps, tuple(marks), np.array(kl_at_marks), np.mean(last_losses, 0), steps * size / len(texts))


def _train_step(stack: AppliedStack, translators: list[Translator], ids: Tensor, done: int, steps: int) -> list[float]:
    """Take one training step with every translator on windows [B, T].

    It is step number `done` of `steps`. The result is their mean KL before it, in nats.
    """
    states = _positions(stack.states(ids))
    positions = len(states[0])
    losses = [0.0] * len(translators)
    for part in stack.parts(positions):
        with torch.no_grad():
            final = stack.to_logits(states[-1][part]).log_softmax(-1)
        p = final.exp()
        for i, translator in enumerate(translators):
            logits = stack.to_logits(translator(states[i][part], translator.trained))
            lens_logs = logits.detach().log_softmax(-1)
            losses[i] += float((p * (final - lens_logs)).sum()) / positions
            # computed by hand, so that it is 0 if the two are equal; autograd leaves rounding, which Adam would follow
            slope = (lens_logs.exp() - p) / positions
            torch.autograd.backward(logits, slope, inputs=translator.trained)
    decay = min(1 - AVERAGED / max(steps, AVERAGED), (done + 1) / (done + 10))  # weight of the previous average
    for translator in translators:
        translator.step(decay)
    return losses


def _batches(texts: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield windows [size, T] without end: every window once, shuffled, then again."""
    while True:
        order = torch.randperm(len(texts), generator=generator)
        for i in range(0, len(texts) - size + 1, size):
            yield texts[order[i : i + size]]


# --- reading


def _positions(states: Sequence[Tensor]) -> list[Tensor]:
    """Return the states of positions that have a next token.

    [B, T, D] becomes [B·(T − 1), D].
    """
    return [of_layer[:, :-1].reshape(-1, of_layer.shape[-1]) for of_layer in states]


def _passes(stack: AppliedStack, texts: Tensor) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield (states before each layer and after the last [N, D], next tokens [N]).

    A few windows are run at a time.
    """
    length = texts.shape[1]
    values = (len(stack.applications) + 1) * stack.width * length  # values of the states of one window
    at_once = max(1, min(2**12 // length, 2**26 // values))
    for group in torch.split(texts, at_once):
        yield _positions(stack.states(group)), group[:, 1:].reshape(-1)


@torch.no_grad()
def _fixed(stack: AppliedStack, texts: Tensor) -> Tensor:
    """Return logarithms of three fixed distributions [3, V].

    They are uniform, the text's tokens with one added to each count, and the model's mean.
    """
    total, count = torch.zeros(0), 0
    for states, targets in _passes(stack, texts):
        for part in stack.parts(len(targets)):
            shares = stack.to_logits(states[-1][part]).softmax(-1).double().sum(0)
            total = shares if not count else total + shares
            count += part.stop - part.start
    size = len(total)
    uniform = torch.ones_like(total) / size
    counts = torch.bincount(texts.reshape(-1), minlength=size).double()[:size] + 1
    mean = (total / count).clamp_min(1e-300)
    logs = torch.stack([uniform, counts / counts.sum(), mean]).log()
    return logs.to(stack.opened.ends.head.weight.dtype)


@torch.no_grad()
def _measure_lenses(
    stack: AppliedStack, texts: Tensor, lenses: Sequence[_Lens], fixed: Sequence[Tensor] = ()
) -> tuple[list[LensReadout], list[Estimate]]:
    """Measure lenses on windows [m, T].

    Returns:
        The results of each lens; the model's own nll, and its KL to fixed distributions [V].
    """
    pieces: list[Tensor] = []
    for states, targets in _passes(stack, texts):
        for part in stack.parts(len(targets)):
            at_part = [of_layer[part] for of_layer in states]
            columns = _measure_positions(stack, at_part, targets[part], lenses, fixed)
            pieces.append(torch.stack(columns).double())
    positions = torch.cat(pieces, 1)
    by_window = positions.reshape(len(positions), len(texts), -1).mean(-1).numpy()
    estimates = [mean_interval(of_windows) for of_windows in by_window]
    first = 1 + len(fixed)  # the model's own estimates come first
    readouts = [LensReadout(*estimates[i : i + 3]) for i in range(first, len(estimates), 3)]
    return readouts, estimates[:first]


def _measure_positions(
    stack: AppliedStack, states: Sequence[Tensor], targets: Tensor, lenses: Sequence[_Lens], fixed: Sequence[Tensor]
) -> list[Tensor]:
    """Measure lenses on some positions [N].

    Returns the model's nll and its KL to each of `fixed`, then KL, nll and agreement of each lens.
    """
    final = stack.to_logits(states[-1]).log_softmax(-1)
    p = final.exp()
    columns = [_nll(final, targets)]
    for logs in fixed:
        columns.append((p * (final - logs)).sum(-1))
    for depth, translated in lenses:
        lens_logs = stack.to_logits(translated(states[depth])).log_softmax(-1)
        agrees = lens_logs.argmax(-1) == final.argmax(-1)
        columns += [(p * (final - lens_logs)).sum(-1), _nll(lens_logs, targets), agrees.to(final.dtype)]
    return columns


def _nll(logs: Tensor, targets: Tensor) -> Tensor:
    """Return −log p of the targets [N] by log-probabilities [N, V]."""
    return -logs.gather(1, targets[:, None])[:, 0]


@dataclass(frozen=True)
class _BothLenses:
    """Both lenses on held-out windows."""

    logit: list[LensReadout]  # before each layer [L]
    tuned: list[LensReadout]  # the same
    last: LensReadout  # after the last layer, where both lenses equal the model
    nll: Estimate  # the model's own
    chances: list[Estimate]  # the model's KL to the uniform, the text's and its own mean distribution

    @property
    def constant(self) -> Estimate:
        """Return the KL to the model's mean distribution, which needs no state."""
        return self.chances[-1]


def _measure_both(stack: AppliedStack, heldout: Tensor, translators: list[Translator], fixed: Tensor) -> _BothLenses:
    """Measure the logit lens and the tuned lens at every layer."""
    depth = len(stack.applications)
    as_it_is: list[_Lens] = [(i, lambda states: states) for i in range(depth + 1)]
    readouts, (nll, *chances) = _measure_lenses(stack, heldout, [*as_it_is, *enumerate(translators)], [*fixed])
    return _BothLenses(readouts[:depth], readouts[depth + 1 :], readouts[depth], nll, chances)


# --- the report


def _report(stack: AppliedStack, lenses: _BothLenses, training: _Training) -> Measurement:
    """Report from which layer on the first choice can be read, and every layer's KL."""
    names = ["input", *(layer.name for layer in stack.applications)]
    return Measurement(
        answer=_answer(lenses),
        quantities=tuple(_quantities(lenses)),
        curves=tuple(_curves(lenses, training)),
        listings=(_listing(names, lenses, training.moved),),
        notes=tuple(_notes(lenses, training)),
    )


def _answer(lenses: _BothLenses) -> str:
    """Return the first layer after which the tuned lens has the first choice at most positions."""
    depths = [depth for depth, readout in enumerate(lenses.tuned) if readout.agreement.low > 0.5]
    if not depths:
        return NEVER
    if depths[0] == 0:
        return "at most positions the first choice can be read before any layer"
    return f"at most positions the first choice can be read after layer {depths[0]} of {len(lenses.tuned)}"


def _notes(lenses: _BothLenses, training: _Training) -> Iterator[str]:
    """Yield notes on poor logit lenses and on tuned lenses that were trained too little."""
    depth = len(lenses.tuned)
    worse = [readout for readout in lenses.logit if readout.kl.low > lenses.constant.high]
    yield f"at {len(worse)} of {depth} places the logit lens is further off than the model's mean distribution"
    unfinished = np.sum(np.abs(training.moved) >= CONVERGED)
    if unfinished:
        yield f"{unfinished} of {depth} tuned lenses still moved in the last tenth; raise --lens-steps"
    least = np.array([0.9 * readout.kl.low for readout in lenses.tuned])
    by_heart = int((training.fit < least).sum())
    if by_heart:
        where = "1 place" if by_heart == 1 else f"{by_heart} places"
        times = plain(training.times, 1)
        yield f"at {where} the tuned lens knows its windows by heart, seen {times} times: give more text"


def _quantities(lenses: _BothLenses) -> Iterator[Quantity]:
    """Yield both lenses before any layer, the model's own nll, and the levels of chance."""
    before_layers = {"tuned lens, before any layer": lenses.tuned[0], "logit lens there": lenses.logit[0]}
    for name, readout in before_layers.items():
        why = f"{_in_bits(readout.kl)} bits"
        yield Quantity.of_estimate(name, readout.kl, unit=KL, chance=lenses.constant.value, why=why)
        yield Quantity.of_estimate(f"same first choice, {name}", readout.agreement, unit="%", main=False)
    yield Quantity.of_estimate("the model's own nll", lenses.nll, unit=NATS, main=False)
    for name, chance in zip((UNIFORM, UNIGRAM, CONSTANT), lenses.chances, strict=True):
        yield Quantity.of_estimate(name, chance, unit=KL, main=False, why="the same everywhere, without a lens")


def _curves(lenses: _BothLenses, training: _Training) -> Iterator[Curve]:
    """Yield KL and agreement of both lenses by layer, and the training of three tuned lenses."""
    both = {"tuned lens": lenses.tuned, "logit lens": lenses.logit}
    for which, of_lens in both.items():
        distances = enumerate(readout.kl for readout in of_lens)
        yield Curve.through(
            "How far is each layer from the final distribution?", distances,
            which=which, along=APPLIED, unit=KL, log=True,
            level=lenses.constant.value, level_name="the model's mean distribution",
            why="Held out.",
        )  # fmt: skip
    for which, of_lens in both.items():
        agreements = enumerate(readout.agreement for readout in of_lens)
        yield Curve.through(
            "Does a layer already name the model's first choice?", agreements,
            which=which, along=APPLIED, unit="share of positions", why="Held out.",
        )  # fmt: skip
    by_layer = training.curves.T
    half = max(1, (len(by_layer) - 1) // 2)
    why = f"Yes, where the last tenth changes it by under {CONVERGED:.0%}."
    for depth in range(0, len(by_layer), half):  # the first, one in the middle, the last
        heldout = tuple(by_layer[depth].tolist())
        yield Curve(
            "Were the tuned lenses trained long enough?", training.marks, heldout,
            which=f"depth {depth}", along="step of training", unit=KL, log=True, why=why,
        )  # fmt: skip


def _listing(names: Sequence[str], lenses: _BothLenses, moved: NDArray[np.float64]) -> Listing:
    """List the results of both lenses at each layer.

    After the last layer there is only the logit lens.
    """
    header = ["place"]
    for column in ("nats", "bits", "nll", "same token"):
        header += [f"logit lens, {column}", f"tuned lens, {column}"]
    header += ["last tenth", "converged"]
    layer_names = [names[0]]
    for depth, name in enumerate(names[1:], 1):
        layer_names.append(f"{depth} · {name}")
    rows = []
    for layer, logit, tuned, share in zip(layer_names[:-1], lenses.logit, lenses.tuned, moved, strict=True):
        is_converged = "yes" if abs(share) < CONVERGED else "no"
        cells = _both_cells(_cells(logit), _cells(tuned))
        rows.append((layer, *cells, f"{plain(-100 * share, 2)} %", is_converged))
    cells = _both_cells(_cells(lenses.last), [NONE] * 4)
    rows.append((layer_names[-1], *cells, NONE, NONE))
    return Listing("Both lenses at each place", tuple(header), tuple(rows))


def _cells(readout: LensReadout) -> list[str]:
    """Return KL in nats, in bits, nll and agreement of one lens as text."""
    return [_cell(readout.kl), _in_bits(readout.kl), _cell(readout.nll), _cell(readout.agreement)]


def _both_cells(logit: Sequence[str], tuned: Sequence[str]) -> list[str]:
    """Put each cell of the tuned lens after the same cell of the logit lens."""
    cells = []
    for of_logit, of_tuned in zip(logit, tuned, strict=True):
        cells += [of_logit, of_tuned]
    return cells


def _cell(estimate: Estimate) -> str:
    """Return an estimate as text for a table."""
    quantity = Quantity.of_estimate("", estimate, unit="value")
    return str(quantity)


def _in_bits(nats: Estimate) -> str:
    """Return an estimate in nats as bits, as text."""
    return plain(nats.value / math.log(2), 2)
