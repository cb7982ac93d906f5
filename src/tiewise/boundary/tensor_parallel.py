"""Ends whose tables tensor parallelism has spread: every rank of the `tp` mesh holds some rows, and all see all tokens.

transformers' plans do so to embeddings and heads (`embedding_rowwise`, `colwise_gather_output`): weights become
DTensors of rows, and the style puts a function of its own before the module's `forward`, into the instance. That one
passes by any class that is swapped in beneath, and gathers [N, V] logits: it is set aside, and put back where the
family's own classes run. Lookup and head then work on local rows, and one exchange per chunk of tokens takes the place
of the logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tiewise.core.errors import InstallError, UnsupportedError
from tiewise.ops.vocabulary_shard import VocabularyShard

ASIDE = "_tiewise_parallel_forward"


def shard_of(weight: Any) -> VocabularyShard | None:
    """Return which rows of a table (or entries of a bias) are here; None where it is whole."""
    return VocabularyShard(weight.shape[0], weight.device_mesh.get_group()) if by_rows(weight) else None


def local(weight: Any) -> Tensor:
    """Return what is here of a Parameter, its gradient that of the whole's rows."""
    return weight.to_local() if by_rows(weight) else weight


def held(gradient: Any) -> Any:
    """Return a gradient's rows that are here; all of them where it is cut otherwise, for which all must ask."""
    whole = hasattr(gradient, "full_tensor") and not by_rows(gradient)
    return gradient.full_tensor() if whole else local(gradient)


def by_rows(weight: Any) -> bool:
    """Whether a weight is spread by rows over the one dimension of a mesh."""
    placements: Any = getattr(weight, "placements", ())
    return len(placements) == 1 and bool(placements[0].is_shard(0))


def spread(module: Any) -> bool:
    """Whether tensor parallelism has spread the table of an end; what `fully_shard` keeps, a forward sees whole."""
    return by_rows(module.weight) and not vars(module).keys().isdisjoint(("forward", ASIDE))


def set_aside(module: Any, journal: Any) -> None:
    """Take out of the way what tensor parallelism put before the `forward` of a module whose weight it spread."""
    if spread(module) and "forward" in vars(module):
        journal.set(module, ASIDE, vars(module)["forward"])
        journal.later(setattr, module, "forward", vars(module).pop("forward"))


def require_whole_table(module: Any, what: str) -> None:
    """Refuse what reads or changes a whole table.

    Raises:
        UnsupportedError: its rows are spread over ranks.
    """
    if spread(module):
        raise UnsupportedError(f"{what}: the table's rows are spread over ranks", "do it before tensor parallelism")


def require_as_it_is(model: Any, spec: Any, has: Any, *, verified: bool) -> None:
    """Refuse what a model with spread tables cannot be given.

    Raises:
        InstallError: a spec that would change them; one that was `verified` before and can be on whole tables alone;
            attention heads that the ranks do not divide, of which transformers itself says nothing.
    """
    kind, ranks = type(model).__name__, getattr(model, "_tp_size", None) or 1  # transformers' own entry
    if spec not in (None, has):
        fix = "install it before tensor parallelism, which tiewise.parallel_plan gives its tables"
        raise InstallError(
            f"{kind} has {has} tables whose rows are spread over ranks, and {spec} would change them", fix
        )
    if verified:
        fix = "take its handle by tiewise.installed(model): install verified it before its rows were spread"
        raise InstallError(f"{kind}: {has} is verified on whole tables only", fix)
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            fix = f"choose a tp_size that divides {heads}, or tiewise.parallel_plan, which leaves the body whole"
            raise InstallError(f"{kind}: tp_size={ranks} does not divide {name}={heads}", fix)
