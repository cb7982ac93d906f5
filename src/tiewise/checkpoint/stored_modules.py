"""Tensors of a checkpoint by module, under names without training wrappers such as DDP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tiewise.checkpoint import claims
from tiewise.checkpoint.claims import in_layer, is_foreign, usual_names
from tiewise.checkpoint.family_record import ClassEnds, module_of
from tiewise.checkpoint.stored import FLOATING, Stored

_TABLE_PARAMETERS = ("weight", *claims.PACKED)


@dataclass(frozen=True)
class End:
    """Stored tensors of one end of the model."""

    module: str | None = None  # name of the module; None if unknown
    # {last part of the name: tensor}: the weight, or packed numbers and their scales; empty if nothing is stored
    parts: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def quantised(self) -> bool:
        """Return whether the numbers are packed, of an integer or 8-bit type, or have scales."""
        if len(self.parts) != 1:
            return len(self.parts) > 1
        weight = self.parts.get("weight")
        return weight is None or weight.dtype not in FLOATING


class StoredModules:
    """Tensors of a checkpoint by module, under names without wrappers."""

    tensors: dict[str, Stored]  # {name without wrappers: tensor}
    parts: dict[str, dict[str, Stored]]  # {module: {parameter: tensor}}
    tables: dict[str, Stored]  # {module: its matrix}
    end_candidates: dict[str, Stored]  # items of `tables` that may belong to an end

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors, self.parts = _without_wrappers(tensors), {}
        for name, tensor in self.tensors.items():
            module, parameter = module_of(name)
            self.parts.setdefault(module, {})[parameter] = tensor
        self.tables, self.end_candidates = {}, {}
        for module, parts in self.parts.items():
            table = _table_among(parts)
            if table is None or module == "":
                continue
            self.tables[module] = table
            if may_be_end(module):
                self.end_candidates[module] = table

    def end(self, module: str | None) -> End:
        """Return the stored tensors of an end's module."""
        parts = dict[str, Stored]()
        for below in ("", "weight.", "weight.quant_state."):  # bitsandbytes stores its statistics there
            path = f"{module}.{below}".removesuffix(".")
            for name, tensor in self.parts.get(path, {}).items():
                part = f"{below}{name}"
                if part in _TABLE_PARAMETERS or claims.QUANTISATION_PARTS.fullmatch(part):
                    parts[part] = tensor
        return End(module, dict(sorted(parts.items())))

    def count_stored(self, ends: ClassEnds) -> int:
        """Return the number of a class's ends that are stored under these names."""
        return sum(name in self.tables for name in (*ends.inputs, ends.output))

    def named_like(self, paths: Iterable[str]) -> list[str]:
        """Return the modules outside layers whose last name part is that of a path."""
        last_parts = {_last_part(path) for path in paths}
        modules = []
        for module in self.tables:
            if _last_part(module) in last_parts and not in_layer(module):
                modules.append(module)
        return modules

    def find_usual_output(self) -> str | None:
        """Return the outermost stored module with a usual head name, else None."""
        heads = filter(_has_usual_output_name, self.end_candidates)
        return min(heads, key=_by_depth, default=None)


def may_be_end(module: str) -> bool:
    """Return whether a module can be an end: outside layers and other modalities."""
    return not in_layer(module) and not is_foreign(module)


def _last_part(path: str) -> str:
    """Return the last part of a dotted name."""
    return path.rpartition(".")[2]


def _by_depth(module: str) -> tuple[int, str]:
    """Return the key that sorts the outermost modules first."""
    return module.count("."), module


def _without_wrappers(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return {name without wrappers: tensor}. A tensor stored without wrappers takes precedence."""
    plain, wrapped = dict[str, Stored](), dict[str, Stored]()
    for name, tensor in tensors.items():
        plain_name = claims.strip_wrappers(name)
        if plain_name == name:
            plain[name] = tensor
        else:
            wrapped.setdefault(plain_name, tensor)
    for name, tensor in wrapped.items():
        plain.setdefault(name, tensor)
    return plain


def _table_among(parts: Mapping[str, Stored]) -> Stored | None:
    """Return the matrix among a module's tensors, plain or quantised, else None."""
    for name in _TABLE_PARAMETERS:
        table = parts.get(name)
        if table is None:
            continue
        if len(table.shape) == 2 or f"{name}.absmax" in parts:
            return table
    return None


def _has_usual_output_name(module: str) -> bool:
    """Return whether a module has a usual name of an output head."""
    return module in usual_names().exact_outputs or claims.ends_with_any(module, usual_names().outputs)
