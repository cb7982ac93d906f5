"""What stands before the head of each family whose direct path is known exactly.

Every entry is held against transformers' own class without layers (`tests/analysis/test_open_path.py`): its logits are
the direct path. For a family that is not here nothing is assumed: its tables are multiplied as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiewise.analysis.direct_path import LAYER, RMS, Norm
from tiewise.checkpoint.claims import number


@dataclass(frozen=True)
class Ending:
    """How a family ends.

    Args:
        norm: the final norm's module, beside the input table.
        kind: as `Norm`.
        eps_key: of the config; "" where the class fixes it.
        eps: the class's own, where the config has no key.
        stored: whether the norm has a weight.
        plus_one: whether the stored weight is the gain less one.
        root_width: whether input rows are multiplied by √E.
        scalars: keys of the config that this class applies at its two ends.
    """

    norm: str = "norm"
    kind: str = RMS
    eps_key: str = "rms_norm_eps"
    eps: float = 1e-6
    stored: bool = True
    plus_one: bool = False
    root_width: bool = False
    scalars: tuple[str, ...] = ()


_PLAIN = Ending()
_FIVE = Ending(eps=1e-5)
_GPT = Ending("ln_f", LAYER, "layer_norm_epsilon", 1e-5)
_GEMMA = Ending(plus_one=True, root_width=True)
_CAPPED = replace(_GEMMA, scalars=("final_logit_softcapping",))

FAMILIES: Mapping[str, Ending] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), _PLAIN),
    **dict.fromkeys(("phi3", "olmo2", "olmoe", "mixtral"), _FIVE),
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "falcon"), _GPT),
    "glm": Ending(eps=1.5625e-7),
    "gemma": _GEMMA,
    "gemma2": _CAPPED,
    "gemma3_text": _CAPPED,
    "granite": Ending(scalars=("embedding_multiplier", "logits_scaling")),
    "olmo": Ending(kind=LAYER, eps_key="", eps=1e-5, stored=False),
    "cohere": Ending(kind=LAYER, eps_key="layer_norm_eps", eps=1e-5, scalars=("logit_scale",)),
    "gpt_neox": Ending("final_layer_norm", LAYER, "layer_norm_eps", 1e-5),
    "opt": Ending("final_layer_norm", LAYER, "", 1e-5),
    "phi": Ending("final_layernorm", LAYER, "layer_norm_eps", 1e-5),
    "stablelm": Ending("norm", LAYER, "layer_norm_eps", 1e-5),
    "starcoder2": Ending("norm", LAYER, "norm_epsilon", 1e-5),
}


def plain_norm(ending: Ending, config: Mapping[str, Any]) -> Norm:
    """Return the norm of a family, without its stored vectors."""
    eps = number(config.get(ending.eps_key)) if ending.eps_key else None
    return Norm(ending.kind, ending.eps if eps is None or eps < 0 else eps)
