"""Comparison of `model.safetensors` with the shard files next to it, which an index names.

transformers opens `model.safetensors` and ignores the index. Other loaders read the shard files. All loaders agree if
both store the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from tiewise.checkpoint.hf_folder import SINGLE, Fault, Folder, recording_faults
from tiewise.checkpoint.stored import Stored, read_header_from

MOST_COMPARED = 4 * 2**30  # bytes of a model up to which every tensor is compared


class SecondCopy(Enum):
    """Relation of `model.safetensors` to the shard files."""

    EQUAL = "every tensor is equal"
    ENDS_EQUAL = "the tables of both ends are equal, and the other tensors were not compared"
    DIFFERENT = "they store different tensors"
    UNKNOWN = "their tensors were not compared"


def compare_single_file(
    folder: Folder, ends: tuple[Stored, ...], are_equal: Callable[[Stored, Stored], bool], *, scan: bool
) -> SecondCopy:
    """Return the relation of `model.safetensors` to the shard files of a folder.

    Args:
        folder: folder whose index does not name the file.
        ends: stored tables of both ends, which are always compared.
        are_equal: compares the bytes of two tensors.
        scan: tensors may be read; False: headers only.
    """
    copies = _tensors_of_single_file(folder)
    if copies is None:
        return SecondCopy.UNKNOWN
    if _headers(copies) != _headers(folder.tensors):
        return SecondCopy.DIFFERENT
    if not scan:
        return SecondCopy.UNKNOWN
    compared, relation = list(folder.tensors.values()), SecondCopy.EQUAL
    if folder.nbytes > MOST_COMPARED:
        compared, relation = list(ends), SecondCopy.ENDS_EQUAL
    if all(are_equal(tensor, copies[tensor.name]) for tensor in compared):
        return relation
    return SecondCopy.DIFFERENT


def _tensors_of_single_file(folder: Folder) -> Mapping[str, Stored] | None:
    """Return the tensors of `model.safetensors`. None on the Hub, and after a fault of any file."""
    if folder.repository is not None or folder.faults:
        return None
    faults = list[Fault]()
    with recording_faults(faults, SINGLE):
        return read_header_from(folder.source, SINGLE).tensors
    return None


def _headers(tensors: Mapping[str, Stored]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor."""
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
