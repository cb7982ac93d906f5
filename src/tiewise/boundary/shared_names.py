"""Names of a model's parameters by the tensor that they share, with shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class NamedParameter:
    """One parameter with every name that it has in a model."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' = '.join(self.names)} {list(self.shape)}"


def named_tables(model: nn.Module, tables: Iterable[Tensor]) -> list[NamedParameter]:
    """Return each of the tables once, with all its names in the model."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    distinct = {id(table): table for table in tables}
    return [NamedParameter(tuple(names.get(key, ())), tuple(table.shape)) for key, table in distinct.items()]


def shared_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return every parameter that has several names in a model."""
    return [one for one in named_tables(model, model.parameters()) if len(one.names) > 1]
