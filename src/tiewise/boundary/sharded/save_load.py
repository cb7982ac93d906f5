"""Saving and loading the state of a training that runs in several processes.

Every process writes the parts of tensors that it has; if several processes have the same part, one writes it. The first
process writes the index. On loading, every process reads the parts that it needs from all files. No value is set before
everything is compared.
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

from tiewise.boundary.sharded.cuts import Indices, local_indices, local_part, parts_cover, shape_of
from tiewise.boundary.sharded.live_state import LiveState, describe_model, find_live_state
from tiewise.boundary.sharded.shard_files import (
    INDEX,
    NAMES,
    TYPES,
    VERSION,
    Index,
    SavedTensor,
    ShardedSave,
    ShardFile,
    ShardPart,
    remove_old_files,
    sha256,
    wrap_write_errors,
)
from tiewise.checkpoint.rewrite.change import NewTensor, Pieces
from tiewise.checkpoint.rewrite.file_writing import write_tensors
from tiewise.checkpoint.stored import BITS, CHUNK_BYTES
from tiewise.checkpoint.untrusted import short
from tiewise.core import ranks
from tiewise.core.errors import CheckpointError, RunError, UnsupportedError
from tiewise.core.files import atomic_replacement, write_atomically


class _TensorReport(NamedTuple):
    """Report of one process on a tensor, for all other processes."""

    dtype: str
    shape: tuple[int, ...]  # full shape, over all processes
    placed: str
    indices: Indices  # indices of this process's part


Report = dict[str, _TensorReport]  # by the tensor's name


@dataclass(frozen=True)
class _Division:
    """Division of the parts among the processes that write them.

    It is the same in every process, except `local_parts`.
    """

    tensors: dict[str, SavedTensor]
    layouts: list[list[ShardPart]]
    local_parts: dict[str, Indices]  # the parts that this process writes, by tensor name


def save_sharded(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None, *, notes: Mapping[str, Any] | None = None
) -> Path:
    """Save weights and optimizer state as the processes hold them, and return the folder.

    All processes make this call, and `folder` is shared. If `folder` holds an earlier save, that one is loaded until
    the new one is complete, and is then removed.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save = save_sharded(folder, torch.nn.Linear(2, 2), notes={"step": 1200})
    ...     load_sharded(folder, torch.nn.Linear(2, 2))
    {'step': 1200}

    Args:
        folder: created if missing; its parent must exist.
        model: plain or wrapped in DDP, with full tensors or DTensors (`fully_shard`, tensor parallelism, both).
        optimizer: a torch optimizer of the model's parameters, or accelerate's wrapper of one.
        notes: other values to save, of JSON's types: {"step": 1200, "scheduler": scheduler.state_dict()}. The notes of
            the first process are saved.

    Returns:
        The folder.

    Raises:
        UnsupportedError: the state cannot be saved: pipeline stages, FSDP1's flat parameters, a partial sum.
        CheckpointError: the model's tying contradicts its config, or the folder cannot be written.
        RunError: the optimizer has other parameters than the model, or another process ended meanwhile.
    """
    save_folder = Path(os.fspath(folder))
    with ranks.existing_group(f"{save_folder} was saved", "the folder holds this save or the one before it, whole"):
        try:
            with ranks.agreed():
                live = find_live_state(model, optimizer)
                report = _report_tensors(live)
                plain_notes = _to_json(notes or {})
            reports = ranks.all_of(report)
            with ranks.agreed():
                division = _divide_parts(reports)
            with ranks.agreed(), wrap_write_errors(save_folder):
                if ranks.is_first():
                    save_folder.mkdir(exist_ok=True)
                    remove_old_files(save_folder)
            # new file names: the save before this one is loaded until the index is replaced
            token = ranks.on_rank_zero(lambda: secrets.token_hex(4))
            with ranks.agreed():
                written = _write_shard(save_folder, f"sharded-{token}-{ranks.rank():05}.safetensors", live, division)
            files = ranks.all_of(written)
            state = (live.aliases, live.values, live.groups)
            index = Index(
                VERSION, plain_notes, files, division.layouts, division.tensors, *state, *describe_model(model)
            )
            with ranks.agreed(), wrap_write_errors(save_folder):
                if ranks.is_first():
                    _write_index(save_folder, index)
        except BaseException as error:
            # an error that other processes do not raise may come after they saw the save succeed
            if ranks.is_first() and ranks.is_raised_everywhere(error):
                remove_old_files(save_folder)
            raise
    return save_folder


def _to_json(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return notes as JSON reads them back."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(notes)))
    except (TypeError, ValueError) as error:
        raise RunError(f"notes cannot be kept: {error}", "give what JSON takes") from None
    return plain


def _write_index(save_folder: Path, index: Index) -> None:
    """Write the index, so that this save is loaded, and remove the save before it."""
    missing = [file.name for file in index.files if not (save_folder / file.name).is_file()]
    if missing:
        what = f"{save_folder}: {missing[0]}, which another process wrote, is not there"
        raise RunError(what, "give a folder on a file system that all processes share")
    write_atomically(save_folder / INDEX, json.dumps(asdict(index), separators=(",", ":")))  # JSON with infinities
    remove_old_files(save_folder)


def _report_tensors(live: LiveState) -> Report:
    """Return type, shape, placement and indices of every tensor in this process."""
    report = Report()
    indices: dict[Any, Indices] = {}  # one object for all tensors with the same cuts, so that less is sent
    for name, tensor in live.tensors.items():
        if tensor.dtype not in NAMES or tensor.layout != torch.strided:
            dtype_and_layout = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
            raise UnsupportedError(
                f"{name} is a tensor of {dtype_and_layout}", "only dense tensors of plain types are kept"
            )
        placed = _placement(tensor)
        key = (tuple(tensor.shape), placed, getattr(tensor, "device_mesh", None))
        if key not in indices:
            indices[key] = local_indices(tensor)
        part = indices[key]
        report[name] = _TensorReport(NAMES[tensor.dtype], tuple(tensor.shape), placed, part)
        if tuple(local_part(tensor).shape) != shape_of(part):
            what = f"{name}: its part has the shape {tuple(local_part(tensor).shape)}, not {shape_of(part)}"
            raise UnsupportedError(f"{what} as {placed} of {tuple(tensor.shape)} says", "it is cut in an unknown way")
    return report


def _placement(tensor: Tensor) -> str:
    """Return a description of how a tensor is placed on the mesh of processes."""
    if not isinstance(tensor, DTensor):
        return "whole"
    axes = tensor.device_mesh.mesh_dim_names or range(tensor.device_mesh.ndim)
    return ", ".join(f"{p!r} over {axis}" for p, axis in zip(tensor.placements, axes, strict=True))


def _divide_parts(reports: Sequence[Report]) -> _Division:
    """Divide the parts among processes to write; every process makes the same decision.

    If several processes have the same part, the one with the fewest bytes so far writes it.
    """
    _require_same_tensors(reports)
    division = _Division({}, [], {})
    layouts: dict[tuple[tuple[int, Indices], ...], int] = {}  # writers and parts of each layout → its number
    load = [0] * len(reports)  # bytes to write, by process
    for name, tensor in reports[0].items():
        parts = []
        for part, processes in _find_holders(name, reports).items():
            writer = min(processes, key=load.__getitem__)
            load[writer] += math.prod(shape_of(part)) * BITS[tensor.dtype] // 8
            parts.append((writer, part))
            if writer == ranks.rank():
                division.local_parts[name] = part
        if not parts_cover(tensor.shape, [part for _, part in parts]):
            what = f"{short(name)}: what the processes hold of it does not make up {tuple(tensor.shape)}"
            raise UnsupportedError(what, f"it is cut in a way that is not known here ({tensor.placed})")
        layout = layouts.setdefault(tuple(parts), len(layouts))
        division.tensors[name] = SavedTensor(tensor.dtype, list(tensor.shape), tensor.placed, layout)
    for layout_parts in layouts:
        division.layouts.append([ShardPart(writer, _as_lists(part)) for writer, part in layout_parts])
    return division


def _require_same_tensors(reports: Sequence[Report]) -> None:
    """Refuse processes that have different tensors, such as stages of a pipeline."""
    first = _tensor_signatures(reports[0])
    for process, report in enumerate(reports):
        differing = first ^ _tensor_signatures(report)
        if differing:
            name = min(differing)[0]
            what = f"processes 0 and {process} do not hold the same tensors: {short(name)}"
            raise UnsupportedError(what, "stages of a pipeline are no shards, and must be saved each for itself")


def _tensor_signatures(report: Report) -> set[tuple[str, str, tuple[int, ...]]]:
    """Return (name, type, full shape) of every tensor that a process reports."""
    return {(name, tensor.dtype, tensor.shape) for name, tensor in report.items()}


def _find_holders(name: str, reports: Sequence[Report]) -> dict[Indices, list[int]]:
    """Return the processes that have each nonempty part of a tensor."""
    holders: dict[Indices, list[int]] = {}
    for process, report in enumerate(reports):
        part = report[name].indices
        if math.prod(shape_of(part)):
            holders.setdefault(part, []).append(process)
    return holders


def _as_lists(part: Indices) -> list[list[list[int]]]:
    """Return the indices of a part as lists, for JSON."""
    return [[list(run) for run in axis] for axis in part]


def _write_shard(save_folder: Path, name: str, live: LiveState, division: _Division) -> ShardFile:
    """Write this process's file, and return its name, size and digest as read back."""
    # the widest types first, so that every tensor starts at a multiple of its element size
    ordered = sorted(division.local_parts, key=lambda key: -BITS[division.tensors[key].dtype])
    tensors = []
    for key in ordered:
        shape = shape_of(division.local_parts[key])
        # a function yields the bytes, so that a save needs no second copy in memory
        write = _byte_source(live.tensors[key])
        tensors.append(NewTensor(key, division.tensors[key].dtype, shape, name, write))
    with wrap_write_errors(save_folder), atomic_replacement(save_folder / name) as partial:
        write_tensors(partial, tensors, {})
        return ShardFile(name, partial.stat().st_size, sha256(partial))


def _byte_source(tensor: Tensor) -> Callable[[], Pieces]:
    """Return a function that yields the bytes of the local part of a tensor."""

    def pieces() -> Pieces:
        """Yield the bytes, a chunk at a time."""
        for piece in torch.split(local_part(tensor).contiguous().view(-1), CHUNK_BYTES):
            yield piece.cpu().view(torch.uint8).numpy().data

    return pieces


def load_sharded(folder: str | os.PathLike[str], model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Fill a model and its optimizer from a save, and return the save's notes.

    The save may come from any number of processes.

    All processes make this call. Build and shard the model, and create the optimizer, before it; both may be new. Every
    file's digest is computed, by one process each, and everything is compared before the first value is set.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save = save_sharded(folder, torch.nn.Linear(2, 2), notes={"step": 1200})
    ...     load_sharded(folder, torch.nn.Linear(2, 2))
    {'step': 1200}

    Args:
        folder: the folder of a save.
        model: the same model as was saved, sharded in any supported way.
        optimizer: the same optimizer as was saved; None loads the model alone.

    Returns:
        The `notes` of the save.

    Raises:
        CheckpointError: there is no complete save, a file was changed, or the model differs from the saved one.
        RunError: the optimizer differs from the saved one, or another process ended meanwhile.
        UnsupportedError: as `save_sharded`.
    """
    save_folder = Path(os.fspath(folder))
    with ranks.existing_group(f"{save_folder} was loaded", "start again"):
        with ranks.agreed():
            saved = ShardedSave(save_folder)
            saved.verify()
            live = find_live_state(model, optimizer)
            _require_same(saved, live)
        with ranks.agreed(), torch.no_grad():
            for name, tensor in live.tensors.items():
                if name.startswith("model/"):
                    saved.fill(saved.name_of(name), tensor)
            if optimizer is not None:
                _fill_optimizer(saved, live, getattr(optimizer, "optimizer", optimizer))
    return saved.index.notes


def _require_same(saved: ShardedSave, live: LiveState) -> None:
    """Refuse a model or an optimizer that differs from the saved one."""
    here = _model_names(live.tensors)
    _require_same_names(saved, live, here)
    _require_same_ties(saved, live, here)
    _require_same_shapes(saved, live, here)
    if live.groups is None:
        return
    if saved.index.groups is None:
        raise RunError(f"{saved.folder} has no optimizer state", "load the model alone: load_sharded(folder, model)")
    _saved_group_options(saved, live)


def _model_names(tensors: Iterable[str]) -> set[str]:
    """Return the names in the model of the model's tensors in a save."""
    return {name.removeprefix("model/") for name in tensors if name.startswith("model/")}


_AS_SAVED = "build the model as it was when it was saved"


def _require_same_names(saved: ShardedSave, live: LiveState, here: set[str]) -> None:
    """Refuse a model that lacks a saved name, or has another one."""
    names = here | live.aliases.keys()
    saved_names = _model_names(saved.index.tensors) | saved.index.aliases.keys()
    differing = names ^ saved_names
    if differing:
        name = min(differing)
        how = "is in the save and not in the model" if name in saved_names else "is not in the save"
        raise CheckpointError(f"{saved.folder}: {short(name)} {how}", _AS_SAVED)


def _require_same_ties(saved: ShardedSave, live: LiveState, here: set[str]) -> None:
    """Refuse a model in which other names share a parameter than in the save."""
    owners: dict[str, str] = {}  # name of a saved parameter → name in the model
    for name in (*here, *live.aliases):
        owner, saved_owner = live.aliases.get(name, name), saved.owner_of(name)
        if owners.setdefault(saved_owner, owner) != owner:
            both = f"{short(name)} and {short(owners[saved_owner])}"
            what = f"{both} were saved as one parameter, and are two in the model"
            raise CheckpointError(f"{saved.folder}: {what}", "tie them before the optimizer is built")
    for name, owner in live.aliases.items():
        if saved.owner_of(name) != saved.owner_of(owner):
            what = f"{short(name)} and {short(owner)} were saved as two parameters, and are one in the model"
            raise CheckpointError(f"{saved.folder}: {what}", "untie them before the optimizer is built")


def _require_same_shapes(saved: ShardedSave, live: LiveState, here: set[str]) -> None:
    """Refuse a model with a tensor of another type or shape."""
    for name in sorted(here):
        tensor, entry = live.tensors[f"model/{name}"], saved.index.tensors[saved.name_of(f"model/{name}")]
        dtype, shape = NAMES.get(tensor.dtype), list(tensor.shape)
        if (dtype, shape) != (entry.dtype, entry.shape):
            what = f"{short(name)} was saved as {entry.dtype} {entry.shape}"
            what += f", and is {NAMES.get(tensor.dtype, tensor.dtype)} {shape} in the model"
            raise CheckpointError(f"{saved.folder}: {what}", _AS_SAVED)


def _saved_group_options(saved: ShardedSave, live: LiveState) -> list[dict[str, Any]]:
    """Return the saved options of each of the optimizer's groups.

    Parameters with the same options may be in one group or in several: some optimizers need separate groups for tensors
    that are cut over different axes.
    """
    options = _options_by_parameter(saved)
    groups = []  # saved names of each group's parameters
    for members in live.parameters:
        groups.append([saved.owner_of(name) for name, _ in members])
    names = itertools.chain.from_iterable(groups)
    if sorted(names) != sorted(options):
        raise _groups_error(saved)
    options_of_groups = []
    for group in groups:
        options_of_groups.append(_common_options(saved, [options[name] for name in group]))
    return options_of_groups


def _options_by_parameter(saved: ShardedSave) -> dict[str, dict[str, Any]]:
    """Return the saved options of each parameter's group, without the names in it."""
    options: dict[str, dict[str, Any]] = {}
    for group in saved.index.groups or []:
        options_alone = {**group, "params": None}
        for name in group["params"]:
            options[name] = options_alone
    return options


def _common_options(saved: ShardedSave, options: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the options that all parameters of a group were saved with; none without parameters."""
    if not options:
        return {}
    common, *others = options
    for other in others:
        if other != common:
            raise _groups_error(saved)
    return common


def _groups_error(saved: ShardedSave) -> RunError:
    """Return the error for groups of an optimizer that differ from the saved ones."""
    what = f"{saved.folder}: the optimizer's groups hold other parameters than those that were saved"
    return RunError(what, "build the optimizer as it was when it was saved")


def _fill_optimizer(saved: ShardedSave, live: LiveState, optimizer: Any) -> None:
    """Set every parameter's saved state, cut as the parameter is, and every group's options."""
    state = _state_names(saved)
    for group, members, options in zip(
        optimizer.param_groups, live.parameters, _saved_group_options(saved, live), strict=True
    ):
        _set_options(group, options)
        steps_on_device = group.get("capturable") or group.get("fused")  # otherwise AdamW counts its steps on the CPU
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


def _state_names(saved: ShardedSave) -> dict[str, dict[str, str]]:
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


def _saved_step(saved: ShardedSave, name: str, device: torch.device) -> Any:
    """Return the saved number of an optimizer's steps, a value or a tensor on a device."""
    entry = saved.index.tensors.get(name)
    if entry is None:
        return saved.index.values[name]
    step = torch.empty(entry.shape, dtype=TYPES[entry.dtype], device=device)
    saved.fill(name, step)
    return step


def _saved_state(saved: ShardedSave, name: str, parameter: Tensor) -> Any:
    """Return a value or tensor of the optimizer's state.

    A tensor of its parameter's shape is cut as the parameter is.
    """
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
