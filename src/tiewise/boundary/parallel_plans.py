"""Tables spread by rows over the ranks of tensor parallelism or of FSDP.

`parallel_plan` returns the entries for input embedding and output head in a plan of torch's `parallelize_module`:

    mesh = init_device_mesh("cuda", (data, tp), mesh_dim_names=("data", "tp"))
    plan = tiewise.boundary.parallel_plan(model, mesh)
    parallelize_module(model, mesh["tp"], {**plan_of_the_body, **plan})
    fully_shard(model, mesh=mesh["data"])                     # optional, after parallelize_module
    tiewise.install(model)                                    # the loss over the ranks, and one gradient buffer

Every rank of `tp` then holds some rows of each table and sees all tokens. The body may have a separate plan. Without
one every rank has the full body, as in families that transformers has no plan for (GPT-2, BERT, T5, BART). Tables, and
a head's bias, that several modules share stay one Parameter, unlike with torch's styles.

`keep_tables` spreads the tables over the ranks of `fully_shard`, each of which has separate tokens:

    tables = tiewise.boundary.keep_tables(model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=tables)
    tiewise.install(model)                                    # or before keep_tables, then with any boundary

Then the tables are never gathered. Hidden states travel to the table rows, and gradients of hidden states travel back.
This sends less if a step of these ranks has fewer tokens than half the vocabulary (2N < V; see `tiewise plan --world`).
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
# transformers' name of a style -> torch's style, and the width of a matrix that the style splits
_STYLES = {"colwise": (ColwiseParallel, "out_features"), "rowwise": (RowwiseParallel, "in_features")}


def parallel_plan(model: Any, mesh: Any) -> dict[str, ParallelStyle]:
    """Return the plan by which `parallelize_module` spreads the rows of the model's tables.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> sorted(parallel_plan(model, init_device_mesh("cpu", (1,))))
    ['lm_head', 'transformer.wte']
    >>> dist.destroy_process_group()

    Args:
        model: a model of transformers with its weights loaded; it does not change. If its boundary has more than
            tables (factored, projected, residual, spd, or options), install it first.
        mesh: a `DeviceMesh` of one dimension, or with a dimension named `tp`. All ranks of that dimension see the same
            tokens.

    Returns:
        {module name: style} for every lookup and the head.

    Raises:
        InstallError: the model lacks an input embedding or an output head, the mesh lacks the dimension, or the tables
            are already spread.
    """
    ends = _locate_unspread(model, mesh, "parallel_plan")
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and AXIS not in names:
        problem = (
            f"none of the mesh's {mesh.ndim} dimensions is named {AXIS!r} ({', '.join(names) or 'none has a name'})"
        )
        raise InstallError(problem, f"name the one whose ranks share tokens: mesh_dim_names=(…, {AXIS!r})")
    end_names = [name for name, _ in ends.named_modules]
    return dict.fromkeys(end_names, _RowStyle(model))


def keep_tables(model: Any, mesh: Any) -> set[nn.Parameter]:
    """Spread the rows of a model's tables over the ranks of FSDP, which never gathers them.

    Every rank stores its rows with their gradient and optimizer state, and no rank ever has a full table. A bias of the
    head is spread with its table. The model can be evaluated at once, but trained only after `install`.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50))
    >>> len(keep_tables(model, init_device_mesh("cpu", (1,))))  # one table, because GPT-2 is tied
    1
    >>> dist.destroy_process_group()

    Args:
        model: a model of transformers with its weights loaded. If its boundary has more than tables, install it first.
        mesh: the `DeviceMesh` that `fully_shard` will get: of one dimension, or of two, where the first dimension is
            replicas.

    Returns:
        The tables. Pass them as `ignored_params` to `fully_shard(model, …)` and to `fully_shard` of any module that
            holds one of them.

    Raises:
        InstallError: the model lacks an input embedding or an output head, is on the meta device, or is already
            sharded or spread. Or the mesh has more than two dimensions.
    """
    ends = _locate_unspread(model, mesh, "keep_tables")
    class_name, remedy = type(model).__name__, "call keep_tables on the loaded model, and then fully_shard"
    if is_on_meta(model):
        raise InstallError(f"{class_name} is on the meta device", remedy)
    if fsdp_units(model):
        raise InstallError(f"{class_name} is sharded by fully_shard already", remedy)
    if mesh.ndim > 2:
        raise InstallError(f"keep_tables over a mesh of {mesh.ndim} dimensions", "give that of (replicas, shards)")
    for _, module in ends.named_modules:
        setattr(module, FSDP_TABLE, True)
        _RowStyle(model)._apply(module, mesh)
    tables: set[nn.Parameter] = set()
    for _, module in ends.named_modules:
        tables.update(module.parameters(recurse=False))
    return tables


def _locate_unspread(model: Any, mesh: Any, caller: str) -> ModelEnds:
    """Return the model's ends, whose tables must not be spread yet.

    A `mesh` of another type is refused too. Errors name the public function that is the `caller`.
    """
    require_module(model)
    ends, link = locate(model), link_of(model)
    if link is not None:
        link.spec.require(SHARDED)
    if not isinstance(mesh, DeviceMesh):
        remedy = "make one with torch.distributed.device_mesh.init_device_mesh"
        raise InstallError(f"{caller} of a {type(mesh).__name__} in place of a mesh", remedy)
    if is_row_parallel(ends.main_lookup) or is_row_parallel(ends.head):
        problem = f"{type(model).__name__}: the rows of its tables are spread over ranks already"
        raise InstallError(problem, "call tiewise.install(model)")
    return ends


def body_plan(model: Any, ranks: int) -> dict[str, ParallelStyle]:
    """Return {module: style} by which `ranks` ranks split a body, from its family's plan.

    The plan is empty, and every rank has the full body, if the family has no plan or uses styles other than splitting
    matrices by columns and by rows. A matrix whose width the ranks do not divide is not split.

    Raises:
        UnsupportedError: the ranks do not divide the number of attention heads.
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
    """Spread a loaded model over the ranks of a one-dimensional mesh.

    The body follows `body_plan`, the tables follow `parallel_plan`.
    """
    parallelize_module(model, mesh, {**body_plan(model, mesh.size()), **parallel_plan(model, mesh)})


class _RowStyle(ParallelStyle):
    """Parallel style that spreads a module's Parameters by rows over a mesh's last dimension.

    Every module of the model that shares such a Parameter gets the spread one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Spread the module's Parameters and set a forward that gathers them."""
        replicas = [Replicate()] * (device_mesh.ndim - 1)
        for parameter in list(module.parameters(recurse=False)):
            if not is_row_sharded(parameter):
                rows = distribute_tensor(parameter.detach(), device_mesh, [*replicas, Shard(0)])
                self._replace(parameter, nn.Parameter(rows, requires_grad=parameter.requires_grad))
        module.forward = _make_gathering_forward(module, self._model)
        link = link_of(module)
        if link is not None:  # installed earlier: `Lookup` and `Head` compute with local rows
            detach_parallel_forward(module, link.journal)
        return module

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Replace a Parameter in every module that holds it."""
        for holder in self._model.modules():
            for name, parameter in list(holder._parameters.items()):
                if parameter is old:
                    holder.register_parameter(name, new)


def _make_gathering_forward(module: nn.Module, model: nn.Module) -> Callable[..., Any]:
    """Return a forward that gathers the module's Parameters first.

    It serves until a boundary is installed.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        """Run the class's forward with full Parameters, and restore the spread ones."""
        dtype = None
        if FSDP_TABLE in vars(module):
            _refuse_training(module)
            dtype = mixed_precision_dtype(model)  # as `fully_shard` casts the Parameters that it gathers
        spread_parameters = dict(module._parameters)
        try:
            for name, parameter in spread_parameters.items():
                if is_row_sharded(parameter):
                    module._parameters[name] = _gather(parameter, dtype)
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(spread_parameters)

    return forward


def _refuse_training(module: nn.Module) -> None:
    """Refuse a training forward of a module whose table `keep_tables` has spread."""
    if torch.is_grad_enabled():
        problem = f"training a {type(module).__name__} whose table is kept in rows, each rank with its own tokens,"
        raise UnsupportedError(f"{problem} without a boundary", "call tiewise.install(model) first")


def _gather(parameter: Any, dtype: torch.dtype | None) -> Any:
    """Return the full tensor of a Parameter that is spread by rows.

    It is cast to `dtype` unless that is None.
    """
    full = parameter.full_tensor()
    if dtype is None:
        return full
    return full.to(dtype)
