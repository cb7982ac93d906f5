"""Keys of the Parameters that a transformers model may tie.

    allowed_keys(model)         {"lm_head.weight": "model.embed_tokens.weight"}        {target: source}

transformers ties if `config.tie_word_embeddings` (the flag) is True, and `_tied_weights_keys` names the pairs. The flag
often ties more than the head: the input tables of T5 and BART, and the bias of BERT's head.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tiewise.boundary.journal import Journal

FLAG = "tie_word_embeddings"


def depth_keys(model: Any) -> dict[str, str]:
    """Return the keys that lists of layers declare.

    Layers share these Parameters for any value of the flag.
    """
    keys: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        declared = vars(module).get("_tied_weights_keys") or {}
        for target, source in declared.items():
            keys[f"{name}.{target}"] = f"{name}.{source}"
    return keys


def allowed_keys(model: Any, *, parts: bool = True) -> dict[str, str]:
    """Return every key that the model (and its `parts`) may tie.

    The flag does not matter. Keys that layers share are left out.
    """
    across_depth, journal = depth_keys(model), Journal()
    journal.set(model.config, FLAG, True)
    try:
        keys = model.get_expanded_tied_weights_keys(all_submodels=parts)
    finally:
        journal.undo()
    return {target: source for target, source in keys.items() if target not in across_depth}


def partners(model: Any, module: str) -> set[str]:
    """Return the modules whose weights are or may be tied to that of `module`.

    The result has names, `module` included:

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
    """Return pairs of modules that may be tied or that share a weight."""
    pairs = [(target.rpartition(".")[0], source.rpartition(".")[0]) for target, source in allowed_keys(model).items()]
    first_owner: dict[int, str] = {}
    for name, part in model.named_modules():
        weight = vars(part).get("_parameters", {}).get("weight")
        if weight is not None:
            pairs.append((name, first_owner.setdefault(id(weight), name)))
    return pairs
