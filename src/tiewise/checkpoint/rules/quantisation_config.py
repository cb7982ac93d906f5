"""Reader of a config's quantisation: the modules that it packs or leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiewise.checkpoint.untrusted import items_of, object_of

_LEFT_ALONE = (
    "modules_to_not_convert",
    "llm_int8_skip_modules",
    "ignore",
    "ignored_layers",
    "exclude_modules",
    "exclude",
    "skip_modules",
    "modules_to_exclude",
    "exclude_layers",
)
MOST_LISTED = 100_000
_UNPACKED_BITS = (16, 32)


def lists_of(section: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the modules that a quantisation leaves alone, by the key that lists them.

    Patterns are returned as written, and never run.
    """
    lists = dict[str, list[str]]()
    for key in _LEFT_ALONE:
        entries = section.get(key)
        if isinstance(entries, list):
            lists[key] = list(items_of(str, entries[:MOST_LISTED]))
    dynamic = section.get("dynamic")
    if isinstance(dynamic, Mapping):  # GPTQModel: "-:pattern" leaves modules alone
        patterns = [key.removeprefix("-:") for key in dynamic if key.startswith("-:")]
        lists["dynamic"] = patterns[:MOST_LISTED]
    return lists


def is_listed(module: str, entries: list[str]) -> bool:
    """Return whether a list names a module, a part above it, or a pattern of it."""
    return any(_may_name(entry, module) for entry in entries)


def _may_name(entry: str, module: str) -> bool:
    """Return whether an entry names a module, a part above it, or a pattern of it."""
    if not entry:
        return False
    last_part = module.rpartition(".")[2]
    return last_part in entry or module.startswith(f"{entry}.")


def method_of(section: Mapping[str, Any]) -> str:
    """Return the name of a quantisation's method; an empty text if it has none."""
    for key in ("quant_method", "quant_algo", "mode"):
        name = section.get(key)
        if isinstance(name, str):
            return name
    return ""


def packs_module(section: Mapping[str, Any], module: str, class_name: str) -> bool:
    """Return whether a quantisation packs a module of class `class_name`.

    A module that nothing names is not packed.
    """
    plain = sum(lists_of(section).values(), start=list[str]())
    if is_listed(module, plain):
        return False
    settings = _settings_of(section, module)
    if settings is not None:
        return settings.get("bits") not in _UNPACKED_BITS
    targets = _targets(section)
    if targets is not None:
        return class_name in targets or is_listed(module, targets)
    if section.get("include_input_output_embeddings") is True:
        return True
    return class_name == "Linear" and section.get("lm_head") is True


def _settings_of(section: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """Return the settings of GPTQModel or auto-round whose pattern names a module; None without any."""
    for key in ("dynamic", "extra_config"):
        for pattern, settings in object_of(section.get(key)).items():
            if not isinstance(settings, Mapping) or pattern.startswith("-:"):
                continue
            if is_listed(module, [pattern.removeprefix("+:")]):
                return settings
    return None


def _targets(section: Mapping[str, Any]) -> list[str] | None:
    """Return the names and classes that compressed-tensors packs; None for a quantisation without targets."""
    lists = list[Any]()
    for group in (section, *object_of(section.get("config_groups")).values()):
        settings = object_of(group)
        if "targets" in settings:
            lists.append(settings["targets"])
    if not lists:
        return None
    targets = list[str]()
    for entries in lists:
        targets += items_of(str, entries)[:MOST_LISTED]
    return targets
