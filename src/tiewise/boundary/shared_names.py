"""Names of a model's parameters by the tensor that they share, with shapes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class NamedParameter:
    """One parameter with every name that it has in a model."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' = '.join(self.names)} {list(self.shape)}"


def named_tables(model: nn.Module, tables: tuple[Tensor, ...]) -> list[NamedParameter]:
    """Return each of the tables once, with all its names in the model."""
    distinct = {id(table): table for table in tables}
    return [NamedParameter(names_of(model, table), tuple(table.shape)) for table in distinct.values()]


def names_of(model: nn.Module, parameter: Tensor) -> tuple[str, ...]:
    """Return all names of a parameter in a model."""
    every = model.named_parameters(remove_duplicate=False)
    return tuple(name for name, other in every if other is parameter)


def shared_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return every parameter that has several names in a model."""
    names: dict[int, list[str]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[id(parameter)] = tuple(parameter.shape)
    return [NamedParameter(tuple(of), shapes[key]) for key, of in names.items() if len(of) > 1]
