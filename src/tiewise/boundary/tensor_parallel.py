"""Ends whose tables tensor parallelism has spread: every rank of the `tp` mesh holds some rows, and all see all tokens.

transformers' plans do so to embeddings and heads (`embedding_rowwise`, `colwise_gather_output`): weights become
DTensors of rows, and the style puts a function of its own before the module's `forward`, into the instance. That one
passes by any class that is swapped in beneath, and gathers [N, V] logits: it is set aside, and put back where the
family's own classes run. Lookup and head then work on local rows, and one exchange per chunk of tokens takes the place
of the logits. Where `fully_shard` has cut those rows once more, over other ranks, a forward finds them gathered.

Tables that `keep_tables` has spread over the ranks of FSDP lie here in the same way, and those ranks have tokens of
their own: hidden states come to the rows in place of rows to the states. Their gradient is averaged over ranks as FSDP
averages the others, behind the lookup, so that it is of both paths alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate

from tiewise.boundary.fsdp import units
from tiewise.core.errors import InstallError, UnsupportedError
from tiewise.ops.vocabulary_shard import VocabularyShard

ASIDE = "_tiewise_parallel_forward"
KEPT = "_tiewise_kept_table"  # of an end whose rows are spread over ranks that have tokens of their own


def shard_of(module: Any) -> VocabularyShard | None:
    """Return which rows of an end's table are here; None where it is whole."""
    if not by_rows(module.weight):
        return None
    mesh = module.weight.device_mesh
    return VocabularyShard(len(module.weight), mesh.get_group(mesh.ndim - 1), own_tokens=KEPT in vars(module))


def local(module: Any, name: str = "weight", kind: torch.dtype | None = None) -> Any:
    """Return what is here of an end's Parameter, its gradient that of the whole's rows; a kept one in type `kind`."""
    held = getattr(module, name)
    if not by_rows(held):
        return held
    if KEPT not in vars(module):
        return held.to_local()
    return _Averaged.apply(held.to_local(), held.device_mesh).to(kind or held.dtype)


class _Averaged(torch.autograd.Function):
    """Local rows, whose gradient is of the sum of all losses: it is divided by the ranks, in its own buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        upstream = upstream.contiguous().div_(ctx.mesh.size())
        for dimension in range(ctx.mesh.ndim - 1):  # replicas
            dist.all_reduce(upstream, group=ctx.mesh.get_group(dimension))
        return upstream, None


def held(gradient: Any) -> tuple[Any, VocabularyShard | None]:
    """Return a gradient's rows that are here, and which rows of its table they are (None: all); all ranks must ask.

    What is cut over several dimensions of a mesh is put together over all but the last.
    """
    if not hasattr(gradient, "full_tensor"):
        return gradient, None
    *others, last = gradient.placements
    if not last.is_shard(0):
        return gradient.full_tensor(), None
    rows = gradient.redistribute(placements=[*(Replicate() for _ in others), last]).to_local()
    return rows, VocabularyShard(gradient.shape[0], gradient.device_mesh.get_group(len(others)))


def by_rows(weight: Any) -> bool:
    """Whether a weight is spread by rows over the last dimension of a mesh alone."""
    *others, last = getattr(weight, "placements", (Replicate(),))
    return bool(last.is_shard(0)) and all(one.is_replicate() for one in others)


def spread(module: Any) -> bool:
    """Whether tensor parallelism has spread the table of an end by rows, which `fully_shard` may have cut once more.

    Over a mesh of several dimensions its own is the last. What `fully_shard` alone keeps, a forward sees whole.
    """
    placements: Any = getattr(module.weight, "placements", ())
    rows = len(placements) > 0 and bool(placements[-1].is_shard(0))
    return rows and not vars(module).keys().isdisjoint(("forward", ASIDE))


def set_aside(module: Any, journal: Any) -> None:
    """Take out of the way what tensor parallelism put before the `forward` of a module whose weight it spread."""
    if spread(module) and "forward" in vars(module):
        journal.set(module, ASIDE, vars(module)["forward"])
        journal.later(setattr, module, "forward", vars(module).pop("forward"))


def require_whole_table(model: Any, head: Any, what: str) -> None:
    """Refuse what reads or changes a whole table.

    Raises:
        UnsupportedError: `fully_shard` or tensor parallelism has cut the tables.
    """
    if units(model) or spread(head):
        fix = "do it before fully_shard and tensor parallelism"
        raise UnsupportedError(f"{what}: the tables of {type(model).__name__} are sharded", fix)


def require_same_tables(model: Any, spec: Any, has: Any, *, changed: bool, verified: bool) -> None:
    """Refuse what a model whose tables are sharded cannot be given.

    Raises:
        InstallError: other tables than it `has`, or rows to start from (`changed`); what was `verified` before and can
            be on whole tables alone; attention heads that the ranks of tensor parallelism do not divide, of which
            transformers itself says nothing.
    """
    kind, ranks = type(model).__name__, getattr(model, "_tp_size", None) or 1  # transformers' own entry
    if spec not in (None, has) or changed:
        fix = "install it before fully_shard and tensor parallelism, which tiewise.parallel_plan gives its tables"
        raise InstallError(f"{kind} has {has} tables that are sharded, and {spec} would change them", fix)
    if verified:
        fix = "take its handle by tiewise.installed(model): install verified it before the model was sharded"
        raise InstallError(f"{kind} is sharded, and {has} is verified on whole tables only", fix)
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            fix = f"choose a tp_size that divides {heads}, or tiewise.parallel_plan, which leaves the body whole"
            raise InstallError(f"{kind}: tp_size={ranks} does not divide {name}={heads}", fix)
