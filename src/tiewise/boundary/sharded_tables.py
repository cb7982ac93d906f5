"""Tables that are cut over processes: what `fully_shard` (FSDP2) and tensor parallelism make of a model's ends.

    fully_shard(model)          each unit keeps its Parameters as DTensors, one part of the rows per process
    forward of a unit           gathers them: its modules hold plain Parameters until it reshards
    backward                    scatters their summed gradient, once per unit and backward pass

Ends that see one gathered table have one gradient buffer, as on one process. They do not where one Parameter is kept
by two units. transformers' `DistributedConfig(fsdp_size=…)` does that to tied tables: it shards embedding and head
before it ties them, so that each is gathered by itself. With V that the processes do not divide, torch then pads one
of the two into memory of its own (`FSDPParam.reset_sharded_param`), which the optimizer never reaches: from the second
step on that end reads the rows that training began with.

Under tensor parallelism every rank of the `tp` mesh holds some rows, and all see all tokens. transformers' plans do so
to embeddings and heads (`embedding_rowwise`, `colwise_gather_output`): weights become DTensors of rows, and the style
puts a function of its own before the module's `forward`, into the instance. That one passes by any class that is
swapped in beneath, and gathers [N, V] logits: it is set aside, and put back where the family's own classes run. Lookup
and head then work on local rows, and one exchange per chunk of tokens takes the place of the logits. Where
`fully_shard` has cut those rows once more, over other ranks, a forward finds them gathered.

Tables that `keep_tables` has spread over the ranks of FSDP lie here in the same way, and those ranks have tokens of
their own: hidden states come to the rows in place of rows to the states. Their gradient is averaged over ranks as FSDP
averages the others, behind the lookup, so that it is of both paths alike.
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
FSDP_TABLE = "_tiewise_kept_table"  # of an end whose rows are spread over ranks that have tokens of their own
_SHARD_LATER = "load without fsdp_size and call torch's fully_shard on the layers and on the model"


# fully_shard


def fsdp_units(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on; told by what it adds to their class."""
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def _states(model: nn.Module) -> list[Any]:
    """Return torch's record of each unit; modules that were sharded together share one."""
    states = {}
    for unit in fsdp_units(model):
        state = unit._get_fsdp_state()
        states[id(state)] = state
    return list(states.values())


def _groups(state: Any) -> list[Any]:
    """Return what a unit gathers at once: its Parameters, of several groups where their meshes differ."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = state._fsdp_param_group  # older torch has one, or none
    if group is None:
        return []
    return [group]


def reshard(model: nn.Module) -> None:
    """Give every unit its sharded Parameters back. An optimizer must hold these, and their tables are whole.

    A forward leaves the outermost unit gathered, for a backward pass that may never come. One that raised leaves it
    in the middle of a forward besides, where torch does not reshard; what a backward pass ends with, ends that too.
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
    """Return torch's record (`FSDPParam`) of every Parameter that a unit keeps."""
    records: list[Any] = []
    for state in _states(model):
        for group in _groups(state):
            records += group.fsdp_params
    return records


def mixed_precision_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the type that the units' mixed-precision policy computes in, or None."""
    for state in _states(model):
        dtype: torch.dtype | None = state._mp_policy.param_dtype
        if dtype is not None:
            return dtype
    return None


def gathered_table_ids(model: nn.Module) -> set[int]:
    """Return the ids of the sharded Parameters that `fully_shard` gathers whole before modules read them."""
    sharded = fsdp_units(model)
    if not sharded:
        return set()
    kind = type(model).__name__
    if model not in sharded:
        problem = f"parts of {kind} are sharded by fully_shard, and {kind} itself is not"
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
            problem = f"{kind}: {other} and {name} are one Parameter that two units of fully_shard keep"
            raise InstallError(
                f"{problem}, so that one end of the table is never updated where V does not divide", _SHARD_LATER
            )
        names_by_parameter[id(parameter)] = name
        if not record.is_dtensor:  # others stay as tensor parallelism has cut them
            gathered.add(id(parameter))
    return gathered


def shard(model: Any, mesh: DeviceMesh | None = None, ignored_params: set[nn.Parameter] | None = None) -> None:
    """Shard a model over a mesh, but for what is `kept`. Each layer is a unit; the rest, with tables, is one more."""
    names = getattr(model, "_no_split_modules", None)
    if not names:
        problem = f"{type(model).__name__} does not say which modules are its layers (_no_split_modules)"
        raise UnsupportedError(problem, "train it without --fsdp")
    # a list: fully_shard changes the classes
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for module in layers:
        if model.get_input_embeddings() not in module.modules():  # of BERT's too, whose table the head has as well
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=ignored_params)


@torch.no_grad()
def fill_from_shards(full_model: nn.Module, sharded_model: nn.Module) -> None:
    """Copy the parts of a sharded model into one that is whole. All processes call it."""
    reshard(sharded_model)
    parts = sharded_model.state_dict()
    for name, tensor in full_model.state_dict().items():
        values = parts[name]
        if isinstance(values, DTensor):
            values = values.full_tensor()
        tensor.copy_(values)


# tensor parallelism, and tables that are kept over the ranks of FSDP


def shard_of(module: Any) -> VocabularyShard | None:
    """Return which rows of an end's table are here; None where it is whole."""
    if not is_row_sharded(module.weight):
        return None
    mesh = module.weight.device_mesh
    return VocabularyShard(len(module.weight), mesh.get_group(mesh.ndim - 1), own_tokens=FSDP_TABLE in vars(module))


def local_part(module: Any, name: str = "weight", dtype: torch.dtype | None = None) -> Any:
    """Return this rank's part of an end's Parameter, whose gradient is that of these rows.

    A table that `keep_tables` keeps over the ranks of FSDP comes in type `dtype`, and its gradient is averaged over
    the ranks.
    """
    parameter = getattr(module, name)
    if not is_row_sharded(parameter):
        return parameter
    rows = parameter.to_local()
    averages_gradient = FSDP_TABLE in vars(module)
    if not averages_gradient:  # under tensor parallelism all ranks read the same tokens: nothing is averaged
        return rows
    mesh = parameter.device_mesh

    def average(upstream: Tensor) -> Tensor:
        """Average a gradient over all ranks, in its own buffer.

        It comes as a sum over the ranks of the last dimension of the mesh, which split the rows.
        """
        upstream = upstream.contiguous().div_(mesh.size())
        for dimension in range(mesh.ndim - 1):  # the other dimensions are replicas of these rows
            dist.all_reduce(upstream, group=mesh.get_group(dimension))
        return upstream

    return apply_map(rows, _view, average).to(dtype or parameter.dtype)


def _view(x: Tensor) -> Tensor:
    """Return the same values as a tensor of its own for autograd."""
    return x.view_as(x)


def local_gradient(gradient: Any) -> tuple[Any, VocabularyShard | None]:
    """Return a gradient's rows that are here, and which rows they are (None: all). All ranks must call it."""
    if not hasattr(gradient, "full_tensor"):
        return gradient, None
    *others, last = gradient.placements
    if not last.is_shard(0):
        return gradient.full_tensor(), None
    rows = gradient.redistribute(placements=[*(Replicate() for _ in others), last]).to_local()
    return rows, VocabularyShard(gradient.shape[0], gradient.device_mesh.get_group(len(others)))


def is_row_sharded(weight: Any) -> bool:
    """Return whether a weight is spread by rows over the last dimension of a mesh alone."""
    *others, last = getattr(weight, "placements", (Replicate(),))
    if not last.is_shard(0):
        return False
    return all(placement.is_replicate() for placement in others)


def is_row_parallel(module: Any) -> bool:
    """Return whether tensor parallelism has spread an end's table by rows. `fully_shard` may have cut these once more.

    Over a mesh of several dimensions its own is the last. What `fully_shard` alone keeps, a forward sees whole.
    """
    placements: Any = getattr(module.weight, "placements", ())
    if not placements or not placements[-1].is_shard(0):
        return False
    return "forward" in vars(module) or PARALLEL_FORWARD in vars(module)


def detach_parallel_forward(module: Any, journal: Any) -> None:
    """Take out of the way what tensor parallelism put before the `forward` of a module whose weight it spread."""
    if is_row_parallel(module) and "forward" in vars(module):
        journal.set(module, PARALLEL_FORWARD, vars(module)["forward"])
        journal.later(setattr, module, "forward", vars(module).pop("forward"))


def require_unsharded_table(model: Any, head: Any, operation: str) -> None:
    """Refuse, by an UnsupportedError, what reads or changes a whole table where the tables are cut."""
    if fsdp_units(model) or is_row_parallel(head):
        remedy = "do it before fully_shard and tensor parallelism"
        raise UnsupportedError(f"{operation}: the tables of {type(model).__name__} are sharded", remedy)


def require_same_tables(model: Any, spec: Any, has: Any, *, changed: bool, verified: bool) -> None:
    """Refuse, by an InstallError, what a model whose tables are sharded cannot be given.

    That is other tables than it `has`, or rows to start from (`changed`); what was `verified` before and can be on
    whole tables alone; attention heads that the ranks do not divide, of which transformers itself says nothing.
    """
    kind = type(model).__name__
    (spec or has).require(SHARDED)
    if spec not in (None, has) or changed:
        remedy = "install it before fully_shard and tensor parallelism, which tiewise.parallel_plan gives its tables"
        raise InstallError(f"{kind} has {has} tables that are sharded, and {spec} would change them", remedy)
    if verified:
        remedy = "take its handle by tiewise.installed(model): install verified it before the model was sharded"
        raise InstallError(f"{kind} is sharded, and {has} is verified on whole tables only", remedy)
    ranks = getattr(model, "_tp_size", None) or 1  # transformers' own entry
    require_divisible_heads(model, ranks, InstallError)


def require_divisible_heads(model: Any, ranks: int, error: type[TiewiseError]) -> None:
    """Refuse, by an `error`, numbers of attention heads that the ranks of tensor parallelism do not divide."""
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            problem = f"{type(model).__name__}: {ranks} ranks of tensor parallelism do not divide {name}={heads}"
            remedy = f"choose another number, a model with a multiple of {ranks} heads, or tiewise.parallel_plan alone"
            raise error(problem, f"{remedy}, which leaves the body whole")
