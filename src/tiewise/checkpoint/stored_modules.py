"""Tensors of a checkpoint by module, under names without what training wraps around modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tiewise.checkpoint import claims
from tiewise.checkpoint.claims import in_layer, is_foreign, usual
from tiewise.checkpoint.family_record import ClassEnds, module_of
from tiewise.checkpoint.stored import FLOATING, Stored

_TABLE_PARAMETERS = ("weight", *claims.PACKED)


@dataclass(frozen=True)
class End:
    """One end of the model, as it is stored."""

    module: str | None = None  # its name; None where none is known
    # by the last part of its name: the weight, or packed numbers and their scales; empty where nothing is stored
    parts: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Return whether its numbers are packed, are of an integer or 8-bit type, or have scales."""
        return any(part != "weight" or tensor.dtype not in FLOATING for part, tensor in self.parts.items())


class StoredModules:
    """The tensors of a checkpoint by module, under names without wrappers."""

    tensors: dict[str, Stored]  # by name without wrappers
    parts: dict[str, dict[str, Stored]]  # {module: {parameter: tensor}}
    tables: dict[str, Stored]  # {module: its matrix}
    outer: dict[str, Stored]  # those of `tables` that may belong to an end

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors, self.parts = {}, {}
        names = [(claims.unwrapped(name), name) for name in tensors]
        for plain, name in sorted(names, key=lambda pair: pair[0] != pair[1]):  # of two, the one without wrappers
            if plain in self.tensors:
                continue
            self.tensors[plain] = tensors[name]
            module, parameter = module_of(plain)
            self.parts.setdefault(module, {})[parameter] = tensors[name]
        self.tables = {}
        for module, parts in self.parts.items():
            table = _table_among(parts) if module else None
            if table is not None:
                self.tables[module] = table
        self.outer = {name: table for name, table in self.tables.items() if not in_layer(name) and not is_foreign(name)}

    def end(self, module: str | None) -> End:
        """Return everything that is stored for the module of an end."""
        parts = dict[str, Stored]()
        for below in ("", "weight.", "weight.quant_state."):  # bitsandbytes stores its statistics there
            at = f"{module}.{below}".removesuffix(".")
            for name, tensor in self.parts.get(at, {}).items():
                part = f"{below}{name}"
                if part in _TABLE_PARAMETERS or claims.BESIDE.fullmatch(part):
                    parts[part] = tensor
        return End(module, dict(sorted(parts.items())))

    def hits(self, ends: ClassEnds) -> int:
        """Return the number of a class's ends that are stored under these names."""
        return sum(name in self.tables for name in (*ends.inputs, ends.output))

    def called(self, paths: Iterable[str]) -> list[str]:
        """Return modules outside layers whose last part is that of one of the paths: few of many."""
        last_parts = {path.rpartition(".")[2] for path in paths}
        modules = [module for module in self.tables if module.rpartition(".")[2] in last_parts]
        return [module for module in modules if not in_layer(module)]

    def usual_output(self) -> str | None:
        """Return the head that is stored under a usual name, the outermost of several."""
        heads = filter(_has_usual_output_name, self.outer)
        return min(heads, key=lambda module: (module.count("."), module), default=None)


def _table_among(parts: Mapping[str, Stored]) -> Stored | None:
    """Return the matrix among the tensors of one module, plain or packed; None for none."""
    for name in _TABLE_PARAMETERS:
        if name in parts and (len(parts[name].shape) == 2 or f"{name}.absmax" in parts):
            return parts[name]
    return None


def _has_usual_output_name(module: str) -> bool:
    """Return whether a module has a name that output heads usually have."""
    return module in usual().whole_outputs or any(claims.ends_with(module, name) for name in usual().outputs)
