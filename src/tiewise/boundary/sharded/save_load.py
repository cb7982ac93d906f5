"""Saving and loading the state of a training that several processes hold.

Every process writes the parts that it holds; of a part that several hold, one writes it. The first process writes the
index. Every process reads the parts that it will hold from all files. Nothing is set before everything is compared.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiewise.boundary.sharded.cuts import Held, held, local, make_up, shape_of
from tiewise.boundary.sharded.held_state import HeldState, built_from, find_held
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


class _HeldTensor(NamedTuple):
    """Report of one process on a tensor, for all others."""

    dtype: str
    shape: tuple[int, ...]  # over all processes
    placed: str
    indices: Held  # of this process


Report = dict[str, _HeldTensor]  # by name


@dataclass(frozen=True)
class _Division:
    """Which process writes which part: the same in every process, except `mine`."""

    tensors: dict[str, WholeTensor]
    layouts: list[list[ShardPart]]
    mine: dict[str, Held]  # the parts that this process writes, by name


def save_sharded(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, notes: Mapping[str, Any] | None = None
) -> Path:
    """Save weights and optimizer state as the processes hold them.

    All processes call it, and `folder` is shared. A save that lies in `folder` stays what is loaded until this one is
    whole, and is then removed.

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
                report = _report(live)
                plain_notes = _as_json(notes or {})
            everyone = ranks.all_of(report)
            with ranks.agreed():
                division = _divided(everyone)
            with ranks.agreed(), writing(place):
                if ranks.first():
                    place.mkdir(exist_ok=True)
                    sweep(place)
            # the names differ from those of the save before, which is loaded until the index is replaced
            token = ranks.on_rank_zero(lambda: secrets.token_hex(4))
            with ranks.agreed():
                written = _write_shard(place, f"sharded-{token}-{ranks.rank():05}.safetensors", live, division)
            files = ranks.all_of(written)
            state = (live.aliases, live.values, live.groups)
            index = Index(VERSION, plain_notes, files, division.layouts, division.tensors, *state, *built_from(model))
            with ranks.agreed(), writing(place):
                if ranks.first():
                    _write_index(place, index)
        except BaseException as error:
            if ranks.first() and ranks.known(error):  # else another process may have seen it succeed
                sweep(place)
            raise
    return place


def _as_json(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return notes as they come back from JSON."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(notes)))
    except (TypeError, ValueError) as error:
        raise RunError(f"notes cannot be kept: {error}", "give what JSON takes") from None
    return plain


def _write_index(place: Path, index: Index) -> None:
    """Write the index, with which this save is loaded, and remove the one before."""
    lost = [file.name for file in index.files if not (place / file.name).is_file()]
    if lost:
        what = f"{place}: {lost[0]}, which another process wrote, is not there"
        raise RunError(what, "give a folder on a file system that all processes share")
    write_whole(place / INDEX, json.dumps(asdict(index), separators=(",", ":")))  # infinities too
    sweep(place)


def _report(live: HeldState) -> Report:
    """Return type, shape, placement and held indices of every tensor in this process."""
    report = Report()
    indices: dict[Any, Held] = {}  # one object for all that are cut alike: less is sent
    for name, tensor in live.tensors.items():
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
            raise UnsupportedError(f"{name} is a tensor of {kind}", "only dense tensors of plain types are kept")
        placed = _placement(tensor)
        key = (tuple(tensor.shape), placed, getattr(tensor, "device_mesh", None))
        if key not in indices:
            indices[key] = held(tensor)
        part = indices[key]
        report[name] = _HeldTensor(NAMES[tensor.dtype], tuple(tensor.shape), placed, part)
        if tuple(local(tensor).shape) != shape_of(part):
            what = f"{name}: its part has the shape {tuple(local(tensor).shape)}, not {shape_of(part)}"
            raise UnsupportedError(f"{what} as {placed} of {tuple(tensor.shape)} says", "it is cut in an unknown way")
    return report


def _placement(tensor: Tensor) -> str:
    """Return in words how a tensor is placed on the mesh of processes."""
    if not isinstance(tensor, DTensor):
        return "whole"
    axes = tensor.device_mesh.mesh_dim_names or range(tensor.device_mesh.ndim)
    return ", ".join(f"{p!r} over {axis}" for p, axis in zip(tensor.placements, axes, strict=True))


def _divided(everyone: Sequence[Report]) -> _Division:
    """Return which process writes which part: decided alike in every process.

    Of those that hold the same part, the one writes that has least to write.
    """
    _require_same_tensors(everyone)
    division = _Division({}, [], {})
    layouts: dict[tuple[tuple[int, Held], ...], int] = {}  # the writers and parts of each layout → its number
    load = [0] * len(everyone)  # bytes that each process writes
    for name, tensor in everyone[0].items():
        parts = []
        for part, processes in _holders(name, everyone).items():
            writer = min(processes, key=load.__getitem__)
            load[writer] += math.prod(shape_of(part)) * BITS[tensor.dtype] // 8
            parts.append((writer, part))
            if writer == ranks.rank():
                division.mine[name] = part
        if not make_up(tensor.shape, [part for _, part in parts]):
            what = f"{short(name)}: what the processes hold of it does not make up {tuple(tensor.shape)}"
            raise UnsupportedError(what, f"it is cut in a way that is not known here ({tensor.placed})")
        layout = layouts.setdefault(tuple(parts), len(layouts))
        division.tensors[name] = WholeTensor(tensor.dtype, list(tensor.shape), tensor.placed, layout)
    for layout_parts in layouts:
        division.layouts.append([ShardPart(writer, _in_lists(part)) for writer, part in layout_parts])
    return division


def _require_same_tensors(everyone: Sequence[Report]) -> None:
    """Refuse processes that hold different tensors: stages of a pipeline."""
    first = _kinds(everyone[0])
    for process, report in enumerate(everyone):
        differing = first ^ _kinds(report)
        if differing:
            name = min(differing)[0]
            what = f"processes 0 and {process} do not hold the same tensors: {short(name)}"
            raise UnsupportedError(what, "stages of a pipeline are no shards, and must be saved each for itself")


def _kinds(report: Report) -> set[tuple[str, str, tuple[int, ...]]]:
    """Return (name, type, shape over all processes) of every tensor that a process reports."""
    return {(name, tensor.dtype, tensor.shape) for name, tensor in report.items()}


def _holders(name: str, everyone: Sequence[Report]) -> dict[Held, list[int]]:
    """Return the processes that hold each part of a tensor, without empty parts."""
    holders: dict[Held, list[int]] = {}
    for process, report in enumerate(everyone):
        part = report[name].indices
        if math.prod(shape_of(part)):
            holders.setdefault(part, []).append(process)
    return holders


def _in_lists(part: Held) -> list[list[list[int]]]:
    """Return the indices of a part as JSON has them."""
    return [[list(run) for run in axis] for axis in part]


def _write_shard(place: Path, name: str, live: HeldState, division: _Division) -> ShardFile:
    """Write this process's file, and return its name, size and digest as read back."""
    # the widest types first: then every tensor starts at a multiple of its number's size
    ordered = sorted(division.mine, key=lambda key: -BITS[division.tensors[key].dtype])
    tensors = []
    for key in ordered:
        shape = shape_of(division.mine[key])
        # a function that yields the bytes: a save holds no second copy in memory
        write = _pieces_of(live.tensors[key])
        tensors.append(NewTensor(key, division.tensors[key].dtype, shape, name, write))
    with writing(place), written_whole(place / name) as partial:
        write_tensors(partial, tensors, {})
        return ShardFile(name, partial.stat().st_size, sha256(partial))


def _pieces_of(tensor: Tensor) -> Callable[[], Pieces]:
    """Return a function that yields the bytes of the part of a tensor in this process."""

    def pieces() -> Pieces:
        """Yield the bytes, a chunk at a time."""
        for piece in torch.split(local(tensor).contiguous().view(-1), CHUNK_BYTES):
            yield piece.cpu().view(torch.uint8).numpy().data

    return pieces


def load_sharded(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Fill a model and its optimizer from a save, whatever number of processes wrote it.

    All processes call it. The model is built and sharded as it shall be, and the optimizer made, before; both may be
    fresh. Every file's digest is computed, by one process each, and everything is compared, before the first value is
    set.

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
    here = _model_names(live.tensors)
    _require_same_names(saved, live, here)
    _require_same_ties(saved, live, here)
    _require_same_shapes(saved, live, here)
    if live.groups is None:
        return
    if saved.index.groups is None:
        raise RunError(f"{saved.place} has no optimizer state", "load the model alone: load_sharded(folder, model)")
    _options(saved, live)


def _model_names(tensors: Iterable[str]) -> set[str]:
    """Return the names in the model of those tensors of a save that are the model's."""
    return {name.removeprefix("model/") for name in tensors if name.startswith("model/")}


_AS_SAVED = "build the model as it was when it was saved"


def _require_same_names(saved: Saved, live: HeldState, here: set[str]) -> None:
    """Refuse a model that lacks a name of the save, or has another one."""
    names = here | live.aliases.keys()
    saved_names = _model_names(saved.index.tensors) | saved.index.aliases.keys()
    differing = names ^ saved_names
    if differing:
        name = min(differing)
        how = "is in the save and not in the model" if name in saved_names else "is not in the save"
        raise CheckpointError(f"{saved.place}: {short(name)} {how}", _AS_SAVED)


def _require_same_ties(saved: Saved, live: HeldState, here: set[str]) -> None:
    """Refuse a model in which other names share a parameter than in the save."""
    owners: dict[str, str] = {}  # name of a saved parameter → name of the model's
    for name in (*here, *live.aliases):
        owner, saved_owner = live.aliases.get(name, name), saved.owner_of(name)
        if owners.setdefault(saved_owner, owner) != owner:
            both = f"{short(name)} and {short(owners[saved_owner])}"
            what = f"{both} were saved as one parameter, and are two in the model"
            raise CheckpointError(f"{saved.place}: {what}", "tie them before the optimizer is built")
    for name, owner in live.aliases.items():
        if saved.owner_of(name) != saved.owner_of(owner):
            what = f"{short(name)} and {short(owner)} were saved as two parameters, and are one in the model"
            raise CheckpointError(f"{saved.place}: {what}", "untie them before the optimizer is built")


def _require_same_shapes(saved: Saved, live: HeldState, here: set[str]) -> None:
    """Refuse a model with a tensor of another type or shape."""
    for name in sorted(here):
        tensor, entry = live.tensors[f"model/{name}"], saved.index.tensors[saved.name_of(f"model/{name}")]
        dtype, shape = NAMES.get(tensor.dtype), list(tensor.shape)
        if (dtype, shape) != (entry.dtype, entry.shape):
            what = f"{short(name)} was saved as {entry.dtype} {entry.shape}"
            what += f", and is {NAMES.get(tensor.dtype, tensor.dtype)} {shape} in the model"
            raise CheckpointError(f"{saved.place}: {what}", _AS_SAVED)


def _options(saved: Saved, live: HeldState) -> list[dict[str, Any]]:
    """Return the options that the parameters of each of the optimizer's groups were saved with.

    Groups of the same options may be one or several: some optimizers want those apart that are cut over other axes.
    """
    options = _options_by_parameter(saved)
    groups = []  # of names in the save
    for members in live.parameters:
        groups.append([saved.owner_of(name) for name, _ in members])
    names = itertools.chain.from_iterable(groups)
    if sorted(names) != sorted(options):
        raise _other_groups(saved)
    options_of_groups = []
    for group in groups:
        options_of_groups.append(_common_options(saved, [options[name] for name in group]))
    return options_of_groups


def _options_by_parameter(saved: Saved) -> dict[str, dict[str, Any]]:
    """Return the saved options of each parameter's group, without the names in it."""
    options: dict[str, dict[str, Any]] = {}
    for group in saved.index.groups or []:
        options_alone = {**group, "params": None}
        for name in group["params"]:
            options[name] = options_alone
    return options


def _common_options(saved: Saved, options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the options that all parameters of a group were saved with. A group without parameters has none."""
    if not options:
        return {}
    common, *others = options
    for other in others:
        if other != common:
            raise _other_groups(saved)
    return common


def _other_groups(saved: Saved) -> RunError:
    """Return the error on groups of an optimizer that are not those of the save."""
    what = f"{saved.place}: the optimizer's groups hold other parameters than those that were saved"
    return RunError(what, "build the optimizer as it was when it was saved")


def _fill_optimizer(saved: Saved, live: HeldState, optimizer: Any) -> None:
    """Give every parameter its saved state, cut as the parameter is, and every group its options."""
    state = _state_names(saved)
    for group, members, options in zip(optimizer.param_groups, live.parameters, _options(saved, live), strict=True):
        _set_options(group, options)
        steps_on_device = group.get("capturable") or group.get("fused")  # else AdamW counts its steps on the CPU
        for name, parameter in members:
            step_device = parameter.device if steps_on_device else torch.device("cpu")
            optimizer.state.pop(parameter, None)
            names = state.get(saved.owner_of(name), {})
            for key, saved_name in names.items():
                if key == "step":
                    value = _saved_step(saved, saved_name, step_device)
                else:
                    value = _saved_state(saved, saved_name, parameter)
                optimizer.state[parameter][key] = value


def _state_names(saved: Saved) -> dict[str, dict[str, str]]:
    """Return the saved name of each parameter's state, by its key: {"lm_head.weight": {"exp_avg": …}}."""
    names: dict[str, dict[str, str]] = {}
    for name in (*saved.index.tensors, *saved.index.values):
        if name.startswith("optimizer/"):
            _, key, owner = name.split("/", 2)
            names.setdefault(owner, {})[key] = name
    return names


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the options of one of the optimizer's groups, tensors in place."""
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        elif key != "params":
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _saved_step(saved: Saved, name: str, device: torch.device) -> Any:
    """Return the saved number of an optimizer's steps, a value or a tensor on a device."""
    entry = saved.index.tensors.get(name)
    if entry is None:
        return saved.index.values[name]
    step = torch.empty(entry.shape, dtype=TYPES[entry.dtype], device=device)
    saved.fill(name, step)
    return step


def _saved_state(saved: Saved, name: str, parameter: Tensor) -> Any:
    """Return a value or tensor of the optimizer's state, cut as its parameter if alike."""
    entry = saved.index.tensors.get(name)
    if entry is None:
        return saved.index.values[name]
    dtype = TYPES[entry.dtype]
    if entry.shape == list(parameter.shape):
        state = torch.empty_like(parameter, dtype=dtype)
    else:
        state = torch.empty(entry.shape, dtype=dtype, device=parameter.device)
    saved.fill(name, state)
    return state
