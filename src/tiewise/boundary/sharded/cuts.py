"""Parts of a tensor that processes have, and their overlaps.

The *indices* of a part: for each axis the runs [start, stop) in it, in the order of the bytes.

    a table [97, 32] over 4 processes, process 1     (((25, 50),), ((0, 32),))
    gate and up in one [12, 8] over 2, process 1     (((3, 6), (9, 12)), ((0, 8),))
    3 rows over 4 processes, the last process        ((), ((0, 32),))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from tiewise.core.errors import UnsupportedError

Runs = Sequence[Sequence[int]]  # runs [start, stop) of indices along one axis, in the order of the bytes
Indices = Sequence[Runs]  # runs along every axis


class Overlap(NamedTuple):
    """Indices that two lists of runs share: their position in each list, and their number."""

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
    """Mesh axis that cuts an axis of a tensor."""

    axis: int
    pieces: int
    coordinate: int  # coordinate of this process along the mesh axis
    groups: int = 1  # groups of indices, each cut separately


def local_indices(tensor: Tensor) -> Indices:
    """Return the indices of a tensor that this process has; all indices of a plain tensor.

    They follow torch's layout of DTensors. Mesh axes cut one after the other, each into pieces of ceil(n/W); the last
    piece is smaller or empty. A `_StridedShard` whose factor is the number of pieces of the later mesh axes cuts after
    them (FSDP over tensor parallelism). Any other `_StridedShard` cuts each of its groups separately (fused matrices).
    """
    axes = [_all_indices(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for cut in _find_cuts(tensor):
            axes[cut.axis] = _cut_runs(axes[cut.axis], cut)
    return tuple(axes)


def _all_indices(size: int) -> Runs:
    """Return the runs of all indices of an axis; no run if it is empty."""
    if size == 0:
        return ()
    return ((0, size),)


def _find_cuts(tensor: DTensor) -> list[_Cut]:
    """Return the cuts that give this process its part, in the order in which they apply."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedError("a tensor is a partial sum, or lies on other processes", "save between two steps")
    cuts: list[_Cut] = []
    postponed: list[_Cut] = []
    for number, placement in enumerate[Any](tensor.placements):
        if placement.is_replicate():
            continue
        groups = getattr(placement, "split_factor", 1)
        cut = _Cut(placement.dim, mesh.size(number), coordinate[number], groups)
        if groups > 1 and groups == _count_later_pieces(tensor, placement.dim, number):
            postponed.append(cut._replace(groups=1))
        else:
            cuts.append(cut)
    return cuts + postponed[::-1]


def _count_later_pieces(tensor: DTensor, axis: int, number: int) -> int:
    """Return into how many pieces the mesh axes after `number` cut an axis of the tensor."""
    count = 1
    later = slice(number + 1, None)
    for placement, size in zip(tensor.placements[later], tensor.device_mesh.shape[later], strict=True):
        if getattr(placement, "dim", None) == axis:
            count *= size
    return count


def _cut_runs(runs: Runs, cut: _Cut) -> Runs:
    """Return the part of some indices that a cut leaves, a piece of each group."""
    indices: list[tuple[int, int]] = []
    size = _count_indices(runs)
    width = max(1, math.ceil(size / cut.groups))
    for start in range(0, size, width):
        stop = min(start + width, size)
        step = math.ceil((stop - start) / cut.pieces)
        low = min(start + cut.coordinate * step, stop)
        high = min(start + (cut.coordinate + 1) * step, stop)
        indices += _runs_between(runs, low, high)
    return tuple(indices)


def _runs_between(runs: Runs, low: int, high: int) -> Iterable[tuple[int, int]]:
    """Yield the runs of indices number `low` to `high`, counted over all runs."""
    at = 0  # position of a run's first index
    for first, end in runs:
        start, stop = max(first, first + low - at), min(end, first + high - at)
        if start < stop:
            yield start, stop
        at += end - first


def _count_indices(runs: Runs) -> int:
    """Return the number of indices in some runs."""
    return sum(stop - start for start, stop in runs)


def shape_of(indices: Indices) -> tuple[int, ...]:
    """Return the shape of a part: the number of indices along each axis."""
    return tuple(_count_indices(runs) for runs in indices)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this process, without copying it."""
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


def parts_cover(shape: Sequence[int], parts: Sequence[Indices]) -> bool:
    """Return whether parts cover a tensor of this shape, each index exactly once.

    No part may be empty. Parts cover the tensor if two conditions are met: along every axis, the distinct cuts follow
    one another from 0 to the end; and each cut of one axis is combined with each cut of the others.
    """
    if not parts:
        return min(shape, default=1) == 0
    if 0 in shape:
        return False
    for indices in parts:
        if not _is_well_formed(indices, len(shape)):
            return False
    distinct = {_as_tuples(indices) for indices in parts}
    cuts = [set(runs) for runs in zip(*distinct, strict=True)]  # distinct cuts of each axis
    for runs, size in zip(cuts, shape, strict=True):
        if not _cuts_cover(runs, size):
            return False
    boxes = math.prod(len(runs) for runs in cuts)
    return len(distinct) == len(parts) == boxes


def _is_well_formed(indices: Indices, axes: int) -> bool:
    """Return whether a part has `axes` axes, whose runs are nonempty pairs."""
    if len(indices) != axes:
        return False
    for run in chain.from_iterable(indices):
        if len(run) != 2:
            return False
        if run[0] >= run[1]:
            return False
    return True


def _as_tuples(indices: Indices) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return a part, which may consist of lists, as tuples."""
    return tuple(tuple(map(tuple, axis)) for axis in indices)


def _cuts_cover(cuts: Iterable[tuple[tuple[int, ...], ...]], size: int) -> bool:
    """Return whether the runs of distinct cuts follow one another from 0 to `size`."""
    at = 0
    for start, stop in sorted(chain.from_iterable(cuts)):
        if start != at:
            return False
        at = stop
    return at == size
