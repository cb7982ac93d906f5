"""`parallel_plan`: the two ends of a model as an entry of a plan for torch's own `parallelize_module`.

    mesh = init_device_mesh("cuda", (data, tp), mesh_dim_names=("data", "tp"))
    plan = tiewise.parallel_plan(model, mesh)
    parallelize_module(model, mesh["tp"], {**plan_of_the_body, **plan})
    tiewise.install(model)                                    # the loss over the ranks, and one gradient buffer

Every rank of `tp` then holds some rows of each table and sees all tokens. The body may have a plan of its own or none:
it is then whole on every rank, as for families that transformers has no plan for (GPT-2, BERT, T5, BART). What torch's
styles do not keep is kept here: tables, and a head's bias, that several modules hold stay one Parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tiewise.boundary.locate import locate
from tiewise.boundary.saved import link_of
from tiewise.boundary.tensor_parallel import by_rows, set_aside, spread
from tiewise.core.errors import InstallError

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
