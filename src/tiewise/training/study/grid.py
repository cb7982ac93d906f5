"""A grid: settings that stay, axes that vary, and every cell of them as the settings of a comparison.

    asks: Up to which width does tying pay?
    settings: {arms: [untied, tied], seeds: 3, steps: 600}
    axes: {width: [32, 64, 128], train_tokens: [50000, 200000]}

Both name settings of `run.yaml`; the first arm is what the others are compared with. Arms of one cell share their text
and are paired by seed, so ranks and α stand among the arms (`factored:16`, `tied+alpha=4`) and not on an axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tiewise.core.errors import RunError, TiewiseError, suggest_choices
from tiewise.core.files import write_atomically
from tiewise.training.folder import folder_name
from tiewise.training.settings import Settings, read_yaml, recipe

GRID = "grid.yaml"  # in a study's folder
MOST = 1000  # cells
QUICK_STEPS, QUICK_SEEDS = 30, 2
_HERE = Path(__file__).parent
_EXAMPLES = {
    "asks": "asks: Up to which width does tying pay?",
    "settings": "settings: {arms: [untied, tied], steps: 600}",
    "axes": "axes: {width: [32, 64, 128]}",
}
_NOT_IN_GRIDS = {"seed": "use seeds: N, whose runs are seeds 1 to N", "minutes": "use steps: cells differ"}


@dataclass(frozen=True)
class StudyGrid:
    """The question of a study, settings that stay, and axes that vary."""

    asks: str
    settings: dict[str, Any]
    axes: dict[str, list[Any]]

    @classmethod
    def named(cls, name: str) -> StudyGrid:
        """Read a grid that comes with the package, or a YAML file. Raises RunError as `of`, and where there is none."""
        names = sorted(path.stem for path in _HERE.glob("*.yaml"))
        path = _HERE / f"{name}.yaml" if name in names else Path(name)
        if not path.is_file():
            raise RunError(f"no grid {name!r}", suggest_choices(name, names, "name a YAML file, or one of"))
        return cls.of(read_yaml(path), name)

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> StudyGrid:
        """Check the content of a grid's file; `where` names it. Raises RunError for what no grid can have."""
        for key in record:
            if key not in _EXAMPLES:
                raise RunError(f"unknown key {key!r} in {where}", "a grid has asks, settings and axes")
        grid = cls(record.get("asks") or "", record.get("settings") or {}, record.get("axes") or {})
        grid._check_types(where)
        grid._check_axes(where)
        grid.cells(where)
        return grid

    def _check_types(self, where: str) -> None:
        """Raise RunError if a part of the grid is of another type than its example, or if there is no axis."""
        types = {"asks": str, "settings": dict, "axes": dict}
        for key, example in _EXAMPLES.items():
            is_missing = key == "axes" and not self.axes
            if is_missing or not isinstance(getattr(self, key), types[key]):
                raise RunError(f"{key} in {where} cannot be read", f"write {example}")

    def _check_axes(self, where: str) -> None:
        """Raise RunError for an axis without different values, too many cells, and settings that no grid has."""
        for name, values in self.axes.items():
            if not isinstance(values, list) or not values:
                raise RunError(f"axis {name} in {where} has no list of values", f"write {name}: [1, 2], say")
            if len({repr(value) for value in values}) < len(values):
                raise RunError(f"axis {name} in {where} has a value twice", "name each once")
            if name in self.settings:
                raise RunError(f"{name} in {where} is a setting and an axis", "leave one of the two out")
        cells = math.prod(len(values) for values in self.axes.values())
        if cells > MOST:
            raise RunError(f"{where} has {cells:,} cells", f"leave values out: {MOST:,} are the most")
        for name, fix in _NOT_IN_GRIDS.items():
            if name in self.settings or name in self.axes:
                raise RunError(f"{name} in {where}: no grid has it", fix)

    def cells(self, where: str = GRID) -> dict[str, Settings]:
        """Return the settings of every cell by its folder's name, the last axis fastest. Raises TiewiseError."""
        first = recipe(self.settings["recipe"]) if self.settings.get("recipe") else {}
        cells = {}
        for values in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, values, strict=True))
            name = ",".join(f"{axis}={value}" for axis, value in chosen.items())
            try:
                settings = Settings.of({**first, **self.settings, **chosen}, where).checked()
            except TiewiseError as error:
                raise RunError(f"{where}, cell {name}: {error.problem}", error.remedy) from None
            if len(settings.arms) < 2:
                raise RunError(f"{where}, cell {name} has one arm", "write arms: [untied, tied], say")
            cells[folder_name(name)] = settings
        return cells

    def quick(self) -> StudyGrid:
        """Return the same for a rehearsal: the ends of every axis, two seeds, a few steps."""
        few = {"seeds": [QUICK_SEEDS], "steps": [QUICK_STEPS // 2, QUICK_STEPS]}
        axes: dict[str, list[Any]] = {}
        for name, values in self.axes.items():
            ends = values if len(values) == 1 else [values[0], values[-1]]
            axes[name] = few[name][-len(ends) :] if name in few else ends
        settings = {name: value for name, value in self.settings.items() if name != "tune"}
        for name, values in few.items():
            if name not in axes:
                settings[name] = values[-1]
        return StudyGrid(self.asks, settings, axes)

    def save(self, folder: Path) -> None:
        """Write `grid.yaml`."""
        write_atomically(folder / GRID, yaml.safe_dump(asdict(self), sort_keys=False))
