"""Saving: every process writes what it holds, of what several hold one of them, and the first writes the index."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tiewise.checkpoint.stored import BITS, CHUNK_BYTES
from tiewise.checkpoint.untrusted import short
from tiewise.core import ranks
from tiewise.core.errors import RunError, UnsupportedError
from tiewise.core.files import to_record, write_whole, written_whole
from tiewise.rewrite.change import NewTensor, Pieces
from tiewise.rewrite.file_plan import write_tensors
from tiewise.sharded.cuts import Held, held, local, make_up, shape_of
from tiewise.sharded.held_state import HeldState, built_from, find_held
from tiewise.sharded.shard_files import (
    INDEX,
    NAMES,
    VERSION,
    Index,
    ShardFile,
    ShardPart,
    WholeTensor,
    sha256,
    sweep,
    writing,
)

Told = dict[str, tuple[str, tuple[int, ...], str, Any]]  # name → type, shape, placement, held indices


def save_sharded(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Any = None,
    *,
    notes: Mapping[str, Any] | None = None,
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
                    write_whole(place / INDEX, json.dumps(to_record(index), separators=(",", ":")))
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
    """Decide which process writes which part, the same in every process.

    Of those that hold the same part, the one writes that has least to write. Returns what is kept, the layouts, and
    the parts that this process writes, by name.
    """
    first = everyone[0]
    for process, other in enumerate(everyone):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name, (0,))[:2] != other.get(name, (0,))[:2]:
                what = f"processes 0 and {process} do not hold the same tensors: {short(name)}"
                fix = "stages of a pipeline are no shards, and must be saved each for itself"
                raise UnsupportedError(what, fix)
    kept: dict[str, WholeTensor] = {}
    mine: dict[str, Held] = {}
    layouts: dict[Any, int] = {}
    load = [0] * len(everyone)
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
    made = [
        [ShardPart(writer, [[list(run) for run in axis] for axis in part]) for writer, part in key] for key in layouts
    ]
    return kept, made, mine


def _written(
    place: Path, name: str, live: HeldState, kept: Mapping[str, WholeTensor], mine: Mapping[str, Held]
) -> ShardFile:
    """Write this process's file, and see it on the disk."""

    def tensor(key: str) -> NewTensor:
        def pieces() -> Pieces:
            flat = local(live.tensors[key]).contiguous().view(-1)
            for piece in flat.split(CHUNK_BYTES):
                yield memoryview(piece.cpu().view(torch.uint8).numpy())

        return NewTensor(key, kept[key].dtype, shape_of(mine[key]), name, pieces)

    ordered = sorted(mine, key=lambda key: -BITS[kept[key].dtype])  # so that each lies aligned to its type
    with writing(place), written_whole(place / name) as made:
        write_tensors(made, [tensor(key) for key in ordered], {})
        return ShardFile(name, made.stat().st_size, sha256(made))
