"""Settings of a new PEFT adapter that keep the base model tied or untied."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tiewise.checkpoint.adapter import end_modules
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError, require_path


class _BaseEnds(NamedTuple):
    """Input embedding and output head of the model that an adapter will change."""

    where: str  # path or class of the model, for errors
    modules: list[str]  # modules of the input embedding and the output head; an absent one is left out
    rows: int  # rows of the input table; 0 if unknown
    tied: bool | None  # both ends are one table; None if unknown


def lora_config(model: Any, new_tokens: Iterable[int] = (), *, tables: bool = False) -> dict[str, Any]:
    """Return keyword arguments for `peft.LoraConfig` that keep a model tied or untied.

    The adapter updates the body, and trains rows of the tables or full tables. The arguments follow PEFT 0.21: it
    trains rows of a tied input table also at the head, and needs `ensure_weight_tying` to keep full tables tied. The
    caller adds the rank and other settings.

    Args:
        model: a checkpoint folder, whose tables are compared, or a Hugging Face model.
        new_tokens: ids whose rows are trained at both ends. Each needs a row; `tiewise vocab resize` adds rows.
        tables: train both tables in full instead.

    Returns:
        `target_modules`, and with `tables` also `modules_to_save` and `ensure_weight_tying`, or with `new_tokens`
        also `trainable_token_indices`: {module: ids}.

    Raises:
        CheckpointError: no input table is found, it is unknown whether both ends share it, or a token has no row.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> with torch.device("meta"):
    ...     model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    >>> lora_config(model, [15])
    {'target_modules': 'all-linear', 'trainable_token_indices': {'transformer.wte': [15]}}
    """
    ids = [int(token) for token in new_tokens]
    base = _live_ends(model) if hasattr(model, "get_input_embeddings") else _stored_ends(model)
    remedy = "tiewise check says what is there"
    if not base.modules:
        raise CheckpointError(f"{base.where}: no input table was found", remedy)
    if base.tied is None:
        raise CheckpointError(f"{base.where}: it is unknown if this base is tied", remedy)
    _require_rows(base, ids)
    config: dict[str, Any] = {"target_modules": "all-linear"}  # PEFT leaves the head out of it
    if tables:
        config["modules_to_save"] = base.modules
        config["ensure_weight_tying"] = base.tied
    elif ids:
        modules = base.modules
        if base.tied:  # PEFT also trains the rows of a tied input table at the head
            modules = modules[:1]
        config["trainable_token_indices"] = dict.fromkeys(modules, ids)
    return config


def _live_ends(model: Any) -> _BaseEnds:
    """Return the ends of a Hugging Face model."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    modules = [names[id(end)] for end in (embedding, head) if id(end) in names]
    is_tied = head is not None and embedding.weight is head.weight
    return _BaseEnds(type(model).__name__, modules, len(embedding.weight), is_tied)


def _stored_ends(path: str | os.PathLike[str]) -> _BaseEnds:
    """Return the ends of a checkpoint folder, after a comparison of its tables."""
    require_path("checkpoint.lora_config(FOLDER)", path)
    facts = Facts(open_folder(path))
    modules = [name for name in end_modules(facts) if name is not None]
    input_table = facts.roles.plain_input_table
    rows = 0 if input_table is None else input_table.rows
    is_tied = facts.tables_are_tied if facts.claims.tied else False
    return _BaseEnds(str(facts.path), modules, rows, is_tied)


def _require_rows(base: _BaseEnds, ids: Sequence[int]) -> None:
    """Raise a CheckpointError if a token has no row of the input table."""
    if not ids:
        return
    for token in (min(ids), max(ids)):
        if 0 <= token < base.rows:
            continue
        remedy = f"tiewise vocab resize --vocab {token + 1} gives it one"
        if token < 0:
            remedy = "ids begin at 0"
        raise CheckpointError(f"{base.where}: token {token} has no row; there are {base.rows:,} rows", remedy)
