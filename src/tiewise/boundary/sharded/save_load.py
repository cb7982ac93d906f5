"""Saving and loading what several processes hold of a training.

Every process writes what it holds, of what several hold one of them, and the first writes the index. Every process
reads of all files what it will hold, and nothing is set before everything is compared.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiewise.boundary.sharded.held_state import Held, HeldState, built_from, find_held, held, local, make_up, shape_of
from tiewise.boundary.sharded.shard_files import (
    INDEX,
    NAMES,
    TYPES,
    VERSION,
    Index,
    Saved,
    ShardFile,
    ShardPart,
    WholeTensor,
    sha256,
    sweep,
    writing,
)
from tiewise.checkpoint.rewrite.change import NewTensor, Pieces
from tiewise.checkpoint.rewrite.file_writing import write_tensors
from tiewise.checkpoint.stored import BITS, CHUNK_BYTES
from tiewise.checkpoint.untrusted import short
from tiewise.core import ranks
from tiewise.core.errors import CheckpointError, RunError, UnsupportedError
from tiewise.core.files import write_whole, written_whole

Told = dict[str, tuple[str, tuple[int, ...], str, Any]]  # name → type, shape, placement, held indices


def save_sharded(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, notes: Mapping[str, Any] | None = None
) -> Path:
    """Save weights and optimizer state as the processes hold them; all processes call it, and `folder` is shared.

    A save that lies in `folder` stays what is loaded until this one is whole, and is then removed.

    Args:
        folder: made where it does not exist; its parent must.
        model: plain or wrapped in DDP, its tensors whole or DTensors (`fully_shard`, tensor parallelism, both).
        optimizer: a torch optimizer of the model's parameters, or what accelerate makes of it.
        notes: whatever else you want back, as JSON takes it: {"step": 1200, "scheduler": scheduler.state_dict()}.
            Of several processes the first one's are kept.

    Returns:
        The folder.

    Raises:
        UnsupportedError: something that cannot be kept: pipeline stages, FSDP1's flat parameters, a partial sum.
        CheckpointError: the model's tying is not what its config says; or nothing can be written there.
        RunError: the optimizer is of other parameters; or another process ended meanwhile.
    """
    place = Path(os.fspath(folder))
    with ranks.met(f"{place} was saved", "the folder holds this save or the one before it, whole"):
        try:
            with ranks.agreed():
                live = find_held(model, optimizer)
                own = _what_is_held(live)
                try:
                    noted = json.loads(json.dumps(dict(notes or {})))
                except (TypeError, ValueError) as error:
                    raise RunError(f"notes cannot be kept: {error}", "give what JSON takes") from None
            everyone = ranks.all_of(own)
            with ranks.agreed():
                kept, layouts, mine = _divided(everyone)
            with ranks.agreed(), writing(place):
                if ranks.first():
                    place.mkdir(exist_ok=True)
                    sweep(place)
            token = ranks.first_does(lambda: secrets.token_hex(4))
            with ranks.agreed():
                written = _written(place, f"sharded-{token}-{ranks.rank():05}.safetensors", live, kept, mine)
            files = ranks.all_of(written)
            state = live.aliases, live.values, live.groups
            index = Index(VERSION, noted, files, layouts, kept, *state, *built_from(model))
            with ranks.agreed(), writing(place):
                if ranks.first():
                    if lost := [file.name for file in files if not (place / file.name).is_file()]:
                        what = f"{place}: {lost[0]}, which another process wrote, is not there"
                        raise RunError(what, "give a folder on a file system that all processes share")
                    write_whole(place / INDEX, json.dumps(asdict(index), separators=(",", ":")))  # infinities too
                    sweep(place)
        except BaseException as error:
            if ranks.first() and ranks.known(error):  # else another process may have seen it succeed
                sweep(place)
            raise
    return place


def _what_is_held(live: HeldState) -> Told:
    """Return type, shape, placement and held indices of every tensor in this process."""
    found, seen = Told(), dict[Any, Held]()
    for name, tensor in live.tensors.items():
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
            raise UnsupportedError(f"{name} is a tensor of {kind}", "only dense tensors of plain types are kept")
        placed = "whole"
        if isinstance(tensor, DTensor):
            axes = tensor.device_mesh.mesh_dim_names or range(tensor.device_mesh.ndim)
            placed = ", ".join(f"{p!r} over {axis}" for p, axis in zip(tensor.placements, axes, strict=True))
        key = (tuple(tensor.shape), placed, getattr(tensor, "device_mesh", None))
        if key not in seen:  # one object for all that are cut alike: what is sent is the smaller for it
            seen[key] = held(tensor)
        found[name] = (NAMES[tensor.dtype], tuple(tensor.shape), placed, seen[key])
        if tuple(local(tensor).shape) != shape_of(seen[key]):
            what = f"{name}: its part has the shape {tuple(local(tensor).shape)}, not {shape_of(seen[key])}"
            raise UnsupportedError(f"{what} as {placed} of {tuple(tensor.shape)} says", "it is cut in an unknown way")
    return found


def _divided(everyone: Sequence[Told]) -> tuple[dict[str, WholeTensor], list[list[ShardPart]], dict[str, Held]]:
    """What is kept, the layouts, and the parts that this process writes, by name: decided alike in every process.

    Of those that hold the same part, the one writes that has least to write.
    """
    first = everyone[0]
    for process, other in enumerate(everyone):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name, (0,))[:2] != other.get(name, (0,))[:2]:
                what = f"processes 0 and {process} do not hold the same tensors: {short(name)}"
                raise UnsupportedError(what, "stages of a pipeline are no shards, and must be saved each for itself")
    kept, mine = dict[str, WholeTensor](), dict[str, Held]()
    layouts, load = dict[Any, int](), [0] * len(everyone)
    for name, (dtype, shape, placed, _) in first.items():
        holders: dict[Any, list[int]] = {}
        for process, told in enumerate(everyone):
            if math.prod(shape_of(told[name][3])):
                holders.setdefault(told[name][3], []).append(process)
        parts = []
        for part, processes in holders.items():
            writer = min(processes, key=load.__getitem__)
            load[writer] += math.prod(shape_of(part)) * BITS[dtype] // 8
            parts.append((writer, part))
            if writer == ranks.rank():
                mine[name] = part
        if not make_up(shape, [part for _, part in parts]):
            what = f"{short(name)}: what the processes hold of it does not make up {tuple(shape)}"
            raise UnsupportedError(what, f"it is cut in a way that is not known here ({placed})")
        kept[name] = WholeTensor(dtype, list(shape), placed, layouts.setdefault(tuple(parts), len(layouts)))
    made = [[ShardPart(writer, [[*map(list, axis)] for axis in part]) for writer, part in key] for key in layouts]
    return kept, made, mine


def _written(
    place: Path, name: str, live: HeldState, kept: Mapping[str, WholeTensor], mine: Mapping[str, Held]
) -> ShardFile:
    """Write this process's file, and see it on the disk."""

    def tensor(key: str) -> NewTensor:
        def pieces() -> Pieces:
            for piece in local(live.tensors[key]).contiguous().view(-1).split(CHUNK_BYTES):
                yield memoryview(piece.cpu().view(torch.uint8).numpy())

        return NewTensor(key, kept[key].dtype, shape_of(mine[key]), name, pieces)

    ordered = sorted(mine, key=lambda key: -BITS[kept[key].dtype])  # so that each lies aligned to its type
    with writing(place), written_whole(place / name) as made:
        write_tensors(made, [tensor(key) for key in ordered], {})
        return ShardFile(name, made.stat().st_size, sha256(made))


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
    for name, own in live.aliases.items():
        if index.aliases.get(name, name) != index.aliases.get(own, own):
            what = f"{short(name)} and {short(own)} were saved as two parameters, and are one in the model"
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
    index, state = saved.index, dict[str, dict[str, str]]()
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
                    device = "cpu" if key == "step" and on_cpu else parameter.device
                    value = torch.empty(shape, dtype=dtype, device=device)
                saved.fill(kept, value)
                optimizer.state[parameter][key] = value
