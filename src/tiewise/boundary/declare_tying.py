"""`declare_tying`: set a model's tying flag and tied keys to match its tables.

The config's flag also ties other Parameters: the input tables of T5 and BART, and the bias of BERT's head. These are
called *neighbours*. If neighbours are shared, untying leaves the flag on and removes the head's key. In other models
the flag alone says whether the tables are tied.
"""

from __future__ import annotations

import copy
from typing import Any

from tiewise.boundary.journal import Journal
from tiewise.boundary.locate import ModelEnds
from tiewise.boundary.tied_keys import FLAG, allowed_keys
from tiewise.core.errors import InstallError

Keys = dict[str, str]  # {target: source}, names of Parameters; the target is tied to the source


def copy_config(model: Any, journal: Journal) -> Any:
    """Replace the config of a model and its parts by a copy, and return it.

    So no other model with the same config object changes.
    """
    memo: dict[int, Any] = {}  # id of every config and sub-config -> its copy
    copied = copy.deepcopy(model.config, memo)
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) in memo:
            journal.set(module, "config", memo[id(config)])
    return copied


def declare_tying(model: Any, ends: ModelEnds, journal: Journal, *, loading: bool = False) -> bool:
    """Set the tying flag and the tied keys to match the tables.

    Return False if the family's plain class would not load the tables in this way.
    """
    head_key = f"{ends.head_name}.weight"
    allowed, of_model = allowed_keys(model), allowed_keys(model, parts=False)
    neighbours = _drop_key(head_key, allowed)
    if ends.tied:
        flag = True
        keys = _keys_when_tied(ends, head_key, allowed, of_model)
        if not loading:
            _tie_neighbours(model, neighbours, journal)
    else:
        flag = _flag_when_untied(model, allowed, neighbours, loading)
        keys = of_model
        if flag and head_key in allowed:
            keys = _drop_key(head_key, of_model)
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


def _drop_key(target: str, keys: Keys) -> Keys:
    """Return the keys without one target."""
    others = dict(keys)
    others.pop(target, None)
    return others


def _keys_when_tied(ends: ModelEnds, head_key: str, allowed: Keys, of_model: Keys) -> Keys:
    """Return the model's keys, with a key for the head if there is none."""
    if head_key in allowed:
        return of_model
    source_name, _ = ends.named_main_lookup
    return {**of_model, head_key: f"{source_name}.weight"}


def _tie_neighbours(model: Any, neighbours: Keys, journal: Journal) -> None:
    """Tie the neighbours, as the next `tie_weights` would."""
    for target, source in neighbours.items():
        if "." not in source:
            continue
        value = model.get_parameter_or_buffer(target)  # the target's value is in use, and the source gets it
        if value is not model.get_parameter_or_buffer(source):
            owner, _, name = source.rpartition(".")
            journal.set(model.get_submodule(owner), name, value)


def _flag_when_untied(model: Any, allowed: Keys, neighbours: Keys, loading: bool) -> bool:
    """Return the tying flag of a model with an untied head: True if neighbours are tied."""
    # while a model loads its tables may not be tied yet; in a class that ties nothing the flag has no meaning
    if loading or not allowed:
        flag: bool = getattr(model.config, FLAG, False)
        return flag
    table = model.get_parameter_or_buffer
    return any(table(target) is table(source) for target, source in neighbours.items())
