"""Say in a model's config and tied keys what its tables really are, so that saving and loading stay truthful.

transformers ties by `config.tie_word_embeddings` (may anything be tied?) and `_tied_weights_keys` (what to what). The
flag often rules more than the head: T5 and BART share their input tables by it, BERT its head's bias. Where such
neighbours are shared, untying keeps the flag and takes the head's key away; elsewhere the flag says the whole truth.
"""

from __future__ import annotations

import copy
from typing import Any

from tiewise.boundary.journal import Journal
from tiewise.boundary.keys import FLAG, allowed_keys, own_keys
from tiewise.boundary.locate import Ends
from tiewise.core.errors import InstallError


def own_config(model: Any, journal: Journal) -> Any:
    """Give the model and its parts a copy of their config, so that no other model built from it changes."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model.config, memo)
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) in memo:
            journal.set(module, "config", memo[id(config)])
    return copied


def declare_tying(model: Any, ends: Ends, journal: Journal, *, loading: bool = False) -> bool:
    """Set flag and keys to what the tables are; False where the family's own class would not load them so.

    Args:
        loading: the model is being built from a config that already says the flag, and may not have tied yet.

    Raises:
        InstallError: a part of the model would decide over the head's table by itself.
    """
    key = f"{ends.head_name}.weight"
    allowed = allowed_keys(model)
    neighbours = {target: source for target, source in allowed.items() if target != key}
    native = True
    if ends.tied:
        flag = True
        if not loading:
            _share(model, neighbours, journal)
        if key not in allowed:
            native = False
            name = next(name for name, module in ends.lookups if module is ends.source)
            journal.set(model, "_tied_weights_keys", {**own_keys(model), key: f"{name}.weight"})
    else:
        flag = getattr(model.config, FLAG, False) if loading else _any_shared(model, neighbours)
        if flag and key in allowed:
            kept = {target: source for target, source in own_keys(model).items() if target != key}
            journal.set(model, "_tied_weights_keys", kept)
    if getattr(model.config, FLAG, False) != flag:
        journal.set(own_config(model, journal), FLAG, flag)
    keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    if (key in keys) != ends.tied:
        fix = "install into the part that holds the head"
        raise InstallError(f"{type(model).__name__}: a part of it decides by itself whether {key} is tied", fix)
    journal.set(model, "all_tied_weights_keys", keys)
    return native


def _any_shared(model: Any, neighbours: dict[str, str]) -> bool:
    return any(_parameter(model, target) is _parameter(model, source) for target, source in neighbours.items())


def _share(model: Any, neighbours: dict[str, str], journal: Journal) -> None:
    """Tie what the flag ties besides the head, as the next `tie_weights` will: the value in use, the target's, wins."""
    for target, source in neighbours.items():
        if "." in source and _parameter(model, target) is not _parameter(model, source):
            owner, _, name = source.rpartition(".")
            journal.set(model.get_submodule(owner), name, _parameter(model, target))


def _parameter(model: Any, name: str) -> Any:
    return model.get_parameter_or_buffer(name)
