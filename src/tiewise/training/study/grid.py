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

from tiewise.core.errors import RunError, TiewiseError, choices
from tiewise.core.files import write_whole
from tiewise.training.folder import folder_name
from tiewise.training.settings import Settings, read_yaml, recipe

GRID = "grid.yaml"  # in a study's folder
MOST = 1000  # cells
QUICK_STEPS, QUICK_SEEDS = 30, 2
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class StudyGrid:
    """What a study asks, and where it looks."""

    asks: str
    settings: dict[str, Any]
    axes: dict[str, list[Any]]

    @classmethod
    def named(cls, name: str) -> StudyGrid:
        """Read a grid that comes with the package, or a YAML file. Raises RunError as `of`, and where there is none."""
        known = sorted(path.stem for path in _HERE.glob("*.yaml"))
        path = _HERE / f"{name}.yaml" if name in known else Path(name)
        if not path.is_file():
            raise RunError(f"no grid {name!r}", choices(name, known, "name a YAML file, or one of"))
        return cls.of(read_yaml(path), name)

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> StudyGrid:
        """Check what a grid's file says; `where` names it. Raises RunError for what no grid can have."""
        for key in record:
            if key not in ("asks", "settings", "axes"):
                raise RunError(f"unknown key {key!r} in {where}", "a grid has asks, settings and axes")
        asks, settings, axes = record.get("asks") or "", record.get("settings") or {}, record.get("axes") or {}
        for key, value, kind, example in (
            ("asks", asks, str, "asks: Up to which width does tying pay?"),
            ("settings", settings, dict, "settings: {arms: [untied, tied], steps: 600}"),
            ("axes", axes, dict, "axes: {width: [32, 64, 128]}"),
        ):
            if not isinstance(value, kind) or (key == "axes" and not value):
                raise RunError(f"{key} in {where} cannot be read", f"write {example}")
        for name, values in axes.items():
            if not isinstance(values, list) or not values:
                raise RunError(f"axis {name} in {where} has no list of values", f"write {name}: [1, 2], say")
            if len({repr(value) for value in values}) < len(values):
                raise RunError(f"axis {name} in {where} has a value twice", "name each once")
            if name in settings:
                raise RunError(f"{name} in {where} is a setting and an axis", "leave one of the two out")
        if (cells := math.prod(map(len, axes.values()))) > MOST:
            raise RunError(f"{where} has {cells:,} cells", f"leave values out: {MOST:,} are the most")
        for name, fix in (
            ("seed", "use seeds: N, whose runs are seeds 1 to N"),
            ("minutes", "use steps: cells differ"),
        ):
            if name in {**settings, **axes}:
                raise RunError(f"{name} in {where}: no grid has it", fix)
        made = cls(asks, settings, axes)
        made.cells(where)
        return made

    def cells(self, where: str = GRID) -> dict[str, Settings]:
        """Checked settings of every cell by the name of its folder, the last axis fastest. Raises TiewiseError."""
        first = recipe(self.settings["recipe"]) if self.settings.get("recipe") else {}
        found = {}
        for values in itertools.product(*self.axes.values()):
            chosen = dict(zip(self.axes, values, strict=True))
            name = ",".join(f"{axis}={value}" for axis, value in chosen.items())
            try:
                made = Settings.of({**first, **self.settings, **chosen}, where).checked()
            except TiewiseError as error:
                raise RunError(f"{where}, cell {name}: {error.what}", error.fix) from None
            if len(made.arms) < 2:
                raise RunError(f"{where}, cell {name} has one arm", "write arms: [untied, tied], say")
            found[folder_name(name)] = made
        return found

    def quick(self) -> StudyGrid:
        """The same for a rehearsal: the ends of every axis, two seeds, a few steps."""
        axes = {name: [values[0], *values[1:][-1:]] for name, values in self.axes.items()}
        few = {"seeds": [QUICK_SEEDS], "steps": [QUICK_STEPS // 2, QUICK_STEPS]}
        axes |= {name: few[name][-len(axes[name]) :] for name in few if name in axes}
        short = {name: values[-1] for name, values in few.items() if name not in axes}
        kept = {name: value for name, value in self.settings.items() if name != "tune"}
        return StudyGrid(self.asks, kept | short, axes)

    def save(self, folder: Path) -> None:
        """Write `grid.yaml`."""
        write_whole(folder / GRID, yaml.safe_dump(asdict(self), sort_keys=False))
