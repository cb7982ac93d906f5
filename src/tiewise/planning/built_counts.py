"""Counts of a config without a reader, from the class of the installed transformers.

`count_built(config)` builds the class without weights in a child process with limits (`checkpoint.built_class`) and
returns its counts. `count_on_meta(config)` does the same in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiewise.checkpoint.built_class import ClassQuestion, NotBuilt, ask
from tiewise.checkpoint.untrusted import short
from tiewise.core import Late
from tiewise.core.errors import PlanError
from tiewise.planning.architecture import Architecture, Count, TokenTables, lookup
from tiewise.planning.config import saved_class
from tiewise.planning.read_config import unknown_family

QUESTION = "tiewise.planning.counted_class"
# Keys that say how a model is stored, run or loaded. They do not change its parameters.
NOT_OF_THE_CLASS = ("quantization_config", "auto_map", "attn_implementation", "_attn_implementation")
child, counted_class = Late("tiewise.checkpoint.built_class_child"), Late(QUESTION)  # they need torch


def count_built(config: Mapping[str, Any]) -> Architecture | NotBuilt:
    """Return the counts of a config's class, or the reason for none.

    The installed transformers is asked in a child process, and its replies are cached.
    """
    names = _mapped_names()
    class_name, model_type = saved_class(config), config.get("model_type")
    if class_name not in names and not (isinstance(model_type, str) and model_type in names):
        return NotBuilt("transformers has no class of this type")
    built, sizes = _class_to_build(config, names), _sizes_of_unknown_type(config, names)
    question = ClassQuestion(_of_the_class(config), built, QUESTION, sizes)
    reply = ask(question)
    if isinstance(reply, NotBuilt):
        return reply
    if "unsuitable" in reply:
        return NotBuilt(f"the class has {reply['unsuitable']}")
    return _architecture_of(reply, str(model_type))


def count_on_meta(config: Mapping[str, Any]) -> Architecture:
    """Count `config`'s model by building it on the meta device in this process.

    The total and the tables are exact. Layers are not counted one by one, so sharing cannot be planned.

    Raises:
        PlanError: transformers does not know the family, or refuses the config.
    """
    model_type = str(config.get("model_type", ""))
    try:
        names = _mapped_names()
        model = child.build(_of_the_class(config), _class_to_build(config, names))
        reply = counted_class.answer(model, _sizes_of_unknown_type(config, names))
    except Exception as error:  # an untrusted config may make a class raise anything
        raise _refusal(model_type, short(error, 120)) from None
    if "unsuitable" in reply:
        raise PlanError(f"the class of {model_type} has {reply['unsuitable']}", "plan counts models of tokens")
    return _architecture_of(reply, model_type)


def _refusal(model_type: str, reason: str) -> PlanError:
    """Return the error for a class that cannot be built."""
    problem = f"transformers cannot build {model_type or 'a config without model_type'}: {reason}"
    if model_type and unknown_family(model_type):
        problem = f"{unknown_family(model_type)}, and transformers has no class of this type"
    return PlanError(problem, "leave --build out for an estimate")


def _of_the_class(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that decide about the class's parameters."""
    return {key: value for key, value in config.items() if key not in NOT_OF_THE_CLASS}


def _class_to_build(config: Mapping[str, Any], names: frozenset[str]) -> str | None:
    """Return the class that a config names if transformers has it.

    None: the usual class of its type.
    """
    name = saved_class(config)
    if name in names or _is_defined(name):
        return name
    return None


def _sizes_of_unknown_type(config: Mapping[str, Any], names: frozenset[str]) -> list[str]:
    """Return the keys of sizes of a config whose type transformers does not know.

    The class that it names may be that of another type, which reads other keys.
    """
    if str(config.get("model_type")) in names:
        return []
    return [key for key, value in config.items() if type(value) is int and value > 1 and not key.endswith("_id")]


def _mapped_names() -> frozenset[str]:
    """Return model types and class names in the mappings of the installed transformers.

    The package is not imported.
    """
    names: set[str] = set()
    for path in _model_files("auto/*.py"):
        names.update(path.read_text("utf-8").split('"')[1::2])
    return frozenset(names - {""})


def _is_defined(name: str) -> bool:
    """Return whether the installed transformers has a model class, which no mapping need have.

    A class's name starts like the folder of its file. The package is not imported.
    """
    for path in _model_files("*/modeling_*.py"):
        folder = path.parent.name.replace("_", "")
        if name.lower().startswith(folder) and f"class {name}(" in path.read_text("utf-8"):
            return True
    return False


def _model_files(pattern: str) -> list[Path]:
    """Return the files below `models` of the installed transformers that match a pattern; none without it."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    return sorted((Path(spec.origin).parent / "models").glob(pattern))


def _architecture_of(reply: Mapping[str, Any], model_type: str) -> Architecture:
    """Return a child's reply as an architecture without layers."""
    tables = TokenTables(
        reply["vocab"], reply["width"], reply["tied"], reply["has_head"], head_biases=reply["head_biases"]
    )
    looked_up = {"other_tables": Count(), "positions": Count()}
    for name in looked_up:
        for rows, *widths in reply[name]:
            looked_up[name] += lookup(rows, sum(widths))
    experts, counts_active = _experts_of(reply)
    other = Count(reply["other"], reply["multiplied"], reply["other"])
    around = {**looked_up, "experts": experts, "towers": Count(reply["towers"]), "other": other}
    note = f"{reply['class']} of the installed transformers was built without weights: no count for each layer."
    return Architecture(model_type, reply["width"], tables, (), around, counts_active=counts_active, notes=(note,))


def _experts_of(reply: Mapping[str, Any]) -> tuple[Count, bool]:
    """Return the counts of experts, and whether the number that a token uses can be read."""
    stored, count, chosen = reply["experts"], reply["expert_count"], reply["chosen"]
    if not stored:
        return Count(), True
    if count is None or chosen is None:
        return Count(stored, stored, stored), False
    used = stored * min(count, chosen) // count
    return Count(stored, used, used), True
