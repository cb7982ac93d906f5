"""State that an optimizer keeps for a model's tables, when one table becomes two or two become one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tiewise.core.errors import UnsupportedError

# known entries of an optimizer's state: linear in the gradient, linear in its square, numbers of steps
FIRST = ("momentum_buffer", "exp_avg")
SECOND = ("exp_avg_sq", "max_exp_avg_sq")
COUNTER = ("step",)
State = dict[str, Any]


def state_of(optimizer: torch.optim.Optimizer | None, table: Tensor) -> State:
    """Return a copy of the optimizer's state of a table; UnsupportedError for entries that are unknown."""
    state = {} if optimizer is None else dict(optimizer.state.get(table, {}))
    known = {*FIRST, *SECOND, *COUNTER}
    unknown = [key for key, value in state.items() if key not in known and value is not None]
    if unknown:
        what = f"{type(optimizer).__name__} keeps {', '.join(unknown)}, which cannot be copied or merged"
        raise UnsupportedError(what, "use SGD, Adam or AdamW, or change the boundary without an optimizer")
    return state


def split(state: State) -> State:
    """Return a state with half of the first moments, so that two of it add up to the old one."""
    halves = {key: state[key] * 0.5 for key in FIRST if state.get(key) is not None}
    return state | halves


def merge(one: State, two: State) -> State:
    """Return the state of a table whose gradient is the sum of two: moments add, the larger step counter stays."""
    merged = one | two
    for key in one.keys() & two.keys():
        a, b = one[key], two[key]
        if a is None or b is None:
            merged[key] = b if a is None else a
        elif key in COUNTER:
            merged[key] = max(a, b)
        else:
            merged[key] = a + b
    return merged


def replace_tables(
    optimizer: torch.optim.Optimizer, model: nn.Module, old: list[Any], new: list[Any], state: State
) -> None:
    """Replace tables by `new` ones, each with this state, in the order that a new optimizer's group would have."""
    order = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    old_ids = {id(table) for table in old}
    for group in optimizer.param_groups:
        parameters = group["params"]
        others = [p for p in parameters if id(p) not in old_ids]
        if len(others) == len(parameters):
            continue
        has_first = any(p is old[0] for p in parameters)  # the new tables join the group of the first old one
        joined = [*others, *new] if has_first else others
        group["params"] = sorted(joined, key=lambda p: order.get(id(p), len(order)))
    for table in (*old, *new):
        optimizer.state.pop(table, None)
    if state:
        for table in new:
            optimizer.state[table] = {key: _copied(value) for key, value in state.items()}


def _copied(value: Any) -> Any:
    """Return an entry of a state that no other table shares."""
    return value.clone() if torch.is_tensor(value) else value
