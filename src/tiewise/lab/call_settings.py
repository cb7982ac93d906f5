"""Arguments of `compare`, `train` and `heal` as settings of a run.

A call names its text, its folder and any setting of `run.yaml`. These functions check the first two, read the settings,
and write the call as text for the report.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tiewise.core.errors import RunError, SpecError, did_you_mean
from tiewise.core.spec import BoundarySpec, split_specs
from tiewise.training.settings import Settings, recipe, with_sharings

Text = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Function = TypeVar("Function", bound=Callable[..., Any])


def shows_settings(*without: str) -> Callable[[Function], Function]:
    """Return a decorator that lists the settings of every kind of run in a function's signature.

    Notebooks complete them, and `help` shows their defaults. Settings named in `without` are left out.
    """

    def add_settings(function: Function) -> Function:
        """Replace the parameter `**settings` by the settings, followed by those of single kinds."""
        parameters = list(inspect.signature(function).parameters.values())
        names = {*without, "kind_options", *(parameter.name for parameter in parameters)}
        keyword = inspect.Parameter.KEYWORD_ONLY
        settings = [
            inspect.Parameter(one.name, keyword, default=one.default, annotation=one.type)
            for one in fields(Settings)
            if one.name not in names
        ]
        ordered = [*parameters[:-1], *settings, parameters[-1]]
        vars(function)["__signature__"] = inspect.Signature(ordered)
        return function

    return add_settings


def read_text_argument(name: str, text: Text | None) -> list[str] | None:
    """Return the texts that a call names; None if it names none.

    RunError: the argument is no text. The message shows the right call.
    """
    if text is None:
        return None
    texts = [text] if isinstance(text, str | os.PathLike) else text
    right = f'give files or folders: tiewise.{name}("my.txt")'
    if not isinstance(texts, list | tuple):
        raise RunError(f"a {type(text).__name__} is no text", right)
    for each in texts:
        if not isinstance(each, str | os.PathLike):
            raise RunError(f"a {type(each).__name__} is no text", right)
    names = [os.fspath(each) for each in texts]
    if names and all(_is_arm(each) for each in names):
        arms = ",".join(names)
        problem = f"{arms} names arms, and the first argument of tiewise.{name} is the text"
        raise RunError(problem, f'write tiewise.{name}("my.txt", arms="{arms}")')
    return names


def _is_arm(name: str) -> bool:
    """Return whether a name is the spec of a boundary and no file."""
    try:
        BoundarySpec.parse(name)
    except SpecError:
        return False
    return not Path(name).exists()


def read_folder_argument(name: str, out: str | os.PathLike[str]) -> Path:
    """Return the folder of a run.

    RunError: it is a file, which was most likely meant as `text`, or no path at all.
    """
    if not isinstance(out, str | os.PathLike):
        raise RunError(f"a {type(out).__name__} is no folder", f'name one: tiewise.{name}(…, out="runs/mine")')
    folder = Path(out)
    if folder.is_file():
        problem = f"{folder} is a file, and `out` is the folder that tiewise.{name} writes"
        raise RunError(problem, f"name the text first: tiewise.{name}({str(folder)!r})")
    return folder


def refuse_unknown_settings(name: str, names: Iterable[str], settings: type) -> None:
    """Raise RunError if a call has a setting that its function does not take.

    The message suggests the nearest name.
    """
    setting_names = get_type_hints(settings)
    for setting in names:
        if setting not in setting_names:
            remedy = f"{did_you_mean(setting, setting_names)}help(tiewise.{name}) lists all"
            raise RunError(f"tiewise.{name} has no setting {setting!r}", remedy)


def read_settings(record: dict[str, Any], out: Path, resume: bool) -> Settings | None:
    """Return the settings of a call on top of its recipe's; None if it resumes.

    RunError: a setting is unknown or has the wrong type, or a call that resumes has settings.
    """
    if resume:
        if record:
            remedy = f"leave {', '.join(record)} out; `out` names the folder of the run"
            raise RunError(f"resume takes its settings from the run in {out}", remedy)
        return None
    if "boundary" in record:  # the same setting as the command's --boundary
        if "arms" in record:
            raise RunError("both arms and boundary are given", "they are one setting: leave one of them out")
        record = {**record, "arms": record["boundary"]}
        del record["boundary"]
    if isinstance(record.get("arms"), str):
        record = {**record, "arms": split_specs(record["arms"])}
    share = record.pop("share", None)  # of a call; a recipe may have one for arms that name none
    if record.get("recipe"):
        record = {**recipe(record["recipe"]), **record}
    return with_sharings(Settings.of(record), share)


def call_text(name: str, first: object, settings: dict[str, Any]) -> str:
    """Return a call as text, for the report; `first` is its first argument, None for none."""
    keywords = [f"{key}={_as_typed(value)}" for key, value in settings.items()]
    if first is not None:
        keywords = [_as_typed(first), *keywords]
    return f"tiewise.{name}({', '.join(keywords)})"


def _as_typed(value: object) -> str:
    """Return a value as a caller types it; a path as text."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return repr(value)
