"""What `fully_shard` (FSDP2) makes of a model's tables, and what of it a boundary can stand.

    fully_shard(model)          each unit keeps its Parameters as DTensors, one part of the rows per process
    forward of a unit           gathers them: its modules hold plain Parameters until it reshards
    backward                    scatters their summed gradient, once per unit and backward pass

Ends that see one gathered table have one gradient buffer, as on one process. They do not where one Parameter is kept
by two units. transformers' `DistributedConfig(fsdp_size=…)` does that to tied tables: it shards embedding and head
before it ties them, so that each is gathered by itself. With V that the processes do not divide, torch then pads one
of the two into memory of its own (`FSDPParam.reset_sharded_param`), which the optimizer never reaches: from the second
step on that end reads the rows that training began with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor

from tiewise.core.errors import InstallError, UnsupportedError

_OWN = "load without fsdp_size and call torch's fully_shard on the layers and on the model"


def units(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on; told by what it adds to their class."""
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def _states(model: nn.Module) -> list[Any]:
    """Return torch's record of each unit; modules that were sharded together share one."""
    states = [unit._get_fsdp_state() for unit in units(model)]
    return list({id(state): state for state in states}.values())


def _groups(state: Any) -> list[Any]:
    """Return what a unit gathers at once: its Parameters, of several groups where their meshes differ."""
    found = getattr(state, "_fsdp_param_groups", None)  # older torch has one, or none
    return found if found is not None else [group for group in [state._fsdp_param_group] if group is not None]


def reshard(model: nn.Module) -> None:
    """Give every unit its sharded Parameters back: those that an optimizer must hold, and whose tables are whole.

    A forward leaves the outermost unit gathered, for a backward pass that may never come. One that raised leaves it
    in the middle of a forward besides, where torch does not reshard; what a backward pass ends with, ends that too.
    """
    for state in _states(model):
        idle = type(state._training_state).IDLE
        if state._training_state is not idle:
            state._training_state = idle
            state._state_ctx.iter_forward_root = None
            getattr(state, "_modules_to_run_forward", set()).clear()
            for group in _groups(state):
                group._training_state = idle
    for unit in units(model):
        unit.reshard()


def kept(model: nn.Module) -> list[Any]:
    """Return torch's record (`FSDPParam`) of every Parameter that a unit keeps."""
    return [parameter for state in _states(model) for group in _groups(state) for parameter in group.fsdp_params]


def narrowed(model: nn.Module) -> torch.dtype | None:
    """Return the type that the units' mixed-precision policy computes in, or None."""
    policies = (state._mp_policy for state in _states(model))
    return next((policy.param_dtype for policy in policies if policy.param_dtype is not None), None)


def tables_of_units(model: nn.Module) -> set[int]:
    """Return the ids of the sharded Parameters that `fully_shard` gathers whole before their modules read them.

    Raises:
        InstallError: units whose outermost is not the model, or two that keep one Parameter.
    """
    found = units(model)
    if not found:
        return set()
    kind = type(model).__name__
    if model not in found:
        what = f"parts of {kind} are sharded by fully_shard, and {kind} itself is not"
        raise InstallError(what, "call fully_shard(model) as well, or install before the first fully_shard")
    reshard(model)
    places: dict[int, str] = {}
    gathered: set[int] = set()
    names = {id(module): name for name, module in model.named_modules()}
    for record in kept(model):
        place = record._module_info
        parameter = getattr(place.module, place.param_name)  # what was tied since is not what the record began with
        name = f"{names.get(id(place.module), '')}.{place.param_name}"
        if id(parameter) in places:
            what = f"{kind}: {places[id(parameter)]} and {name} are one Parameter that two units of fully_shard keep"
            raise InstallError(f"{what}, so that one end of the table is never updated where V does not divide", _OWN)
        places[id(parameter)] = name
        if not record.is_dtensor:  # others stay as tensor parallelism has cut them
            gathered.add(id(parameter))
    return gathered


def shard(model: Any, mesh: DeviceMesh | None = None, kept: set[nn.Parameter] | None = None) -> None:
    """Shard a Hugging Face model over a mesh, or all processes: each layer a unit, the rest, with the tables, one more.

    What is `kept` stays as it is (`keep_tables`).

    Raises:
        UnsupportedError: a model that does not name its layers.
    """
    names = getattr(model, "_no_split_modules", None)
    if not names:
        what = f"{type(model).__name__} does not say which modules are its layers (_no_split_modules)"
        raise UnsupportedError(what, "train it without --fsdp")
    for module in [module for module in model.modules() if type(module).__name__ in names]:
        if model.get_input_embeddings() not in module.modules():  # of BERT's too, whose table the head has as well
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=kept)


@torch.no_grad()
def fill(whole: nn.Module, sharded: nn.Module) -> None:
    """Copy what the processes hold of a model into one that is not sharded; all of them call it."""
    reshard(sharded)
    held = sharded.state_dict()
    for name, tensor in whole.state_dict().items():
        part = held[name]
        tensor.copy_(part.full_tensor() if isinstance(part, DTensor) else part)
