"""Tying as a model's config and tied keys declare it, set to what its tables are.

T5 and BART share their input tables by the config's flag, BERT its head's bias. Where such neighbours are shared,
untying keeps the flag and takes the head's key away; elsewhere the flag says the whole truth.
"""

from __future__ import annotations

import copy
from typing import Any

from tiewise.boundary.journal import Journal
from tiewise.boundary.locate import ModelEnds
from tiewise.boundary.tied_keys import FLAG, allowed_keys
from tiewise.core.errors import InstallError

Keys = dict[str, str]  # {target: source}


def copy_config(model: Any, journal: Journal) -> Any:
    """Give the model and its parts a copy of their config. No other model built from it changes."""
    memo: dict[int, Any] = {}  # id of every config and sub-config -> its copy
    copied = copy.deepcopy(model.config, memo)
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) in memo:
            journal.set(module, "config", memo[id(config)])
    return copied


def declare_tying(model: Any, ends: ModelEnds, journal: Journal, *, loading: bool = False) -> bool:
    """Set flag and keys to what the tables are. Return False if the family's own class would not load them so."""
    head_key = f"{ends.head_name}.weight"
    allowed, of_model = allowed_keys(model), allowed_keys(model, parts=False)
    neighbours = _without(head_key, allowed)
    if ends.tied:
        flag = True
        keys = _keys_when_tied(ends, head_key, allowed, of_model)
        if not loading:
            _tie_neighbours(model, neighbours, journal)
    else:
        flag = _flag_when_untied(model, allowed, neighbours, loading)
        keys = of_model
        if flag and head_key in allowed:
            keys = _without(head_key, of_model)
    if keys is not of_model:
        journal.set(model, "_tied_weights_keys", keys)
    if getattr(model.config, FLAG, False) != flag:
        journal.set(copy_config(model, journal), FLAG, flag)
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    if (head_key in declared) != ends.tied:
        remedy = "install into the part that holds the head"
        raise InstallError(f"{type(model).__name__}: a part of it decides by itself whether {head_key} is tied", remedy)
    journal.set(model, "all_tied_weights_keys", declared)
    return not ends.tied or head_key in allowed


def _without(target: str, keys: Keys) -> Keys:
    """Return keys without that of one target."""
    others = dict(keys)
    others.pop(target, None)
    return others


def _keys_when_tied(ends: ModelEnds, head_key: str, allowed: Keys, of_model: Keys) -> Keys:
    """Return the model's own keys, with one of the head if none ties it."""
    if head_key in allowed:
        return of_model
    source_name, _ = ends.named_source
    return {**of_model, head_key: f"{source_name}.weight"}


def _tie_neighbours(model: Any, neighbours: Keys, journal: Journal) -> None:
    """Tie everything else that the flag ties, as the next `tie_weights` will."""
    for target, source in neighbours.items():
        if "." not in source:
            continue
        value = model.get_parameter_or_buffer(target)  # the value in use, the target's, wins
        if value is not model.get_parameter_or_buffer(source):
            owner, _, name = source.rpartition(".")
            journal.set(model.get_submodule(owner), name, value)


def _flag_when_untied(model: Any, allowed: Keys, neighbours: Keys, loading: bool) -> bool:
    """Return the flag of a model whose head is not tied: set where neighbours are."""
    # a model that is being built may not have tied yet; in a class that ties nothing the flag has no meaning
    if loading or not allowed:
        flag: bool = getattr(model.config, FLAG, False)
        return flag
    table = model.get_parameter_or_buffer
    return any(table(target) is table(source) for target, source in neighbours.items())
