"""Recipes: the settings of published recurrent models, as YAML files that come with the package.

A recipe is what `--config` takes, and any of its settings can be changed by `--set`: it is where a run begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiewise.errors import RunError
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
    """Names of the settings that differ from their recipe's, but for what a recipe leaves open.

    Raises:
        RunError: as `recipe`.
    """
    from_recipe = Settings.of(
        {"arms": settings.arms, **{k: v for k, v in recipe(settings.recipe).items() if k != "arms"}}
    )
    left_open = {"arms", "seeds", "seed", "text", "tokenizer", "steps", "measured", "recurrent"}
    own = [
        name for name, value in vars(settings).items() if name not in left_open and value != getattr(from_recipe, name)
    ]
    assert settings.recurrent is not None
    assert from_recipe.recurrent is not None
    theirs = vars(from_recipe.recurrent)
    return own + [name for name, value in vars(settings.recurrent).items() if value != theirs[name]]
