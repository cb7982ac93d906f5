"""Parts of a tensor that processes hold, and how they overlap.

The *held* indices of a part: for each axis the runs [start, stop) that lie in it, one behind the other.

    a table [97, 32] over 4 processes, process 1     (((25, 50),), ((0, 32),))
    gate and up in one [12, 8] over 2, process 1     (((3, 6), (9, 12)), ((0, 8),))
    nothing left for the last of 4 of 3 rows         ((), ((0, 32),))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from tiewise.core.errors import UnsupportedError

Runs = Sequence[Sequence[int]]  # [start, stop) of indices of one axis, in the order of the bytes
Held = Sequence[Runs]  # of every axis


class Overlap(NamedTuple):
    """Indices that two lists of runs share: the first one's place in each, and how many."""

    source: int
    target: int
    length: int

    @property
    def source_slice(self) -> slice:
        """Return the indices in the first list."""
        return slice(self.source, self.source + self.length)

    @property
    def target_slice(self) -> slice:
        """Return the indices in the second list."""
        return slice(self.target, self.target + self.length)


class _Cut(NamedTuple):
    """One mesh axis that cuts an axis of a tensor."""

    axis: int
    pieces: int
    place: int  # of this process
    groups: int = 1  # of indices, each cut separately


def held(tensor: Tensor) -> Held:
    """Return the indices of a tensor that this process holds, all of a plain one.

    As torch lays DTensors out: mesh axes cut one after the other, each into pieces of ceil(n/W), the last smaller or
    empty; a `_StridedShard` cuts after the mesh axes behind it where its factor is theirs (FSDP over tensor
    parallelism), and else each of its groups separately (fused matrices).
    """
    axes = [_all_indices(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for cut in _cuts(tensor):
            axes[cut.axis] = _part(axes[cut.axis], cut)
    return tuple(axes)


def _all_indices(size: int) -> Runs:
    """Return the runs of all indices of an axis; none of an empty one."""
    if size == 0:
        return ()
    return ((0, size),)


def _cuts(tensor: DTensor) -> list[_Cut]:
    """Return the cuts that leave this process its part, in the order in which they apply."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None or any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError("a tensor is a partial sum, or lies on other processes", "save between two steps")
    cuts: list[_Cut] = []
    postponed: list[_Cut] = []
    for number, placement in enumerate[Any](tensor.placements):
        if placement.is_replicate():
            continue
        groups = getattr(placement, "split_factor", 1)
        cut = _Cut(placement.dim, mesh.size(number), place[number], groups)
        if groups > 1 and groups == _pieces_behind(tensor, placement.dim, number):
            postponed.append(cut._replace(groups=1))
        else:
            cuts.append(cut)
    return cuts + postponed[::-1]


def _pieces_behind(tensor: DTensor, axis: int, number: int) -> int:
    """Return into how many pieces the mesh axes behind `number` cut an axis of the tensor."""
    count = 1
    behind = slice(number + 1, None)
    for placement, size in zip(tensor.placements[behind], tensor.device_mesh.shape[behind], strict=True):
        if getattr(placement, "dim", None) == axis:
            count *= size
    return count


def _part(runs: Runs, cut: _Cut) -> Runs:
    """Return the part of some indices that a cut leaves, a piece of each group."""
    part: list[tuple[int, int]] = []
    size = _size(runs)
    width = max(1, math.ceil(size / cut.groups))
    for start in range(0, size, width):
        stop = min(start + width, size)
        step = math.ceil((stop - start) / cut.pieces)
        low = min(start + cut.place * step, stop)
        high = min(start + (cut.place + 1) * step, stop)
        part += _runs_between(runs, low, high)
    return tuple(part)


def _runs_between(runs: Runs, low: int, high: int) -> Iterable[tuple[int, int]]:
    """Yield the runs of indices number `low` to `high`, counted over all runs."""
    at = 0  # number of a run's first index
    for first, end in runs:
        start, stop = max(first, first + low - at), min(end, first + high - at)
        if start < stop:
            yield start, stop
        at += end - first


def _size(runs: Runs) -> int:
    """Return how many indices there are."""
    return sum(stop - start for start, stop in runs)


def shape_of(part: Held) -> tuple[int, ...]:
    """Return the shape of a part: how many indices its runs have, by axis."""
    return tuple(_size(runs) for runs in part)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process, no copy."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach()


def overlaps(source: Runs, target: Runs) -> list[Overlap]:
    """Return the indices that two lists of runs share."""
    shared, at = [], 0
    for first, end in source:
        to = 0
        for start, stop in target:
            low, high = max(first, start), min(end, stop)
            if low < high:
                shared.append(Overlap(at + low - first, to + low - start, high - low))
            to += stop - start
        at += end - first
    return shared


def make_up(shape: Sequence[int], parts: Sequence[Held]) -> bool:
    """Return whether parts make up a tensor of this shape, each index once.

    No part is empty. They do where, along every axis, the different cuts follow one another from 0 to the end, and each
    cut of one axis meets each of the others.
    """
    if not parts:
        return min(shape, default=1) == 0
    if 0 in shape:
        return False
    for part in parts:
        if not _has_runs_of(part, len(shape)):
            return False
    different = {_hashable(part) for part in parts}
    cuts = [set(runs) for runs in zip(*different, strict=True)]  # by axis
    for runs, size in zip(cuts, shape, strict=True):
        if not _fill_axis(runs, size):
            return False
    boxes = math.prod(len(runs) for runs in cuts)
    return len(different) == len(parts) == boxes


def _has_runs_of(part: Held, axes: int) -> bool:
    """Return whether a part has so many axes, whose runs are pairs that are not empty."""
    if len(part) != axes:
        return False
    for run in chain.from_iterable(part):
        if len(run) != 2:
            return False
        if run[0] >= run[1]:
            return False
    return True


def _hashable(part: Held) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return a part, which may be of lists, in tuples."""
    return tuple(tuple(map(tuple, axis)) for axis in part)


def _fill_axis(cuts: Iterable[tuple[tuple[int, ...], ...]], size: int) -> bool:
    """Return whether the runs of different cuts follow one another from 0 to `size`."""
    at = 0
    for start, stop in sorted(chain.from_iterable(cuts)):
        if start != at:
            return False
        at = stop
    return at == size
