"""Shapes of the two ends in mlx-lm's model, compared with those in the files.

mlx-lm refuses a tensor whose shape differs from its model. The model takes the shape of a table from two keys of the
config, which `data/mlx_lm.json` records for each family. A packed table has the shape that `infer_quant_config` and
`nn.quantize` of mlx-lm 0.32.2 give it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint.claims import positive_int
from tiewise.checkpoint.mlx_fit import unknown_tensor
from tiewise.checkpoint.mlx_runs import MlxRun, config_value
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import short

PACKED_TYPE = "U32"  # of packed numbers
PACKED_BITS = (1, 2, 3, 4, 5, 6, 8)  # of one number, for which mlx has kernels
GROUP_SIZES = (32, 64, 128)  # numbers that share a scale
WORD = 32  # bits


@dataclass(frozen=True)
class MlxEndShapes:
    """Comparison of the shapes of stored tables with those in mlx-lm's model."""

    run: MlxRun
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]  # every stored tensor

    def misfit(self, names: Iterable[str]) -> str | None:
        """Return a sentence about the first of these tables that has another shape. None if all fit.

        A table is not compared if the config lacks a size, or if it is packed in another way than MLX's affine mode.
        """
        misfit = self._size_misfit()
        if misfit is not None:
            return misfit
        for name in names:
            table = self.tensors.get(name)
            if table is not None:
                misfit = self._table_misfit(table)
            if misfit is not None:
                return misfit
        return None

    def _size_misfit(self) -> str | None:
        """Return a sentence about a malformed size in the config. None without one."""
        for path in self.run.shape:
            is_written, value = config_value(self.config, path or "")
            if is_written and positive_int(value) is None:
                return f"Its model class does not accept {short(json.dumps(value))} for {path}."
        return None

    def _table_misfit(self, table: Stored) -> str | None:
        """Return a sentence about a table of another shape. None if it fits, or cannot be compared."""
        rows, width = (self._size(key) for key in self.run.shape)
        if rows is None or width is None:
            return None
        module = table.name.removesuffix(".weight")
        scales = self.tensors.get(f"{module}.scales")
        section = mlx_section(self.config)
        if section is None and "quantization_config" in self.config and table.dtype not in FLOATING:
            return None  # packed in another layout, which mlx-lm may convert
        if scales is None:
            return _shape_misfit(table, (rows, width))
        if section is None:
            return unknown_tensor(scales.name)
        if scales.dtype == "U8" or module in section:
            return None
        return self._packed_misfit(table, scales, rows, width)

    def _size(self, path: str | None) -> int | None:
        """Return a size of the model from its key with a path. None if it is unknown."""
        if path is None:
            return None
        is_written, value = config_value(self.config, path)
        if not is_written:
            value = self.run.by_default.get(path)
        if type(value) is not int:
            return None
        return value

    def _packed_misfit(self, table: Stored, scales: Stored, rows: int, width: int) -> str | None:
        """Return a sentence about a packed table, its scales or biases; None if all fit."""
        bits = WORD * table.columns // max(width, 1)
        group_size = width // max(scales.columns, 1)
        if bits not in PACKED_BITS or group_size not in GROUP_SIZES:
            return f"{short(table.name)} would have {bits} bits a number and {group_size} numbers a scale."
        misfit = _shape_misfit(table, (rows, width * bits // WORD))
        for part in (scales, self.tensors.get(f"{table.name.removesuffix('.weight')}.biases")):
            if part is not None:
                misfit = misfit or _shape_misfit(part, (rows, width // group_size))
        return misfit


def mlx_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section by which mlx-lm unpacks modules with scales; None without one."""
    section = config.get("quantization")
    if not isinstance(section, Mapping):
        return None
    return section


def _shape_misfit(tensor: Stored, needed: tuple[int, int]) -> str | None:
    """Return a sentence about a tensor of another shape. None if it has the shape."""
    if tensor.shape == needed:
        return None
    return f"{short(tensor.name)} has the shape {list(tensor.shape)}, and its model {list(needed)}."
