"""Keys that a model of transformers may tie: {target: source}, names of Parameters.

    allowed_keys(model)         {"lm_head.weight": "model.embed_tokens.weight"}        whatever is tied now

transformers ties by `config.tie_word_embeddings` (may anything be tied?) and `_tied_weights_keys` (what to what). The
flag often rules more than the head: T5 and BART share their input tables by it, BERT its head's bias.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tiewise.boundary.journal import Journal

FLAG = "tie_word_embeddings"


def depth_keys(model: Any) -> dict[str, str]:
    """Return keys that lists of layers declare: layers share these across depth, whatever the flag says."""
    keys: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        declared = vars(module).get("_tied_weights_keys") or {}
        for target, source in declared.items():
            keys[f"{name}.{target}"] = f"{name}.{source}"
    return keys


def allowed_keys(model: Any, *, parts: bool = True) -> dict[str, str]:
    """Return every key that the model (and its `parts`) may tie, whatever the flag says.

    Keys that layers share are left out.
    """
    across_depth, journal = depth_keys(model), Journal()
    journal.set(model.config, FLAG, True)
    try:
        keys = model.get_expanded_tied_weights_keys(all_submodels=parts)
    finally:
        journal.undo()
    return {target: source for target, source in keys.items() if target not in across_depth}


def partners(model: Any, module: str) -> set[str]:
    """Return names of the modules whose weights are, or may be, tied to that of `module`, itself included.

    partners(bart, "lm_head")   {"lm_head", "model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"}
    """
    pairs = _pairs_of_modules(model)
    group: set[str] = set()
    grown = {module}
    while group != grown:
        group = grown
        grown = group.union(*(pair for pair in pairs if not group.isdisjoint(pair)))
    return group


def _pairs_of_modules(model: Any) -> list[tuple[str, str]]:
    """Return pairs of modules whose weights may be tied, and of modules that share one now."""
    pairs = [(target.rpartition(".")[0], source.rpartition(".")[0]) for target, source in allowed_keys(model).items()]
    first_owner: dict[int, str] = {}
    for name, part in model.named_modules():
        weight = vars(part).get("_parameters", {}).get("weight")
        if weight is not None:
            pairs.append((name, first_owner.setdefault(id(weight), name)))
    return pairs
