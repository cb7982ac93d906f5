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

from tiewise.boundary.locate import ModelEnds, locate
from tiewise.boundary.saved import link_of, on_meta
from tiewise.boundary.sharded_tables import FSDP_TABLE, by_rows, narrowed, require_whole_heads, set_aside, spread, units
from tiewise.core.errors import InstallError, UnsupportedError
from tiewise.core.spec_options import SHARDED

AXIS = "tp"


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
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and AXIS not in names:
        what = f"none of the mesh's {mesh.ndim} dimensions is named {AXIS!r} ({', '.join(names) or 'none has a name'})"
        raise InstallError(what, f"name the one whose ranks share tokens: mesh_dim_names=(…, {AXIS!r})")
    return dict.fromkeys([*(name for name, _ in ends.lookups), ends.head_name], _Rows(model))


def keep_tables(model: Any, mesh: Any) -> set[nn.Parameter]:
    """Spread the rows of a model's tables over the ranks of FSDP; return what `fully_shard` is to leave alone.

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
    if units(model) or on_meta(model):
        fix = "call keep_tables on the loaded model, and then fully_shard"
        how = "on the meta device" if on_meta(model) else "sharded by fully_shard already"
        raise InstallError(f"{type(model).__name__} is {how}", fix)
    if mesh.ndim > 2:
        raise InstallError(f"keep_tables over a mesh of {mesh.ndim} dimensions", "give that of (replicas, shards)")
    modules = [*(module for _, module in ends.lookups), ends.head]
    for module in modules:
        setattr(module, FSDP_TABLE, True)
        _Rows(model)._apply(module, mesh)
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _whole_ends(model: Any, mesh: Any, by: str) -> ModelEnds:
    """Find the ends whose rows are to be spread `by` a function, or refuse."""
    if not isinstance(model, nn.Module):
        raise InstallError(f"a {type(model).__name__} is no model", "load it first, with tiewise.load(path) say")
    ends, link = locate(model), link_of(model)
    if link is not None:
        link.spec.require(SHARDED)
    if not isinstance(mesh, DeviceMesh):
        fix = "make one with torch.distributed.device_mesh.init_device_mesh"
        raise InstallError(f"{by} of a {type(mesh).__name__} in place of a mesh", fix)
    if any(spread(module) for module in (ends.source, ends.head)):
        what = f"{type(model).__name__}: the rows of its tables are spread over ranks already"
        raise InstallError(what, "call tiewise.install(model)")
    return ends


def body_plan(model: Any, ranks: int) -> dict[str, ParallelStyle]:
    """Return {module: style} by which so many ranks split a body, as its family's own plan has it.

    Nothing, so that it stays whole on every rank, where there is no plan or one of other styles than splitting matrices
    by columns and by rows. Matrices of a width that the ranks do not divide stay whole too; attention heads that they
    do not divide are an UnsupportedError.
    """
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    found: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = (model.tp_plan or {}).get(re.sub(r"\d+", "*", name))
        if style is None or id(module) in ends:
            continue
        if style not in styles or not isinstance(module, nn.Linear):
            return {}
        if not (module.out_features if style == "colwise" else module.in_features) % ranks:
            found[name] = styles[style]()
    if found:
        require_whole_heads(model, ranks, UnsupportedError)
    return found


def spread_over(model: Any, mesh: DeviceMesh) -> None:
    """Spread a model with its weights over the ranks of a mesh of one dimension: `body_plan` and `parallel_plan`."""
    parallelize_module(model, mesh, {**body_plan(model, mesh.size()), **parallel_plan(model, mesh)})


class _Rows(ParallelStyle):
    """Spread a module's Parameters by rows over a mesh's last dimension, wherever the model holds them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in [x for x in module.parameters(recurse=False) if not by_rows(x)]:
            placements = [*[Replicate()] * (device_mesh.ndim - 1), Shard(0)]
            rows = distribute_tensor(parameter.detach(), device_mesh, placements)
            spread = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            for holder in self._model.modules():
                for name in [name for name, held in holder._parameters.items() if held is parameter]:
                    holder.register_parameter(name, spread)
        module.forward = _forward_gathered(module, self._model)
        link = link_of(module)
        if link is not None:  # installed before: its own forward knows what to do
            set_aside(module, link.undo)
        return module


def _forward_gathered(module: nn.Module, model: nn.Module) -> Callable[..., Any]:
    """The module's own forward with its Parameters gathered: what it computes until a boundary is installed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if FSDP_TABLE in vars(module) and torch.is_grad_enabled():
            what = f"training a {type(module).__name__} whose table is kept in rows, each rank with its own tokens,"
            raise UnsupportedError(f"{what} without a boundary", "call tiewise.install(model) first")
        kept = dict(module._parameters)
        kind = narrowed(model) if FSDP_TABLE in vars(module) else None  # `fully_shard` casts what it gathers itself
        try:
            for name, held in kept.items():
                module._parameters[name] = held.full_tensor().to(kind or held.dtype) if by_rows(held) else held  # type: ignore[union-attr]
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(kept)

    return forward
