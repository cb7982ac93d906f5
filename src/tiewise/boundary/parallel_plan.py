"""`parallel_plan`: the two ends of a model as an entry of a plan for torch's own `parallelize_module`.

    mesh = init_device_mesh("cuda", (data, tp), mesh_dim_names=("data", "tp"))
    plan = tiewise.parallel_plan(model, mesh)
    parallelize_module(model, mesh["tp"], {**plan_of_the_body, **plan})
    fully_shard(model, mesh=mesh["data"])                     # if at all, then behind it
    tiewise.install(model)                                    # the loss over the ranks, and one gradient buffer

Every rank of `tp` then holds some rows of each table and sees all tokens. The body may have a plan of its own or none:
it is then whole on every rank, as for families that transformers has no plan for (GPT-2, BERT, T5, BART). What torch's
styles do not keep is kept here: tables, and a head's bias, that several modules hold stay one Parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from tiewise.boundary.locate import locate
from tiewise.boundary.saved import link_of
from tiewise.boundary.tensor_parallel import by_rows, set_aside, spread
from tiewise.core.errors import InstallError, UnsupportedError

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
    if not isinstance(model, nn.Module):
        raise InstallError(f"a {type(model).__name__} is no model", "load it first, with tiewise.load(path) say")
    ends, kind = locate(model), type(model).__name__
    if not isinstance(mesh, DeviceMesh):
        fix = "make one with torch.distributed.device_mesh.init_device_mesh"
        raise InstallError(f"parallel_plan of a {type(mesh).__name__} in place of a mesh", fix)
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and AXIS not in names:
        what = f"none of the mesh's {mesh.ndim} dimensions is named {AXIS!r} ({', '.join(names) or 'none has a name'})"
        raise InstallError(what, f"name the one whose ranks share tokens: mesh_dim_names=(…, {AXIS!r})")
    if any(spread(module) for module in (ends.source, ends.head)):
        what = f"{kind}: the rows of its tables are spread over ranks already"
        raise InstallError(what, "call tiewise.install(model)")
    style = _Rows(model)
    return dict.fromkeys([*(name for name, _ in ends.lookups), ends.head_name], style)


def body_plan(model: Any, ranks: int) -> dict[str, ParallelStyle]:
    """Return {module: style} by which so many ranks split a body, as its family's own plan has it.

    Nothing, so that it stays whole on every rank, where there is no plan or one of other styles than splitting matrices
    by columns and by rows. Matrices of a width that the ranks do not divide stay whole too.

    Raises:
        UnsupportedError: attention heads that the ranks do not divide.
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
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads") if found else ():
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            fix = f"choose another number, or a model with a multiple of {ranks} heads"
            raise UnsupportedError(f"{ranks} processes of --tp do not divide {name} = {heads}", fix)
    return found


def spread_over(model: Any, mesh: DeviceMesh) -> None:
    """Spread a model with its weights over the ranks of a mesh of one dimension: `body_plan` and `parallel_plan`."""
    parallelize_module(model, mesh, {**body_plan(model, mesh.size()), **parallel_plan(model, mesh)})


class _Rows(ParallelStyle):
    """Spread every Parameter of a module by rows, wherever the model holds it; forward as if it were whole."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in [x for x in module.parameters(recurse=False) if not by_rows(x)]:
            rows = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            spread = nn.Parameter(rows, requires_grad=parameter.requires_grad)
            for holder in self._model.modules():
                for name in [name for name, held in holder._parameters.items() if held is parameter]:
                    holder.register_parameter(name, spread)
        module.forward = _whole(module)
        link = link_of(module)
        if link is not None:  # installed before: its own forward knows what to do
            set_aside(module, link.undo)
        return module


def _whole(module: nn.Module) -> Callable[..., Any]:
    """The module's own forward with its Parameters gathered: what it computes until a boundary is installed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = dict(module._parameters)
        try:
            for name, held in kept.items():
                module._parameters[name] = held.full_tensor() if by_rows(held) else held  # type: ignore[union-attr]
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(kept)

    return forward
