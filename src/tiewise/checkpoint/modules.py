"""Stored tensors by the modules that they belong to, under the names that they have without wrappers."""

from __future__ import annotations

from collections.abc import Mapping

from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.names import BESIDE, PACKED, module_of, unwrapped


class Modules:
    """The tensors of a checkpoint, looked up by module.

    Args:
        tensors: by name as stored. Where two names are one without wrappers, the one without is kept, else the first.
    """

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors: dict[str, Stored] = {}
        self.parts: dict[str, dict[str, Stored]] = {}
        names = [(unwrapped(name), name) for name in tensors]
        for plain, name in sorted(names, key=lambda pair: pair[0] != pair[1]):
            tensor = tensors[name]
            if self.tensors.setdefault(plain, tensor) is tensor:
                module, parameter = module_of(plain)
                self.parts.setdefault(module, {})[parameter] = tensor
        self.tables = {module: table for module in self.parts if module and (table := self._table(module)) is not None}

    def _table(self, module: str) -> Stored | None:
        parts = self.parts[module]
        for parameter in ("weight", *PACKED):
            if parameter in parts and (len(parts[parameter].shape) == 2 or f"{parameter}.absmax" in parts):
                return parts[parameter]
        return None

    def quantised(self, module: str | None) -> tuple[Stored, ...]:
        """Every tensor of a quantised table, the packed numbers first; empty where `module` stores a plain one."""
        table = self.tables.get(module or "")
        if table is None or module is None:
            return ()
        inside = f"{module}.weight"  # bitsandbytes hangs its statistics below the weight
        beside = [tensor for name, tensor in self.parts[module].items() if BESIDE.fullmatch(name)]
        beside += list(self.parts.get(inside, {}).values()) + list(self.parts.get(f"{inside}.quant_state", {}).values())
        plain = not beside and self.parts[module].get("weight") is table
        return () if plain else (table, *beside)
