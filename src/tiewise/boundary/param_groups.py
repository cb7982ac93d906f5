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
from tiewise.boundary.locate import call_if_present, require_module
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
    require_module(model, UnsupportedError)
    ends = _EndParameters()
    for module in model.modules():
        ends.add(module)
    if not ends.are_named:
        problem = f"{type(model).__name__} does not say which of its matrices is the output head"
        raise UnsupportedError(problem, "give it a method get_output_embeddings() that returns the head, or None")
    groups: dict[str, list[nn.Parameter]] = {"tables": [], "head": [], "hidden": [], "vectors": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[ends.group_of(parameter)].append(parameter)
    return [{"params": parameters, "name": name} for name, parameters in groups.items()]


class _EndParameters:
    """Parameters at the two ends of a model, by their ids, collected from its modules."""

    def __init__(self) -> None:
        self.tables: set[int] = set()  # that an index looks up
        self.heads: set[int] = set()  # weights of output heads, tied or not
        self.are_named = False  # whether any module says which weight is the output head

    def add(self, module: nn.Module) -> None:
        """Add the parameters by which a module is at one end, or at both."""
        if isinstance(module, Boundary):
            self.tables.add(id(module.table_in))
            self.heads.add(id(module.table_out))
            self.are_named = True
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self.tables.add(id(module.weight))
        if hasattr(module, "get_output_embeddings"):
            head = call_if_present(module, "get_output_embeddings")
            self.heads.add(id(getattr(head, "weight", None)))
            self.are_named = True

    def group_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter's group, by its use at an end or by shape."""
        if id(parameter) in self.tables:
            return "tables"
        if id(parameter) in self.heads:
            return "head"
        is_matrix = parameter.dim() == 2 and min(parameter.shape) > 1
        if is_matrix:
            return "hidden"
        return "vectors"
