"""What a model and its optimizer hold in this process: which tensors, by a save's names, and which part of each.

The *held* indices of a part: for each axis the runs [start, stop) that lie in it, one behind the other.

    a table [97, 32] over 4 processes, process 1     (((25, 50),), ((0, 32),))
    gate and up in one [12, 8] over 2, process 1     (((3, 6), (9, 12)), ((0, 8),))
    nothing left for the last of 4 of 3 rows         ((), ((0, 32),))
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tiewise.boundary.locate import ask
from tiewise.boundary.saved import link_of
from tiewise.core.errors import CheckpointError, RunError, UnsupportedError
from tiewise.core.spec_options import SHARDED

Runs = Sequence[Sequence[int]]  # [start, stop) of indices of one axis, in the order of the bytes
Held = Sequence[Runs]  # of every axis


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
    if (link := link_of(model)) is not None:
        link.spec.require(SHARDED)
    live, names, state = HeldState({}, {}, {}, None, []), dict[int, str](), model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            what = f"{name} is {'a tensor without values' if isinstance(value, Tensor) else type(value).__name__}"
            raise UnsupportedError(f"{what}, and only tensors are kept", "load or initialise it, or leave it out")
        if (first := names.setdefault(id(value), name)) == name:
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
        options = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        live.groups.append(options | {"params": [name for name, _ in members]})
        for name, parameter in members:
            for key, value in optimizer.state.get(parameter, {}).items():
                kept = f"optimizer/{key}/{name}"
                live.tensors |= {kept: value} if isinstance(value, Tensor) else {}
                live.values |= {} if isinstance(value, Tensor) else {kept: _plain(key, value)}
    return live


def unwrapped(model: Any) -> Any:
    """Return the model within wrappers."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):  # the latter of torch.compile
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        what = "FSDP1 keeps flat parameters, which no other number of processes can take"
        raise UnsupportedError(what, "use torch.distributed.fsdp.fully_shard")
    return model


def _plain(key: str, value: Any) -> Any:
    """Return an option of the optimizer as JSON takes it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str, type(None))) for item in value):
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
    told = [None if one is None else json.loads(one.to_json_string()) for one in (model.config, generation)]
    return kind.__name__, told[0], told[1]


# which part of a tensor


def held(tensor: Tensor) -> Held:
    """Return the indices of a tensor that this process holds: all of them of a plain one.

    As torch lays DTensors out: mesh axes cut one after the other, each into pieces of ceil(n/W), the last smaller or
    empty; a `_StridedShard` cuts after the mesh axes behind it where its factor is theirs (FSDP over tensor
    parallelism), and else each of its groups for itself (fused matrices).
    """
    found: list[Runs] = [((0, size),) if size else () for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(found)
    mesh, place, after = tensor.device_mesh, tensor.device_mesh.get_coordinate(), []
    if place is None or any(p.is_partial() for p in tensor.placements):
        raise UnsupportedError("a tensor is a partial sum, or lies on other processes", "save between two steps")
    for number, placement in enumerate[Any](tensor.placements):
        if placement.is_replicate():
            continue
        axis, groups, behind = placement.dim, getattr(placement, "split_factor", 1), 1
        for other, count in zip(tensor.placements[number + 1 :], mesh.shape[number + 1 :], strict=True):
            behind *= count if getattr(other, "dim", None) == axis else 1
        if 1 < groups == behind:
            after.append((axis, mesh.size(number), place[number]))
        else:
            found[axis] = _cut(found[axis], mesh.size(number), place[number], groups)
    for axis, count, own in reversed(after):
        found[axis] = _cut(found[axis], count, own)
    return tuple(found)


def _cut(runs: Runs, count: int, own: int, groups: int = 1) -> Runs:
    """Return part `own` of `count` of some indices, of each of their groups for itself."""
    size, found = shape_of([runs])[0], list[tuple[int, int]]()
    width = math.ceil(size / groups)
    for start in range(0, size, max(1, width)):
        stop = min(start + width, size)
        step = math.ceil((stop - start) / count)
        low, high = min(start + own * step, stop), min(start + (own + 1) * step, stop)
        at = 0  # of the first index of a run, counted over all runs
        for first, end in runs:
            run = max(first, first + low - at), min(end, first + high - at)
            found += [run] if run[0] < run[1] else []
            at += end - first
    return tuple(found)


def shape_of(part: Held) -> tuple[int, ...]:
    """Return the shape of a part: how many indices there are in the runs of every axis."""
    return tuple(sum(stop - start for start, stop in runs) for runs in part)


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, no copy."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def overlaps(source: Runs, target: Runs) -> list[tuple[int, int, int]]:
    """Return (place in source, place in target, how many) of the indices that two lists of runs share."""
    found, at = [], 0
    for first, end in source:
        to = 0
        for start, stop in target:
            low, high = max(first, start), min(end, stop)
            if low < high:
                found.append((at + low - first, to + low - start, high - low))
            to += stop - start
        at += end - first
    return found


def make_up(shape: Sequence[int], parts: Sequence[Held]) -> bool:
    """Whether parts that are not empty make up a tensor of this shape, each of its indices once.

    They do where, along every axis, the different cuts follow one another from 0 to the end, and each cut of one axis
    meets each of the others.
    """
    if not parts or 0 in shape:
        return not parts and min(shape, default=1) == 0
    runs = (run for part in parts for axis in part for run in axis)
    if any(len(part) != len(shape) for part in parts) or any(len(run) != 2 or run[0] >= run[1] for run in runs):
        return False
    different = {tuple(tuple(map(tuple, axis)) for axis in part) for part in parts}
    count = 1
    for axis, size in enumerate(shape):
        cuts = {part[axis] for part in different}
        ends = [0, *(end for run in sorted(itertools.chain(*cuts)) for end in run), size]
        if ends[::2] != ends[1::2]:
            return False
        count *= len(cuts)
    return len(different) == len(parts) == count
