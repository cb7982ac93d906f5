"""Tensors and values of a model and its optimizer in this process, by their saved names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tiewise.boundary.locate import call_if_present
from tiewise.boundary.saved import link_of
from tiewise.core.errors import CheckpointError, RunError, UnsupportedError
from tiewise.core.spec_options import SHARDED


@dataclass
class LiveState:
    """Tensors and values of a model and its optimizer in this process, by their saved names.

    Attributes:
        tensors: tensors of the model ("model/NAME") and of the optimizer ("optimizer/KEY/NAME").
        aliases: other names of a tied tensor → the name under which it is saved.
        values: state of the optimizer that is not a tensor.
        groups: options of the optimizer's groups, and the names of their parameters; None without an optimizer.
        parameters: name and tensor of each parameter, for every group.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    parameters: list[list[tuple[str, Tensor]]] = field(default_factory=list)


def find_live_state(model: nn.Module, optimizer: Any) -> LiveState:
    """Return the tensors and values to save or to fill.

    Sharded parameters that are gathered are sharded again by this.

    Raises:
        UnsupportedError: the model is not a module, or its spec cannot be sharded.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"a {type(model).__name__} is no model", "give a torch.nn.Module")
    model = unwrap_model(model)
    link = link_of(model)
    if link is not None:
        link.spec.require(SHARDED)
    live, parameters = LiveState(), model.state_dict(keep_vars=True)
    names = _add_model(live, parameters)
    _require_ties(model, parameters)
    if optimizer is not None:
        _add_optimizer(live, getattr(optimizer, "optimizer", optimizer), names)
    return live


def _add_model(live: LiveState, parameters: Mapping[str, Any]) -> dict[int, str]:
    """Add a model's tensors and aliases, and return the name of each tensor by its id."""
    names: dict[int, str] = {}
    for name, value in parameters.items():
        _require_values(name, value)
        first = names.setdefault(id(value), name)
        if first == name:
            live.tensors[f"model/{name}"] = value
        else:
            live.aliases[name] = first
    return names


def _require_values(name: str, value: Any) -> None:
    """Refuse an entry of a model's state that is not a tensor or has no values."""
    if not isinstance(value, Tensor):
        description = type(value).__name__
    elif value.is_meta:
        description = "a tensor without values"
    else:
        return
    fix = "load or initialise it, or leave it out"
    raise UnsupportedError(f"{name} is {description}, and only tensors are kept", fix)


def _add_optimizer(live: LiveState, optimizer: Any, names: Mapping[int, str]) -> None:
    """Add an optimizer's groups, and the state of their parameters."""
    live.groups = []
    for group in optimizer.param_groups:
        members = _named_members(group["params"], names)
        live.parameters.append(members)
        saved_group = {key: _to_json_value(key, value) for key, value in group.items() if key != "params"}
        saved_group["params"] = [name for name, _ in members]
        live.groups.append(saved_group)
        for name, parameter in members:
            _add_parameter_state(live, name, optimizer.state.get(parameter, {}))


def _named_members(parameters: Iterable[Tensor], names: Mapping[int, str]) -> list[tuple[str, Tensor]]:
    """Return the parameters of one of the optimizer's groups with their names in the model."""
    members = []
    for parameter in parameters:
        if id(parameter) not in names:
            fix = "build it after fully_shard or tensor parallelism, from the parameters that the model then has"
            raise RunError("the optimizer holds a parameter that the model does not have", fix)
        members.append((names[id(parameter)], parameter))
    return members


def _add_parameter_state(live: LiveState, name: str, state: Mapping[str, Any]) -> None:
    """Add the optimizer's tensors and values of one parameter."""
    for key, value in state.items():
        saved_name = f"optimizer/{key}/{name}"
        if isinstance(value, Tensor):
            live.tensors[saved_name] = value
        else:
            live.values[saved_name] = _to_json_value(key, value)


def unwrap_model(model: Any) -> Any:
    """Return the model inside its wrappers.

    Raises:
        UnsupportedError: the model has FSDP1's flat parameters.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # wrapper of torch.compile
            model = model._orig_mod
        else:
            break
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            what = "FSDP1 keeps flat parameters, which no other number of processes can take"
            raise UnsupportedError(what, "use torch.distributed.fsdp.fully_shard")
    return model


_PLAIN = (int, float, str, type(None))  # types that JSON has; bool is an int


def _to_json_value(key: str, value: Any) -> Any:
    """Return an option of the optimizer in JSON's types."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
        return list(value)
    raise UnsupportedError(f"the optimizer's {key} is a {type(value).__name__}", "only numbers and text are kept")


def _require_ties(model: Any, parameters: Mapping[str, Tensor]) -> None:
    """Refuse a model whose tying contradicts its config, because it would load differently."""
    if not hasattr(model, "get_expanded_tied_weights_keys"):
        return
    keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    for pair in keys.items():
        tensors = {id(parameters[name]) for name in pair if name in parameters}
        if len(tensors) == 2:
            target, source = pair
            what = f"the config ties {target} to {source}, and they are two parameters"
            fix = "call model.tie_weights() before it is sharded and the optimizer built, or set tie_word_embeddings"
            raise CheckpointError(what, f"{fix} to false")
    input_weight, output_weight = _end_weight(model, "input"), _end_weight(model, "output")
    if input_weight is None or input_weight is not output_weight:
        return
    targets = {id(parameters.get(target)) for target in keys}
    if id(output_weight) not in targets:
        what = "the config says that the head is a table of its own, and it is the input table"
        raise CheckpointError(what, "set config.tie_word_embeddings = True, or give the head its own parameter")


def _end_weight(model: Any, end: str) -> Tensor | None:
    """Return the weight of the "input" or "output" embeddings of a model; None without one."""
    weight: Tensor | None = getattr(call_if_present(model, f"get_{end}_embeddings"), "weight", None)
    return weight


class ModelClass(NamedTuple):
    """Class, config and generation config that build an ordinary folder; None without a config."""

    architecture: str | None = None  # name of the model's class
    config: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None


def describe_model(model: Any) -> ModelClass:
    """Return what an ordinary folder needs: the class's name, config and generation config."""
    model = unwrap_model(model)
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        return ModelClass()
    architecture = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation = json.loads(generation.to_json_string())
    return ModelClass(architecture.__name__, json.loads(model.config.to_json_string()), generation)
