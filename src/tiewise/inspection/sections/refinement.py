"""Do the layers refine one state, and does a repeated one come to rest?

The quantities of Lan et al. 2020 (ALBERT, §3.1 and figure 1: distance and cosine between a layer's input and output),
with what they need to be read: a null, an interval, and the question of a fixed point put to the model itself.
Dropout is off. See docs/refinement.md.

A repeated block is a map f on states [B, T, D], masks and positions as the model gave them. Along h, f(h), f(f(h)), …
every quantity is a mean over the tokens of a window:

    residual     ‖f(h) − h‖ / ‖h‖
    two steps    ‖f(f(h)) − h‖ / ‖h‖: small while the residual is not, where the states alternate
    ratio        ‖f(f(h)) − f(h)‖ / ‖f(h) − h‖ over the whole window: how much f stretched the last change
    growth       how much one application stretches a small random difference that is followed along and rescaled to
                 1e-3 of the state after each (Benettin et al. 1980); below 1 near-by states come together
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiewise.boundary.locate import locate
from tiewise.boundary.undisturbed import kept_generators
from tiewise.core.errors import advance, doing
from tiewise.core.estimates import mean_interval
from tiewise.core.found import Curve, Found, Grid, Listing, Quantity
from tiewise.inspection.bench import Bench, Subject, mean_of, section
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
from tiewise.training.data.tokenizer import Ids

Values = dict[str, NDArray]  # quantity → its values per window, [windows] or [n, windows]

FURTHER = 64
SMALL = 1e-3  # of the state: far above rounding in fp32, small enough to be the map's derivative
RESTED = 1e-5  # residual at which a state counts as resting; rounding in fp32 is about a hundredth of it
SMALLEST = torch.finfo(torch.float32).tiny
FACTOR = "× per application"
FRESH = "fresh weights"
CONTROL = f"Dashed: {FRESH}."
PER_LAYER = (  # title, unit, whether it falls over orders of magnitude, key, how to read it
    ("Change per application", "relative change", True, "change", "Relative to the state before."),
    ("Cosine of output and input", "cosine", False, "cosine", "Figure 1 of Lan et al. 2020."),
    ("Does a layer go on or turn back?", "cosine of successive changes", False, "turn",
     "Above 0: it goes on."),
    ("Change if the same layer is applied again", "relative change", True, "again",
     "Small: its work was done."),
)  # fmt: skip


@section(asks="Do the layers refine one state, and does a repeated one come to rest?", place=110, text=True)
def refinement(subject: Subject, bench: Bench) -> Found:
    """Follow a text's states from layer to layer, and a repeated block beyond where the model leaves it."""
    return refinement_of(bench.opened(subject), bench.windows(subject)[1], bench.request.seed)


@dataclass(frozen=True)
class Trajectory:
    """All applications of one model's stack, and every block that it repeats."""

    layers: tuple[str, ...]  # name of the module of each application
    each: tuple[Values, ...]  # what it did, as `_applications` names it
    shared: tuple[float, ...]  # fraction of its parameters that an earlier application has used, by Parameter identity
    same_as: tuple[int | None, ...]  # the earliest application (from 0) with exactly the same parameters
    blocks: dict[Repeat, Values]  # what comes of applying each further, as `_repeated` names it
    alike: NDArray[np.float64]  # mean cosine of h_i and h_j [L + 1, L + 1]; the first layer reads h_0


@leaves_model
def refinement_of(opened: Opened, windows: Ids, seed: int = 0, further: int = FURTHER) -> Found:
    """Measure every application of a model's layers on windows of ids [n, T], beside the same architecture untrained.

    One window gives no intervals. `seed` draws the fresh weights and the small differences that are followed; a
    repeated block is applied `further` times beyond the model's own, 2 or more.

    Raises:
        DataError: windows that the model cannot be run on.
        UnsupportedError: the model has not one stack of layers.
    """
    texts, fresh = opened.checked(windows), _fresh(opened, seed)
    count = len(texts)
    with doing("refinement", count if fresh is None else 2 * count):
        trained = _trajectory(find_stack(opened), texts, seed, further)
    if fresh is None:
        return found_of(trained, None, further)
    with doing("refinement", 2 * count, begun=count):
        return found_of(trained, _trajectory(find_stack(fresh), texts, seed, further), further)


def _trajectory(stack: AppliedStack, texts: Tensor, seed: int, further: int) -> Trajectory:
    each: list[list[dict[str, NDArray]]] = [[] for _ in stack.applications]  # by application and batch
    blocks: dict[Repeat, list[dict[str, NDArray]]] = {}
    alike, done = torch.zeros((len(each) + 1,) * 2, dtype=torch.float64), 0
    for number, batch in enumerate(texts.split(stack.opened.at_once(texts.shape[1]))):
        calls = stack.calls(batch)
        made = keys(calls)
        alike += _cosines(states_of(calls)) / len(texts)
        into = [*zip(each, _applications(calls), strict=True)]
        into += [(blocks.setdefault(b, []), _repeated(calls, b, further, seed + number)) for b in repeats(made)]
        for parts, measured in into:
            parts.append({name: values.numpy(force=True) for name, values in measured.items()})
        done += len(batch)
        advance(done)

    def joined(parts: list[dict[str, NDArray]]) -> Values:
        return {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}

    return Trajectory(
        tuple(call.name for call in calls),
        tuple(map(joined, each)),
        tuple(shared_fractions(calls)),
        tuple(made.index(key) if made.index(key) != place else None for place, key in enumerate(made)),
        {block: joined(parts) for block, parts in blocks.items()},
        alike.numpy(),
    )


@torch.no_grad()
def _applications(calls: list[LayerCall]) -> Iterator[dict[str, Tensor]]:
    """Every application, as means over tokens [B]."""
    before = None
    for call in calls:
        step = call.wrote - call.read
        found = {
            "change": relative(call.wrote, call.read),  # ‖h_{l+1} − h_l‖ / ‖h_l‖
            "distance": torch.linalg.vector_norm(step, dim=-1).mean(-1),  # ‖h_{l+1} − h_l‖
            "cosine": F.cosine_similarity(call.wrote, call.read, -1, SMALLEST).mean(-1),
            "norm": torch.linalg.vector_norm(call.wrote, dim=-1).mean(-1),
            "again": relative(call.again(call.wrote), call.wrote),  # the change if it is applied once more
        }
        if before is not None:
            found["turn"] = F.cosine_similarity(step, before, -1, SMALLEST).mean(-1)  # of this change and the last one
        yield found
        before = step


@torch.no_grad()
def _repeated(calls: list[LayerCall], block: Repeat, further: int, seed: int) -> dict[str, Tensor]:
    """A block that the model repeats, applied further from where the model left it."""
    members = calls[block.end - block.period : block.end]

    def apply(state: Tensor) -> Tensor:
        for call in members:
            state = call.again(state)
        return state

    ends = states_of(calls)[block.first : block.end + 1 : block.period]
    last, walked = iterate(apply, ends[-1], further, seed)
    return {
        **walked,
        "residual": torch.cat([torch.stack(list(map(relative, ends[1:], ends))), walked["residual"]]),  # its own first
        "ratio": _geometric(walked["ratio"]),
        "growth": _geometric(walked["growth"][further // 2 :]),
        "from_end": relative(ends[-1], last),
    }


def iterate(
    block: Callable[[Tensor], Tensor], start: Tensor, count: int, seed: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Apply `block` `count` times (2 or more) from `start` [B, T, D], beside a slightly different start.

    Returns the last state, and by name the residual and growth [count, B] and the ratio and two steps [count − 1, B];
    a ratio is NaN where the change was rounding error.
    """

    def size(state: Tensor) -> Tensor:
        return torch.linalg.vector_norm(state, dim=(-2, -1), keepdim=True)

    state, before = start, None
    apart = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed), dtype=start.dtype).to(start.device)
    residual, two_steps, change, growth = [], [], [], []
    for _ in range(count):
        apart = apart * (SMALL * size(state) / size(apart))  # as long as that, window by window
        following = block(state)
        difference = block(state + apart) - following
        growth.append(size(difference) / size(apart))
        residual.append(relative(following, state))
        change.append(size(following - state))
        if before is not None:
            two_steps.append(relative(following, before))
        before, state = state, following
        apart = torch.where(size(difference) > 0, difference, apart)
    changes, rounding = torch.stack(change), 10 * torch.finfo(start.dtype).eps * size(state)
    ratio = torch.where(changes[1:] > rounding, changes[1:] / changes[:-1], torch.nan)
    found = {"residual": torch.stack(residual), "two_steps": torch.stack(two_steps)}
    return state, {**found, "ratio": ratio[..., 0, 0], "growth": torch.stack(growth)[..., 0, 0]}


@torch.no_grad()
def _cosines(states: list[Tensor]) -> Tensor:
    """Cosine of every two states, mean over tokens, summed over windows [L + 1, L + 1]; window by window for memory."""
    total = torch.zeros((len(states),) * 2, dtype=torch.float64)
    for window in zip(*states, strict=True):
        units = torch.stack([F.normalize(state, dim=-1) for state in window]).flatten(1)
        total += (units @ units.T).double().cpu() / len(window[0])
    return total


def _geometric(values: Tensor) -> Tensor:
    """Geometric mean over the rows of [n, B] that are numbers: [B], NaN where none is."""
    return values.clamp_min(SMALLEST).log().nanmean(0).exp()


def _fresh(opened: Opened, seed: int) -> Opened | None:
    """Build the model again with new weights, one Parameter where it has one; None where its config builds another."""
    model: Any = opened.model
    with kept_generators(seed):
        made = type(model)(model.config)
    own, new = (dict(one.named_parameters(remove_duplicate=False)) for one in (model, made))
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in new.items()}:
        return None
    first: dict[int, nn.Parameter] = {}
    for name, value in own.items():
        owner, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(owner), leaf, first.setdefault(id(value), new[name]))
    made.to(dtype=model.dtype).eval()
    return Opened(opened.folder, made, locate(made))


def found_of(trained: Trajectory, untrained: Trajectory | None, further: int) -> Found:
    """Say how far each layer moves the states, and where repeating leads, beside fresh weights."""
    both = {"": trained} if untrained is None else {"": trained, FRESH: untrained}
    quantities, curves, grids = list[Quantity](), list[Curve](), list[Grid]()
    for which, one in both.items():
        quantities += [replace(q, name=f"{q.name}, {which}", main=False) if which else q for q in _quantities(one)]
        curves += _curves(one, which)
        states = tuple(map(str, range(len(one.alike))))
        grids.append(Grid(
            f"How alike the states are{which and f', {which}'}", states, states, tuple(map(tuple, one.alike.tolist())),
            axes=("applications",) * 2, why="In a square of one colour little changes.",
        ))  # fmt: skip
    listings = tuple(_listings(trained, untrained))
    return Found(_answer(trained, further), tuple(quantities), tuple(curves), tuple(grids), listings=listings)


def _rests(values: Values) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which windows came to rest, and which have not but return after two applications [windows]."""
    resting = values["residual"][-1] < RESTED
    return resting, ~resting & (values["two_steps"][-1] < RESTED)


def _answer(found: Trajectory, further: int) -> str:
    if not found.blocks and any(found.shared):
        return f"layers share up to {max(found.shared):.0%} of their parameters, and none is repeated whole"
    said = []
    for block, values in found.blocks.items():
        resting, alternating = _rests(values)
        end = f"does not come to rest within {further} more"
        if resting.any():
            end = f"comes to rest in {resting.sum()} of {resting.size} windows within {further} more"
        elif alternating.any():
            end = f"alternates between two states in {alternating.sum()} of {resting.size} windows"
        what = "a layer" if block.period == 1 else f"a block of {block.period} layers"
        said.append(f"{what} is applied {block.times} times and {end}")
    return "; ".join(said) or "each layer is applied once: none is repeated"


def _quantities(found: Trajectory) -> Iterator[Quantity]:
    for name, values in (("first", found.each[0]), ("last", found.each[-1])):
        yield mean_of(f"{name} layer's change", values["change"], unit="of the state's norm")
    for block, values in found.blocks.items():
        (resting, alternating), where = _rests(values), f", applications {block.first + 1} to {block.end}"
        why = f"below 1 near-by states come together{where}"
        yield mean_of("small differences grow by", values["growth"], unit=FACTOR, chance=1.0, why=why)
        yield mean_of("distance from rest", values["from_end"][resting], unit="of the resting norm")
        yield mean_of("successive changes shrink by", values["ratio"], unit=FACTOR, main=False)
        for name, its in (("windows at rest", resting), ("windows that alternate", alternating)):
            yield Quantity(name, int(its.sum()), n=its.size, main=False, why=f"of {its.size}{where}")


def _curves(found: Trajectory, which: str) -> Iterator[Curve]:
    for name, unit, log, key, why in PER_LAYER:
        points = [(place, mean_interval(values.get(key, ()))) for place, values in enumerate(found.each, 1)]
        curve = Curve.through(
            name, points, along="application", unit=unit, log=log, which=which, why=f"{why} {CONTROL}"
        )
        if curve.x and not (which and key == "again"):
            yield curve
    for block, values in found.blocks.items():
        yield Curve.through(
            "Does the repeated block come to rest?", enumerate(map(mean_interval, values["residual"]), 1),
            along="application of the block", unit="relative change", log=True, mark=block.times, which=which,
            why=f"The model stops at the open marker. A straight fall approaches a fixed point. {CONTROL}",
        )  # fmt: skip


def _listings(trained: Trajectory, untrained: Trajectory | None) -> Iterator[Listing]:
    def cell(values: Values, key: str) -> str:
        return str(mean_of("", values.get(key, ()), unit="value"))

    own, far = [], []
    for place, values in enumerate(trained.each):
        name, shared, same = f"{place + 1} · {trained.layers[place]}", trained.shared[place], trained.same_as[place]
        fresh = {} if untrained is None else untrained.each[place]
        cells = [cell(values, key) for key in ("change", "cosine", "turn", "norm", "again")]
        said = f"all, as {same + 1}" if same is not None else f"{shared:.0%}" if shared else "no"
        own.append((name, *cells, said, cell(fresh, "change")))
        far.append((name, cell(values, "distance"), cell(fresh, "distance")))
    header = ("layer", "change", "cosine", "turn", "norm", "applied twice", "shared", f"change, {FRESH}")
    yield Listing("Each application of a layer", header, tuple(own))
    yield Listing("Distance of output and input", ("layer", "distance", FRESH), tuple(far))
