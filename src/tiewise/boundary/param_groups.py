"""`param_groups`: a model's trainable parameters by their use, for optimizers that treat them differently.

    tables, head, hidden, vectors = tiewise.param_groups(model)
    muon = torch.optim.Muon(hidden["params"], lr=2e-2)
    adamw = torch.optim.AdamW([tables, head, vectors | {"weight_decay": 0.0}], lr=3e-4)

    tables    rows looked up by an index: tokens, positions, types      each row separate
    head      the output head's weight, where no lookup has it          the same: one row per token
    hidden    matrices between activations; a boundary's maps           maps, changed as a whole
    vectors   norms, biases, everything else that is no matrix                 coordinates

Muon (Jordan et al. 2024) makes all singular values of a step alike, which suits a map. A table's gradient has rows for
the tokens of the batch alone; made alike, rare tokens' rows move as far as common ones'. A position table's rows, too,
have a gradient only where a sequence is that long, by the same lookup: it stands with the tables, not with the maps.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tiewise.boundary.boundary import Boundary
from tiewise.boundary.locate import ask
from tiewise.core.errors import UnsupportedError


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return four groups for a torch optimizer, `tables`, `head`, `hidden` and `vectors`, each possibly empty.

    Every trainable parameter is in exactly one, a tied table in `tables`. Tables are those of modules that look them up
    (`nn.Embedding`, `Boundary`), the head by `get_output_embeddings`; no name is read. Call it after `install`, which
    may make new tables, and after freezing.

    Args:
        model: of transformers, wrapped or not, with or without an installed boundary; or any module with a `Boundary`
            or a method `get_output_embeddings`.

    Returns:
        [{"params": […], "name": "tables"}, …] in the order above, parameters in the model's order. `hidden` has
        two dimensions throughout; convolutions and stacks of experts are among the `vectors`.

    Raises:
        UnsupportedError: no model, or one that does not say which weight is its output head.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"a {type(model).__name__} is no model", "load it first, with tiewise.load(path) say")
    modules = list(model.modules())
    boundaries = [module for module in modules if isinstance(module, Boundary)]
    if not boundaries and not any(hasattr(module, "get_output_embeddings") for module in modules):
        what = f"{type(model).__name__} does not say which of its matrices is the output head"
        raise UnsupportedError(what, "give it a method get_output_embeddings() that returns the head, or None")
    tables = _tables(modules, boundaries)
    heads = _heads(modules, boundaries) - tables
    groups: dict[str, list[nn.Parameter]] = {"tables": [], "head": [], "hidden": [], "vectors": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[_group_of(parameter, tables, heads)].append(parameter)
    return [{"params": parameters, "name": name} for name, parameters in groups.items()]


def _tables(modules: list[nn.Module], boundaries: list[Boundary]) -> set[int]:
    """Return ids of the parameters that an index looks up."""
    lookups = [module.weight for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {id(table) for table in (*lookups, *(boundary.table_in for boundary in boundaries))}


def _heads(modules: list[nn.Module], boundaries: list[Boundary]) -> set[int]:
    """Return ids of the weights of output heads, tied or not."""
    heads = [getattr(ask(module, "get_output_embeddings"), "weight", None) for module in modules]
    return {id(table) for table in (*heads, *(boundary.table_out for boundary in boundaries))}


def _group_of(parameter: nn.Parameter, tables: set[int], heads: set[int]) -> str:
    """Return the name of a parameter's group: by its use at the boundary, else by its shape."""
    if id(parameter) in tables:
        return "tables"
    if id(parameter) in heads:
        return "head"
    is_matrix = parameter.dim() == 2 and min(parameter.shape) > 1
    return "hidden" if is_matrix else "vectors"
