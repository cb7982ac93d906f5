"""Numbers in a config that act where a model touches its vocabulary, and what each does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tiewise.checkpoint.claims import family_type
from tiewise.checkpoint.families import family

SCALARS = {  # key: the value at which it does nothing
    "embedding_multiplier": 1.0,  # Granite, Falcon-H1: on the looked-up rows
    "embedding_scale": 1.0,  # HRM-Text: on the looked-up rows
    "scale_emb": 1.0,  # MiniCPM: on the looked-up rows
    "logits_scaling": 1.0,  # Granite: logits are divided by it; HyperCLOVA X: multiplied
    "logit_scale": 1.0,  # Cohere: logits are multiplied by it; MPT: the same
    "lm_head_multiplier": 1.0,  # Falcon-H1
    "output_multiplier_scale": 1.0,  # Grok, remote code
    "final_logit_softcapping": 0.0,  # Gemma 2: cap · tanh(logits / cap)
    "output_logit_soft_cap": 0.0,  # xLSTM
    "logits_soft_cap": 0.0,  # RecurrentGemma
    "dim_model_base": 0.0,  # MiniCPM: hidden states are divided by hidden_size / dim_model_base
    "scale_embedding": 0.0,  # BART: rows times sqrt(d_model) where true
    "scale_decoder_outputs": 0.0,  # T5: hidden states times 1 / sqrt(d_model) where true
    "logits_mup_width_multiplier": 1.0,  # Inkling: hidden states are divided by it
    "mup_enabled": 0.0,  # AFMoE: rows times sqrt(hidden_size) where true
    "rescale_embeddings": 0.0,  # BigBird: the same
    "mup_width_multiplier": 1.0,  # Phi-3-small, remote code
    "mup_embedding_multiplier": 0.0,  # Phi-3-small, remote code
}
WIDTHS = ("word_embed_proj_dim", "embedding_size", "input_embedding_size", "output_embedding_size")  # of the table


def read_scalars(levels: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return the numbers that do something, by dotted key: as written, else by the family's default.

    A width of the table counts where it is not the hidden width.
    """
    found = {}
    for path, level in levels:
        known = family(family_type(level))
        defaults = known.scalars if known is not None else {}
        width = next((number(level.get(key)) for key in ("hidden_size", "d_model") if key in level), None)
        for key in (*SCALARS, *WIDTHS):
            value = number(level.get(key, defaults.get(key)))
            idle = width if key in WIDTHS else SCALARS[key]
            if value is not None and value != idle and not (key in WIDTHS and width is None):
                found[f"{path}.{key}" if path else key] = value
    return found


def number(value: Any) -> float | None:
    """A finite number, true as 1 and false as 0; None for anything else."""
    if not isinstance(value, bool | int | float):
        return None
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if math.isfinite(made) else None
