"""Parameters as safetensors files that PyTorch reads and writes, bit for bit.

    save("boundary.safetensors", boundary.pure, boundary.parameters())     # safetensors.torch.load_model reads it
    boundary.load(load("boundary.safetensors", boundary.pure))             # what safetensors.torch.save_model wrote

A tied table is in the file once, with the note `table_out: table_in` that `safetensors.torch.save_model` leaves for
shared tensors: the two files are equal byte for byte. Names are dotted; `nested` and `flat` turn them into Linen's
trees and back. Nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tiewise.boundary.flax.boundary import PureBoundary
from tiewise.core.errors import CheckpointError, one_line_message
from tiewise.core.files import atomic_replacement

SHARED = {"table_out": "table_in"}


def save(path: str | Path, pure: PureBoundary, params: Mapping[str, Any]) -> None:
    """Write a boundary's parameters, whole or not at all; CheckpointError where they are not this boundary's."""
    write(path, fitting(params, pure, "these parameters"), SHARED if pure.tied else {})


def load(path: str | Path, pure: PureBoundary) -> dict[str, Array]:
    """Read a boundary's parameters.

    Raises:
        CheckpointError: no safetensors file, parameters missing, unknown or of another shape, two different tables
            where the spec ties them, or fp64 that JAX would round.
    """
    return fitting(read(path), pure, str(path))


def write(path: str | Path, params: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> None:
    """Write dotted names → arrays, whole or not at all, with `notes` in the file's header."""
    path = Path(path)
    arrays = {name: np.ascontiguousarray(np.asarray(value)) for name, value in params.items()}
    metadata = dict(notes) if notes else None  # None leaves the entry out of the header
    try:
        with atomic_replacement(path) as unfinished:
            save_file(arrays, unfinished, metadata=metadata)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}", "name another place") from None


def read(path: str | Path) -> dict[str, Array]:
    """Read dotted names → arrays. Raises as `load`, of the file alone."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path}: no such file", "name a safetensors file")
    try:
        arrays = load_file(path)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        what = f"{path} is not a safetensors file that numpy can hold: {one_line_message(error)}"
        raise CheckpointError(what, "save it again") from None
    if not jax.config.jax_enable_x64:
        _refuse_wide_types(arrays, path)
    return {name: jnp.asarray(value) for name, value in arrays.items()}


def _refuse_wide_types(arrays: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Raise a CheckpointError for the first array in 64 bits."""
    for name, value in arrays.items():
        if value.dtype.itemsize == 8:
            fix = "set jax_enable_x64, or save it in fp32"
            raise CheckpointError(f"{path}: {name} is {value.dtype}, which JAX would round to 32 bits", fix)


def fitting(params: Mapping[str, Any], pure: PureBoundary, where: str) -> dict[str, Any]:
    """Return exactly the parameters that a boundary has; raises as `load`."""
    remaining = dict(params)
    if pure.tied and SHARED.keys() <= remaining.keys():
        second = np.asarray(remaining.pop("table_out"))
        if second.tobytes() != np.asarray(remaining["table_in"]).tobytes():
            fix = "load it as untied, or tie it first"
            raise CheckpointError(f"{where} has two different tables for {pure.spec}", fix)
    return exactly(remaining, pure.shapes(), where, f"{pure.spec} has {', '.join(pure.shapes())}")


def exactly(params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str, fix: str) -> dict[str, Any]:
    """Return `params` in the order of `shapes`, all of them and no other.

    `fix` is for names that differ.
    """
    missing, unknown = shapes.keys() - params.keys(), params.keys() - shapes.keys()
    if missing:
        raise CheckpointError(f"{where} lacks {_first_names(missing)}", fix)
    if unknown:
        raise CheckpointError(f"{where} has the unknown {_first_names(unknown)}", fix)
    for name, shape in shapes.items():
        actual = tuple(params[name].shape)
        if actual != shape:
            what = f"{where}: {name} has shape {actual}, not {shape}"
            raise CheckpointError(what, "build it with the sizes of the file")
    return {name: params[name] for name in shapes}


def _first_names(names: AbstractSet[str]) -> str:
    """Return at most four names in their order, and an ellipsis for more."""
    more = ", …" if len(names) > 4 else ""
    return f"{', '.join(sorted(names)[:4])}{more}"


def flat(tree: Any, separator: str = ".") -> dict[str, Any]:
    """Turn a tree (Linen's `params`, an `nnx.State`, any pytree) into dotted names, in the order of its leaves."""
    return {_joined(path, separator): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _joined(path: Iterable[Any], separator: str) -> str:
    """Return the name of a leaf, without the `value` that an NNX variable adds to its path."""
    parts = [str(_key_name(key)) for key in path]
    return separator.join(part for part in parts if part != "value")


def _key_name(key: Any) -> Any:
    """Return the name or index in a key of a pytree's path.

    JAX has a class of keys for each kind of node.
    """
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def nested(params: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted names into nested dictionaries, as Linen's `params`."""
    return dict(unflatten_dict(dict(params), sep="."))
