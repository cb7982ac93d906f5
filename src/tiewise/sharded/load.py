"""Loading: every process reads of all files what it will hold, and nothing is set before everything is compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.checkpoint.untrusted import short
from tiewise.core import ranks
from tiewise.core.errors import CheckpointError, RunError
from tiewise.sharded.held_state import HeldState, find_held
from tiewise.sharded.shard_files import NAMES, TYPES, Saved


def load_sharded(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Fill a model and its optimizer from a save, whatever number of processes wrote it; all processes call it.

    The model is built and sharded as it shall be, and the optimizer made, before; both may be fresh. Every file's
    digest is computed, by one process each, and everything is compared, before the first value is set.

    Returns:
        The `notes` that were saved.

    Raises:
        CheckpointError: no whole save lies there; a file is not what was written; the model is not what was saved.
        RunError: the optimizer is not what was saved; or another process ended meanwhile.
        UnsupportedError: as `save_sharded`.
    """
    place = Path(os.fspath(folder))
    with ranks.met(f"{place} was loaded", "start again"):
        with ranks.agreed():
            saved = Saved(place)
            saved.verify()
            live = find_held(model, optimizer)
            _require_same(saved, live)
        with ranks.agreed(), torch.no_grad():
            for name, tensor in live.tensors.items():
                if name.startswith("model/"):
                    saved.fill(saved.name_of(name), tensor)
            if optimizer is not None:
                _fill_optimizer(saved, live, getattr(optimizer, "optimizer", optimizer))
    return saved.index.notes


def _require_same(saved: Saved, live: HeldState) -> None:
    """Refuse a model or an optimizer that is not what was saved."""
    index, fix = saved.index, "build the model as it was when it was saved"
    here = {name.removeprefix("model/") for name in live.tensors if name.startswith("model/")}
    there = {name.removeprefix("model/") for name in index.tensors if name.startswith("model/")}
    if differ := (here | live.aliases.keys()) ^ (there | index.aliases.keys()):
        name = min(differ)
        how = "is in the save and not in the model" if name in there | index.aliases.keys() else "is not in the save"
        raise CheckpointError(f"{saved.place}: {short(name)} {how}", fix)
    known: dict[str, str] = {}
    for name in (*here, *live.aliases):
        one, other = live.aliases.get(name, name), index.aliases.get(name, name)
        if known.setdefault(other, one) != one:
            what = f"{short(name)} and {short(known[other])} were saved as one parameter, and are two in the model"
            raise CheckpointError(f"{saved.place}: {what}", "tie them before the optimizer is built")
    for name in live.aliases:
        if index.aliases.get(name, name) != index.aliases.get(live.aliases[name], live.aliases[name]):
            what = (
                f"{short(name)} and {short(live.aliases[name])} were saved as two parameters, and are one in the model"
            )
            raise CheckpointError(f"{saved.place}: {what}", "untie them before the optimizer is built")
    for name in sorted(here):
        tensor, kept = live.tensors[f"model/{name}"], index.tensors[saved.name_of(f"model/{name}")]
        if (NAMES.get(tensor.dtype), list(tensor.shape)) != (kept.dtype, kept.shape):
            what = f"{short(name)} was saved as {kept.dtype} {kept.shape}"
            what += f", and is {NAMES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)} in the model"
            raise CheckpointError(f"{saved.place}: {what}", fix)
    if live.groups is None:
        return
    if index.groups is None:
        raise RunError(f"{saved.place} has no optimizer state", "load the model alone: load_sharded(folder, model)")
    _options(saved, live)


def _options(saved: Saved, live: HeldState) -> list[dict[str, Any]]:
    """Return the options that the parameters of each of the optimizer's groups were saved with.

    Groups of the same options may be one or several: some optimizers want those apart that are cut over other axes.

    Raises:
        RunError: parameters that were not saved, or a group of several options.
    """
    of = {name: {**group, "params": None} for group in saved.index.groups or [] for name in group["params"]}
    groups = [[saved.index.aliases.get(name, name) for name, _ in members] for members in live.parameters]
    names = [name for group in groups for name in group]
    if sorted(names) != sorted(of) or any(of[name] != of[group[0]] for group in groups for name in group):
        what = f"{saved.place}: the optimizer's groups hold other parameters than those that were saved"
        raise RunError(what, "build the optimizer as it was when it was saved")
    return [of[group[0]] if group else {} for group in groups]


def _fill_optimizer(saved: Saved, live: HeldState, optimizer: Any) -> None:
    """Give every parameter the state that it was saved with, cut as the parameter is, and every group its options."""
    index = saved.index
    state: dict[str, dict[str, str]] = {}
    for name in (*index.tensors, *index.values):
        if name.startswith("optimizer/"):
            _, key, owner = name.split("/", 2)
            state.setdefault(owner, {})[key] = name
    for group, members, options in zip(optimizer.param_groups, live.parameters, _options(saved, live), strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            elif key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        on_cpu = not (group.get("capturable") or group.get("fused"))  # where AdamW counts its steps
        for name, parameter in members:
            optimizer.state.pop(parameter, None)
            for key, kept in state.get(index.aliases.get(name, name), {}).items():
                if kept not in index.tensors:
                    optimizer.state[parameter][key] = index.values[kept]
                    continue
                shape, dtype = index.tensors[kept].shape, TYPES[index.tensors[kept].dtype]
                if key != "step" and shape == list(parameter.shape):
                    value = torch.empty_like(parameter, dtype=dtype)
                else:
                    device = torch.device("cpu") if key == "step" and on_cpu else parameter.device
                    value = torch.empty(shape, dtype=dtype, device=device)
                saved.fill(kept, value)
                optimizer.state[parameter][key] = value
