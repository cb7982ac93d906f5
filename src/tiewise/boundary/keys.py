"""Which Parameters a transformers model may tie, whatever it ties now: its declared keys, {target: source}.

allowed_keys(llama)     {"lm_head.weight": "model.embed_tokens.weight"}
depth_keys(shared)      {"model.layers.1.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight", …}
partners(bart, "lm_head")   {"lm_head", "model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tiewise.boundary.journal import Journal

FLAG = "tie_word_embeddings"


def depth_keys(model: Any) -> dict[str, str]:
    """Keys that lists of layers declare for themselves: what layers share across depth, whatever the flag says."""
    found = {}
    for name, module in model.named_modules():
        own = vars(module).get("_tied_weights_keys") if isinstance(module, nn.ModuleList) else None
        found.update({f"{name}.{target}": f"{name}.{source}" for target, source in (own or {}).items()})
    return found


def allowed_keys(model: Any) -> dict[str, str]:
    """Every key that the model and its parts may tie, whatever the flag says now; layers that share are left out."""
    return _with_flag(model, lambda: model.get_expanded_tied_weights_keys(all_submodels=True))


def own_keys(model: Any) -> dict[str, str]:
    """Keys that the model's outermost class declares."""
    return _with_flag(model, lambda: model.get_expanded_tied_weights_keys(all_submodels=False))


def partners(model: Any, module: str) -> set[str]:
    """Names of the modules whose weights are, or may be, tied to that of `module`, itself included."""
    pairs = [(_owner(target), _owner(source)) for target, source in allowed_keys(model).items()]
    owners: dict[int, str] = {}
    for name, part in model.named_modules():
        weight = vars(part).get("_parameters", {}).get("weight")
        if weight is not None:
            pairs.append((name, owners.setdefault(id(weight), name)))
    group, size = {module}, 0
    while size < len(group):
        size = len(group)
        for pair in pairs:
            if group & set(pair):
                group |= set(pair)
    return group


def _owner(key: str) -> str:
    return key.rpartition(".")[0]


def _with_flag(model: Any, ask: Callable[[], dict[str, str]]) -> dict[str, str]:
    journal = Journal()
    journal.set(model.config, FLAG, True)
    try:
        across = depth_keys(model)
        return {target: source for target, source in ask().items() if target not in across}
    finally:
        journal.undo()
