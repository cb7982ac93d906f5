"""A grid of settings: fixed settings, axes that vary, and a comparison for every cell.

    asks: Up to which width does tying pay?
    settings: {arms: [untied, tied], seeds: 3, steps: 600}
    axes: {width: [32, 64, 128], train_tokens: [50000, 200000]}

Both name settings of `run.yaml`. The other arms are compared with the first one. Arms of one cell share their text and
are paired by seed, so ranks and α belong to the arms (`factored:16`, `tied+alpha=4`) and not to an axis.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tiewise.core.errors import RunError, TiewiseError, suggest_choices
from tiewise.core.files import write_atomically
from tiewise.training.folder import folder_name
from tiewise.training.settings import Settings, read_yaml, recipe

GRID = "grid.yaml"  # file of a study's grid, in its folder
MOST = 1000  # cells of a grid, at most
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
    """The question of a study, its fixed settings, and its axes."""

    asks: str
    settings: dict[str, Any]
    axes: dict[str, list[Any]]

    @classmethod
    def named(cls, name: str) -> StudyGrid:
        """Read a grid of the package, or a YAML file.

        RunError: there is none, or as `of`.
        """
        names = sorted(path.stem for path in _HERE.glob("*.yaml"))
        path = _HERE / f"{name}.yaml" if name in names else Path(name)
        if not path.is_file():
            raise RunError(f"no grid {name!r}", suggest_choices(name, names, "name a YAML file, or one of"))
        return cls.of(read_yaml(path), name)

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> StudyGrid:
        """Check the content of a grid's file; `where` names it in messages.

        RunError: no grid can have such content.
        """
        for key in record:
            if key not in _EXAMPLES:
                raise RunError(f"unknown key {key!r} in {where}", "a grid has asks, settings and axes")
        grid = cls(record.get("asks") or "", record.get("settings") or {}, record.get("axes") or {})
        grid._check_types(where)
        grid._check_axes(where)
        grid.cells(where)
        return grid

    def _check_types(self, where: str) -> None:
        """Raise RunError if a key's value has the wrong type, or without an axis."""
        types = {"asks": str, "settings": dict, "axes": dict}
        for key, example in _EXAMPLES.items():
            is_missing = key == "axes" and not self.axes
            if is_missing or not isinstance(getattr(self, key), types[key]):
                raise RunError(f"{key} in {where} cannot be read", f"write {example}")

    def _check_axes(self, where: str) -> None:
        """Raise RunError for axes, cells or settings that no grid can have.

        An axis is a list without repeated values, and the number of cells has an upper limit.
        """
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
        """Return the settings of every cell by its folder's name, the last axis fastest.

        TiewiseError: a cell's settings cannot be used.
        """
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
        """Return a small grid for a rehearsal: two seeds and few steps.

        Every axis has only its first and last value.
        """
        few = {"seeds": [QUICK_SEEDS], "steps": [QUICK_STEPS // 2, QUICK_STEPS]}
        axes: dict[str, list[Any]] = {}
        for name, values in self.axes.items():
            ends = values if len(values) == 1 else [values[0], values[-1]]
            axes[name] = few[name][-len(ends) :] if name in few else ends
        settings = {name: value for name, value in self.settings.items() if name != "tune"}
        for name, values in few.items():
            if name not in axes:
                settings[name] = values[-1]
        if "arms" in settings and "steps" not in axes:
            steps = self.settings.get("steps", Settings.steps)
            settings["arms"] = [_rehearsed_arm(arm, steps) for arm in settings["arms"]]
        return StudyGrid(self.asks, settings, axes)

    def save(self, folder: Path) -> None:
        """Write `grid.yaml`."""
        write_atomically(folder / GRID, yaml.safe_dump(asdict(self), sort_keys=False))


def _rehearsed_arm(arm: str, steps: int) -> str:
    """Return the arm with its change of tying at the same fraction of a rehearsal's steps.

    >>> _rehearsed_arm("tied+untie_at=200", steps=600)
    'tied+untie_at=10'
    """
    return re.sub(r"(?<=tie_at=)\d+", lambda written: str(max(1, int(written.group()) * QUICK_STEPS // steps)), arm)
