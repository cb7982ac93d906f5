"""Tie or untie a model in the middle of training, the optimizer's state included.

Untying copies the table: both ends continue from the same values, and each inherits the state that the shared table
had (`copy`), or half of its first moments (`split`, so that the two still add up to the shared one), or starts fresh
(`reset`). Tying keeps one end's values or their mean, and merges states by adding: a shared table's gradient is the
sum of its paths' gradients, so momenta and first moments add exactly; second moments add exactly where the paths'
gradients are uncorrelated. Step counters take the larger.

    shared m, v  --untie copy-->  (m, v), (m, v)        (m₁, v₁), (m₂, v₂)  --tie-->  m₁ + m₂, v₁ + v₂
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.declare import declare_tying
from tiewise.boundary.install import Installed, install
from tiewise.boundary.journal import Journal
from tiewise.boundary.link import link_of
from tiewise.boundary.saved import declare_boundary
from tiewise.core.errors import SpecError, UnsupportedError

KEEP, STATE = ("input", "output", "mean"), ("copy", "split", "reset")
# What each known optimizer keeps per parameter and that is linear in the gradient or in its square.
FIRST = ("momentum_buffer", "exp_avg")
SECOND = ("exp_avg_sq", "max_exp_avg_sq")
COUNTER = ("step",)

State = dict[str, Any]


def untie(installed: Installed, optimizer: torch.optim.Optimizer | None = None, state: str = "copy") -> Installed:
    """Give the output head a table of its own, and the optimizer a state for it.

    Args:
        installed: a tied boundary. It and every other handle of it stay valid; options such as a bias stay.
        optimizer: SGD, Adam or AdamW that trains the model; None where there is none yet.
        state: `copy`, `split` or `reset`.

    Raises:
        SpecError: an unknown `state`, or a boundary that is not tied.
        UnsupportedError: an optimizer that keeps what this function does not know.
    """
    if state not in STATE:
        raise SpecError(f"unknown optimizer state {state!r}", f"choose one of {', '.join(STATE)}")
    if installed.spec.kind != "tied":
        raise SpecError(f"{installed.spec} cannot be untied", "untie a model whose boundary is tied")
    table_in = installed.tables()[0]
    old = {} if state == "reset" else _known_state(optimizer, table_in)
    table_out = nn.Parameter(table_in.detach().clone(), requires_grad=table_in.requires_grad)
    after = _become(installed, "untied", table_out)
    if optimizer is not None:
        _replace(optimizer, installed.model, table_in, [table_in, table_out])
        for table in (table_in, table_out):
            optimizer.state.pop(table, None)
            if old:
                optimizer.state[table] = _scaled(old, 0.5 if state == "split" else 1.0)
    return after


def tie(installed: Installed, optimizer: torch.optim.Optimizer | None = None, keep: str = "mean") -> Installed:
    """Give both ends one table, and the optimizer the sum of their states.

    Args:
        installed: an untied boundary.
        optimizer: as in `untie`.
        keep: whose values the table starts from: `input`, `output` or their `mean`.

    Raises:
        SpecError: an unknown `keep`, or a boundary that is not untied.
        UnsupportedError: as in `untie`.
    """
    if keep not in KEEP:
        raise SpecError(f"unknown keep {keep!r}", f"choose one of {', '.join(KEEP)}")
    if installed.spec.kind != "untied":
        raise SpecError(f"{installed.spec} cannot be tied", "tie a model whose boundary is untied")
    table_in, table_out = installed.tables()
    states = [_known_state(optimizer, table) for table in (table_in, table_out)]
    if table_in.shape != table_out.shape:
        sizes = f"{tuple(table_in.shape)} and {tuple(table_out.shape)}"
        raise UnsupportedError(f"tables of {sizes} cannot become one", "tie tables of one shape")
    after = _become(installed, "tied", table_in)
    with torch.no_grad():
        if keep == "output":
            table_in.copy_(table_out)
        elif keep == "mean":
            table_in.add_(table_out).mul_(0.5)
    if optimizer is not None:
        for table in (table_in, table_out):
            optimizer.state.pop(table, None)
        _replace(optimizer, installed.model, table_out, [])
        if any(states):
            optimizer.state[table_in] = _merged(*states)
    return after


def _become(installed: Installed, kind: str, table_out: Tensor) -> Installed:
    """Give the head a table and say everywhere what the boundary is now; verified, or nothing has changed."""
    model, link = installed.model, link_of(installed.model)
    assert link is not None
    journal = Journal()
    try:
        journal.set(link, "spec", replace(link.spec, kind=kind))
        journal.set(link.head, "weight", table_out)
        journal.set(link, "plain", declare_tying(model, link.ends, journal) and link.structure.plain)
        declare_boundary(model, link, journal, asked=True)
        return install(model)
    except BaseException:
        journal.undo()
        raise


def _known_state(optimizer: torch.optim.Optimizer | None, table: Tensor) -> State:
    state = {} if optimizer is None else dict(optimizer.state.get(table, {}))
    unknown = [key for key, value in state.items() if key not in (*FIRST, *SECOND, *COUNTER) and value is not None]
    if unknown:
        what = f"{type(optimizer).__name__} keeps {', '.join(unknown)}, which cannot be copied or merged"
        raise UnsupportedError(what, "use SGD, Adam or AdamW, or change the boundary without an optimizer")
    return state


def _scaled(state: State, first: float) -> State:
    found = {}
    for key, value in state.items():
        found[key] = value.clone() if torch.is_tensor(value) else value
        if key in FIRST and value is not None:
            found[key] = value * first
    return found


def _merged(one: State, two: State) -> State:
    if not (one and two):
        return _scaled(one or two, 1.0)
    found = {}
    for key, value in one.items():
        other = two.get(key)
        if value is None or other is None:
            found[key] = value if other is None else other
        elif key in COUNTER:
            found[key] = max(value, other).clone() if torch.is_tensor(value) else max(value, other)
        else:
            found[key] = value + other
    return found


def _replace(optimizer: torch.optim.Optimizer, model: nn.Module, old: Tensor, new: list[Any]) -> None:
    """Put `new` where the optimizer has `old`, in the order that a new optimizer's group would have."""
    place = {id(p): i for i, p in enumerate(model.parameters())}
    for group in optimizer.param_groups:
        held = [p for p in group["params"] if p is not old]
        if len(held) < len(group["params"]):
            group["params"] = sorted([*held, *new], key=lambda p: place.get(id(p), len(place)))
