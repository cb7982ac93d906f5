"""Settings of a training command, from recipe, YAML file, `--set` and options.

Later sources override earlier ones.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiewise.cli import options as o
from tiewise.core.errors import RunError, SpecError
from tiewise.core.spec import BoundarySpec, split_specs

if TYPE_CHECKING:
    from tiewise.training.settings import Settings

# options with the name of the setting in `run.yaml`
OPTIONS = (
    *("seeds", "seed", "recipe", "split", "tokenizer", "model", "steps"),
    *("minutes", "match", "select", "margin", "tune", "backend", "teacher", "what", "report_to"),
)
_LENGTH = {"steps", "minutes"}  # a run's length is given by one of these
_Record = dict[str, Any]  # settings by name


def choose_settings(out: Path, parameters: _Record, *, single: bool) -> Settings | None:
    """Return the checked settings of a command.

    A parameter that is None was not typed. `single`: settings of one run, otherwise of a comparison. A single run of a
    recipe of several arms trains the tied arm. `--share` applies to every arm. With `--resume` the result is None,
    because the run has its settings.

    Raises:
        RunError: settings that contradict each other, or are unknown or out of range.
    """
    options = _option_record(parameters, single)
    if parameters["resume"]:
        _refuse_with_resume(out, parameters, options)
        return None
    from tiewise.training.settings import Settings, with_sharings
    from tiewise.training.tracker_names import require_packages

    record = _recipe_record(parameters, options, single)
    file_record = _file_record(parameters["config"])
    record |= file_record
    typed = _set_record(parameters["set_"] or [])
    places = dict.fromkeys(file_record, str(parameters["config"])) | dict.fromkeys(typed, "--set")
    typed |= options
    has_two_lengths = _has_two_lengths(typed if typed.keys() & _LENGTH else record)
    if "steps" in typed:
        record.pop("minutes", None)
    record |= typed
    if not single and record.get("seed") is not None:
        raise RunError("seed is a setting of train", "use --seeds N, whose runs are seeds 1 to N")
    settings = with_sharings(Settings.of(record, sources=places), parameters["share"])
    if settings.backend == "flax":
        o.need("jax", "flax", "optax", extra="flax")
    settings = settings.checked()
    require_packages(settings.report_to)
    if has_two_lengths:
        raise RunError("both steps and minutes are given", "leave one of them out: minutes become steps")
    return settings


def _option_record(parameters: _Record, single: bool) -> _Record:
    """Return the settings that options give."""
    record = {name: parameters[name] for name in OPTIONS if parameters.get(name) is not None}
    arms = parameters["boundary"] if single else parameters["arms"]
    if arms is not None:
        record["arms"] = _arms_of_single_run(arms) if single else split_specs(arms)
    if parameters["recipe"] is not None:
        from tiewise.training.settings import recipe

        recipe(parameters["recipe"])  # raises for an unknown name, before its corpus is missed
    texts = chosen_texts(parameters["text"], parameters["recipe"], parameters["corpus"])
    if texts:
        record["text"] = texts
    return record


def _arms_of_single_run(boundary: str) -> list[str]:
    """Return the boundary of a run as its only arm.

    A boundary may have a comma in it, such as projected:300,untied. A list of boundaries gives several arms, which
    `Settings.checked` refuses.
    """
    try:
        BoundarySpec.parse(boundary)
    except SpecError:
        return split_specs(boundary)
    return [boundary]


def _refuse_with_resume(out: Path, parameters: _Record, options: _Record) -> None:
    """Refuse settings next to `--resume`. Raises RunError."""
    others = [parameters["overwrite"], parameters["config"], parameters["set_"], options]
    if any(others) or parameters["share"] is not None:
        raise RunError("--resume takes its settings from the run", f"give only --out {out} --resume")


def _recipe_record(parameters: _Record, options: _Record, single: bool) -> _Record:
    """Return the settings below the file's: of the recipe, of a single run, of healing."""
    from tiewise.training.settings import recipe

    record: _Record = recipe(options["recipe"]) if "recipe" in options else {}
    if single:
        arms = record.get("arms", ())
        record |= {"arms": arms if len(arms) == 1 else ["tied"], "seed": 1}
    if parameters.get("kind") == "heal":
        from tiewise.training.kinds.heal import healing_settings

        record |= healing_settings(options.pop("model", None), options.pop("teacher", None))
    return record


def _file_record(config: Path | None) -> _Record:
    """Return the settings of a YAML file that have a value."""
    if config is None:
        return {}
    from tiewise.training.settings import read_yaml

    return {name: value for name, value in read_yaml(config).items() if value is not None}


def _set_record(items: Sequence[str]) -> _Record:
    """Return the settings of `--set NAME=VALUE`; a value is read as YAML."""
    import yaml

    from tiewise.training.settings import YAML_ERRORS

    record = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise RunError(f"--set {item!r}", "write --set NAME=VALUE")
        try:
            record[name] = yaml.safe_load(value)
        except YAML_ERRORS:
            raise RunError(f"--set {item!r}: the value cannot be read", "write NAME=VALUE with a plain value") from None
    return record


def _has_two_lengths(record: _Record) -> bool:
    """Return whether one source of settings sets the length of a run twice."""
    return record.keys() >= _LENGTH


def chosen_texts(text: list[str] | None, recipe: str | None, corpus: str | None) -> tuple[str, ...]:
    """Return the texts that a command reads, from `--text` or a recipe's corpus.

    The tuple is empty if neither is named.
    """
    if recipe is None and corpus is not None:
        _refuse_corpus(corpus)
    if recipe is not None and (text or corpus is None):
        _refuse_lack_of_corpus(recipe, corpus, text)
    if text and corpus is not None:
        raise RunError(f"{corpus!r} and --text", "name the text once")
    if corpus is not None:
        return (corpus,)
    return tuple(text or ())


def _refuse_lack_of_corpus(recipe: str, corpus: str | None, text: list[str] | None) -> None:
    """Raise RunError for a recipe that needs a corpus of words. An ALBERT is trained on any text."""
    if recipe.startswith("albert"):
        return
    if corpus is not None:
        raise RunError(f"--recipe {recipe} needs one corpus", f"leave --text out, and {corpus!r} is read")
    folder = next(filter(os.path.isdir, text or ()), "CORPUS")
    example = f"--recipe {recipe} {shlex.quote(folder)}"
    raise RunError(f"--recipe {recipe} needs one corpus", f"name its folder without --text: {example}")


def _refuse_corpus(corpus: str) -> None:
    """Refuse a corpus without a recipe; say so if it is a model. Raises RunError."""
    if (Path(corpus) / "config.json").is_file():
        raise RunError(f"{corpus!r} is a model, and this command trains new ones", "give it your text: --text FILE")
    raise RunError(f"{corpus!r} without --recipe", "add --recipe NAME for a word-level corpus, or use --text")
