"""Optimizer state of a model's tables, when they are tied or untied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.core.errors import UnsupportedError

# known entries of an optimizer's state: linear in the gradient, linear in its square, numbers of steps
FIRST = ("momentum_buffer", "exp_avg")
SECOND = ("exp_avg_sq", "max_exp_avg_sq")
COUNTER = ("step",)
_UNDERSTOOD = {*FIRST, *SECOND, *COUNTER}
State = dict[str, Any]


def state_of(optimizer: torch.optim.Optimizer | None, table: Tensor) -> State:
    """Return a copy of the optimizer's state of a table.

    Raises:
        UnsupportedError: the state has entries of an unknown type.
    """
    if optimizer is None:
        return {}
    state = dict(optimizer.state.get(table, {}))
    unknown = [key for key in _drop_none(state) if key not in _UNDERSTOOD]
    if unknown:
        problem = f"{type(optimizer).__name__} keeps {', '.join(unknown)}, which cannot be copied or merged"
        raise UnsupportedError(problem, "use SGD, Adam or AdamW, or change the boundary without an optimizer")
    return state


def _drop_none(state: State) -> State:
    """Return the entries of a state that are not None. SGD without momentum stores a None buffer."""
    return {key: value for key, value in state.items() if value is not None}


def split(state: State) -> State:
    """Return a state with half of the first moments. Two such states add up to the old one."""
    halved = dict(state)
    for key, value in _drop_none(state).items():
        if key in FIRST:
            halved[key] = value * 0.5
    return halved


def merge(first_state: State, second_state: State) -> State:
    """Return the state of a tied table from the states of two tables.

    The gradient of the tied table is the sum of both. So moments add, and the larger step counter stays.
    """
    merged = first_state | second_state
    for key, value in _drop_none(first_state).items():
        other = second_state.get(key)
        if other is None:
            merged[key] = value
        elif key in COUNTER:
            merged[key] = max(value, other)
        else:
            merged[key] = value + other
    return merged


def replace_tables(
    optimizer: torch.optim.Optimizer, model: nn.Module, old: list[Any], new: list[Any], state: State
) -> None:
    """Replace `old` tables by `new` ones, each with this state, in an optimizer.

    Parameters of a group get the order that they would have in a new optimizer.
    """
    position = {parameter_id: index for index, parameter_id in enumerate(_ids(model.parameters()))}
    for group in optimizer.param_groups:
        _replace_in_group(group, old, new, position)
    for table in (*old, *new):
        optimizer.state.pop(table, None)
    if not state:
        return
    for table in new:
        optimizer.state[table] = _copy_state(state)


def _ids(parameters: Iterable[Any]) -> list[int]:
    """Return the ids of parameters, to compare them by identity instead of by value."""
    return [id(parameter) for parameter in parameters]


def _replace_in_group(group: dict[str, Any], old: list[Any], new: list[Any], position: dict[int, int]) -> None:
    """Replace the old tables of one parameter group.

    The group of the first old table gets the new ones. `position` has the order of parameters by id; parameters that
    the model lacks come last.
    """
    ids, old_ids = _ids(group["params"]), _ids(old)
    if set(ids).isdisjoint(old_ids):
        return
    parameters = [parameter for parameter in group["params"] if id(parameter) not in old_ids]
    if old_ids[0] in ids:
        parameters += new
    last = len(position)
    group["params"] = sorted(parameters, key=lambda parameter: position.get(id(parameter), last))


def _copy_state(state: State) -> State:
    """Return a copy of a state, with copied tensors."""
    copied = dict(state)
    for key, value in state.items():
        if torch.is_tensor(value):
            copied[key] = value.clone()
    return copied
