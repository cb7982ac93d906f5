"""Recipes: the settings of published recurrent models, as YAML files that come with the package.

A recipe is what `--config` takes, and any of its settings can be changed by `--set`: it is where a run begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiewise.core.errors import RunError
from tiewise.training.settings import Settings

_FOLDER = Path(__file__).parents[2] / "recipes"


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def recipe(name: str) -> dict[str, Any]:
    """Return the settings of a recipe, by name, with its name among them.

    Raises:
        RunError: no recipe of this name.
    """
    if name not in names():
        raise RunError(f"no recipe {name!r}", f"choose one of {', '.join(names())}")
    return {**Settings.read(_FOLDER / f"{name}.yaml"), "recipe": name}


def changed(settings: Settings) -> list[str]:
    """Settings that differ from their recipe's, as `name=value`, but for what a recipe leaves open.

    Raises:
        RunError: as `recipe`.
    """
    theirs = _flat(Settings.of(recipe(settings.recipe)))
    return [f"{name}={value}" for name, value in _flat(settings).items() if name in theirs and value != theirs[name]]


def _flat(settings: Settings) -> dict[str, Any]:
    assert settings.recurrent is not None
    open_ = ("arms", "seeds", "seed", "text", "tokenizer", "steps", "measured", "recurrent", "files")
    return {k: v for k, v in {**vars(settings), **vars(settings.recurrent)}.items() if k not in open_}
