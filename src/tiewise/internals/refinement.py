"""How each application of a layer changes the representation, and whether repeating a layer comes to rest.

    found = refinement(open_model("checkpoint"), windows(ids, 128, 32))
    found.trained.applications[3].change        # ‖h_{l+1} − h_l‖ / ‖h_l‖, with its interval over windows
    found.trained.repeats[0].converged          # windows that reached a fixed point within `further` applications
    found.untrained                             # the same of the same architecture with fresh weights

The quantities of Lan et al. 2020 (ALBERT, §3.1 and figure 1: distance and cosine between a layer's input and output),
with what they need to be read: a null, an interval, and the question of a fixed point put to the model itself.
Dropout is off. See docs/refinement.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiewise.analysis.estimates import Estimate, mean_interval
from tiewise.boundary.locate import locate
from tiewise.core.errors import DataError
from tiewise.core.progress import advance, doing
from tiewise.data.tokenizer import Ids
from tiewise.internals.loaded import Opened
from tiewise.internals.repeats import LayerCall, Repeat, applied, iterate, keys, relative, repeats, shared_fractions
from tiewise.internals.stack import AppliedStack, find_stack

Parts = dict[str, list[NDArray]]  # quantity → its values per window, batch by batch

FURTHER = 64
RESTED = 1e-5  # residual at which a state counts as resting; rounding in fp32 is about a hundredth of it
TOKENS_AT_ONCE = 2048
LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True)
class Application:
    """One application of a layer; every estimate is a mean over tokens, its interval one over windows."""

    layer: str  # name of the module in the model
    change: Estimate | None  # ‖h_{l+1} − h_l‖ / ‖h_l‖
    distance: Estimate | None  # ‖h_{l+1} − h_l‖, as ALBERT's figure 1 has it
    cosine: Estimate | None  # of h_{l+1} and h_l
    turn: Estimate | None  # cosine between this application's change and the one before it; None for the first
    norm: Estimate | None  # ‖h_{l+1}‖
    again: Estimate | None  # relative change if the same layer is applied once more to its own output
    again_cosine: Estimate | None  # cosine of that output and the layer's own
    shared: float  # fraction of the layer's parameters that an earlier application has used, by Parameter identity
    same_as: int | None  # the earliest application (from 0) with exactly the same parameters


@dataclass(frozen=True)
class Rest:
    """A block that the model repeats, applied further from where the model left it (see `repeats`).

    Estimates are None once a window is no longer finite, or where no change is more than rounding error.
    """

    first: int  # the block's first application, from 0
    period: int  # its length in layers
    times: int  # how often the model applies it
    residual: tuple[Estimate | None, ...]  # at each application of the block, the model's own `times` first
    two_steps: tuple[Estimate | None, ...]  # at each further application but the first
    ratio: Estimate | None  # geometric mean over the further applications
    growth: Estimate | None  # geometric mean over the second half of them
    windows: int  # that were followed
    converged: int  # those whose residual at the end is below 1e-5
    alternating: int  # those that have not, but return after two applications (two_steps below 1e-5)
    from_end: Estimate | None  # ‖h_model − h_end‖ / ‖h_end‖ over the converged windows


@dataclass(frozen=True)
class Trajectory:
    """All applications of one model's stack, and every block that it repeats."""

    applications: tuple[Application, ...]  # L in order
    repeats: tuple[Rest, ...]  # runs in which a block is applied again and again
    alike: tuple[tuple[float, ...], ...]  # [L + 1][L + 1], mean cosine of h_i and h_j; the first layer reads h_0

    @property
    def shared(self) -> bool:
        """Whether any application uses parameters of an earlier one."""
        return any(one.shared > 0 for one in self.applications)


@dataclass(frozen=True)
class Refinement:
    """What a model does from layer to layer, beside the same architecture untrained."""

    tokens: int  # that were run
    windows: int  # they came in
    further: int  # applications of a repeated block beyond the model's own
    trained: Trajectory  # the model as it is
    untrained: Trajectory | None  # with fresh weights, shared alike; None where its class does not build it again


def refinement(opened: Opened, windows: Ids, seed: int = 0, further: int = FURTHER) -> Refinement:
    """Measure every application of a model's layers on windows of ids [n, T].

    Args:
        opened: the model.
        windows: ids [n, T]; one window gives no intervals.
        seed: of the fresh weights and of the small differences that are followed.
        further: applications of a repeated block beyond the model's own, 2 or more.

    Raises:
        DataError: no windows, or longer ones than the model has positions.
        UnsupportedError: the model has not one stack of layers.
    """
    _check(opened, windows)
    stack, fresh = find_stack(opened), _fresh(opened, seed)
    count = len(windows)
    with doing("refinement", count if fresh is None else 2 * count):
        trained = _trajectory(stack, windows, seed, further)
    untrained = None
    if fresh is not None:
        with doing("refinement", 2 * count, begun=count):
            untrained = _trajectory(find_stack(fresh), windows, seed, further)
    return Refinement(windows.size, count, further, trained, untrained)


def _check(opened: Opened, windows: Ids) -> None:
    if windows.ndim != 2 or not windows.size:
        raise DataError("refinement was given no windows of text", "give a text of at least one window")
    longest = opened.longest
    if longest is not None and windows.shape[1] > longest:
        what = f"windows of {windows.shape[1]} tokens, and the model has {longest} positions"
        raise DataError(what, f"choose windows of at most {longest}")


def _trajectory(stack: AppliedStack, windows: Ids, seed: int, further: int) -> Trajectory:
    sums: list[Parts] = [{} for _ in stack.applications]
    iterated: dict[Repeat, Parts] = {}
    alike, done = torch.zeros((len(sums) + 1,) * 2, dtype=torch.float64), 0
    for number, batch in enumerate(_batches(windows, stack.opened.vocab)):
        states, calls = applied(stack, batch)
        found = keys(calls)
        alike += _cosines(states) / len(windows)
        _add_applications(states, calls, sums)
        for block in repeats(found):
            _add_repeat(states, calls, block, iterated.setdefault(block, {}), further, seed + number)
        done += len(batch)
        advance(done)
    applications = tuple(
        Application(
            call.name,
            **{name: _estimate(parts.get(name)) for name in _PER_APPLICATION},
            shared=fraction,
            same_as=found.index(key) if found.index(key) != index else None,
        )
        for index, (call, parts, key, fraction) in enumerate(
            zip(calls, sums, found, shared_fractions(calls), strict=True)
        )
    )
    rests = tuple(_rest(block, parts) for block, parts in iterated.items())
    return Trajectory(applications, rests, tuple(map(tuple, alike.tolist())))


_PER_APPLICATION = ("change", "distance", "cosine", "turn", "norm", "again", "again_cosine")


def _batches(windows: Ids, vocab: int) -> Iterator[Tensor]:
    """Yield a few windows at a time: states and logits [b, T, V] of one batch are all that is held at once."""
    tokens = min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // vocab)
    step = max(1, tokens // windows.shape[1])
    for start in range(0, len(windows), step):
        yield torch.from_numpy(np.ascontiguousarray(windows[start : start + step]))


@torch.no_grad()
def _add_applications(states: list[Tensor], calls: list[LayerCall], into: list[Parts]) -> None:
    last_step = None
    for call, old, new, parts in zip(calls, states, states[1:], into, strict=False):
        step, once_more = new - old, call.again(new)
        found = {
            "change": relative(new, old),
            "distance": torch.linalg.vector_norm(step, dim=-1).mean(-1),
            "cosine": _cosine(new, old),
            "norm": torch.linalg.vector_norm(new, dim=-1).mean(-1),
            "again": relative(once_more, new),
            "again_cosine": _cosine(once_more, new),
        }
        if last_step is not None:
            found["turn"] = _cosine(step, last_step)
        _put(found, parts)
        last_step = step


@torch.no_grad()
def _add_repeat(
    states: list[Tensor], calls: list[LayerCall], block: Repeat, into: Parts, further: int, seed: int
) -> None:
    ends = states[block.first : block.end + 1 : block.period]
    members = calls[block.end - block.period : block.end]

    def apply(state: Tensor) -> Tensor:
        for call in members:
            state = call.again(state)
        return state

    walked, half = iterate(apply, ends[-1], further, seed), further // 2
    found = {
        "residual": torch.cat([torch.stack(list(map(relative, ends[1:], ends))), walked.residual]),
        "two_steps": walked.two_steps,
        "ratio": _geometric(walked.ratio),
        "growth": _geometric(walked.growth[half:]),
        "from_end": relative(ends[-1], walked.last),
    }
    _put(found, into)


def _put(found: Mapping[str, Tensor], into: Parts) -> None:
    for name, values in found.items():
        into.setdefault(name, []).append(values.numpy(force=True))


def _rest(block: Repeat, parts: Parts) -> Rest:
    joined = {name: np.concatenate(values, axis=-1) for name, values in parts.items()}
    residual, two_steps = joined["residual"], joined["two_steps"]
    resting = residual[-1] < RESTED
    return Rest(
        block.first,
        block.period,
        block.times,
        residual=tuple(_estimate([row]) for row in residual),
        two_steps=tuple(_estimate([row]) for row in two_steps),
        ratio=_estimate(parts["ratio"]),
        growth=_estimate(parts["growth"]),
        windows=len(resting),
        converged=int(resting.sum()),
        alternating=int((~resting & (two_steps[-1] < RESTED)).sum()),
        from_end=_estimate([joined["from_end"][resting]]),
    )


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Mean over tokens [B] of two states' cosine [B, T, D]; two zero vectors have none and count as 0."""
    sizes = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    products = (a * b).sum(-1)
    return torch.where(sizes > 0, products / sizes, 0.0).mean(-1)


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
    logs = torch.where(values > 0, values, torch.finfo(values.dtype).tiny).log()
    return torch.where(values.isnan(), values, logs).nanmean(0).exp()


def _estimate(parts: list[NDArray] | None) -> Estimate | None:
    """Mean over windows with its interval; None where nothing finite was measured in each of them."""
    if not parts:
        return None
    found = mean_interval(np.concatenate(parts))
    return found if np.isfinite(found.value) else None


def _fresh(opened: Opened, seed: int) -> Opened | None:
    """Build the model again from its config with new weights, one Parameter where the model has one."""
    model: Any = opened.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
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
