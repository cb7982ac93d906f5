"""Refinement of one state by the layers, and fixed points of a repeated block.

The quantities are those of Lan et al. 2020 (ALBERT, §3.1 and figure 1: distance and cosine between a layer's input and
output), with a null and an interval. A repeated block is also tested for a fixed point by further applications. Dropout
is off. See docs/direct-path.md.

A repeated block is a map f on states [B, T, D], with the masks and positions of the model. Along h, f(h), f(f(h)), …
every quantity is a mean over the tokens of a window:

    residual     ‖f(h) − h‖ / ‖h‖
    two steps    ‖f(f(h)) − h‖ / ‖h‖: small although the residual is not, if the states alternate
    ratio        ‖f(f(h)) − f(h)‖ / ‖f(h) − h‖ over the full window: how much f stretched the last change
    growth       how much one application stretches a small random difference, which is rescaled to 1e-3 of the state
                 after each application (Benettin et al. 1980); below 1 near-by states converge
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiewise.boundary.locate import locate
from tiewise.boundary.undisturbed import preserve_generators
from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import Curve, Grid, Listing, Measurement, Quantity
from tiewise.core.progress import advance_progress, progress_of
from tiewise.inspection.running.loaded import Opened, leaves_model
from tiewise.inspection.running.stack import (
    AppliedStack,
    LayerCall,
    Repeat,
    find_stack,
    keys,
    relative,
    repeats,
    shared_fractions,
    states_of,
)
from tiewise.inspection.workspace import InspectedModel, Workspace, mean_of, section
from tiewise.training.data.tokenizer import Ids

Values = dict[str, NDArray[np.floating]]  # quantity → its values by window, [windows] or [n, windows]

FURTHER = 64
SMALL = 1e-3  # relative to the state: far above rounding in fp32, small enough for the map's derivative
RESTED = 1e-5  # residual below which a state is a fixed point; rounding in fp32 is about a hundredth of it
SMALLEST = torch.finfo(torch.float32).tiny
FACTOR = "× per application"
FRESH = "fresh weights"
CONTROL = f"Dashed: {FRESH}."
PER_LAYER = (  # (title, unit, True for a logarithmic axis, key, explanation)
    ("Change per application", "relative change", True, "change", "Relative to the state before."),
    ("Cosine of output and input", "cosine", False, "cosine", "Figure 1 of Lan et al. 2020."),
    ("Does a layer go on or turn back?", "cosine of successive changes", False, "turn",
     "Above 0: it continues."),
    ("Change if the same layer is applied again", "relative change", True, "again",
     "Small: its work was done."),
)  # fmt: skip


@section(question="Do repeated layers reach a fixed state?", order=110, text=True)
def refinement(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Measure the change of a text's states by each layer, and by further applications.

    Further applications are those of a repeated block.
    """
    _, heldout = workspace.windows(model)
    return refinement_of(workspace.opened(model), heldout, workspace.request.seed)


@dataclass(frozen=True)
class Trajectory:
    """All applications of one model's stack, and every block that it repeats."""

    layers: tuple[str, ...]  # name of the module of each application
    each: tuple[Values, ...]  # measures of each application, as named in `_applications`
    shared: tuple[float, ...]  # fraction of its parameters that an earlier application used, by Parameter identity
    same_as: tuple[int | None, ...]  # the earliest application (from 0) with exactly the same parameters
    blocks: dict[Repeat, Values]  # measures of further applications, as named in `_repeated`
    alike: NDArray[np.float64]  # mean cosine of h_i and h_j [L + 1, L + 1]; the first layer reads h_0


@leaves_model
def refinement_of(opened: Opened, windows: Ids, seed: int = 0, further: int = FURTHER) -> Measurement:
    """Measure every application of a model's layers, compared with fresh weights.

    The windows are ids [n, T]; one window gives no intervals. `seed` draws the fresh weights and the small differences.
    A repeated block is applied `further` times more than by the model, 2 or more.

    Raises:
        DataError: windows that the model cannot run on.
        UnsupportedError: the model has no single stack of layers.
    """
    texts, fresh = opened.checked(windows), _fresh(opened, seed)
    count = len(texts)
    with progress_of("refinement", count if fresh is None else 2 * count):
        trained = _trajectory(find_stack(opened), texts, seed, further)
    if fresh is None:
        return measurement_of(trained, None, further)
    with progress_of("refinement", 2 * count, start=count):
        untrained = _trajectory(find_stack(fresh), texts, seed, further)
    return measurement_of(trained, untrained, further)


def _trajectory(stack: AppliedStack, texts: Tensor, seed: int, further: int) -> Trajectory:
    """Measure every application and every repeated block on windows [n, T].

    A few windows are run at a time.
    """
    by_application: list[list[Values]] = [[] for _ in stack.applications]  # application → values of each batch
    by_block: dict[Repeat, list[Values]] = {}
    states = len(by_application) + 1
    cosines = torch.zeros((states, states), dtype=torch.float64)
    windows_done = 0
    for number, batch in enumerate(torch.split(texts, stack.opened.at_once(texts.shape[1]))):
        calls = stack.calls(batch)
        cosines += _cosines(states_of(calls)) / len(texts)
        for parts, measured in zip(by_application, _applications(calls), strict=True):
            parts.append(_as_arrays(measured))
        for block in repeats(keys(calls)):
            measured = _repeated(calls, block, further, seed + number)
            by_block.setdefault(block, []).append(_as_arrays(measured))
        windows_done += len(batch)
        advance_progress(windows_done)
    # every batch calls the same modules, so the last calls name all layers
    return Trajectory(
        layers=tuple(call.name for call in calls),
        each=tuple(_joined(parts) for parts in by_application),
        shared=tuple(shared_fractions(calls)),
        same_as=_same_as(keys(calls)),
        blocks={block: _joined(parts) for block, parts in by_block.items()},
        alike=cosines.numpy(),
    )


def _as_arrays(measured: dict[str, Tensor]) -> Values:
    """Return measured tensors as arrays."""
    return {name: values.numpy(force=True) for name, values in measured.items()}


def _joined(parts: list[Values]) -> Values:
    """Join the windows of all batches."""
    return {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}


def _same_as(of_calls: Sequence[object]) -> tuple[int | None, ...]:
    """Return the first application with the key of each; None for the first itself."""
    earlier: list[int | None] = []
    for index, key in enumerate(of_calls):
        first = of_calls.index(key)
        earlier.append(first if first < index else None)
    return tuple(earlier)


@torch.no_grad()
def _applications(calls: list[LayerCall]) -> Iterator[dict[str, Tensor]]:
    """Yield measures of every application, as means over tokens [B]."""
    before = None
    for call in calls:
        step = call.wrote - call.read
        measured = {
            "change": relative(call.wrote, call.read),  # ‖h_{l+1} − h_l‖ / ‖h_l‖
            "distance": torch.linalg.vector_norm(step, dim=-1).mean(-1),  # ‖h_{l+1} − h_l‖
            "cosine": F.cosine_similarity(call.wrote, call.read, -1, SMALLEST).mean(-1),
            "norm": torch.linalg.vector_norm(call.wrote, dim=-1).mean(-1),
            "again": relative(call.again(call.wrote), call.wrote),  # change by one more application
        }
        if before is not None:  # cosine of this change and the previous one
            measured["turn"] = F.cosine_similarity(step, before, -1, SMALLEST).mean(-1)
        yield measured
        before = step


@torch.no_grad()
def _repeated(calls: list[LayerCall], block: Repeat, further: int, seed: int) -> dict[str, Tensor]:
    """Apply a repeated block further times, from the model's last state."""
    members = calls[block.end - block.period : block.end]

    def apply(state: Tensor) -> Tensor:
        """Apply every layer of the block to a state."""
        for call in members:
            state = call.again(state)
        return state

    ends = states_of(calls)[block.first : block.end + 1 : block.period]
    last, beyond = iterate(apply, ends[-1], further, seed)
    within = torch.stack([relative(after, before) for before, after in pairwise(ends)])  # the model's own applications
    later_growth = beyond["growth"][further // 2 :]
    return {
        **beyond,
        "residual": torch.cat([within, beyond["residual"]]),
        "ratio": _geometric(beyond["ratio"]),
        "growth": _geometric(later_growth),
        "from_end": relative(ends[-1], last),
    }


def iterate(
    block: Callable[[Tensor], Tensor], start: Tensor, count: int, seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Apply `block` `count` times (2 or more) from `start` [B, T, D].

    It is also applied to a slightly different state each time. Returns the last state, and by name the residual and
    growth [count, B] and the ratio and two steps [count − 1, B]; a ratio is NaN if the change was rounding error.
    """

    state, before = start, None
    generator = torch.Generator().manual_seed(seed)
    offset = torch.randn(start.shape, generator=generator, dtype=start.dtype).to(start.device)
    residual, two_steps, change, growth = [], [], [], []
    for _ in range(count):
        offset = offset * (SMALL * _size(state) / _size(offset))  # rescaled in each window
        following = block(state)
        difference = block(state + offset) - following
        growth.append(_size(difference) / _size(offset))
        residual.append(relative(following, state))
        change.append(_size(following - state))
        if before is not None:
            two_steps.append(relative(following, before))
        before, state = state, following
        offset = torch.where(_size(difference) > 0, difference, offset)
    changes = torch.stack(change)
    rounding = 10 * torch.finfo(start.dtype).eps * _size(state)
    ratio = torch.where(changes[1:] > rounding, changes[1:] / changes[:-1], torch.nan)
    return state, {
        "residual": torch.stack(residual),
        "two_steps": torch.stack(two_steps),
        "ratio": ratio[..., 0, 0],
        "growth": torch.stack(growth)[..., 0, 0],
    }


def _size(state: Tensor) -> Tensor:
    """Return the norm of each window [B, 1, 1] of a state [B, T, D]."""
    norms: Tensor = torch.linalg.vector_norm(state, dim=(-2, -1), keepdim=True)
    return norms


@torch.no_grad()
def _cosines(states: list[Tensor]) -> Tensor:
    """Return the cosine of every two states, summed over windows [L + 1, L + 1].

    The cosine is a mean over tokens. For memory, one window is processed at a time.
    """
    total = torch.zeros((len(states),) * 2, dtype=torch.float64)
    for window in zip(*states, strict=True):
        units = torch.stack([F.normalize(state, dim=-1) for state in window]).flatten(1)
        total += (units @ units.T).double().cpu() / len(window[0])
    return total


def _geometric(values: Tensor) -> Tensor:
    """Return the geometric mean [B] over the finite rows of [n, B].

    It is NaN if there are none.
    """
    return values.clamp_min(SMALLEST).log().nanmean(0).exp()


def _fresh(opened: Opened, seed: int) -> Opened | None:
    """Return the model with new weights, with the same sharing of Parameters.

    None if the model's config builds other shapes.
    """
    model: Any = opened.model
    with preserve_generators(seed):
        fresh = type(model)(model.config)
    trained = dict(model.named_parameters(remove_duplicate=False))
    untrained = dict(fresh.named_parameters(remove_duplicate=False))
    if _shapes(trained) != _shapes(untrained):
        return None
    first: dict[int, nn.Parameter] = {}
    for name, value in trained.items():
        owner, _, leaf = name.rpartition(".")
        parameter = first.setdefault(id(value), untrained[name])
        setattr(fresh.get_submodule(owner), leaf, parameter)
    fresh.to(dtype=model.dtype).eval()
    return Opened(opened.folder, fresh, locate(fresh))


def _shapes(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Size]:
    """Return the shape of each parameter."""
    return {name: value.shape for name, value in parameters.items()}


def measurement_of(trained: Trajectory, untrained: Trajectory | None, further: int) -> Measurement:
    """Report each layer's change and the end of repetition, compared with fresh weights."""
    quantities, curves, grids = [*_quantities(trained)], [*_curves(trained, "")], [_grid(trained, "")]
    if untrained is not None:
        for quantity in _quantities(untrained):
            quantities.append(replace(quantity, name=f"{quantity.name}, {FRESH}", main=False))
        curves += _curves(untrained, FRESH)
        grids.append(_grid(untrained, FRESH))
    listings = tuple(_listings(trained, untrained))
    return Measurement(_answer(trained, further), tuple(quantities), tuple(curves), tuple(grids), listings=listings)


def _grid(trajectory: Trajectory, which: str) -> Grid:
    """Return a grid of the cosines of every two states.

    `which` names the weights; "" for the model's own.
    """
    states = tuple(str(index) for index in range(len(trajectory.alike)))
    title = "How alike the states are"
    if which:
        title += f", {which}"
    values = tuple(tuple(row) for row in trajectory.alike.tolist())
    why = "In a square of one colour little changes."
    return Grid(title, states, states, values, axes=("applications", "applications"), why=why)


def _rests(values: Values) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Mark windows that reached a fixed point, and others that return after two applications."""
    resting = values["residual"][-1] < RESTED
    return resting, ~resting & (values["two_steps"][-1] < RESTED)


def _answer(trajectory: Trajectory, further: int) -> str:
    """Return which blocks are repeated, and whether their states reach a fixed point."""
    if trajectory.blocks:
        return "; ".join(_block_answer(block, values, further) for block, values in trajectory.blocks.items())
    if any(trajectory.shared):
        return f"no layer is repeated whole; layers share up to {max(trajectory.shared):.0%} of their parameters"
    return "no layer is repeated: each is applied once"


def _block_answer(block: Repeat, values: Values, further: int) -> str:
    """Return how often a block is applied, and how many windows reach a fixed point."""
    resting, alternating = _rests(values)
    end = f"reaches no fixed state within {further} more"
    if resting.any():
        end = f"reaches a fixed state in {resting.sum()} of {resting.size} windows within {further} more"
    elif alternating.any():
        end = f"alternates between two states in {alternating.sum()} of {resting.size} windows"
    name = "a layer" if block.period == 1 else f"a block of {block.period} layers"
    return f"{name} is applied {block.times} times and {end}"


def _quantities(trajectory: Trajectory) -> Iterator[Quantity]:
    """Yield the change by the first and the last layer, and each block's end state."""
    first, last = trajectory.each[0]["change"], trajectory.each[-1]["change"]
    yield mean_of("first layer's change", first, unit="of the state's norm")
    yield mean_of("last layer's change", last, unit="of the state's norm")
    for block, values in trajectory.blocks.items():
        resting, alternating = _rests(values)
        where = f", applications {block.first + 1} to {block.end}"
        why = f"below 1 near-by states come together{where}"
        yield mean_of("small differences grow by", values["growth"], unit=FACTOR, chance=1.0, why=why)
        yield mean_of("distance from rest", values["from_end"][resting], unit="of the resting norm")
        yield mean_of("successive changes shrink by", values["ratio"], unit=FACTOR, main=False)
        n, why = resting.size, f"of {resting.size}{where}"
        yield Quantity("windows at rest", int(resting.sum()), n=n, main=False, why=why)
        yield Quantity("windows that alternate", int(alternating.sum()), n=n, main=False, why=why)


def _curves(trajectory: Trajectory, which: str) -> Iterator[Curve]:
    """Yield measures of every application, and the residuals of each repeated block.

    `which` names the weights.
    """
    for name, unit, log, key, why in PER_LAYER:
        if which and key == "again":
            continue
        points = [(index, mean_interval(values.get(key, ()))) for index, values in enumerate(trajectory.each, 1)]
        caption = f"{why} {CONTROL}"
        curve = Curve.through(name, points, along="application", unit=unit, log=log, which=which, why=caption)
        if curve.x:
            yield curve
    caption = f"The model stops at the open marker. A straight fall approaches a fixed point. {CONTROL}"
    for block, values in trajectory.blocks.items():
        residuals = [mean_interval(of_windows) for of_windows in values["residual"]]
        yield Curve.through(
            "Does the repeated block come to rest?", enumerate(residuals, 1),
            along="application of the block", unit="relative change", log=True, mark=block.times, which=which,
            why=caption,
        )  # fmt: skip


def _listings(trained: Trajectory, untrained: Trajectory | None) -> Iterator[Listing]:
    """Yield every application of a layer, compared with fresh weights."""
    rows, distances = [], []
    for index, values in enumerate(trained.each):
        name = f"{index + 1} · {trained.layers[index]}"
        fresh = {} if untrained is None else untrained.each[index]
        cells = [_cell(values, key) for key in ("change", "cosine", "turn", "norm", "again")]
        rows.append((name, *cells, _shared_cell(trained, index), _cell(fresh, "change")))
        distances.append((name, _cell(values, "distance"), _cell(fresh, "distance")))
    header = ("layer", "change", "cosine", "turn", "norm", "applied twice", "shared", f"change, {FRESH}")
    yield Listing("Each application of a layer", header, tuple(rows))
    yield Listing("Distance between a layer's output and its input", ("layer", "distance", FRESH), tuple(distances))


def _cell(values: Values, key: str) -> str:
    """Return the mean of a measure with its interval; a dash if it was not measured."""
    mean = mean_of("", values.get(key, ()), unit="value")
    return str(mean)


def _shared_cell(trajectory: Trajectory, index: int) -> str:
    """Return the share of an application's parameters that an earlier one used."""
    same, share = trajectory.same_as[index], trajectory.shared[index]
    if same is not None:
        return f"all, as {same + 1}"
    if not share:
        return "no"
    return f"{share:.0%}"
