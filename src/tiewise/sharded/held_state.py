"""What a model and its optimizer hold in this process, under the names that a save gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tiewise.boundary.locate import ask
from tiewise.core.errors import CheckpointError, RunError, UnsupportedError


@dataclass
class HeldState:
    """Tensors of a model and its optimizer as they are in this process, under the names that a save gives them."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    values: dict[str, Any]
    groups: list[dict[str, Any]] | None
    parameters: list[list[tuple[str, Tensor]]]  # of every group


def find_held(model: nn.Module, optimizer: Any) -> HeldState:
    """Find all that is to be kept, or to be filled. Sharded parameters that are gathered are sharded again by this."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"a {type(model).__name__} is no model", "give a torch.nn.Module")
    model = unwrapped(model)
    live = HeldState({}, {}, {}, None, [])
    state = model.state_dict(keep_vars=True)
    names: dict[int, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            what = f"{name} is {'a tensor without values' if isinstance(value, Tensor) else type(value).__name__}"
            raise UnsupportedError(f"{what}, and only tensors are kept", "load or initialise it, or leave it out")
        first = names.setdefault(id(value), name)
        if first == name:
            live.tensors[f"model/{name}"] = value
        else:
            live.aliases[name] = first
    _require_ties(model, state)
    if optimizer is None:
        return live
    optimizer = getattr(optimizer, "optimizer", optimizer)
    live.groups = []
    for group in optimizer.param_groups:
        if any(id(p) not in names for p in group["params"]):
            fix = "build it after fully_shard or tensor parallelism, from the parameters that the model then has"
            raise RunError("the optimizer holds a parameter that the model does not have", fix)
        members = [(names[id(p)], p) for p in group["params"]]
        live.parameters.append(members)
        live.groups.append({key: _plain(key, value) for key, value in group.items() if key != "params"})
        live.groups[-1]["params"] = [name for name, _ in members]
        for name, parameter in members:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    live.tensors[f"optimizer/{key}/{name}"] = value
                else:
                    live.values[f"optimizer/{key}/{name}"] = _plain(key, value)
    return live


def unwrapped(model: Any) -> Any:
    """Return the model within wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # of torch.compile
            model = model._orig_mod
        else:
            break
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            "FSDP1 keeps flat parameters, which no other number of processes can take",
            "use torch.distributed.fsdp.fully_shard",
        )
    return model


def _plain(key: str, value: Any) -> Any:
    """Return an option of the optimizer as JSON takes it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in value):
        return list(value)
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise UnsupportedError(f"the optimizer's {key} is a {type(value).__name__}", "only numbers and text are kept")
    return value


def _require_ties(model: Any, state: Mapping[str, Tensor]) -> None:
    """Refuse a model whose ends are one Parameter or two against what its config says: it would load as another."""
    if not hasattr(model, "get_expanded_tied_weights_keys"):
        return
    keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    for target, source in keys.items():
        one, other = state.get(target), state.get(source)
        if one is not None and other is not None and one is not other:
            what = f"the config ties {target} to {source}, and they are two parameters"
            fix = "call model.tie_weights() before it is sharded and the optimizer built, or set tie_word_embeddings"
            raise CheckpointError(what, f"{fix} to false")
    table, head = (getattr(ask(model, f"get_{end}_embeddings"), "weight", None) for end in ("input", "output"))
    if table is not None and table is head and not any(state.get(target) is head for target in keys):
        what = "the config says that the head is a table of its own, and it is the input table"
        raise CheckpointError(what, "set config.tie_word_embeddings = True, or give the head its own parameter")


def built_from(model: Any) -> tuple[str | None, dict[str, Any] | None, dict[str, Any] | None]:
    """Return what builds an ordinary folder: the class's name, config and generation config."""
    model = unwrapped(model)
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        return None, None, None
    kind = next(made for made in type(model).__mro__ if not issubclass(made, FSDPModule))
    generation = getattr(model, "generation_config", None)
    told = [json.loads(config.to_json_string()) for config in (model.config, generation) if config is not None]
    return kind.__name__, told[0], told[1] if generation is not None else None
