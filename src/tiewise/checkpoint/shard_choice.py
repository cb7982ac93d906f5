"""Choice of the shard files whose headers answer questions on the two ends of a model.

The index names all tensors. `find_roles` reads these names as it reads those of a folder, and the shard files of the
tensors with a role are chosen. Shapes are unknown at that point, so tensors that may have a role count too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiewise.checkpoint.claims import read_claims
from tiewise.checkpoint.end_names import BY_SHAPES
from tiewise.checkpoint.family_record import ClassEnds, module_of
from tiewise.checkpoint.roles import Roles, find_roles
from tiewise.checkpoint.stored import Stored


def shards_of_ends(weight_map: Mapping[str, str], config: Mapping[str, Any] | None) -> set[str] | None:
    """Return the shard files of both ends and of tensors tied to them.

    None if the names do not show both ends: then shapes must decide, so every header is needed.
    """
    # a matrix of one number stands for a tensor whose shape is not known yet
    unseen = {name: Stored(name, Path(file), "F32", (1, 1), 0, 4) for name, file in weight_map.items()}
    roles = find_roles(unseen, config)
    if roles.source == BY_SHAPES or roles.input is None or _lacks_separate_head(roles, config):
        return None
    return {tensor.path.name for tensor in _with_role(unseen, roles)}


def _lacks_separate_head(roles: Roles, config: Mapping[str, Any] | None) -> bool:
    """Return whether the config has two tables, and the index names one."""
    if roles.headless or roles.output is not None:
        return False
    return read_claims(config).tied is not True


def _with_role(tensors: Mapping[str, Stored], roles: Roles) -> Iterator[Stored]:
    """Yield the tensors that may have a role at an end by their names."""
    yield from (*roles.tables, *roles.biases, *roles.positions, *roles.maps, *roles.opaque)
    yield from (*roles.input_end.parts.values(), *roles.output_end.parts.values())
    for other in roles.indexed_tensors:
        yield other.tensor
    ends = roles.class_ends or ClassEnds()
    tied = {*roles.ties, *roles.ties.values()}
    for name, tensor in tensors.items():
        if name in tied or _belongs_to_class_ends(ends, name):
            yield tensor


def _belongs_to_class_ends(ends: ClassEnds, name: str) -> bool:
    """Return whether a class loads a tensor as a part of its ends."""
    for loaded in (ends.loaded_as(name), ends.loaded_as(module_of(name)[0]), ends.head_tensor(name)):
        if loaded is not None:
            return True
    return False
