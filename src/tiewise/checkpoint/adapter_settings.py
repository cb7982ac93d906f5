"""Settings of a new PEFT adapter that leave the two ends of its base what they are: tied, or untied."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tiewise.checkpoint.adapter import end_modules
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError


class _BaseEnds(NamedTuple):
    """The two ends of the model that an adapter is to change."""

    where: str  # for errors
    modules: list[str]  # the input table's, the head's: those that are there
    rows: int  # of the input table; 0 where it is not known
    tied: bool | None  # None where it is not known


def lora_config(model: Any, new_tokens: Iterable[int] = (), *, tables: bool = False) -> dict[str, Any]:
    """Return keyword arguments for `peft.LoraConfig` that update the body, and train rows or whole tables.

    As PEFT 0.21 does it: rows of a tied input table are trained at the head too, and whole tables that are one are one
    only with `ensure_weight_tying`. Rank and the rest are yours to add.

    Args:
        model: a checkpoint folder, whose tables are compared, or a Hugging Face model.
        new_tokens: ids whose rows are trained at both ends; each needs a row (`tiewise resize` gives it one).
        tables: train both tables whole instead.

    Raises:
        CheckpointError: no table is found, it is not known whether it is shared, or a token has no row.
    """
    ids = [int(token) for token in new_tokens]
    base = _live_ends(model) if hasattr(model, "get_input_embeddings") else _stored_ends(model)
    remedy = "tiewise check says what is there"
    if not base.modules:
        raise CheckpointError(f"{base.where}: no input table was found", remedy)
    if base.tied is None:
        raise CheckpointError(f"{base.where}: whether its two ends are one table is not known", remedy)
    _require_rows(base, ids)
    config: dict[str, Any] = {"target_modules": "all-linear"}  # which leaves the head out
    if tables:
        config["modules_to_save"] = base.modules
        config["ensure_weight_tying"] = base.tied
    elif ids:
        modules = base.modules
        if base.tied:  # PEFT trains the rows of a tied input table at the head too
            modules = modules[:1]
        config["trainable_token_indices"] = dict.fromkeys(modules, ids)
    return config


def _live_ends(model: Any) -> _BaseEnds:
    """Return the ends of a Hugging Face model."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    modules = [names[id(end)] for end in (table, head) if id(end) in names]
    is_tied = head is not None and table.weight is head.weight
    return _BaseEnds(type(model).__name__, modules, len(table.weight), is_tied)


def _stored_ends(path: str | os.PathLike[str]) -> _BaseEnds:
    """Return the ends of a checkpoint folder, whose tables are compared."""
    facts = Facts(open_folder(os.fspath(path)))
    modules = [name for name in end_modules(facts) if name is not None]
    counted = facts.roles.plain_input_table
    rows = 0 if counted is None else counted.rows
    is_tied = facts.tables_are_tied if facts.claims.tied else False
    return _BaseEnds(str(facts.path), modules, rows, is_tied)


def _require_rows(base: _BaseEnds, ids: Sequence[int]) -> None:
    """Raise a CheckpointError if a token has no row of the input table."""
    if not ids:
        return
    for token in (min(ids), max(ids)):
        if 0 <= token < base.rows:
            continue
        remedy = f"tiewise resize --vocab {token + 1} gives it one"
        if token < 0:
            remedy = "ids begin at 0"
        raise CheckpointError(f"{base.where}: of {base.rows:,} rows none is token {token}'s", remedy)
