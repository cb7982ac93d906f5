"""Which part of a tensor a process holds.

The *held* indices of a part: for each axis the runs [start, stop) that lie in it, one behind the other.

    a table [97, 32] over 4 processes, process 1     (((25, 50),), ((0, 32),))
    gate and up in one [12, 8] over 2, process 1     (((3, 6), (9, 12)), ((0, 8),))
    nothing left for the last of 4 of 3 rows         ((), ((0, 32),))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from tiewise.core.errors import UnsupportedError

Runs = Sequence[Sequence[int]]  # [start, stop) of indices of one axis, in the order of the bytes
Held = Sequence[Runs]  # of every axis


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
    size = _length(runs)
    width, found = math.ceil(size / groups), list[tuple[int, int]]()
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


def _length(runs: Runs) -> int:
    """Return how many indices there are in runs."""
    return sum(stop - start for start, stop in runs)


def shape_of(part: Held) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(map(_length, part))


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
    if any(len(part) != len(shape) for part in parts):
        return False
    if any(len(run) != 2 or run[0] >= run[1] for part in parts for axis in part for run in axis):
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
