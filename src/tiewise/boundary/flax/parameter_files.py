"""Parameters as safetensors files that PyTorch reads and writes, bit for bit.

    save("boundary.safetensors", boundary.pure, boundary.parameters())     # safetensors.torch.load_model reads it
    boundary.load(load("boundary.safetensors", boundary.pure))             # reads safetensors.torch.save_model's file

A tied table is in the file once, with the note `table_out: table_in` that `safetensors.torch.save_model` writes for
shared tensors: the two files are equal byte for byte. Names are dotted; `nested` and `flat` convert between them and
Linen's trees. Nothing in a file is executed.
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
from tiewise.core.writing_faults import writing_fault

SHARED = {"table_out": "table_in"}
FREE_IDS = "free.ids"  # int32 [K], as PyTorch's boundary stores them


def save(path: str | Path, pure: PureBoundary, params: Mapping[str, Any]) -> None:
    """Write a boundary's parameters to a file; after an error there is no partial file.

    `load` has an example.

    Args:
        path: the safetensors file.
        pure: functions of the boundary, which give names and shapes.
        params: name → array of every parameter.

    Raises:
        CheckpointError: the parameters are not this boundary's, or the file cannot be written.
    """
    checked = require_parameters(params, pure, "these parameters")
    write(path, checked | _ids_of_free_rows(pure), SHARED if pure.tied else {})


def load(path: str | Path, pure: PureBoundary) -> dict[str, Array]:
    """Return a boundary's parameters from a safetensors file.

    >>> import tempfile
    >>> pure = PureBoundary.of("tied", vocab=10, width=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/boundary.safetensors", pure, pure.initial(jax.random.key(0)))
    ...     {name: x.shape for name, x in load(f"{folder}/boundary.safetensors", pure).items()}
    {'table_in': (10, 4)}

    Args:
        path: the safetensors file.
        pure: functions of the boundary, which give names and shapes.

    Returns:
        name → array of every parameter.

    Raises:
        CheckpointError: the file is not a safetensors file; parameters are missing, unknown or of another shape; the
            file has two different tables and the spec ties them; its free rows are of other tokens; or JAX would round
            fp64 values.
    """
    params = read(path)
    stored = np.asarray(params.pop(FREE_IDS, ()))
    if tuple(stored.tolist()) != pure.free_ids:
        what = f"{path} has free rows of other tokens than this boundary"
        raise CheckpointError(what, f"build the boundary with counts that are 1 at the tokens of {FREE_IDS}")
    return require_parameters(params, pure, str(path))


def _ids_of_free_rows(pure: PureBoundary) -> dict[str, Any]:
    """Return the ids of the free rows by their name in a file."""
    if not pure.free_ids:
        return {}
    return {FREE_IDS: np.asarray(pure.free_ids, np.int32)}


def write(path: str | Path, params: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> None:
    """Write dotted names → arrays to a file; after an error there is no partial file.

    `notes` are stored in the file's header.
    """
    path = Path(path)
    arrays = {name: np.ascontiguousarray(np.asarray(value)) for name, value in params.items()}
    metadata = dict(notes) if notes else None  # None omits the entry from the header
    try:
        with atomic_replacement(path) as unfinished:
            save_file(arrays, unfinished, metadata=metadata)
    except OSError as error:
        remedy = writing_fault(error).remedy("name another place")
        raise CheckpointError(f"cannot write {path}: {error.strerror}", remedy) from None


def read(path: str | Path) -> dict[str, Array]:
    """Return dotted names → arrays from a file.

    Raises:
        CheckpointError: as `load`, for reasons in the file alone.
    """
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
    """Raise a CheckpointError for the first array with 64 bits per number."""
    for name, value in arrays.items():
        if value.dtype.itemsize == 8:
            fix = "set jax_enable_x64, or save it in fp32"
            raise CheckpointError(f"{path}: {name} is {value.dtype}, which JAX would round to 32 bits", fix)


def require_parameters(params: Mapping[str, Any], pure: PureBoundary, where: str) -> dict[str, Any]:
    """Return exactly the parameters that a boundary has; raise as `load`."""
    remaining = dict(params)
    if pure.tied and SHARED.keys() <= remaining.keys():
        second = np.asarray(remaining.pop("table_out"))
        if second.tobytes() != np.asarray(remaining["table_in"]).tobytes():
            fix = "load it as untied, or tie it first"
            raise CheckpointError(f"{where} has two different tables for {pure.spec}", fix)
    return require_shapes(remaining, pure.shapes(), where, f"{pure.spec} has {', '.join(pure.shapes())}")


def require_shapes(
    params: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str, fix: str
) -> dict[str, Any]:
    """Return `params` in the order of `shapes`, after checking names and shapes.

    `fix` is the remedy in the error for different names.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape differs.
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
    """Return at most four names in alphabetical order, and an ellipsis for more."""
    more = ", …" if len(names) > 4 else ""
    return f"{', '.join(sorted(names)[:4])}{more}"


def flat(tree: Any, separator: str = ".") -> dict[str, Any]:
    """Return dotted names → leaves of a tree, in the order of its leaves.

    The tree may be Linen's `params`, an `nnx.State` or any pytree.
    """
    return {_leaf_name(path, separator): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _leaf_name(path: Iterable[Any], separator: str) -> str:
    """Return the name of a leaf, without the `value` that NNX adds to its path."""
    parts = [str(_key_name(key)) for key in path]
    return separator.join(part for part in parts if part != "value")


def _key_name(key: Any) -> Any:
    """Return the name or index in a key of a pytree's path.

    JAX has a class of keys for each type of node.
    """
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def nested(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries, as Linen's `params`, from dotted names."""
    return dict(unflatten_dict(dict(params), sep="."))
