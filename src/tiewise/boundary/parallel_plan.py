"""Rows of a model's tables, spread over ranks before `install`: over those of tensor parallelism, or those of FSDP.

`parallel_plan` has the two ends as an entry of a plan for torch's own `parallelize_module`:

    mesh = init_device_mesh("cuda", (data, tp), mesh_dim_names=("data", "tp"))
    plan = tiewise.parallel_plan(model, mesh)
    parallelize_module(model, mesh["tp"], {**plan_of_the_body, **plan})
    fully_shard(model, mesh=mesh["data"])                     # if at all, then behind it
    tiewise.install(model)                                    # the loss over the ranks, and one gradient buffer

Every rank of `tp` then holds some rows of each table and sees all tokens. The body may have a plan of its own or none:
it is then whole on every rank, as for families that transformers has no plan for (GPT-2, BERT, T5, BART). What torch's
styles do not keep is kept here: tables, and a head's bias, that several modules hold stay one Parameter.

`keep_tables` spreads them over the ranks of `fully_shard`, whose tokens are their own, and has that leave them alone:

    kept = tiewise.keep_tables(model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=kept)
    tiewise.install(model)                                    # or before all that: then with any boundary

Nothing gathers the tables then: hidden states travel to their rows and gradients of hidden states back, which is less
to send while a step of these ranks has fewer tokens than half the vocabulary (2N < V; `tiewise plan --world` counts).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tiewise.boundary.locate import ModelEnds, locate, require_module
from tiewise.boundary.saved import is_on_meta, link_of
from tiewise.boundary.sharded_tables import (
    FSDP_TABLE,
    detach_parallel_forward,
    fsdp_units,
    is_row_parallel,
    is_row_sharded,
    mixed_precision_dtype,
    require_divisible_heads,
)
from tiewise.core.errors import InstallError, UnsupportedError
from tiewise.core.spec_options import SHARDED

AXIS = "tp"
# transformers' name of a style -> torch's, and the width of a matrix that it splits
_STYLES = {"colwise": (ColwiseParallel, "out_features"), "rowwise": (RowwiseParallel, "in_features")}


def parallel_plan(model: Any, mesh: Any) -> dict[str, ParallelStyle]:
    """Return {module: style} by which `parallelize_module` gives every rank some rows of the model's tables.

    Args:
        model: of transformers, with its weights loaded; nothing of it changes here. A boundary of more than tables
            (factored, projected, residual, spd, or with options) is installed before.
        mesh: of one dimension, or with one that is named `tp`; all its ranks will see the same tokens.

    Raises:
        InstallError: no model with two ends, a mesh without the dimension, tables that are spread already.
    """
    ends = _whole_ends(model, mesh, "parallel_plan")
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and AXIS not in names:
        problem = (
            f"none of the mesh's {mesh.ndim} dimensions is named {AXIS!r} ({', '.join(names) or 'none has a name'})"
        )
        raise InstallError(problem, f"name the one whose ranks share tokens: mesh_dim_names=(…, {AXIS!r})")
    end_names = [name for name, _ in ends.named]
    return dict.fromkeys(end_names, _Rows(model))


def keep_tables(model: Any, mesh: Any) -> set[nn.Parameter]:
    """Spread the rows of a model's tables over the ranks of FSDP. Return what `fully_shard` is to leave alone.

    Every rank keeps its rows, with their gradient and optimizer state, and no rank ever has a whole table; a bias of
    the head is spread with it. Until a boundary is installed the model can be evaluated, and not trained.

    Args:
        model: of transformers, with its weights loaded. A boundary of more than tables is installed before.
        mesh: that `fully_shard` will be given: of one dimension, or of two, of which the first are replicas.

    Returns:
        its tables, to be given as `ignored_params` to `fully_shard(model, …)` and to any unit that holds one.

    Raises:
        InstallError: no model with two ends, on the meta device, sharded or spread already; a mesh of more dimensions.
    """
    ends = _whole_ends(model, mesh, "keep_tables")
    kind, remedy = type(model).__name__, "call keep_tables on the loaded model, and then fully_shard"
    if is_on_meta(model):
        raise InstallError(f"{kind} is on the meta device", remedy)
    if fsdp_units(model):
        raise InstallError(f"{kind} is sharded by fully_shard already", remedy)
    if mesh.ndim > 2:
        raise InstallError(f"keep_tables over a mesh of {mesh.ndim} dimensions", "give that of (replicas, shards)")
    for _, module in ends.named:
        setattr(module, FSDP_TABLE, True)
        _Rows(model)._apply(module, mesh)
    kept: set[nn.Parameter] = set()
    for _, module in ends.named:
        kept.update(module.parameters(recurse=False))
    return kept


def _whole_ends(model: Any, mesh: Any, by: str) -> ModelEnds:
    """Find the ends whose rows are to be spread `by` a function, or refuse."""
    require_module(model)
    ends, link = locate(model), link_of(model)
    if link is not None:
        link.spec.require(SHARDED)
    if not isinstance(mesh, DeviceMesh):
        remedy = "make one with torch.distributed.device_mesh.init_device_mesh"
        raise InstallError(f"{by} of a {type(mesh).__name__} in place of a mesh", remedy)
    if is_row_parallel(ends.source) or is_row_parallel(ends.head):
        problem = f"{type(model).__name__}: the rows of its tables are spread over ranks already"
        raise InstallError(problem, "call tiewise.install(model)")
    return ends


def body_plan(model: Any, ranks: int) -> dict[str, ParallelStyle]:
    """Return {module: style} by which so many ranks split a body, by its family's own plan.

    Nothing, so that it stays whole on every rank, where there is no plan or one of other styles than splitting matrices
    by columns and by rows. Matrices of a width that the ranks do not divide stay whole too; attention heads that they
    do not divide are an UnsupportedError.
    """
    family_plan = model.tp_plan or {}
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = family_plan.get(re.sub(r"\d+", "*", name))
        if style is None or id(module) in ends:
            continue
        if style not in _STYLES or not isinstance(module, nn.Linear):
            return {}
        make_style, width = _STYLES[style]
        if getattr(module, width) % ranks == 0:
            plan[name] = make_style()
    if plan:
        require_divisible_heads(model, ranks, UnsupportedError)
    return plan


def spread_over(model: Any, mesh: DeviceMesh) -> None:
    """Spread a model with its weights over the ranks of a mesh of one dimension: `body_plan` and `parallel_plan`."""
    parallelize_module(model, mesh, {**body_plan(model, mesh.size()), **parallel_plan(model, mesh)})


class _Rows(ParallelStyle):
    """Spread a module's Parameters by rows over a mesh's last dimension, wherever the model holds them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicas = [Replicate()] * (device_mesh.ndim - 1)
        for parameter in list(module.parameters(recurse=False)):
            if not is_row_sharded(parameter):
                rows = distribute_tensor(parameter.detach(), device_mesh, [*replicas, Shard(0)])
                self._replace(parameter, nn.Parameter(rows, requires_grad=parameter.requires_grad))
        module.forward = _forward_gathered(module, self._model)
        link = link_of(module)
        if link is not None:  # installed before: its own forward knows what to do
            detach_parallel_forward(module, link.journal)
        return module

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Replace a Parameter in every module that holds it."""
        for holder in self._model.modules():
            for name, parameter in list(holder._parameters.items()):
                if parameter is old:
                    holder.register_parameter(name, new)


def _forward_gathered(module: nn.Module, model: nn.Module) -> Callable[..., Any]:
    """Return the module's own forward with its Parameters gathered, for use until a boundary is installed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run the class's forward with whole Parameters, and put the parts back."""
        dtype = None
        if FSDP_TABLE in vars(module):
            _refuse_training(module)
            dtype = mixed_precision_dtype(model)  # `fully_shard` casts what it gathers itself
        spread_parameters = dict(module._parameters)
        try:
            for name, parameter in spread_parameters.items():
                if is_row_sharded(parameter):
                    module._parameters[name] = _gathered(parameter, dtype)
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(spread_parameters)

    return forward


def _refuse_training(module: nn.Module) -> None:
    """Refuse a training forward of a module whose table is kept in rows."""
    if torch.is_grad_enabled():
        problem = f"training a {type(module).__name__} whose table is kept in rows, each rank with its own tokens,"
        raise UnsupportedError(f"{problem} without a boundary", "call tiewise.install(model) first")


def _gathered(parameter: Any, dtype: torch.dtype | None) -> Any:
    """Return a Parameter that is spread by rows as one tensor, in `dtype` if given."""
    whole = parameter.full_tensor()
    if dtype is None:
        return whole
    return whole.to(dtype)
