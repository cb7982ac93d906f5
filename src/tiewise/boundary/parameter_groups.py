"""`param_groups`: a model's trainable parameters grouped by their use.

    tables, head, hidden, vectors = tiewise.param_groups(model)
    muon = torch.optim.Muon(hidden["params"], lr=2e-2)
    adamw = torch.optim.AdamW([tables, head, vectors | {"weight_decay": 0.0}], lr=3e-4)

    tables    rows looked up by an index: tokens, positions, types      each row is a separate vector
    head      the output head's weight, if no lookup uses it            one row per token, as in a table
    hidden    matrices between activations; a boundary's maps           linear maps
    vectors   norms, biases, everything else that is no matrix          separate coordinates

Muon (Jordan et al. 2024) makes all singular values of a step equal, which suits a linear map. A table's gradient has
rows for the tokens of the batch only. With equal singular values, rare tokens' rows would move as far as common ones'.
A position table is looked up in the same way: a row has a gradient only if a sequence is that long. So it is grouped
with the tables.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from tiewise.boundary.boundary import Boundary
from tiewise.boundary.free_rows import free_rows_of
from tiewise.boundary.locate import call_if_present, require_module
from tiewise.core.errors import UnsupportedError


def param_groups(model: nn.Module, lr: float | None = None, table_lr: float | None = None) -> list[dict[str, Any]]:
    """Return a model's trainable parameters in four groups for a torch optimizer.

    The groups are `tables`, `head`, `hidden` and `vectors`; a group may be empty. Every trainable parameter is in
    exactly one group, and a tied table is in `tables`. Tables are the weights of modules that look them up
    (`nn.Embedding`, `Boundary`), and the head is the module of `get_output_embeddings`. Names play no part. Call it
    after `install`, which may make new tables, and after freezing.

    Args:
        model: a model of transformers, wrapped or not, with or without an installed boundary. Or any module with a
            `Boundary` or a method `get_output_embeddings`.
        lr: learning rate of all groups; None: the groups have none, and the optimizer's holds.
        table_lr: learning rate of `tables` and `head`; None: as `lr`. Decoders of width 64 to 256 want 8 to 16 times
            `lr` (docs/dev/atlas.md, "Which learning rate do tables want?").

    Returns:
        Groups [{"params": […], "name": "tables"}, …] in the order above, each with its parameters in the model's order,
            and with `lr` if it has a learning rate. All parameters in `hidden` have two dimensions; convolutions and
            stacked experts are in `vectors`.

    Raises:
        UnsupportedError: `model` is no torch module, or does not say which weight is its output head.

    >>> boundary = Boundary("tied+bias", vocab=10, width=4)
    >>> [(group["name"], len(group["params"])) for group in param_groups(boundary)]
    [('tables', 1), ('head', 0), ('hidden', 0), ('vectors', 1)]
    >>> [group["lr"] for group in param_groups(boundary, lr=0.004, table_lr=0.064)]
    [0.064, 0.064, 0.004, 0.004]
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
    table_rate = lr if table_lr is None else table_lr
    rates = {"tables": table_rate, "head": table_rate, "hidden": lr, "vectors": lr}
    return [_optimizer_group(name, parameters, rates[name]) for name, parameters in groups.items()]


def _optimizer_group(name: str, parameters: list[nn.Parameter], lr: float | None) -> dict[str, Any]:
    """Return a group as an optimizer takes it, with a learning rate if there is one."""
    group: dict[str, Any] = {"params": parameters, "name": name}
    if lr is not None:
        group["lr"] = lr
    return group


class _EndParameters:
    """Ids of the parameters that are tables or output heads, collected from a model's modules."""

    def __init__(self) -> None:
        self.tables: set[int] = set()  # weights that an index looks up
        self.heads: set[int] = set()  # weights of output heads, tied or not
        self.are_named = False  # whether any module says which weight is the output head

    def add(self, module: nn.Module) -> None:
        """Add a module's weights that are tables or output heads."""
        if isinstance(module, Boundary):
            self.tables.add(id(module.table_in))
            self.heads.add(id(module.table_out))
            self._add_free_rows(module)
            self.are_named = True
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self.tables.add(id(module.weight))
        if hasattr(module, "get_output_embeddings"):
            head = call_if_present(module, "get_output_embeddings")
            self.heads.add(id(getattr(head, "weight", None)))
            self._add_free_rows(head)
            self.are_named = True

    def _add_free_rows(self, head: Any) -> None:
        """Add the separate output rows of a head or a boundary."""
        free = free_rows_of(head)
        if free is not None:
            self.heads.add(id(free.rows))

    def group_of(self, parameter: nn.Parameter) -> str:
        """Return the name of a parameter's group, by its use or else by its shape."""
        if id(parameter) in self.tables:
            return "tables"
        if id(parameter) in self.heads:
            return "head"
        is_matrix = parameter.dim() == 2 and min(parameter.shape) > 1
        if is_matrix:
            return "hidden"
        return "vectors"
