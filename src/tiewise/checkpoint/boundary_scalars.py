"""Numbers of a config that act at the boundary: factors, caps, and table widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tiewise.checkpoint.claims import dotted_path, family_type, finite_number
from tiewise.checkpoint.families import family

SCALARS = {  # {key: neutral value}
    # factor of the looked-up rows: Granite and Falcon-H1; HRM-Text; MiniCPM
    **dict.fromkeys(("embedding_multiplier", "embedding_scale", "scale_emb"), 1.0),
    # logits are divided by it in Granite, and multiplied in HyperCLOVA X, Cohere and MPT, Falcon-H1, Grok (remote code)
    **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier_scale"), 1.0),
    # cap · tanh(logits / cap): Gemma 2; xLSTM; RecurrentGemma
    **dict.fromkeys(("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap"), 0.0),
    # hidden states are divided by hidden_size / value (MiniCPM); if true, rows are times sqrt(d_model) (BART)
    **dict.fromkeys(("dim_model_base", "scale_embedding"), 0.0),
    "scale_decoder_outputs": 0.0,  # T5: if true, hidden states are times 1 / sqrt(d_model)
    "logits_mup_width_multiplier": 1.0,  # Inkling: hidden states are divided by it
    # if true, rows are times sqrt(hidden_size): AFMoE; BigBird
    **dict.fromkeys(("mup_enabled", "rescale_embeddings"), 0.0),
    **{"mup_width_multiplier": 1.0, "mup_embedding_multiplier": 0.0},  # Phi-3-small, remote code
}
WIDTHS = ("word_embed_proj_dim", "embedding_size", "input_embedding_size", "output_embedding_size")  # table widths E


def read_scalars(levels: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return {dotted key: number} of all scalars that differ from their neutral value.

    An absent key has the family's default. A table width is neutral if it equals the hidden width.
    """
    scalars = dict[str, float]()
    for path, level in levels:
        defaults = family(family_type(level)).ends.scalars
        for key, neutral in _neutral_values(level).items():
            value = finite_number(level.get(key, defaults.get(key)))
            if value is not None and value != neutral:
                scalars[dotted_path(path, key)] = value
    return scalars


def _neutral_values(level: Mapping[str, Any]) -> dict[str, float]:
    """Return {key: neutral value} for the scalars of a level."""
    width = finite_number(level.get("hidden_size", level.get("d_model")))
    if width is None:
        return SCALARS
    return SCALARS | dict.fromkeys(WIDTHS, width)
