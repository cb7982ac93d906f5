"""Tables that `fully_shard` (FSDP2) or tensor parallelism splits over processes.

    fully_shard(model)          each unit stores its Parameters as DTensors, one part of the rows per process
    forward of a unit           gathers them: its modules hold plain Parameters until it reshards
    backward                    scatters their summed gradient, once per unit and backward pass

A *unit* is a module that `fully_shard` was called on. If input embedding and output head read one gathered table, they
have one gradient buffer, as on one process. This fails if two units store one Parameter. transformers'
`DistributedConfig(fsdp_size=…)` does that to tied tables: it shards embedding and head before it ties them, so that
each is gathered separately. If the processes do not divide V, torch then pads one of the two tables into separate
memory (`FSDPParam.reset_sharded_param`), which the optimizer never updates. From the second step on, that end reads
the initial rows.

Under tensor parallelism every rank of the `tp` mesh holds some rows, and all ranks see all tokens. transformers' plans
do so to embeddings and heads (`embedding_rowwise`, `colwise_gather_output`). The weights become DTensors of rows, and
the style sets a `forward` on the module instance. That forward bypasses the classes of `link`, and gathers [N, V]
logits. So it is removed while the boundary is active, and restored while the family's plain classes run. Lookup and
head then work on local rows, with one exchange per chunk of tokens instead of logits. If `fully_shard` has also split
those rows over other ranks, they are gathered during a forward.

`keep_tables` spreads tables over the ranks of FSDP in the same way, but those ranks see different tokens. So hidden
states travel to the rows. The gradient is averaged over ranks as FSDP averages other gradients. This happens after the
lookup's gradient is added, so both paths are averaged alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from tiewise.boundary.ops.vocabulary_shard import VocabularyShard, apply_map
from tiewise.core.errors import InstallError, TiewiseError, UnsupportedError
from tiewise.core.spec_options import SHARDED

PARALLEL_FORWARD = "_tiewise_parallel_forward"
FSDP_TABLE = "_tiewise_kept_table"  # attribute of an end whose table `keep_tables` has spread
_SHARD_LATER = "load without fsdp_size and call torch's fully_shard on the layers and on the model"


# fully_shard


def fsdp_units(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on. It gives them a class with this method."""
    return [module for module in model.modules() if hasattr(type(module), "_get_fsdp_state")]


def _states(model: nn.Module) -> list[Any]:
    """Return torch's state object of each unit. Modules that were sharded together share one."""
    states = {}
    for unit in fsdp_units(model):
        state = unit._get_fsdp_state()
        states[id(state)] = state
    return list(states.values())


def _groups(state: Any) -> list[Any]:
    """Return a unit's groups of Parameters, which are several if their meshes differ."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = state._fsdp_param_group  # in older torch: one group, or None
    if group is None:
        return []
    return [group]


def reshard(model: nn.Module) -> None:
    """Set every unit back to its sharded Parameters, which an optimizer must hold.

    After a forward the outermost unit stays gathered, for a backward pass that may never come. After a forward that
    raised, torch also considers the unit to be within a forward, and would not reshard it. So the state is first set to
    idle, as at the end of a backward pass.
    """
    for state in _states(model):
        idle = type(state._training_state).IDLE
        if state._training_state is idle:
            continue
        state._training_state = idle
        state._state_ctx.iter_forward_root = None
        getattr(state, "_modules_to_run_forward", set()).clear()
        for group in _groups(state):
            group._training_state = idle
    for unit in fsdp_units(model):
        unit.reshard()


def parameter_records(model: nn.Module) -> list[Any]:
    """Return torch's record (`FSDPParam`) of every Parameter that a unit stores."""
    records: list[Any] = []
    for state in _states(model):
        for group in _groups(state):
            records += group.fsdp_params
    return records


def mixed_precision_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the compute dtype of the units' mixed-precision policy, or None without one."""
    for state in _states(model):
        dtype: torch.dtype | None = state._mp_policy.param_dtype
        if dtype is not None:
            return dtype
    return None


def gathered_table_ids(model: nn.Module) -> set[int]:
    """Return the ids of the Parameters that `fully_shard` gathers before modules read them.

    Raises:
        InstallError: only parts of the model are sharded, or two units store one Parameter.
    """
    sharded = fsdp_units(model)
    if not sharded:
        return set()
    class_name = type(model).__name__
    if model not in sharded:
        problem = f"parts of {class_name} are sharded by fully_shard, and {class_name} itself is not"
        raise InstallError(problem, "call fully_shard(model) as well, or install before the first fully_shard")
    reshard(model)
    names_by_parameter: dict[int, str] = {}
    gathered: set[int] = set()
    names = {id(module): name for name, module in model.named_modules()}
    for record in parameter_records(model):
        module_info = record._module_info
        # read from the module: it may have been tied after the record was made
        parameter = getattr(module_info.module, module_info.param_name)
        name = f"{names.get(id(module_info.module), '')}.{module_info.param_name}"
        if id(parameter) in names_by_parameter:
            other = names_by_parameter[id(parameter)]
            problem = f"{class_name}: {other} and {name} are one Parameter that two units of fully_shard keep"
            raise InstallError(
                f"{problem}, so that one end of the table is never updated where V does not divide", _SHARD_LATER
            )
        names_by_parameter[id(parameter)] = name
        if not record.is_dtensor:  # else the gathered Parameter is still a DTensor of tensor parallelism
            gathered.add(id(parameter))
    return gathered


def shard(model: Any, mesh: DeviceMesh | None = None, ignored_params: set[nn.Parameter] | None = None) -> None:
    """Shard a model over a mesh by `fully_shard`, except `ignored_params`.

    Each layer is a unit. The remaining modules, tables included, are one more unit.
    """
    names = getattr(model, "_no_split_modules", None)
    if not names:
        problem = f"{type(model).__name__} does not say which modules are its layers (_no_split_modules)"
        raise UnsupportedError(problem, "train it without --fsdp")
    # a list, since fully_shard changes the classes
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for module in layers:
        if model.get_input_embeddings() not in module.modules():  # BERT lists its embedding as such a layer
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored_params)


@torch.no_grad()
def fill_from_shards(full_model: nn.Module, sharded_model: nn.Module) -> None:
    """Copy the Parameters of a sharded model into a full one. All processes must call it."""
    reshard(sharded_model)
    parts = sharded_model.state_dict()
    for name, tensor in full_model.state_dict().items():
        values = parts[name]
        if isinstance(values, DTensor):
            values = values.full_tensor()
        tensor.copy_(values)


# tensor parallelism, and tables that are kept over the ranks of FSDP


def shard_of(module: Any) -> VocabularyShard | None:
    """Return the description of an end's local rows, or None if its table is not spread."""
    if not is_row_sharded(module.weight):
        return None
    mesh = module.weight.device_mesh
    return VocabularyShard(len(module.weight), mesh.get_group(mesh.ndim - 1), own_tokens=FSDP_TABLE in vars(module))


def local_part(module: Any, name: str = "weight", dtype: torch.dtype | None = None) -> Any:
    """Return this rank's rows of an end's Parameter, with a gradient for these rows only.

    A table that `keep_tables` has spread is cast to `dtype`, and its gradient is averaged over the ranks.
    """
    parameter = getattr(module, name)
    if not is_row_sharded(parameter):
        return parameter
    rows = parameter.to_local()
    averages_gradient = FSDP_TABLE in vars(module)
    if not averages_gradient:  # under tensor parallelism all ranks read the same tokens
        return rows
    mesh = parameter.device_mesh

    def average(upstream: Tensor) -> Tensor:
        """Average a gradient over all ranks in place.

        It arrives as a sum over the ranks of the mesh's last dimension, over which the rows are spread.
        """
        upstream = upstream.contiguous().div_(mesh.size())
        for dimension in range(mesh.ndim - 1):  # ranks of the other dimensions hold the same rows
            dist.all_reduce(upstream, group=mesh.get_group(dimension))
        return upstream

    return apply_map(rows, _view, average).to(dtype or parameter.dtype)


def _view(x: Tensor) -> Tensor:
    """Return a view of the same values, which is a separate tensor for autograd."""
    return x.view_as(x)


def local_gradient(gradient: Any) -> tuple[Any, VocabularyShard | None]:
    """Return the local rows of a gradient, and their description (None: all rows).

    All ranks must call it.
    """
    if not hasattr(gradient, "full_tensor"):
        return gradient, None
    *others, last = gradient.placements
    if not last.is_shard(0):
        return gradient.full_tensor(), None
    rows = gradient.redistribute(placements=[*(Replicate() for _ in others), last]).to_local()
    return rows, VocabularyShard(gradient.shape[0], gradient.device_mesh.get_group(len(others)))


def is_row_sharded(weight: Any) -> bool:
    """Return whether a weight is spread by rows over the last dimension of a mesh only."""
    *others, last = getattr(weight, "placements", (Replicate(),))
    if not last.is_shard(0):
        return False
    return all(placement.is_replicate() for placement in others)


def is_row_parallel(module: Any) -> bool:
    """Return whether tensor parallelism has spread an end's table by rows.

    `fully_shard` may have split these rows over further mesh dimensions; that of tensor parallelism is the last. A
    table that only `fully_shard` has split is gathered during a forward, and gives False.
    """
    placements: Any = getattr(module.weight, "placements", ())
    if not placements or not placements[-1].is_shard(0):
        return False
    return "forward" in vars(module) or PARALLEL_FORWARD in vars(module)


def detach_parallel_forward(module: Any, journal: Any) -> None:
    """Remove the `forward` that tensor parallelism set on a module instance.

    The module stores it in another attribute. `journal.undo` sets it back.
    """
    if is_row_parallel(module) and "forward" in vars(module):
        journal.set(module, PARALLEL_FORWARD, vars(module)["forward"])
        journal.later(setattr, module, "forward", vars(module).pop("forward"))


def require_unsharded_table(model: Any, head: Any, operation: str) -> None:
    """Raise UnsupportedError if an operation on the full table meets sharded tables."""
    if fsdp_units(model) or is_row_parallel(head):
        remedy = "do it before fully_shard and tensor parallelism"
        raise UnsupportedError(f"{operation}: the tables of {type(model).__name__} are sharded", remedy)


def require_same_tables(model: Any, spec: Any, present_spec: Any, *, changed: bool, verified: bool) -> None:
    """Raise InstallError if a model with sharded tables cannot get the boundary `spec`.

    It cannot get other tables than those of `present_spec`, nor rows to start from (`changed`). A boundary that was
    `verified` before, with maps or scales, cannot be verified again on sharded tables. Ranks that do not divide the
    attention heads are refused too, since transformers does not check them.
    """
    class_name = type(model).__name__
    (spec or present_spec).require(SHARDED)
    if spec not in (None, present_spec) or changed:
        remedy = "install it before fully_shard and tensor parallelism: tiewise.boundary.parallel_plan cuts its tables"
        raise InstallError(
            f"{class_name} has {present_spec} tables that are sharded, and {spec} would change them", remedy
        )
    if verified:
        remedy = "take its handle by tiewise.installed(model): install verified it before the model was sharded"
        raise InstallError(f"{class_name} is sharded, and {present_spec} is verified on whole tables only", remedy)
    ranks = getattr(model, "_tp_size", None) or 1  # transformers' own entry
    require_divisible_heads(model, ranks, InstallError)


def require_divisible_heads(model: Any, ranks: int, error: type[TiewiseError]) -> None:
    """Raise `error` if the ranks of tensor parallelism do not divide the attention heads."""
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            problem = f"{type(model).__name__}: {ranks} ranks of tensor parallelism do not divide {name}={heads}"
            remedy = f"choose another number, a model with a multiple of {ranks} heads"
            raise error(problem, f"{remedy}, or tiewise.boundary.parallel_plan alone, which leaves the body whole")
