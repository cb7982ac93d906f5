"""Settings for PEFT's `LoraConfig` under which a model's two ends stay what they are: one table, or two."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tiewise.checkpoint.adapter import end_modules
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import CheckpointError


def lora_config(model: Any, new_tokens: Iterable[int] = (), *, tables: bool = False) -> dict[str, Any]:
    """Return keyword arguments for `peft.LoraConfig`: low-rank updates of the body, and of the tables what is asked.

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
    if hasattr(model, "get_input_embeddings"):
        where, both = type(model).__name__, [model.get_input_embeddings(), model.get_output_embeddings()]
        names = [next((name for name, one in model.named_modules() if one is end), None) for end in both]
        rows = len(both[0].weight)
        tied: bool | None = both[1] is not None and both[0].weight is both[1].weight
    else:
        facts = Facts(open_folder(os.fspath(model)))
        where, names, tied = str(facts.path), list(end_modules(facts)), facts.truth if facts.claims.tied else False
        rows = 0 if facts.roles.counted is None else facts.roles.counted.rows
    ends = [name for name in names if name is not None]
    if not ends or tied is None:
        what = "no input table was found" if not ends else "whether its two ends are one table is not known"
        raise CheckpointError(f"{where}: {what}", "tiewise check says what is there")
    if ids and not 0 <= min(ids) <= max(ids) < rows:
        fix = f"tiewise resize --vocab {max(ids) + 1} gives it one" if min(ids) >= 0 else "ids begin at 0"
        raise CheckpointError(
            f"{where}: of {rows:,} rows none is token {max(ids) if min(ids) >= 0 else min(ids)}'s", fix
        )
    config: dict[str, Any] = {"target_modules": "all-linear"}  # which leaves the head out
    if tables:
        return config | {"modules_to_save": ends, "ensure_weight_tying": tied}
    return config | ({"trainable_token_indices": dict.fromkeys(ends[: 1 if tied else 2], ids)} if ids else {})
